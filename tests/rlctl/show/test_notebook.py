"""Where the panel is drawn: in a notebook as one output, on terminals that can, nowhere else."""

from __future__ import annotations

import io
import re
import sys
import types
from typing import Any

import pytest

from rlctl.show import notebook
from rlctl.show.progress import Progress
from rlctl.show.screen import Screen


class Display:
    """Stand in for IPython's: displays, and what each of them showed."""

    def __init__(self) -> None:
        self.shown: list[list[str]] = []

    def __call__(self, html: str, *, display_id: bool) -> types.SimpleNamespace:
        assert display_id
        own = [html]
        self.shown.append(own)
        return types.SimpleNamespace(update=own.append)


def test_a_notebook_gets_one_output_that_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    display = Display()
    module: Any = types.ModuleType("IPython.display")
    module.display, module.HTML = display, str
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(notebook, "REDRAW_S", 0.0)
    printed = io.StringIO()
    with Progress(20, 0, "mine", Screen(file=printed, force_jupyter=True, width=100)) as progress:
        assert progress.live
        progress.message("run directory: runs/mine")
        for step in range(1, 21):
            progress.tick()
            progress.step({"step": step, "reward/mean": step / 10, "time/step_s": 0.1})
        progress.warning("odd <script>")
    (outputs,) = display.shown
    last = re.sub(r"<[^>]+>", "", outputs[-1])
    assert len(outputs) > 20
    assert "step 20/20" in last
    assert "step 19/20" not in last
    assert last.index("run directory") < last.index("warning: odd &lt;script&gt;") < last.index("reward")
    assert printed.getvalue() == "", "nothing beside it"


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"FORCE_COLOR": "1"}, {}])
def test_no_panel_where_nothing_can_be_drawn_over(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    file = io.StringIO()
    file.isatty = lambda: env.get("TERM") == "dumb"  # type: ignore[method-assign]
    with Progress(2, 0, "mine", Screen(file=file, width=80)) as progress:
        assert not progress.live
        for _ in range(50):
            progress.tick()
        progress.step({"step": 2, "reward/mean": 0.5, "time/step_s": 0.1})
    assert len(file.getvalue().splitlines()) == 1
    assert "\x1b[1A" not in file.getvalue()
