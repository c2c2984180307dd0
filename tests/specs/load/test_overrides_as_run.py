"""The text of a spec as it was run, with `--set` in it."""

from __future__ import annotations

import tomli
from running import REPO

from specs.load.overrides import apply_overrides, as_run

QUICKSTART = (REPO / "specs" / "presets" / "quickstart.toml").read_text()


def test_without_changes_not_a_byte_is_changed() -> None:
    assert as_run(QUICKSTART, []) == QUICKSTART
    assert as_run("[run]\nsteps = 10 # few\n", ["run.steps=10"]) == "[run]\nsteps = 10 # few\n"


def test_one_layer_is_not_true_though_python_finds_them_equal() -> None:
    text = "[actor]\ngradient_checkpointing = true\n"
    kept = tomli.loads(as_run(text, ["actor.gradient_checkpointing=1"]))["actor"]["gradient_checkpointing"]
    assert kept is not True
    assert kept == 1


def test_what_is_set_stands_in_the_text_and_above_it() -> None:
    overrides = ["run.steps=7", "algorithm.kind=gspo", "eval.every=3", "tracking=[{kind='tensorboard'}]"]
    text = as_run(QUICKSTART, overrides)
    wanted = tomli.loads(QUICKSTART)
    apply_overrides(wanted, overrides)
    assert tomli.loads(text) == wanted
    assert text.startswith("# --set run.steps=7\n# --set algorithm.kind=gspo\n")
    assert as_run(text, []) == text


def test_a_control_character_in_what_is_set_leaves_the_text_toml() -> None:
    text = as_run(QUICKSTART, ["actor.env.COLOUR=\x1b[1m\x7f"])
    assert tomli.loads(text)["actor"]["env"] == {"COLOUR": "\x1b[1m\x7f"}
