"""Check what a spec names on this machine: model, data, reward functions, interpreters, GPUs.

Nothing is created, changed, imported or downloaded.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.models.hardware import gpu_count, has_nvidia_driver
from rlctl.models.model_check import ModelCheck
from rlctl.models.shapes_fit import adapter_problems, sequence_problems, shard_problems
from rlctl.models.tokenizer_files import chat_problems, chat_template_of, kinship_problems
from rlctl.preflight.data_files import check_data
from rlctl.preflight.interpreters import interpreter_problems
from rlctl.preflight.judge_address import address_problems, key_problems
from rlctl.preflight.machine import machine_problems
from rlctl.preflight.reward_files import function_problems
from rlctl.preflight.role_choices import choice_problems
from specs.errors import NotHere, Problem
from specs.model_facts import model_facts
from specs.rules.all_rules import with_values
from specs.schema.engines.engine_table import engine_of
from specs.schema.rank_groups import sequence_parallel_of
from specs.schema.recipes import sampling_of
from specs.schema.role_section import RoleSection
from specs.schema.roles import ROLES, ROLLOUT, RoleName
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
    saves: bool = True,
) -> tuple[list[Problem], list[Problem]]:
    """Return errors and warnings about everything that the spec names. Relative paths start at `spec_dir`. `run_dir`:
    where the run writes, when it is not where the spec says. `saves`: it writes checkpoints.

    GPUs that this machine lacks are errors when `starting` a run, else warnings: a spec may be checked elsewhere.
    Interpreters, engines, launchers and judges' keys that it lacks are errors; when the run is to start `elsewhere`,
    all that it lacks is a warning, `NotHere`. Judges are asked whether they answer when `starting` a run alone.
    """
    errors, warnings, config = _models(spec, spec_dir)
    data_errors, data_warnings = check_data(spec, spec_dir)
    errors += _new(data_errors, errors)
    errors += choice_problems(spec, spec_dir, elsewhere=True)
    errors += function_problems(spec, spec_dir)
    warnings += data_warnings
    lacking = [*interpreter_problems(spec, spec_dir, nvidia_driver=has_nvidia_driver())]
    lacking += key_problems(spec)
    lacking += _new(choice_problems(spec, spec_dir), errors)
    if elsewhere:
        lacking = [NotHere(one.key, one.message, one.hint, one.value) for one in [*lacking, *_devices(spec)]]
    else:
        (errors if starting else warnings).extend(_devices(spec))
    errors += lacking
    if starting and not errors:
        errors += address_problems(spec)
    here = starting or has_nvidia_driver() or not any(spec.role(role).devices for role in spec.roles)
    where = run_dir or spec.run.place
    machine_errors, machine_warnings = machine_problems(
        spec, spec_dir, config, where, starting=starting, here=here, saves=saves
    )
    errors, warnings = with_values(spec, [*errors, *machine_errors]), with_values(spec, [*warnings, *machine_warnings])
    if elsewhere:
        warnings += [problem for problem in errors if isinstance(problem, NotHere)]
        errors = [problem for problem in errors if not isinstance(problem, NotHere)]
    return errors, warnings


def _new(found: Iterable[Problem], known: Sequence[Problem]) -> list[Problem]:
    """Leave out problems of keys that have one: what is wrong with a chat template shows in the rows too."""
    return [problem for problem in found if problem.key not in {one.key for one in known}]


# ── models ────────────────────────────────────────────────────────────────────────────────────────


def _models(spec: Spec, spec_dir: Path) -> tuple[list[Problem], list[Problem], dict[str, Any]]:
    """Return errors and warnings, and the main model's config.json ({} if it cannot be read)."""
    main = ModelCheck(spec, spec.lead, spec_dir)
    own = [role for role, section in spec.sections() if getattr(section, "model", "")]
    others = {role: ModelCheck(spec, role, spec_dir) for role in own if role in spec.roles and role != spec.lead}
    checks = [main, *others.values()]
    errors = [problem for check in checks for problem in check.problems]
    if main.folder is not None:
        errors += chat_problems(spec, main.folder)
    for role, other in others.items():
        errors += _kinship(main, other) if ROLES[role].same_tokens else _no_conversations(spec, main, other)
    if spec.lead_engine.model_of != "bigram":
        if (sampling := sampling_of(spec)) is not None:
            errors += shard_problems(sampling, main.config)
        for role, section in spec.sections():
            errors += _shapes(role, section, others.get(role, main).config)
        for role, lora in spec.adapters():
            errors += adapter_problems(role, lora, others.get(role, main).config)
    return errors, [problem for check in checks for problem in check.warnings], main.config


def _no_conversations(spec: Spec, main: ModelCheck, other: ModelCheck) -> Iterator[Problem]:
    """Yield a model that scores conversations and has no template for them."""
    if spec.data.chat == "never" or main.folder is None or other.folder is None:
        return
    if chat_template_of(main.folder).text and not chat_template_of(other.folder).text:
        message = "its tokenizer has no chat template, and prompts are conversations"
        hint = 'use a reward model whose tokenizer has one, or set data.chat = "never"'
        yield Problem(other.key, message, hint)


def _kinship(actor: ModelCheck, other: ModelCheck) -> Iterator[Problem]:
    """Yield where another role's model has not the actor's vocabulary or tokenizer."""
    wanted, given = actor.config.get("vocab_size"), other.config.get("vocab_size")
    if isinstance(wanted, int) and isinstance(given, int) and given < wanted:
        message = f"its vocabulary ({given}) is smaller than the actor's ({wanted}): it cannot score the same tokens"
        yield Problem(other.key, message, "use a model with the same tokenizer")
    elif actor.folder is not None and other.folder is not None and other.config:
        for message, hint in kinship_problems(actor.folder, other.folder):
            yield Problem(other.key, message, hint)


def _shapes(role: RoleName, section: RoleSection, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what the engine cannot run in its role's model, and ranks cannot share of it."""
    engine, facts = engine_of(section), model_facts(config)
    if facts is not None and engine is not None:
        yield from engine.model_problems(role, section, facts)
        if facts.composite and engine.attention == "engine":
            message = f"{engine.kind} builds models of its own, and this folder's language model is one among others"
            hint = 'write "torch"' if role == ROLLOUT else 'write "ddp", "fsdp2" or "zero"'
            yield Problem(f"{role}.engine.kind", message, hint, show(engine.kind))
    again = getattr(section, "gradient_checkpointing", False)
    if facts is not None and 0 < facts.layers < again:
        message, hint = f"the model has {facts.layers} layers", "write true for all of them"
        yield Problem(f"{role}.gradient_checkpointing", message, hint, show(again))
    if (degree := sequence_parallel_of(section)) > 1:
        yield from sequence_problems(f"{role}.sequence_parallel", degree, config)


def _devices(spec: Spec) -> list[Problem]:
    """Return roles that ask for GPUs on a machine without an NVIDIA driver, or for numbers beyond those that it has.
    Where a scheduler has handed GPUs out, placement knows how many."""
    asked = [(role, section) for role, section in spec.sections() if ROLES[role].holds_model and section.devices]
    if asked and not has_nvidia_driver():
        return [Problem(f"{role}.devices", "this machine has no NVIDIA driver", _NO_GPU) for role, _ in asked]
    here = [(f"{role}.devices", max(section.devices)) for role, section in asked if 0 in section.hosts]
    if os.environ.get("CUDA_VISIBLE_DEVICES") or not here or (count := gpu_count()) is None:
        return []
    has = f"this host, {socket.gethostname()}, has {count} GPU{'' if count == 1 else 's'}, and number"
    hint = f"use numbers below {count}" if count else _NO_GPU
    return [Problem(key, f"{has} {highest} is asked for", hint) for key, highest in here if highest >= count]
