"""`--set` changes one key, reads its value as TOML, and says where it cannot."""

from __future__ import annotations

import pytest
from small_spec import raw_spec

from specs.errors import SpecError
from specs.load.load import spec_from
from specs.load.overrides import parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("cosine", "cosine"),
        ('"3"', "3"),
        ("{ kind = 'fake' }", {"kind": "fake"}),
        ("a.py:score", "a.py:score"),
        ("", ""),
        ("1\nother = 2", "1\nother = 2"),
    ],
)
def test_values_are_toml_or_else_text(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_keys_of_every_depth_can_be_set() -> None:
    spec = spec_from(
        raw_spec(),
        ["run.steps=3", "actor.optimizer.lr=0.5", "reward.terms.0.weight=2", "eval.every=2", "actor.devices=[1]"],
    )
    assert (spec.run.steps, spec.actor.optimizer.lr, spec.reward.terms[0].weight) == (3, 0.5, 2.0)
    assert spec.eval is not None
    assert spec.actor.devices == (1,)


def test_the_last_of_two_settings_wins() -> None:
    assert spec_from(raw_spec(), ["run.steps=3", "run.steps=4"]).run.steps == 4


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.steps", "not of the form key=value"),
        ("=3", "not of the form key=value"),
        ("run..steps=3", "not of the form key=value"),
        ("reward.terms.1.weight=2", "a list of 1"),
        ("reward.terms.x.weight=2", "a list of 1"),
        ("run.name.x=2", "run.name holds a value"),
        ("run.stesp=3", "`steps`"),
        ("actr.optimizer.lr=3", "`actor`"),
        ("rollout.temperature=0,7", "must be a number"),
        ("run.name=true", "must be text"),
    ],
)
def test_what_cannot_be_set_is_named(override: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_from(raw_spec(), [override])
    assert words in str(caught.value)


def test_a_bad_override_and_a_bad_key_are_reported_together() -> None:
    with pytest.raises(SpecError) as caught:
        spec_from({**raw_spec(), "zzz": 1}, ["nonsense"])
    assert len(caught.value.problems) == 2
