"""Compare what `--probe` found with the spec: as problems, as JSON, and as tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.check.meta_build import ProbeFindings
from rlctl.models.as_built_check import NAMES, Expected, compare, mesh_text
from rlctl.models.hardware import has_nvidia_driver
from specs.errors import NotHere, Problem
from specs.rules.all_rules import with_values
from specs.schema.roles import DATA, ROLLOUT, RoleName
from specs.schema.spec import Spec
from specs.text import show
from specs.wire.meta_request import Probed

if TYPE_CHECKING:
    from rich.table import Table

FIELDS = (
    *("path", "model_class", "parameters", "trainable_parameters", "hidden_size", "layers", "vocab_size"),
    *("tied_embeddings", "dtype", "attn_implementation", "attn_function", "mesh"),
    *("state_layers", "recomputed_layers", "activation_offload", "kernels"),
)
_UNKNOWN, _LATER = "–", "seen when a run starts"
_ANOTHER = "look at the model's config.json, the packages of the role's interpreter and its env; nothing else decides"


def probe_problems(spec: Spec, probe: ProbeFindings) -> tuple[list[Problem], list[Problem]]:
    """Return errors, and warnings about roles for GPUs on a machine that has none. What this machine lacks is
    NotHere."""
    errors: list[Problem] = []
    warnings: list[Problem] = []
    for role, found in probe.found.items():
        if found.error:
            here = not spec.role(role).devices or has_nvidia_driver()
            kind = Problem if here and not found.not_here else NotHere
            (errors if here else warnings).append(kind(role, found.error, found.hint))
        if found.model is not None:
            for what, wanted, actual in compare(probe.asked[role], found.model, found.not_seen):
                errors.append(Problem(role, f"{what}: expected {wanted}, built {actual}", _ANOTHER))
        for finding in found.findings:
            problem = Problem(finding.key, finding.message, finding.hint, finding.value)
            (errors if finding.refuses else warnings).append(problem)
    ends = probe.found[ROLLOUT].ends if ROLLOUT in probe.found else None
    answer_end = probe.found[DATA].answer_end if DATA in probe.found else None
    if ends == ():
        message = "no token ends a completion: each has data.max_response_tokens tokens"
        warnings.append(Problem("model.path", message, "put eos_token_id into its generation_config.json"))
    elif ends is not None and answer_end is not None and answer_end[0] not in ends:
        text = show(answer_end[1])
        message = (
            f"the chat template ends an answer with {text}, and that ends no completion: the model writes on behind it"
        )
        warnings.append(Problem("rollout.stop", message, f"add {text} to rollout.stop"))
    return with_values(spec, errors), with_values(spec, warnings)


def role_json(asked: Expected, found: Probed) -> dict[str, Any]:
    """Return `asked` and `got` by field, what was `not_seen`, and what was read back beside the role's other keys."""
    actual = {} if found.model is None else {field: getattr(found.model, field) for field in FIELDS}
    got = {field: value for field, value in actual.items() if field not in found.not_seen}
    about: dict[str, Any] = {field: value for field, value in got.items() if field not in ("path", "mesh")}
    about |= {"asked": dict(asked), "got": got, "not_seen": list(found.not_seen)}
    if found.tokens is not None:
        about["tokenizer_tokens"] = found.tokens
    return about | {"error": found.error, "probe_s": found.seconds}


# ── for the person ────────────────────────────────────────────────────────────────────────────────


def probe_table(spec: Spec, probe: ProbeFindings) -> Table:
    """Show expected against actual, side by side; what differs is red."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("role", "built without memory", "asked", "got"):
        table.add_column(column, overflow="fold")
    for role, found in probe.found.items():
        for number, (what, wanted, actual, differs) in enumerate(_rows(spec, role, probe.asked.get(role, {}), found)):
            table.add_row("" if number else role, what, wanted, actual, style="bold red" if differs else "")
        table.add_section()
    return table


def _rows(spec: Spec, role: RoleName, asked: Expected, found: Probed) -> Iterator[tuple[str, str, str, bool]]:
    if found.error:
        yield "", "", "could not be built, see below", True
    elif found.tokens is not None:
        yield "tokenizer", _UNKNOWN, f"{found.tokens:,} tokens", False
    elif found.model is None:
        yield "", _UNKNOWN, "this engine cannot say before it is built", False
    else:
        for field in FIELDS:
            value, seen = getattr(found.model, field), field not in found.not_seen
            wanted, actual = _text(field, asked.get(field)), _text(field, value) if seen else _LATER
            if field == "attn_implementation" and spec.attention(role) == "auto" and field in asked:
                wanted = f"auto: {wanted}"
            if (wanted, actual) != (_UNKNOWN, _UNKNOWN):
                yield NAMES.get(field, field), wanted, actual, seen and field in asked and asked[field] != value


def _text(field: str, value: object) -> str:
    if isinstance(value, dict):
        return mesh_text(value) or _UNKNOWN
    if value is None or isinstance(value, bool):
        return _UNKNOWN if value is None else "yes" if value else "no"
    if field == "path":
        return Path(str(value)).name
    return f"{value:,}" if isinstance(value, int) else str(value)
