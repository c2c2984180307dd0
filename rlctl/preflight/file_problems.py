"""Checks what a spec names on this machine: model, data, reward functions, interpreters, GPUs.

Nothing is created, changed, imported or downloaded.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.models.chat_template import chat_template_of
from rlctl.models.gpu import gpu_count
from rlctl.models.model_check import ModelCheck
from rlctl.models.shapes_fit import (
    adapter_problems,
    adapter_warnings,
    cut_problems,
    rate_warnings,
    sequence_problems,
)
from rlctl.models.tokenizer_files import NEEDS_PACKAGE, lone_tokenizer
from rlctl.models.vocabulary import vocabulary_problems
from rlctl.preflight.data_files import check_data
from rlctl.preflight.hostfile import hostfile_problems
from rlctl.preflight.interpreters import interpreter_problems, packages_of
from rlctl.preflight.judge_address import address_problems, key_problems
from rlctl.preflight.machine import machine_problems
from rlctl.preflight.reward_files import function_problems
from rlctl.preflight.role_attention import role_attention_problems
from rlctl.preflight.role_kernels import role_kernel_problems
from specs.errors import NotHere, Problem
from specs.model_facts import model_facts
from specs.packages import installed_here
from specs.schema.engines.engine_table import engine_of
from specs.schema.rank_groups import sequence_parallel_of
from specs.schema.role_section import Learner, RoleSection
from specs.schema.roles import ACTOR, ROLES, RoleName
from specs.schema.spec import Spec
from specs.text import show

_NO_GPU = "leave it out to run on the CPU; of a run elsewhere, `check-config --target cluster` makes it a note"


def file_problems(
    spec: Spec,
    spec_dir: Path,
    *,
    starting: bool = False,
    elsewhere: bool = False,
    run_dir: Path | None = None,
    notes: list[Problem] | None = None,
) -> tuple[list[Problem], list[Problem]]:
    """Return errors and warnings about everything that the spec names. Relative paths start at `spec_dir`. `run_dir`:
    where the run writes, when it is not where the spec says.

    GPUs that this machine lacks are errors when `starting` a run, else warnings: a spec may be checked elsewhere.
    Interpreters, engines, launchers and judges' keys that it lacks are errors unless the run is to start `elsewhere`.
    What it lacks then goes to `notes`, or without them to the warnings. Judges are asked whether they answer when
    `starting` a run alone.
    """
    errors, warnings, config = _models(spec, spec_dir)
    of_here = warnings if notes is None else notes
    data_errors, data_warnings = check_data(spec, spec_dir)
    errors += [*_new(data_errors, errors), *function_problems(spec, spec_dir), *hostfile_problems(spec, spec_dir)]
    warnings += data_warnings
    lacking = [*interpreter_problems(spec, spec_dir, nvidia_driver=has_nvidia_driver()), *_launchers(spec)]
    lacking += [*key_problems(spec), *role_kernel_problems(spec, spec_dir)]
    (of_here if elsewhere else errors).extend(lacking)
    errors += address_problems(spec) if starting and not errors else []
    attention = [*role_attention_problems(spec, spec_dir, elsewhere=elsewhere)]
    errors += attention
    if elsewhere:
        of_here += [problem for problem in role_attention_problems(spec, spec_dir) if problem not in attention]
    (errors if starting else of_here if elsewhere else warnings).extend(_devices(spec))
    here = starting or has_nvidia_driver() or not any(spec.role(role).devices for role in spec.roles)
    where = run_dir or spec.run.place
    machine_errors, machine_warnings = machine_problems(spec, spec_dir, config, where, starting=starting, here=here)
    errors, warnings = [*errors, *machine_errors], [*warnings, *machine_warnings]
    if elsewhere and notes is not None:
        notes += [problem for problem in (*errors, *warnings) if isinstance(problem, NotHere)]
        errors, warnings = ([one for one in found if not isinstance(one, NotHere)] for found in (errors, warnings))
    return errors, warnings


def _new(found: Sequence[Problem], known: Sequence[Problem]) -> list[Problem]:
    """Leave out problems of keys that have one: what is wrong with a chat template shows in the rows too."""
    return [problem for problem in found if problem.key not in {one.key for one in known}]


# ── models ────────────────────────────────────────────────────────────────────────────────────────


def _models(spec: Spec, spec_dir: Path) -> tuple[list[Problem], list[Problem], dict[str, Any]]:
    """Errors and warnings, and the main model's config.json ({} if it cannot be read)."""
    model = spec.model
    fake = spec.actor.engine.model_of == "bigram"
    main = ModelCheck(
        "model.path",
        model.path,
        spec_dir,
        from_scratch=model.from_scratch or fake,
        remote_code=model.trust_remote_code,
        tokenizer=True,
    )
    others = {
        role: ModelCheck(
            f"{role}.model",
            path,
            spec_dir,
            from_scratch=False,
            remote_code=model.trust_remote_code,
            tokenizer=not ROLES[role].same_tokens,
            head=ROLES[role].head,
        )
        for role, section in spec.sections()
        if role in spec.roles and (path := getattr(section, "model", ""))
    }
    if not fake:
        for role, check in {ACTOR: main, **others}.items():
            check.check_length(
                spec.longest_tokens(role), "" if ROLES[role].same_tokens else f"{role}.max_sequence_tokens"
            )
            check.check_kind(learns=ROLES[role].learns, here=not spec.role(role).python)
        main.problems += _heads(spec, main, others)
    main.check_chat(spec.data)
    main.problems += _lone_tokenizer(spec, spec_dir, main)
    checks = [main, *others.values()]
    errors = [problem for check in checks for problem in check.problems]
    warnings = [problem for check in checks for problem in check.warnings]
    for role, other in others.items():
        if not ROLES[role].same_tokens:
            errors += _no_conversations(spec, main, other)
            continue
        token_errors, token_warnings = _tokens(main, other)
        errors, warnings = errors + token_errors, warnings + token_warnings
    if not fake:
        errors += [*cut_problems(spec, main.config), *_engines(spec, main.config, others)]
        warnings += rate_warnings(spec, main.config)
        for role, lora in spec.adapters():
            config = others[role].config if role in others else main.config
            errors += adapter_problems(role, lora, config)
            warnings += adapter_warnings(role, lora, config)
    return errors, warnings, main.config


def _no_conversations(spec: Spec, main: ModelCheck, other: ModelCheck) -> list[Problem]:
    """A model that scores conversations and has no template for them."""
    if spec.data.chat == "never" or main.folder is None or other.folder is None:
        return []
    if not chat_template_of(main.folder).text or (found := chat_template_of(other.folder)).text or found.unknown:
        return []
    message = "its tokenizer has no chat template, and prompts are conversations"
    hint = 'use a reward model whose tokenizer has one, or set data.chat = "never"'
    return [Problem(other.key, message, hint, show(other.path))]


def _heads(spec: Spec, main: ModelCheck, others: Mapping[str, ModelCheck]) -> Iterator[Problem]:
    """Roles that give the main model another head than it can have."""
    for role in [role for role in spec.roles if ROLES[role].head != "lm" and role not in others]:
        if not spec.role(role).python and (wrong := main.can_end_in(ROLES[role].head)) and not main.problems:
            yield Problem(f"{role}.model", *wrong, show(main.path))


def _lone_tokenizer(spec: Spec, spec_dir: Path, main: ModelCheck) -> list[Problem]:
    """A tokenizer in a file that a package reads which a role's interpreter lacks."""
    if main.folder is None or not (name := lone_tokenizer(main.folder)):
        return []
    package = NEEDS_PACKAGE[name]
    readers = [role for role in spec.roles if not ROLES[role].is_trainer]
    lacking = [role for role in readers if package not in (packages_of(spec.role(role), spec_dir) or {package: ""})]
    if not lacking:
        return []
    where = f"the interpreter of {', '.join(lacking)} lacks {package}"
    hint = f"install {package} there, or put a tokenizer.json beside it, as transformers' save_pretrained writes it"
    return [Problem(main.key, f"has its tokenizer only in {name}, and {where}", hint, show(main.path))]


def _engines(spec: Spec, config: Mapping[str, Any], others: Mapping[RoleName, ModelCheck]) -> Iterator[Problem]:
    """What the engines cannot run in their roles' models, and ranks cannot share of them."""
    for role, section in spec.sections():
        engine, own_config = engine_of(section), others[role].config if role in others else config
        if (facts := model_facts(own_config)) is not None and engine is not None:
            yield from engine.model_problems(role, section, facts)
            if isinstance(section, Learner):
                yield from _more_than_all_layers(role, section, facts.layers)
        if (degree := sequence_parallel_of(section)) > 1:
            yield from sequence_problems(f"{role}.sequence_parallel", degree, own_config)


def _more_than_all_layers(role: RoleName, section: Learner, layers: int) -> Iterator[Problem]:
    count = section.gradient_checkpointing
    if count is not True and count > layers > 0:
        hint = f"use at most {layers}, or true for all of them"
        yield Problem(f"{role}.gradient_checkpointing", f"the model has {layers} layers", hint, show(count))


def _tokens(actor: ModelCheck, other: ModelCheck) -> tuple[list[Problem], list[Problem]]:
    """Whether another role's model has the actor's tokenizer and vocabulary."""
    wanted, given = actor.config.get("vocab_size"), other.config.get("vocab_size")
    if isinstance(wanted, int) and isinstance(given, int) and given < wanted:
        message = f"its vocabulary ({given}) is smaller than the actor's ({wanted}): it cannot score the same tokens"
        return [Problem(other.key, message, "use a model with the same tokenizer", show(other.path))], []
    if actor.folder is None or other.folder is None or not other.config:
        return [], []
    return vocabulary_problems(actor.folder, other.folder, other.key, other.path)


# ── launchers, devices ──────────────────────────────────────────────────────────────────────────────


def _launchers(spec: Spec) -> list[Problem]:
    """Launchers whose package is not installed here. Other interpreters are checked elsewhere."""
    wanting = [
        role
        for role, section in spec.sections()
        if ROLES[role].together and section.launcher == "deepspeed" and not section.python
    ]
    if not wanting or installed_here(("deepspeed",)):
        return []
    hint = "rlctl setup-engine deepspeed adds it, and torchrun starts every engine too"
    return [Problem(f"{role}.launcher", "deepspeed is not installed", hint, '"deepspeed"') for role in wanting]


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _devices(spec: Spec) -> list[Problem]:
    """Roles that ask for GPUs on a machine without an NVIDIA driver, or for more than it has."""
    asked = [(role, section) for role, section in spec.sections() if ROLES[role].holds_model and section.devices]
    if not asked:
        return []
    if has_nvidia_driver():
        return _too_few_gpus([(role, section) for role, section in asked if 0 in section.hosts])
    message = "this machine has no NVIDIA driver"
    return [Problem(f"{role}.devices", message, _NO_GPU, show(section.devices)) for role, section in asked]


def _too_few_gpus(asked: Sequence[tuple[RoleName, RoleSection]]) -> list[Problem]:
    """Numbers beyond those of this machine. Where a scheduler has handed GPUs out, placement knows how many."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") or not asked or (count := gpu_count()) is None:
        return []
    has = f"this host, {socket.gethostname()}, has {count} GPU{'' if count == 1 else 's'}, and number"
    hint = f"use numbers below {count}" if count else _NO_GPU
    return [
        Problem(f"{role}.devices", f"{has} {max(section.devices)} is asked for", hint, show(section.devices))
        for role, section in asked
        if max(section.devices) >= count
    ]
