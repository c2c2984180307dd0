"""`--set` changes one key, and says where it cannot. Another `kind` drops what the file wrote for its own."""

from __future__ import annotations

from typing import Any

import pytest
from running import REPO
from small_spec import raw_spec

from specs.errors import SpecError
from specs.load.keys import kind_of, tables_of
from specs.load.load import parse, spec_from
from specs.load.overrides import parse_value
from specs.load.toml_file import read_toml
from specs.rules.all_rules import cross_field_warnings
from specs.schema.algorithms.algorithm_tables import AlgorithmTable

QUICKSTART = REPO / "specs" / "presets" / "quickstart.toml"
ALGORITHMS = tables_of(AlgorithmTable)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("[1, 2]", [1, 2]),
        ("cosine", "cosine"),
        ('"3"', "3"),
        ("{ kind = 'fake' }", {"kind": "fake"}),
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


def test_names_in_quotes_are_those_of_toml() -> None:
    spec = spec_from(raw_spec(), ['actor.env."A"=a', "actor . env.'B.C'=b", "actor.env.D=d"])
    assert spec.actor.env == {"A": "a", "B.C": "b", "D": "d"}
    with pytest.raises(SpecError, match="not of the form key=value"):
        spec_from(raw_spec(), ["# run.steps=3"])


# ── another kind ──


def algorithm_of(file: dict[str, Any], *overrides: str) -> tuple[Any, list[str]]:
    said: list[str] = []
    return spec_from(file, overrides, said.append).algorithm, said


@pytest.mark.parametrize("kind", [kind_of(table) for table in ALGORITHMS])
def test_the_name_of_every_algorithm_alone_is_a_valid_change_of_the_quickstart(kind: str) -> None:
    """One with a teacher warns that it should have one."""
    parsed = parse(read_toml(QUICKSTART), [f"algorithm.kind={kind}"])
    assert parsed.problems == []
    assert parsed.spec is not None
    assert parsed.spec.algorithm.group_size == 16
    warned = [problem.key for problem in cross_field_warnings(parsed.spec)]
    assert warned == (["ref.model"] if parsed.spec.algorithm.advantage.needs_teacher else [])


def test_keys_of_the_old_kind_go_and_those_of_both_stay() -> None:
    file = raw_spec(algorithm={"clip_low": 0.1, "dual_clip": 3.0, "entropy_coef": 0.5})
    found, said = algorithm_of(file, "algorithm.kind=gspo")
    assert (found.clip_low, found.entropy_coef) == (3e-4, 0.5)
    assert said == [
        'algorithm.kind = "gspo": not used of the file, which wrote it for kind "grpo": clip_low = 0.1, dual_clip = 3.0'
    ]


def test_what_is_set_and_does_not_fit_is_refused() -> None:
    with pytest.raises(SpecError, match='kind "gspo" does not have it'):
        algorithm_of(raw_spec(), "algorithm.kind=gspo", "algorithm.dual_clip=3")


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
