"""What `rlctl check-config` says of every role's attention: asked, in effect, why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specs.attention_rules import attention_of
from specs.schema import RoleName, Spec

if TYPE_CHECKING:
    from rich.table import Table


def attention_entry(spec: Spec, role: RoleName, spec_dir: Path) -> dict[str, str | None]:
    """For JSON. `attn_implementation` is what will be in effect, null where only the engine knows or there is none;
    `attn_function` is what will be called then."""
    found = attention_of(spec, role, spec_dir)
    if found is None:
        return dict.fromkeys(("attn_implementation", "attn_asked", "attn_function", "attn_why"))
    return {
        "attn_implementation": found.implementation or None,
        "attn_asked": found.asked,
        "attn_function": found.function or None,
        "attn_why": found.problem or found.why,
    }


def attention_table(spec: Spec, spec_dir: Path) -> Table:
    """One row per role that has attention."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("role", "attention asked", "in effect", "why"):
        table.add_column(column, overflow="fold")
    for role in spec.roles:
        found = attention_of(spec, role, spec_dir)
        if found is not None:
            effect = "none" if found.problem else found.implementation or "its own"
            table.add_row(role, found.asked, effect, found.problem or found.why)
    return table
