"""Text of models, data and people is shown on a terminal and never obeyed by it, nor by rich."""

from __future__ import annotations

import contextlib
import io
import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from corpus import as_toml
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from small_spec import raw_spec

from rlctl.cli import app, main
from rlctl.show.progress import Progress
from rlctl.show.screen import Screen
from specs.terminal import VisibleStream, visible

# Title, link, clipboard, clear, C1, line rewriting, direction; then what rich would make of it.
HOSTILE = (
    "\x1b]0;owned\x07\x1b]8;;http://evil\x1b\\x\x1b]52;c;aGk=\x07\x1b[2J\x9b2J\x90q\x85\r\x08\x7f\u202eA\u2066\u2028"
    "[bold]b[/bold][link=http://evil]l[/link]:smile:"
)
OWN = re.compile(r"\x1b\[[0-9;?]*[mhlAK]|\r")  # what rich sends itself: colours, and for the panel cursor and lines


def commands(text: str) -> set[str]:
    """Characters that command a terminal, by what Unicode says of them."""
    direction = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
    marks = "\u061c\u200e\u200f"
    return {
        one
        for one in text
        if (unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp") and one not in "\n\t")
        or unicodedata.bidirectional(one) in direction
        or one in marks
    }


def assert_harmless(text: str, *, own: bool = False) -> None:
    assert not commands(OWN.sub("", text) if own else text)


# ── one place ─────────────────────────────────────────────────────────────────────────────────────


@given(st.text(st.characters(exclude_categories=[])))
def test_what_commands_is_visible_and_the_rest_stays(text: str) -> None:
    shown = visible(text)
    assert_harmless(shown)
    if not commands(text):
        assert shown == text


def test_a_log_has_no_colours_and_a_line_for_each_state_of_a_bar() -> None:
    file = io.StringIO()
    print(f"\x1b[32m10%\x1b[0m\r20%\r\n\ud800{HOSTILE}", file=VisibleStream(file, log=True))
    assert file.getvalue().startswith("10%\n20%\n\\ud800\\x1b]0;owned")
    assert_harmless(file.getvalue())


# ── everything that prints ────────────────────────────────────────────────────────────────────────


def table() -> Table:
    made = Table(HOSTILE, title=HOSTILE, caption=HOSTILE)
    made.add_row(HOSTILE)
    made.add_row(Text(HOSTILE, style="link http://evil"))
    return made


@pytest.mark.parametrize(
    "make",
    [lambda: HOSTILE, lambda: Text.assemble(("warning", "red"), HOSTILE), table, lambda: Panel(HOSTILE, title=HOSTILE)],
)
def test_a_screen_shows_and_does_not_obey(make: Callable[[], object]) -> None:
    file = io.StringIO()
    Screen(file=file, width=200, force_terminal=True, color_system="truecolor").print(make())
    shown = file.getvalue()
    assert_harmless(shown, own=True)
    assert r"\x1b]52;c;aGk=" in shown
    assert "[bold]b[/bold][link=http://evil]l[/link]:smile:" in shown


@pytest.mark.parametrize("live", [True, False])
def test_the_panel_and_the_lines_of_a_run(live: bool) -> None:
    file = io.StringIO()
    screen = Screen(file=file, width=200, force_terminal=live)
    with Progress(3, HOSTILE, screen, live) as progress:
        progress.phase("rollout", HOSTILE)
        progress.message(HOSTILE)
        progress.warning(HOSTILE)
        progress.message(table())
        progress.evaluation(0, {f"eval/{HOSTILE}/reward_mean": 0.5})
        progress.step({"step": 3, "reward/mean": 0.5, f"eval/{HOSTILE}/reward_mean": 1.0, "time/step_s": 1.0})
    assert_harmless(file.getvalue(), own=live)
    assert "[bold]b[/bold]" in file.getvalue()


def said_by(*arguments: str, cwd: Path) -> str:
    """Return what the command line prints, in this process."""
    out = io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        main(list(arguments))
    return out.getvalue()


NAME = HOSTILE.replace("/", "")  # of a file


def hostile_spec(folder: Path, **sections: dict[str, object]) -> str:
    (folder / f"{NAME}.toml").write_text(as_toml(raw_spec(**sections)).replace("\x7f", "\\u007f"))
    return f"{NAME}.toml"


def sound(folder: Path) -> str:
    """A spec without problems whose names, columns, environment and reward's words are hostile."""
    (folder / f"{NAME}.jsonl").write_text(json.dumps({NAME: NAME, "answer": NAME}) + "\n")
    (folder / f"{NAME}.py").write_text("def score(prompt, completion, row):\n    return 1.0\n")
    return hostile_spec(
        folder,
        data={"train": f"{NAME}.jsonl", "prompt_column": NAME},
        reward={"terms": [{"kind": "function", "path": f"{NAME}.py:score"}], "env": {"WORDS": NAME}},
    )


def broken(folder: Path) -> str:
    """The reward raises hostile words when it is imported; a key, a value and a column are hostile."""
    (folder / f"{NAME}.jsonl").write_text(json.dumps({NAME: NAME}) + "\n")
    (folder / f"{NAME}.py").write_text(f"raise ValueError({HOSTILE!r})\ndef score(prompt, completion, row): ...\n")
    return hostile_spec(
        folder,
        data={"train": f"{NAME}.jsonl"},
        reward={"terms": [{"kind": "function", "path": f"{NAME}.py:score"}]},
        actor={NAME: NAME},
    )


def foreign(folder: Path) -> str:
    """A file of TRL with hostile values, known and unknown."""
    words = json.dumps(HOSTILE)
    (folder / f"{NAME}.yaml").write_text(f"num_generations: 8\nrun_name: {words}\ndataset_name: {words}\nx: {words}\n")
    return f"{NAME}.yaml"


# Command → how it is called; `{sound}` and `{broken}` are specs, `{foreign}` is another tool's file.
CALLS = {
    "init": [[NAME], ["--preset", HOSTILE], [f"{NAME}/x.toml"], ["--launcher", HOSTILE], ["--from", "{foreign}"]],
    "check-config": [["{sound}"], ["{broken}"], ["{sound}", "--json"], ["{broken}", "--json"], ["gone", "--set", NAME]],
    "train": [["{sound}", "--dry-run"], ["{broken}"], ["{sound}", "--set", f"run.name={NAME}"], ["--run-dir", NAME]],
    "plan": [["{sound}"], ["{sound}", "--json"], ["{broken}"], ["{sound}", "--gpu-GiB", HOSTILE]],
    "eval": [[NAME], [NAME, "{sound}"], ["some/model", "{broken}"], [NAME, "{sound}", "--set", NAME]],
    "runs": [[NAME]],
    "report": [[NAME], [NAME, "other"], [NAME, "--out", f"{NAME}/x.html"]],
    "sweep": [
        *(["{sound}", "--set", f"run.name={NAME},b", "--dry-run"], ["{broken}", "--set", f"{NAME}=1,2"]),
        *(["{sound}", "--set", f"run.seed=1,{NAME}"], ["{sound}", "--jobs", HOSTILE]),
    ],
    "serve": [[NAME], ["some/model", "--host", HOSTILE], [NAME, "--step", "3"], ["some/model", "--engine", HOSTILE]],
    "setup-engine": [[HOSTILE]],
    "export-checkpoint": [[NAME, "out"], ["run", "out", "--role", HOSTILE], ["run", "out", "--dtype", HOSTILE]],
}


@pytest.mark.parametrize("command", [command.name or command.callback.__name__ for command in app.registered_commands])
def test_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "4000")
    for call in CALLS[command]:
        folder = tmp_path / str(CALLS[command].index(call))
        folder.mkdir()
        specs = {"{sound}": sound, "{broken}": broken, "{foreign}": foreign}
        arguments = [specs[one](folder) if one in specs else one for one in call]
        said = said_by(command, *arguments, cwd=folder)
        assert said, call
        assert_harmless(said, own=True)
        if "--json" in call:
            assert json.loads(said)


def test_a_fault_of_rlctl_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError(HOSTILE)

    monkeypatch.setattr("rlctl.check.check_command.check", fail)
    said = said_by("check-config", "x.toml", cwd=tmp_path)
    assert "this is a fault in rlctl" in said
    assert_harmless(said)


def test_a_terminal_without_a_width_is_printed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    Screen(file=(file := io.StringIO())).print("a", Text("b"))
    assert file.getvalue() == "a b\n"
