"""Make visible, here and only here, what would command a terminal in text of models, data and people.

A completion, a prompt, a key or a file name may hold escape sequences (move the cursor, set the clipboard, hide what
follows), carriage returns and backspaces that rewrite a line, and marks that turn the direction of the text around.
"""

from __future__ import annotations

import json
import re
from typing import Any, TextIO

# C0 but tab and newline, DEL, C1; marks and overrides of direction, separators of lines; halves of surrogate pairs.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def visible(text: str) -> str:
    """Return `text` with each character that commands a terminal as its number, `\\x1b` or `\\u202e`."""
    return _COMMANDS.sub(_number, text)


def json_text(value: Any, indent: int | None = None) -> str:
    """Return JSON of the same value that a terminal may show: what would command it is `\\u001b`."""
    return _COMMANDS.sub(_json_number, json.dumps(value, ensure_ascii=False, indent=indent))


def _number(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _json_number(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


class VisibleStream:
    """Let only `visible` text through to a text stream. `log`: it is a file that libraries write to; colours are left
    out, and a progress bar that returns to the start of its line begins a new one."""

    def __init__(self, file: TextIO, *, log: bool = False) -> None:
        self.unguarded, self._log = file, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)

    def write(self, text: str) -> int:
        shown = _COLOUR.sub("", text).replace("\r\n", "\n").replace("\r", "\n") if self._log else text
        self.unguarded.write(visible(shown))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)
