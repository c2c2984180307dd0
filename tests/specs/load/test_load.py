"""Loading a spec: every problem of a class at once. What each broken key says: `corpus/`."""

from __future__ import annotations

import copy

from small_spec import raw_spec

from specs.load.load import parse, spec_from


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


def test_what_is_left_of_a_broken_spec_serves_to_look_at_its_files() -> None:
    """A missing key that has no default leaves nothing."""
    parsed = parse(raw_spec(actor={"gpus": 1}, data={"chat": "maybe"}))
    assert parsed.spec is not None
    assert parsed.broken_tables == {"actor", "data"}
    without_steps = raw_spec()
    del without_steps["run"]["steps"]
    assert parse(without_steps).spec is None


def test_an_engine_table_without_kind_is_the_default_engine() -> None:
    spec = spec_from(raw_spec(rollout={"engine": {"max_sequences": 7}}))
    assert spec.rollout.engine.kind == "torch"
    assert spec.rollout.engine.max_sequences == 7
