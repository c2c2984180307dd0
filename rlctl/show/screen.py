"""Print text as it is: neither the terminal nor rich obeys it.

Every command prints through a `Screen` or through `print`, whose streams are guarded (`streams.py`). Only a
`Screen` may send the terminal's own sequences (colours, the panel); what it is given to show is text.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from rlctl.show.streams import SafeStdout
from specs.terminal import VisibleStream, visible


def redraws(console: Console) -> bool:
    """Tell whether a panel can be drawn over itself: on a terminal that moves its cursor, but not in a file that
    FORCE_COLOR or the like has rich take for a terminal."""
    if not console.is_terminal or console.is_dumb_terminal:
        return False
    forced = os.environ.get("FORCE_COLOR") or os.environ.get("TTY_COMPATIBLE")
    return not forced or bool(getattr(console.file, "isatty", lambda: False)())


class Screen(Console):
    """Be rich's console without markup, emoji codes or links: strings are text. `outlives`: its reader may go away."""

    def __init__(self, *, stderr: bool = False, outlives: bool = False, **options: Any) -> None:
        stream = sys.stderr if stderr else sys.stdout
        file = stream.unguarded if isinstance(stream, VisibleStream) else stream
        if outlives and file is not None:
            file = cast(TextIO, SafeStdout(file))
        given = {"file": file, "highlight": False, "force_jupyter": False, **options}
        super().__init__(stderr=stderr, markup=False, emoji=False, **given)
        if self.width < 1:  # COLUMNS=0, as some terminals set it: rich would print nothing
            self.width = 80

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **{**options, "markup": False, "emoji": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text):
            renderable = _visible_text(renderable)
        for segment in super().render(renderable, options):
            yield segment if segment.control else _visible_segment(segment)

    def status(self, status: RenderableType, **options: Any) -> Status:
        shown = Text(status) if isinstance(status, str) else status
        if self.is_terminal and not redraws(self):  # each turn of it would stay there
            return Status(shown, console=Console(file=io.StringIO(), force_terminal=False), **options)
        return super().status(shown, **options)


def progress_screen(*, as_json: bool = False, quiet: bool = False) -> Screen:
    """Return where progress goes: to stderr beside a result in JSON, and nowhere where it is not wanted."""
    return Screen(quiet=True, force_terminal=False) if quiet else Screen(stderr=as_json, outlives=True)


def _visible_text(text: Text) -> Text:
    """Make the text visible, with its styles, before it is laid out: an escape is longer than what it stands for."""
    if visible(text.plain) == text.plain:
        return text
    shown = text.blank_copy()
    for piece in text.divide(range(1, len(text.plain))):
        seen = visible(piece.plain)
        shown.append_text(piece if seen == piece.plain else Text(seen))
    return shown


def _visible_segment(segment: Segment) -> Segment:
    style = segment.style.update_link(None) if segment.style is not None and segment.style.link else segment.style
    return Segment(visible(segment.text), style)
