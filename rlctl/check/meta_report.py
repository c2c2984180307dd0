"""Compare what `--probe` found with the spec: as JSON, and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.check.meta_build import ProbeFindings, can_be_probed
from rlctl.models.as_built_check import NAMES, compare, mesh_text
from rlctl.models.expected import Expected, models_expected
from rlctl.preflight.role_choices import role_attention
from specs.errors import NotHere, Problem
from specs.schema.roles import DATA, REF, ROLLOUT, RoleName
from specs.schema.spec import Spec
from specs.text import show
from specs.wire.meta_request import Probed

if TYPE_CHECKING:
    from rich.table import Table

FIELDS = (
    *("path", "model_class", "parameters", "trainable_parameters", "hidden_size", "layers", "vocab_size"),
    *("tied_embeddings", "dtype", "attn_implementation", "attn_function", "mesh"),
    *("recomputed_layers", "activation_offload", "kernels"),
)
RUN_NOTE = (
    "Weights were random, none was read. Each role ran alone in one process: an engine that cuts the model across\n"
    "ranks held all of it, and a role that shares its device will find less memory free."
)
_UNKNOWN, _LATER = "–", "seen when a run starts"
_ANOTHER = "look at the model's config.json, the packages of the role's interpreter and its env; nothing else decides"


def probe_problems(spec: Spec, spec_dir: Path, probe: ProbeFindings) -> tuple[list[Problem], list[Problem]]:
    """Return errors, and warnings about roles for GPUs on a machine that has none. What this machine lacks is
    NotHere."""
    errors: list[Problem] = []
    warnings: list[Problem] = []
    asked = models_expected(spec, spec_dir, role_attention)
    for role, found in probe.found.items():
        if found.error:
            here = can_be_probed(spec, role)
            kind = Problem if here and not found.not_here else NotHere
            (errors if here else warnings).append(kind(role, found.error, found.hint))
        if found.model is not None:
            for what, wanted, actual in compare(asked[role], found.model, found.not_seen):
                errors.append(Problem(role, f"{what}: expected {wanted}, built {actual}", _ANOTHER))
        for finding in found.findings:
            said = Problem(finding.key, finding.message, finding.hint, finding.value)
            (errors if finding.refuses else warnings).append(said)
    path = show(spec.model.path)
    errors += _beyond(probe.found, path)
    return errors, [*warnings, *_no_end(probe.found, path)]


def _beyond(probed: Mapping[RoleName, Probed], path: str) -> Iterator[Problem]:
    """Find a tokenizer with a token that the model has no row for. Files do not always say: transformers adds special
    tokens that a tokenizer lacks."""
    highest = probed[DATA].highest if DATA in probed else None
    models = [found.model for role, found in probed.items() if found.model is not None and role != REF]
    if highest is None or not models or highest.id < models[0].vocab_size:
        return
    message = f"{show(highest.text)} is token {highest.id}, and the model's vocabulary has {models[0].vocab_size:,}"
    yield Problem("model.path", message, "name in tokenizer_config.json only tokens that the tokenizer has", path)


def _no_end(probed: Mapping[RoleName, Probed], path: str) -> Iterator[Problem]:
    """Find completions that never end."""
    if ROLLOUT in probed and probed[ROLLOUT].ends == ():
        message = "no token ends a completion: each has data.max_response_tokens tokens"
        yield Problem("model.path", message, "put eos_token_id into its generation_config.json", path)


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────


def probe_json(spec: Spec, spec_dir: Path, probe: ProbeFindings) -> dict[RoleName, dict[str, Any]]:
    """Return by role `asked` and `got` by field, what was `not_seen`, and what was read back beside the role's other
    keys."""
    asked = models_expected(spec, spec_dir, role_attention)
    return {role: _role_json(asked.get(role, {}), found) for role, found in probe.found.items()}


def _role_json(asked: Expected, found: Probed) -> dict[str, Any]:
    actual = {} if found.model is None else {field: getattr(found.model, field) for field in FIELDS}
    seen = {field: value for field, value in actual.items() if field not in found.not_seen}
    flat = {field: value for field, value in seen.items() if field not in ("path", "mesh")}
    about: dict[str, Any] = {**flat, "asked": dict(asked), "got": seen, "not_seen": list(found.not_seen)}
    if found.tokens is not None:
        about["tokenizer_tokens"] = found.tokens
    if found.one_update is not None:
        about["one_update"] = found.one_update.model_dump()
    return about | {"error": found.error, "probe_s": found.seconds}


# ── for the person ────────────────────────────────────────────────────────────────────────────────


def probe_table(spec: Spec, spec_dir: Path, probe: ProbeFindings) -> Table:
    """Show expected against actual, side by side; what differs is red."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    how = "built without memory" if probe.level == "meta" else "built"
    for column in ("role", how, "asked", "got"):
        table.add_column(column, overflow="fold")
    asked = models_expected(spec, spec_dir, role_attention)
    for role, found in probe.found.items():
        rows = _rows(spec, role, asked.get(role, {}), found)
        for number, (what, wanted, actual, differs) in enumerate(rows):
            style = "bold red" if differs else ""
            table.add_row(
                "" if number else role, what, wanted, actual, style=style, end_section=number == len(rows) - 1
            )
    return table


def _rows(spec: Spec, role: RoleName, asked: Expected, found: Probed) -> list[tuple[str, str, str, bool]]:
    if found.error:
        return [("", "", "could not be built, see below", True)]
    if found.tokens is not None:
        return [("tokenizer", _UNKNOWN, f"{found.tokens:,} tokens", False)]
    if found.model is None:
        return [("", _UNKNOWN, "this engine cannot say before it is built", False)]
    differing = {what.partition(" axis ")[0] for what, _, _ in compare(asked, found.model, found.not_seen)}
    rows = []
    for field in FIELDS:
        actual = _LATER if field in found.not_seen else _text(field, getattr(found.model, field))
        wanted = _text(field, asked[field]) if field in asked else _UNKNOWN
        if field == "attn_implementation" and spec.attention(role) == "auto" and field in asked:
            wanted = f"auto: {wanted}"
        differs = NAMES.get(field, field) in differing or (field == "mesh" and "ranks along the mesh" in differing)
        if (wanted, actual) != (_UNKNOWN, _UNKNOWN):
            rows.append((NAMES.get(field, field), wanted, actual, differs))
    return rows


def _text(field: str, value: object) -> str:
    if field == "mesh" and isinstance(value, dict):
        return mesh_text(value) or _UNKNOWN
    if field == "path":
        return Path(str(value)).name
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def run_table(probe: ProbeFindings) -> Table:
    """Show what each role's trial update took."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("role", "one trial update of", "build", "step", "tokens/s", "memory before", "peak"):
        table.add_column(column, justify="left" if column in ("role", "one trial update of") else "right")
    for role, found in probe.found.items():
        took, shape = found.one_update, probe.requests[role].shape
        if took is None or shape is None:
            table.add_row(role, "could not be run, see below", style="bold red")
            continue
        sequences = f"{shape.sequences} × ({shape.prompt_tokens} + {shape.response_tokens}) tokens"
        seconds = (f"{took.build_s:.1f} s", f"{took.step_s:.2f} s", f"{took.tokens / max(took.step_s, 1e-9):,.0f}")
        table.add_row(role, sequences, *seconds, f"{took.before_GiB:.2f} GiB", f"{took.peak_GiB:.2f} GiB")
    return table
