"""Something wrong with a spec that a role's process, or its code, found out."""

from __future__ import annotations

from specs.schema.table import Table


class Finding(Table):
    """A problem with a key of the spec. `refuses`: an error; otherwise a warning."""

    key: str
    message: str
    hint: str
    value: str = ""
    refuses: bool = True
