"""Rules about what a spec names on this machine: model, data, reward functions, interpreters, GPUs.

Nothing is created, changed, imported or downloaded.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specs.attention_rules import attention_problems
from specs.cut_rules import adapter_problems, cut_problems, odd_heads
from specs.data_files import check_data
from specs.errors import Problem
from specs.explain import show
from specs.interpreters import interpreter_problems
from specs.machine import machine_problems
from specs.model_check import ModelCheck
from specs.node_rules import hostfile_problems
from specs.reference import vocabulary_problems
from specs.reward_files import reward_problems
from specs.schema import RoleName, RoleSection, Spec


def file_problems(
    spec: Spec, spec_dir: Path, *, starting: bool = False, run_dir: Path | None = None
) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings about everything that the spec names. Relative paths start at `spec_dir`. `run_dir`: where
    the run writes, when it is not where the spec says.

    GPUs that this machine lacks are errors when `starting` a run, else warnings: a spec may be checked elsewhere.
    """
    errors, warnings, config = _models(spec, spec_dir)
    data_errors, data_warnings = check_data(spec, spec_dir)
    errors += data_errors + reward_problems(spec, spec_dir)
    errors += interpreter_problems(spec, spec_dir, nvidia_driver=has_nvidia_driver())
    errors += attention_problems(spec, spec_dir)
    errors += _launchers(spec) + hostfile_problems(spec, spec_dir)
    warnings += data_warnings
    (errors if starting else warnings).extend(_devices(spec))
    here = starting or has_nvidia_driver() or not any(spec.role(role).devices for role in spec.roles)
    where = run_dir or Path(spec.run.dir).expanduser() / spec.run.name
    machine = machine_problems(spec, spec_dir, config, where, starting=starting, here=here)
    return [*errors, *machine[0]], [*warnings, *machine[1]]


# ── models ────────────────────────────────────────────────────────────────────────────────────────


def _models(spec: Spec, spec_dir: Path) -> tuple[list[Problem], list[Problem], dict[str, Any]]:
    """Errors and warnings, and the main model's config.json ({} where it is not at hand)."""
    model = spec.model
    fake = spec.actor.engine.kind == "fake"
    main = ModelCheck(
        "model.path",
        model.path,
        spec_dir,
        from_scratch=model.from_scratch or fake,
        remote_code=model.trust_remote_code,
        tokenizer=True,
    )
    checks = [main]
    if spec.needs_ref and spec.ref is not None and spec.ref.model:
        checks.append(
            ModelCheck(
                "ref.model",
                spec.ref.model,
                spec_dir,
                from_scratch=False,
                remote_code=model.trust_remote_code,
                tokenizer=False,
            )
        )
    if not fake:
        for check, section in zip(checks, (spec.actor, spec.ref), strict=False):
            check.check_length(spec.max_sequence_tokens)
            check.check_kind(learns=section is spec.actor, here=bool(section and not section.python))
    main.check_chat(spec.data)
    errors = [problem for check in checks for problem in check.problems]
    warnings = [problem for check in checks for problem in check.warnings]
    if len(checks) == 2:
        ref_errors, ref_warnings = _tokens(main, checks[1])
        errors, warnings = errors + ref_errors, warnings + ref_warnings
    if not fake:
        errors += [*cut_problems(spec, main.config), *odd_heads(spec, main.config)]
        errors += adapter_problems(spec, main.config)
    return errors, warnings, main.config


def _tokens(actor: ModelCheck, ref: ModelCheck) -> tuple[list[Problem], list[Problem]]:
    """Whether the reference reads the actor's tokens as the actor does."""
    wanted, given = actor.config.get("vocab_size"), ref.config.get("vocab_size")
    if isinstance(wanted, int) and isinstance(given, int) and given < wanted:
        message = f"its vocabulary ({given}) is smaller than the actor's ({wanted}): it cannot score the same tokens"
        return [Problem(ref.key, message, "use a model with the same tokenizer", show(ref.path))], []
    if actor.folder is None or ref.folder is None or not ref.config:
        return [], []
    return vocabulary_problems(actor.folder, ref.folder, ref.key, ref.path)


# ── launchers, devices ──────────────────────────────────────────────────────────────────────────────


def _launchers(spec: Spec) -> list[Problem]:
    """Launchers that come from packages which need not be there. Another interpreter is asked elsewhere."""
    sections: list[tuple[RoleName, RoleSection | None]] = [("actor", spec.actor), ("ref", spec.ref)]
    wanting = [role for role, section in sections if section and section.launcher == "deepspeed" and not section.python]
    if not wanting or find_spec("deepspeed") is not None:
        return []
    hint = "scripts/setup-engine deepspeed adds it, and torchrun starts every engine too"
    return [Problem(f"{role}.launcher", "deepspeed is not installed", hint, '"deepspeed"') for role in wanting]


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _devices(spec: Spec) -> list[Problem]:
    """Roles that ask for GPUs on a machine without an NVIDIA driver."""
    sections: list[tuple[str, RoleSection | None]] = [
        ("actor", spec.actor),
        ("ref", spec.ref),
        ("rollout", spec.rollout),
    ]
    asked = [(role, section) for role, section in sections if section is not None and section.devices]
    if not asked or has_nvidia_driver():
        return []
    message = "this machine has no NVIDIA driver"
    return [
        Problem(f"{role}.devices", message, "leave it out to run on the CPU", show(section.devices))
        for role, section in asked
    ]
