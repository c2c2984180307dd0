"""Which kernels compute a trained model's norms and gated MLPs: one decision, for `check-config` and for the process
that builds the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Asked = Literal["torch", "auto", "liger"]
OWN_MODULES: Literal["torch"] = "torch"  # the model's own code
PACKAGES = ("liger-kernel", "triton")


@dataclass(frozen=True)
class KernelFacts:
    """Facts that a decision rests on. `versions` None: not known, and nothing is refused for that."""

    device: Literal["cpu", "cuda"]
    role: str = ""  # for the words of a problem
    versions: Mapping[str, str] | None = None  # of `PACKAGES` in the role's interpreter
    interpreter: str = ""  # the path of that, for the words of a hint


@dataclass(frozen=True)
class KernelChoice:
    """`kernels` will be in effect. With a `problem` nothing can be built as asked."""

    asked: Asked
    kernels: Literal["torch", "liger"]
    why: str
    problem: str = ""
    hint: str = ""


def choose_kernels(asked: Asked, facts: KernelFacts) -> KernelChoice:
    """Decide whose kernels compute: `auto` takes Liger's wherever they can be had; `liger` takes them or is refused."""
    if asked == OWN_MODULES:
        return KernelChoice(asked, OWN_MODULES, "as asked")
    problem, hint = _obstacle(facts)
    if not problem:
        unknown = "" if facts.versions is not None else ", if liger-kernel is in the role's interpreter"
        return KernelChoice(asked, "liger", ("as asked" if asked == "liger" else "they can be had") + unknown)
    if asked == "auto":
        return KernelChoice(asked, OWN_MODULES, f"liger {problem}")
    return KernelChoice(asked, OWN_MODULES, "", problem, hint)


def _obstacle(facts: KernelFacts) -> tuple[str, str]:
    who = facts.role or "the role"
    if facts.device != "cuda":
        return f"needs a GPU, and {who} runs on the CPU", f'write "torch" or "auto", or give {who} devices'
    missing = [name for name in PACKAGES if facts.versions is not None and not facts.versions.get(name)]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        whose = f"{who}'s interpreter" if facts.role else "this interpreter"
        install = f"{facts.interpreter or 'python'} -m pip install {' '.join(missing)}"
        return f"needs {' and '.join(missing)}, which {are} not installed in {whose}", f'{install}, or write "torch"'
    return "", ""
