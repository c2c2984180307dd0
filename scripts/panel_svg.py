"""Draw the live panel of a run as an SVG, from the run directory alone: what a terminal showed after its last step.

python scripts/panel_svg.py runs/quickstart-1 docs/panel.svg
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rlctl.show.metrics_file import read_metrics
from rlctl.show.progress import Progress
from rlctl.show.screen import Screen
from specs.json_file import read_object

WIDTH = 112


class Replay(Progress):
    """A run's panel after it has ended, `spent` seconds after its start."""

    def __init__(self, total_steps: int, name: str, console: Screen, spent: float) -> None:
        super().__init__(total_steps, 0, name, console, live=True)
        self._started -= spent
        self._phase = ""


def panel(run: Path) -> str:
    """Return the panel after the run's last step, without fonts from the network."""
    spec, records = read_object(run / "resolved.json")["run"], read_metrics(run / "metrics.jsonl")
    spent = sum(record.get("time/wall_s") or record.get("time/step_s") or 0.0 for record in records)
    screen = Screen(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor")
    progress = Replay(spec["steps"], spec["name"], screen, spent)
    for record in records:
        if record["step"]:
            progress.step(record)
        else:
            progress.evaluation(0, record)
    screen.print(progress.render())
    return re.sub(r"@font-face \{.*?\}\s*", "", screen.export_svg(title="rlctl train"), flags=re.DOTALL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("out", type=Path, help="SVG to write")
    given = parser.parse_args()
    given.out.write_text(panel(given.run), encoding="utf-8")
