"""Show the panel in a notebook: one output of one cell, which is updated, with the last messages above the panel."""

from __future__ import annotations

import io
from collections import deque
from typing import Any

from rich.console import Group, RenderableType

from rlctl.show.screen import Screen

KEPT = 40  # messages and tables above the panel
REDRAW_S = 0.5  # each redraw is a message to the browser
_PAGE = '<pre style="white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace">{code}</pre>'


class NotebookPanel:
    """Do for a notebook what `rich.live.Live` does for a terminal."""

    def __init__(self, console: Screen) -> None:
        self._console = console
        self._messages: deque[RenderableType] = deque(maxlen=KEPT)
        self._panel: RenderableType = ""
        self._handle: Any = None

    def start(self) -> None:
        from IPython.display import display

        self._handle = display(self._html(), display_id=True)

    def update(self, panel: RenderableType, *, refresh: bool) -> None:
        self._panel = panel
        self._handle.update(self._html())

    def print(self, message: RenderableType) -> None:
        """Show something above the panel."""
        self._messages.append(message)
        self._handle.update(self._html())

    def stop(self) -> None:
        """Leave the panel as it is."""

    def _html(self) -> Any:
        from IPython.display import HTML

        screen = Screen(
            file=io.StringIO(), width=self._console.width, record=True, force_jupyter=False, force_terminal=True
        )
        screen.print(Group(*self._messages, self._panel))
        return HTML(screen.export_html(inline_styles=True, code_format=_PAGE))
