"""As built = as specified: compare what every rank reports with what the spec asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.models.expected import Expected
from specs.errors import AsBuiltError, RunDirError
from specs.json_file import read_object, write_object
from specs.schema.engines.kernel_choice import OWN_MODULES
from specs.schema.mesh import SEQUENCE
from specs.schema.roles import ACTOR, ROLES, ROLLOUT, RoleName
from specs.schema.spec import Spec
from specs.wire.as_built import AsBuilt, ModelBuilt

if TYPE_CHECKING:
    from rich.table import Table


Reports = Mapping[RoleName, Sequence[AsBuilt]]

# Fields of `ModelBuilt` whose names say too little.
NAMES = {"path": "model path", "attn_function": "attention function"}


def differences(spec: Spec, reports: Reports, expected: Mapping[RoleName, Expected]) -> list[str]:
    """Every difference between what was built and what the spec asks for, in words. Empty: all is well.

    `expected`: what each role's model must be (`rlctl/models/expected.py`).
    """
    found: list[str] = []

    def expect(where: str, what: str, expected: object, actual: object) -> None:
        if expected != actual:
            found.append(f"{where}: {what}: expected {expected}, built {actual}")

    for role, ranks in reports.items():
        section = spec.role(role)
        fewer = getattr(section, "min_processes", None) or section.processes
        if not fewer <= len(ranks) <= section.processes:
            expect(role, "ranks", section.processes, len(ranks))
        for report in ranks:
            where = f"{role} rank {report.rank}"
            expect(where, "device", "cuda" if section.devices else "cpu", report.device.split(":")[0])
            model, first = report.model, ranks[0].model
            if model is None or first is None:
                expect(where, "whether it holds a model", role in expected, model is not None)
                continue
            engine = getattr(section, "engine", None)
            expect(where, "engine", engine.kind if engine else None, report.engine)
            for what, value, actual in compare(expected[role], model):
                expect(where, what, value, actual)
            expect(where, "parameters (rank 0 built the first number)", first.parameters, model.parameters)
            expect(where, "kernels (of rank 0 first)", _kernels(first), _kernels(model))
            expect(where, "weights (checksum of rank 0 first)", first.weights_checksum, model.weights_checksum)
    found += _across_roles(spec, reports)
    return found


def compare(expected: Expected, model: ModelBuilt, not_seen: Sequence[str] = ()) -> list[tuple[str, object, object]]:
    """(what, expected, actual) wherever a model differs from the spec. `not_seen`: fields not read back."""
    found: list[tuple[str, object, object]] = []
    for field, value in expected.items():
        actual = getattr(model, field)
        if field in not_seen or actual == value or (field == "options" and actual is None):
            continue
        if field == "options":
            told = ((name, asked, actual.get(name)) for name, asked in value.items())
            found += [(f"{name} of the engine's library", ask, have) for name, ask, have in told if ask != have]
        elif field != "mesh":
            found.append((NAMES.get(field, field), value, actual))
        else:
            axes = ((axis, value.get(axis, 0), actual.get(axis, 0)) for axis in {**value, **actual})
            found += [(f"ranks along the mesh axis {axis}", ask, have) for axis, ask, have in axes if ask != have]
    return found


def _kernels(model: ModelBuilt) -> str:
    """Their name, and how many modules they compute."""
    replaced = ", ".join(f"{number} × {kind}" for kind, number in sorted(model.replaced_modules.items()))
    return f"{model.kernels} ({replaced})" if replaced else model.kernels


def _learner(model: ModelBuilt) -> str:
    if model.trainable_parameters == model.parameters:
        return "all parameters"
    return "adapters" if 0 < model.trainable_parameters < model.parameters else "nothing"


def _across_roles(spec: Spec, reports: Reports) -> list[str]:
    """Actor and rollout must be the same model. Other trainers must read the same tokens, and a frozen one
    must be the actor's start, unless it has a path of its own."""
    found = []
    actor, rollout = reports[ACTOR][0].model, reports[ROLLOUT][0].model
    assert actor is not None
    assert rollout is not None
    for what in ("parameters", "hidden_size", "layers", "vocab_size", "tied_embeddings"):
        if getattr(actor, what) != getattr(rollout, what):
            found.append(f"rollout: {what}: actor has {getattr(actor, what)}, rollout {getattr(rollout, what)}")
    expected = "all parameters" if spec.actor.lora is None else "adapters"
    if _learner(actor) != expected:
        found.append(f"actor: trainable parameters: expected {expected}, built {_learner(actor)}")
    for role in [role for role in reports if ROLES[role].is_trainer and ROLES[role].same_tokens and role != ACTOR]:
        other = reports[role][0].model
        if other is None:
            continue  # named above
        if other.vocab_size != actor.vocab_size:
            found.append(f"{role}: vocab_size: actor has {actor.vocab_size}, {role} {other.vocab_size}")
        frozen_start = ROLES[role].holds == "frozen" and spec.model_path(role) == spec.model_path(ACTOR)
        if frozen_start and other.dtype == actor.dtype and other.weights_checksum != actor.weights_checksum:
            found.append(f"{role}: weights: it must start from the actor's weights, but the checksums differ")
    return found


def check(spec: Spec, reports: Reports, expected: Mapping[RoleName, Expected]) -> None:
    """Raises AsBuiltError listing every difference."""
    found = differences(spec, reports, expected)
    if found:
        raise AsBuiltError(
            "what was built is not what the spec asked for:\n" + "\n".join(f"  - {line}" for line in found),
            hint="nothing was trained; `rlctl check-config` shows what each role will build",
        )


def check_same_again(before: AsBuilt, after: AsBuilt) -> None:
    """A rank that was started again must be what it was. Raises AsBuiltError naming every difference."""
    own = {"pid"}  # of a process, not of what it built
    was, is_now = before.model_dump(exclude=own), after.model_dump(exclude=own)
    found = [f"{key}: built {was[key]}, then {is_now[key]}" for key in was if was[key] != is_now[key]]
    if found:
        raise AsBuiltError(
            f"{after.role} rank {after.rank} was restarted and differs from before:\n"
            + "\n".join(f"  - {line}" for line in found),
            hint="the environment changed during the run; continue with the same command and --resume",
        )


def read_starting_weights(path: Path) -> dict[RoleName, str]:
    """Role → checksum of the weights that its trainers started from, from an earlier attempt's file; empty where there
    is none. Raises RunDirError."""
    if not os.path.lexists(path):
        return {}
    hint = "put it back from a copy, or move it away: starting weights are then not compared with the first attempt's"
    try:
        before = read_object(path)
    except ValueError as error:
        raise RunDirError(f"{path} {error}", hint=hint) from None
    try:
        trainers = [role for role in before if role in ROLES and ROLES[role].is_trainer]
        return {role: str(before[role][0]["model"]["weights_checksum"]) for role in trainers}
    except (LookupError, TypeError):
        raise RunDirError(f"{path} does not say what weights each role started from", hint=hint) from None


def check_same_start(reports: Reports, earlier: Mapping[RoleName, str]) -> None:
    """On resume the reference and the starting weights must be those of the first attempt (`read_starting_weights`)."""
    for role in [role for role in reports if role in earlier]:
        model = reports[role][0].model
        if model is not None and model.weights_checksum != earlier[role]:
            raise AsBuiltError(
                f"{role}: the starting weights at {model.path} differ from those that this run started with",
                hint="the model folder (or the torch version that draws random weights) changed; start a new run",
            )


def write(reports: Reports, path: Path, sync: Mapping[str, Any] | None = None) -> None:
    """Every rank's report by role, and how weights travel (`sync`)."""
    listed: dict[str, Any] = {role: [report.model_dump() for report in ranks] for role, ranks in reports.items()}
    if sync is not None:
        listed["sync"] = dict(sync)
    write_object(path, listed)


def table(spec: Spec, reports: Reports) -> Table:
    """One row per role: what it is, as read back from its layers. The rest is in `as_built.json`."""
    from rich import box
    from rich.table import Table

    grid = Table(title="As built", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for column in ("role", "held by", "model", "parameters", "dtype", "attention"):
        grid.add_column(column, justify="right" if column == "parameters" else "left", overflow="fold")
    for role, ranks in reports.items():
        report, model = ranks[0], ranks[0].model
        held = f"{len(ranks)} × {report.engine}, {report.device}"
        if model is not None and model.mesh:
            held += "\n" + mesh_text(model.mesh)
        if model is None:
            grid.add_row(role, held)
            continue
        name = f"{_family(model)} {Path(model.path).name}"
        expected = spec.attention(role)
        attention = model.attn_implementation if expected != "auto" else f"{model.attn_implementation} (auto)"
        if model.kernels != OWN_MODULES:
            attention += f"\nkernels {_kernels(model)}"
        grid.add_row(role, held, name, _parameters(model), model.dtype, attention)
    return grid


def mesh_text(axes: Mapping[str, int]) -> str:
    """The axes that the model is cut along; below, the one that samples are: its ranks are the same again."""
    of_model = " × ".join(f"{axis} {ranks}" for axis, ranks in axes.items() if axis != SEQUENCE)
    return "\n".join(filter(None, (of_model, f"{SEQUENCE} {axes[SEQUENCE]}" if SEQUENCE in axes else "")))


def _family(model: ModelBuilt) -> str:
    """Its class, without what the role says already; a head that the checkpoint did not have is told."""
    family = model.model_class.removesuffix("ForCausalLM").removesuffix("ForSequenceClassification")
    return f"{family} with a new head," if model.new_head else family


def _parameters(model: ModelBuilt) -> str:
    """All of them; below, those that learn where that is a part."""
    partly = 0 < model.trainable_parameters < model.parameters
    return f"{model.parameters:,}" + (f"\n{model.trainable_parameters:,} learn" if partly else "")
