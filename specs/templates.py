"""Prompt templates: text with `{column}` where a row's value goes.

Only braces around a name are columns, so that LaTeX such as `\\boxed{}` stays as it is; `{{` and `}}` give
single braces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PIECE = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")


def template_columns(template: str) -> tuple[str, ...]:
    """Return the columns that a template names, each once, in order."""
    return tuple(dict.fromkeys(match[1] for match in _PIECE.finditer(template) if match[1]))


def single_braces(template: str) -> str:
    """Return the hint for a template that names a column as Jinja does, `{{column}}`; "" for any other."""
    jinja = re.search(r"\{\{\s*(\w+)\s*\}\}", template)
    return f"write {{{jinja[1]}}}, with single braces" if jinja else ""


def render_template(template: str, row: Mapping[str, Any]) -> str:
    """Fill a template from a row. Raises KeyError naming the first column that the row lacks."""

    def fill(match: re.Match[str]) -> str:
        if match[1]:
            return str(row[match[1]])
        return match[0][0]

    return _PIECE.sub(fill, template)
