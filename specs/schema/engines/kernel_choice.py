"""Which kernels compute a trained model's norms and gated MLPs: one decision, for `check-config` and for the process
that builds the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from specs.attention import Decision

Asked = Literal["torch", "auto", "liger"]
OWN_MODULES: Literal["torch"] = "torch"  # the model's own code
PACKAGES = ("liger-kernel", "triton")


def choose_kernels(
    asked: Asked, *, on_gpu: bool, versions: Mapping[str, str] | None, role: str = "", interpreter: str = "python"
) -> Decision:
    """Decide whose kernels compute: `auto` takes Liger's wherever they can be had; `liger` takes them or is refused.
    `versions`: of `PACKAGES` in the role's interpreter, whose path is for hints; None: not known, and not refused."""
    if asked == OWN_MODULES:
        return Decision(asked, OWN_MODULES, "", "as asked")
    who = role or "the role"
    missing = [name for name in PACKAGES if versions is not None and not versions.get(name)]
    if not on_gpu:
        problem, hint = f"needs a GPU, and {who} runs on the CPU", f'write "torch" or "auto", or give {who} devices'
    elif missing:
        are, whose = "is" if len(missing) == 1 else "are", f"{who}'s interpreter" if role else "this interpreter"
        problem = f"needs {' and '.join(missing)}, which {are} not installed in {whose}"
        hint = f'{interpreter} -m pip install {" ".join(missing)}, or write "torch"'
    else:
        unknown = "" if versions is not None else ", if liger-kernel is in the role's interpreter"
        return Decision(asked, "liger", "", ("as asked" if asked == "liger" else "they can be had") + unknown)
    if asked == "auto":
        return Decision(asked, OWN_MODULES, "", f"liger {problem}")
    return Decision(asked, OWN_MODULES, "", "", problem, hint)
