"""`--set TABLE.kind=OTHER` alone: what the file wrote for its own kind goes, said in a line, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from running import REPO
from small_spec import raw_spec

from specs.errors import SpecError
from specs.load.keys import kind_of, tables_of
from specs.load.load import parse, read_toml, spec_from
from specs.rules.all_rules import cross_field_warnings
from specs.schema.algorithms.algorithm_tables import AlgorithmTable

QUICKSTART = REPO / "specs" / "presets" / "quickstart.toml"
ALGORITHMS = tables_of(AlgorithmTable)


def algorithm_of(file: dict[str, Any], *overrides: str) -> tuple[Any, list[str]]:
    said: list[str] = []
    return spec_from(file, overrides, said.append).algorithm, said


@pytest.mark.parametrize("kind", [kind_of(table) for table in ALGORITHMS])
def test_the_name_of_every_algorithm_alone_is_a_valid_change_of_the_quickstart(kind: str) -> None:
    """One with a teacher is told that it should have one."""
    parsed = parse(read_toml(QUICKSTART), [f"algorithm.kind={kind}"])
    assert parsed.problems == []
    assert parsed.spec is not None
    assert parsed.spec.algorithm.group_size == 16
    warned = [problem.key for problem in cross_field_warnings(parsed.spec)]
    assert warned == (["ref.model"] if parsed.spec.algorithm.advantage.needs_teacher else [])


@pytest.mark.parametrize("name", [path.stem for path in sorted(Path(QUICKSTART).parent.glob("*.toml"))])
def test_no_preset_is_changed_by_the_kind_that_it_has(name: str) -> None:
    raw = read_toml(QUICKSTART.with_stem(name))
    kind = raw["algorithm"]["kind"]
    changed, said = algorithm_of(raw, f"algorithm.kind={kind}")
    assert changed == spec_from(read_toml(QUICKSTART.with_stem(name))).algorithm
    assert said == []


def test_a_key_of_one_name_and_one_default_means_the_same_in_every_kind() -> None:
    """What is kept when the kind changes."""
    for table in ALGORITHMS:
        for other in ALGORITHMS:
            for name in (table.model_fields.keys() & other.model_fields.keys()) - {"kind"}:
                one, two = table.model_fields[name], other.model_fields[name]
                assert one.default != two.default or one.description == two.description, (table, other, name)


def test_keys_of_the_old_kind_go_and_those_of_both_stay() -> None:
    file = raw_spec(algorithm={"clip_low": 0.1, "dual_clip": 3.0, "entropy_coef": 0.5})
    found, said = algorithm_of(file, "algorithm.kind=gspo")
    assert (found.clip_low, found.entropy_coef) == (3e-4, 0.5)
    assert said == [
        'algorithm.kind = "gspo": not used of the file, which wrote it for kind "grpo": clip_low = 0.1, dual_clip = 3.0'
    ]


def test_what_is_set_is_never_dropped() -> None:
    file = {"clip_low": 0.1, "clip_high": 0.1}
    for order in (1, -1):
        found, said = algorithm_of(
            raw_spec(algorithm=file), *["algorithm.kind=gspo", "algorithm.clip_low=0.002"][::order]
        )
        assert (found.clip_low, found.clip_high) == (0.002, 4e-4)
        assert [line.rpartition(": ")[2] for line in said] == ["clip_high = 0.1"]


def test_what_is_set_and_does_not_fit_is_refused() -> None:
    with pytest.raises(SpecError, match='kind "gspo" does not have it'):
        algorithm_of(raw_spec(), "algorithm.kind=gspo", "algorithm.dual_clip=3")


def test_a_mistake_in_the_file_is_still_named() -> None:
    with pytest.raises(SpecError, match="clip_hihg"):
        algorithm_of(raw_spec(algorithm={"clip_hihg": 0.3}), "algorithm.kind=gspo")


def test_a_table_set_as_a_whole_is_what_was_set() -> None:
    with pytest.raises(SpecError, match='kind "gspo" does not have it'):
        algorithm_of(raw_spec(), "algorithm={kind='gspo', group_size=4, dual_clip=3.0}")


def test_engines_and_rewards_change_by_their_kind_too() -> None:
    zero = {"kind": "zero", "stage": 2, "offload_optimizer": True}
    file = raw_spec(actor={"engine": zero}, rollout={"engine": {"max_sequences": 7, "prefill_tokens": 99}})
    file["reward"]["terms"] = [{"kind": "exact_match", "partial": True, "weight": 2.0}]
    overrides = ["actor.engine.kind=ddp", "rollout.engine.kind=vllm", "reward.terms.0.kind=math_verify"]
    said: list[str] = []
    spec = spec_from(file, overrides, said.append)
    assert (spec.actor.engine.kind, spec.reward.terms[0].weight) == ("ddp", 2.0)
    assert spec.rollout.engine.model_dump()["max_sequences"] == 7
    assert [line.rpartition('": ')[2] for line in said] == [
        "stage = 2, offload_optimizer = true",
        "prefill_tokens = 99",
        "partial = true",
    ]
