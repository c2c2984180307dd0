"""Compares what every rank reports to have built with what the spec asked for: as built = as specified."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.models.paths import lineage
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
# Fields of `ModelBuilt` → the value that they must have (`rlctl/preflight/expected.py`). What is left out is not known
# before the model is built.
Expected = Mapping[str, Any]

# Fields of `ModelBuilt` whose names say too little.
NAMES = {"path": "model path", "attn_function": "attention function"}


def differences(spec: Spec, reports: Reports, expected: Mapping[RoleName, Expected]) -> list[str]:
    """Return every difference between what was built and what the spec asks for. Empty: all is well."""
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
    return [*found, *_across_roles(spec, {role: ranks[0].model for role, ranks in reports.items()})]


def compare(expected: Expected, model: ModelBuilt, not_seen: Sequence[str] = ()) -> list[tuple[str, object, object]]:
    """Return (what, expected, actual) wherever a model differs from the spec. `not_seen`: fields not read back."""
    found: list[tuple[str, object, object]] = []
    pairs: Iterable[tuple[str, object, object]]
    for field, value in expected.items():
        actual = getattr(model, field)
        if field in not_seen or actual == value or (field == "options" and actual is None):
            continue
        if field == "options":
            pairs = ((f"{name} of the engine's library", asked, actual.get(name)) for name, asked in value.items())
        elif field == "mesh":
            axes = {**value, **actual}
            pairs = ((f"ranks along the mesh axis {axis}", value.get(axis, 0), actual.get(axis, 0)) for axis in axes)
        else:
            pairs = [(NAMES.get(field, field), value, actual)]
        found += [(what, asked, built) for what, asked, built in pairs if asked != built]
    return found


def _kernels(model: ModelBuilt) -> str:
    """Return the name of a model's kernels, and how many modules they compute."""
    replaced = ", ".join(f"{number} × {kind}" for kind, number in sorted(model.replaced_modules.items()))
    return f"{model.kernels} ({replaced})" if replaced else model.kernels


def _learner(model: ModelBuilt) -> str:
    if model.trainable_parameters == model.parameters:
        return "all parameters"
    return "adapters" if 0 < model.trainable_parameters < model.parameters else "nothing"


def _across_roles(spec: Spec, models: Mapping[RoleName, ModelBuilt | None]) -> Iterator[str]:
    """Yield where actor and rollout are not the same model, another trainer does not read the same tokens, or a frozen
    one without a path of its own is not the actor's start."""
    actor, rollout = models[spec.lead], models.get(ROLLOUT)
    assert actor is not None
    for what in ("parameters", "hidden_size", "layers", "vocab_size", "tied_embeddings"):
        if rollout is not None and getattr(actor, what) != getattr(rollout, what):
            yield f"rollout: {what}: actor has {getattr(actor, what)}, rollout {getattr(rollout, what)}"
    expected = "all parameters" if spec.lead_section.lora is None else "adapters"
    if _learner(actor) != expected:
        yield f"{spec.lead}: trainable parameters: expected {expected}, built {_learner(actor)}"
    for role, model in models.items():
        if role == spec.lead or model is None or not (ROLES[role].is_trainer and ROLES[role].same_tokens):
            continue
        if model.vocab_size != actor.vocab_size:
            yield f"{role}: vocab_size: actor has {actor.vocab_size}, {role} {model.vocab_size}"
        frozen_start = ROLES[role].holds == "frozen" and spec.model_path(role) == spec.model_path(ACTOR)
        if frozen_start and model.dtype == actor.dtype and model.weights_checksum != actor.weights_checksum:
            yield f"{role}: weights: it must start from the actor's weights, but the checksums differ"


def check(spec: Spec, reports: Reports, expected: Mapping[RoleName, Expected]) -> None:
    """Raise AsBuiltError listing every difference, if there is one."""
    found = differences(spec, reports, expected)
    if found:
        hint = "nothing was trained; `rlctl check-config` shows what each role will build"
        raise AsBuiltError("\n  - ".join(["what was built is not what the spec asked for:", *found]), hint=hint)


def check_same_again(before: AsBuilt, after: AsBuilt) -> None:
    """Raise AsBuiltError naming every difference of a rank that was started again."""
    own = {"pid"}  # of a process, not of what it built
    was, is_now = before.model_dump(exclude=own), after.model_dump(exclude=own)
    found = [f"{key}: built {was[key]}, then {is_now[key]}" for key in was if was[key] != is_now[key]]
    if found:
        message = f"{after.role} rank {after.rank} was restarted and differs from before:"
        hint = "the environment changed during the run; continue with the same command and --resume"
        raise AsBuiltError("\n  - ".join([message, *found]), hint=hint)


def read_starting_weights(path: Path) -> dict[RoleName, str]:
    """Return role → checksum of the weights that its trainers started from, from an earlier attempt's file; empty where
    there is none. Raises RunDirError."""
    if not os.path.lexists(path):
        return {}
    hint = "put it back from a copy, or move it away: starting weights are then not compared with the first attempt's"
    try:
        before = read_object(path)
        trainers = [role for role in before if role in ROLES and ROLES[role].is_trainer]
        return {role: str(before[role][0]["model"]["weights_checksum"]) for role in trainers}
    except ValueError as error:
        raise RunDirError(f"{path} {error}", hint=hint) from None
    except (LookupError, TypeError):
        raise RunDirError(f"{path} does not say what weights each role started from", hint=hint) from None


def check_same_start(reports: Reports, earlier: Mapping[RoleName, str]) -> None:
    """Raise AsBuiltError where a resumed role starts from other weights than in the first attempt (`earlier`)."""
    for role in [role for role in reports if role in earlier]:
        model = reports[role][0].model
        if model is not None and model.weights_checksum != earlier[role]:
            raise AsBuiltError(
                f"{role}: the starting weights at {model.path} differ from those that this run started with",
                hint="the model folder (or the torch version that draws random weights) changed; start a new run",
            )


def write(reports: Reports, path: Path, sync: Mapping[str, Any] | None = None) -> None:
    """Write every rank's report by role, the runs that a model's weights come from, and how they travel (`sync`)."""
    listed = {role: [report.model_dump() for report in ranks] for role, ranks in reports.items()}
    models = {role: ranks[0].model for role, ranks in reports.items()}
    chains = {role: chain for role, model in models.items() if model and len(chain := lineage(model.path)) > 1}
    more = {"lineage": chains, "sync": sync and dict(sync)}
    write_object(path, {**listed, **{key: value for key, value in more.items() if value}})


def table(spec: Spec, reports: Reports) -> Table:
    """Return one row per role: what it is, as read back from its layers. The rest is in `as_built.json`."""
    from rich import box
    from rich.table import Table

    grid = Table(title="As built", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for column in ("role", "held by", "model", "parameters", "dtype", "attention"):
        grid.add_column(column, justify="right" if column == "parameters" else "left", overflow="fold")
    for role, ranks in reports.items():
        report, model = ranks[0], ranks[0].model
        held = f"{len(ranks)} × {report.engine}, {report.device}"
        if model is None:
            grid.add_row(role, held)
            continue
        family = model.model_class.removesuffix("ForCausalLM").removesuffix("ForSequenceClassification")
        origin = lineage(model.path)
        name = f"{family} {'with a new head, ' if model.new_head else ''}"
        name += origin[0] if len(origin) > 1 else Path(model.path).name
        attention = model.attn_implementation + (" (auto)" if spec.attention(role) == "auto" else "")
        if model.kernels != OWN_MODULES:
            attention += f"\nkernels {_kernels(model)}"
        parameters = f"{model.parameters:,}"
        if _learner(model) == "adapters":
            parameters += f"\n{model.trainable_parameters:,} learn"
        held = "\n".join(filter(None, (held, mesh_text(model.mesh))))
        grid.add_row(role, held, name, parameters, model.dtype, attention)
    return grid


def mesh_text(axes: Mapping[str, int]) -> str:
    """Return the axes that the model is sharded along; below, the axis of samples, whose ranks hold the same again."""
    of_model = " × ".join(f"{axis} {ranks}" for axis, ranks in axes.items() if axis != SEQUENCE)
    return "\n".join(filter(None, (of_model, f"{SEQUENCE} {axes[SEQUENCE]}" if SEQUENCE in axes else "")))
