"""Loading a spec: all problems at once, files that are no TOML. What each broken key says: `corpus/`."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from small_spec import problems_of, raw_spec

from specs.errors import SpecError
from specs.load.load import load_spec, spec_from


def test_the_good_spec_is_good_and_unchanged_by_loading() -> None:
    good = raw_spec()
    spec = spec_from(copy.deepcopy(good))
    assert spec.samples_per_step == 32
    resolved = spec.resolved()
    for section, keys in good.items():
        if isinstance(keys, dict):
            for key, value in keys.items():
                if key != "terms":
                    assert resolved[section][key] == value


def test_whole_numbers_serve_as_numbers_and_lists_as_lists() -> None:
    spec = spec_from(raw_spec(rollout={"temperature": 2, "stop": ["a"]}, actor={"optimizer": {"betas": [0, 0.9]}}))
    assert spec.rollout.temperature == 2.0
    assert spec.rollout.stop == ("a",)


def test_all_problems_come_at_once_and_in_one_message() -> None:
    broken = {"run": {"steps": 0}, "actor": {"optimizer": {"rl": 1.0}}, "rollout": {"top_p": "1"}}
    found = problems_of(raw_spec(**broken, data={"chat": "maybe"}))
    assert {problem.key for problem in found} == {"run.steps", "actor.optimizer.rl", "rollout.top_p", "data.chat"}


def test_all_rules_speak_at_once() -> None:
    found = problems_of(raw_spec(ref={}, algorithm={"mini_batches_per_step": 5}, data={"split": "x"}))
    assert {problem.key for problem in found} == {"[ref]", "algorithm.mini_batches_per_step", "data.split"}


def test_an_engine_table_without_kind_is_the_default_engine() -> None:
    spec = spec_from(raw_spec(rollout={"engine": {"max_sequences": 7}}))
    assert spec.rollout.engine.kind == "torch"
    assert spec.rollout.engine.max_sequences == 7


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("schema = 1\n[run\n", ":2:5: not TOML", "[run"),
        ("schema = 1\nname = hello\n", ":2:8: not TOML", "text needs quotes"),
        ("schema = 1\nflag = True\n", ":2:8: not TOML", "lower case"),
        ("schema = 1\nschema = 1\n", ":2:11: not TOML", "is defined twice"),
        ("schema = 1\n[run]\na = [1,\n", ": not TOML", "not closed"),
    ],
)
def test_broken_toml_names_line_and_column(tmp_path: Path, text: str, place: str, words: str) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    assert f"{file}{place}" in str(caught.value) or place == ": not TOML"
    assert words in str(caught.value)


def test_files_that_are_no_specs(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"\n')
    (tmp_path / "grpo.yaml").write_text("beta: 0.04\n")
    for name, words in (
        ("none.toml", "no such file"),
        (".", "a folder"),
        ("latin.toml", "not UTF-8"),
        ("grpo.yaml", "YAML, and a spec is TOML"),
    ):
        with pytest.raises(SpecError, match=words):
            load_spec(tmp_path / name)
    with pytest.raises(SpecError, match=r"keys of TRL and verl"):
        load_spec(tmp_path / "grpo.yaml")


def test_the_run_directory_may_start_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert spec_from(raw_spec(run={"dir": "~/runs"})).run.place == Path("/home/someone/runs/test")
