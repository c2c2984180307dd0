"""Rules of recipes that learn from rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.processes.role_configs import build_bodies
from specs.errors import SpecError
from specs.load.load import spec_from
from specs.wire.role_config import DataConfig

RUN = {"run": {"recipe": "preference", "name": "x", "steps": 2}, "model": {"path": "builtin:tiny-digits"}}
TURNS = {"recipe": "preference", "name": "x", "steps": 2, "colocate": "always"}
DATA = {"train": "pairs.jsonl", "rows_per_step": 4, "max_tokens": 32}
DPO = {"kind": "dpo"}
EVAL = {"eval": {"every": 1}}
EXACT = {"kind": "exact_match"}
KEEPS_NONE = {"desirable_weight": 0.0, "undesirable_weight": 0.0}


def generated(**keys: Any) -> dict[str, Any]:
    return {"eval": {"every": 1, "generate": {"max_response_tokens": 4, **keys}}, "reward": {"terms": [EXACT]}}


GENERATED = generated()


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, {}),
        ({"ref": {"model": "other"}}, {}),
        ({"objective": {"mixture": [{"kind": "nll"}] * 2}}, {"objective.mixture": "no term that compares"}),
        ({"data": {"rows_per_step": 4, "max_tokens": 32}}, {"data.train": "missing"}),
        ({"data": {**DATA, "sets": [{"path": "a.jsonl"}]}}, {"data.train": "has no effect"}),
        ({"data": {**DATA, "split": "x"}}, {"data.split": "is not a hub data set"}),
        ({"data": {**DATA, "system": "x", "chat": "never"}}, {"data.system": "has no effect"}),
        ({"run": TURNS}, {"run.colocate": "nothing is sampled"}),
        ({"run": TURNS, **GENERATED}, {}),
        ({"eval": {"every": 1, "split": "x"}}, {"eval.split": "is not a hub data set"}),
        (
            {"data": {**DATA, "train": "a/b"}, "eval": {"every": 1, "split": "x"}},
            {"eval.split": "the rows are those that are held out"},
        ),
        (
            {"data": {**DATA, "train": "", "sets": [{"path": "a/b", "split": "x"}, {"path": "a.jsonl", "split": "x"}]}},
            {"data.sets.1.split": "is not a hub data set"},
        ),
        (
            {"data": {**DATA, "train": "", "sets": [{"path": "a.jsonl"}, {"path": "./a.jsonl"}]}, **EVAL},
            {"data.sets.1.path": "are held out for"},
        ),
        (
            {
                "data": {**DATA, "train": "", "sets": [{"path": "a/b"}, {"path": "a/b", "split": "x"}]},
                "eval": {"every": 1},
            },
            {},
        ),
        ({"actor": {"processes": 8, "launcher": "torchrun"}}, {"actor.processes": "data.rows_per_step = 4 leaves"}),
        ({"actor": {"micro_batch_tokens": 16}}, {"actor.micro_batch_tokens": "data.max_tokens = 32"}),
        (
            {"objective": {"mixture": [{"kind": "dpo", "betta": 0.2}, {"kind": "nll"}], "beta": 0.2}},
            {"objective.mixture.0.betta": "did you mean `beta`?", "objective.beta": 'kind "mixture" does not have it'},
        ),
        (
            {"objective": {"mixture": [{"kind": "dpo"}, {"kind": "nll"}], "zzz": 1}},
            {"objective.zzz": "[objective] knows: kind, weight, precompute_ref, mixture"},
        ),
        ({"objective": {**DPO, "weight": 2.0}}, {"objective.weight": "it weighs the terms of a mixture"}),
        ({"objective": {"kind": "orpo", "precompute_ref": True}}, {"objective.precompute_ref": "no reference"}),
        ({"objective": {"kind": "kto", "precompute_ref": True}}, {"objective.precompute_ref": "in every step"}),
        ({"objective": {"kind": "simpo"}, "ref": {}}, {"ref": "has no effect"}),
        ({"data": {**DATA, "label_column": "x"}}, {"data.label_column": "no row of dpo is read from it"}),
        ({"objective": {"kind": "kto"}, "data": {**DATA, "label_column": "x"}}, {}),
        ({"objective": {"kind": "kto"}, "eval": {"every": 1, "rows": 1}}, {"eval.rows": "of other rows"}),
        ({"objective": {"kind": "kto", **KEEPS_NONE}}, {"objective.desirable_weight": "nothing would be learned"}),
        ({"objective": {**DPO, "precompute_ref": True}, "ref": {}}, {"ref": "the actor itself is the reference"}),
        (
            {"objective": {"mixture": [{**DPO, "precompute_ref": True}, {"kind": "nll"}]}},
            {"objective.mixture.0.precompute_ref": "is that of all terms"},
        ),
        ({"objective": {"kind": "bpo"}}, {"objective.kind": "unknown kind; known: dpo"}),
        (GENERATED, {}),
        ({"eval": {"every": 1, "generate": {"max_response_tokens": 4}}}, {"[reward]": "is missing"}),
        ({**GENERATED, "reward": {}}, {"reward.terms": "no environment grades"}),
        ({"reward": {"terms": [EXACT]}, "rollout": {}}, {"[reward]": "has no effect", "[rollout]": "has no effect"}),
        ({**GENERATED, "rollout": {"temperature": 0.5}}, {"rollout.temperature": "no sample is learned from"}),
        ({**GENERATED, "rollout": {"max_staleness": 1}}, {"rollout.max_staleness": "no sample is learned from"}),
        (generated(prompts=65), {"eval.generate.prompts": "more than eval.rows = 64"}),
        (generated(prompts=65, sets=[{"name": "a"}]), {"eval.generate.sets.0.prompts": "more than eval.rows = 64"}),
        (generated(prompts=65, data="more.jsonl"), {}),
        (generated(split="x"), {"eval.generate.split": "has no effect"}),
        (generated(samples_per_prompt=2), {"eval.generate.samples_per_prompt": "are all the same"}),
        (generated(pass_term=1), {"eval.generate.pass_term": "reward.terms has 1"}),
        (
            {**generated(answer_column="x"), "reward": {"terms": [{"kind": "regex", "pattern": "a"}]}},
            {"eval.generate.answer_column": "no term of reward.terms compares with it"},
        ),
        ({**GENERATED, "sync": {"delta": True}}, {"sync.delta": "has no effect"}),
        ({"algorithm": {"kind": "grpo"}}, {"algorithm": "unknown key: this recipe does not have it"}),
        ({"critic": {"engine": {"kind": "ddp"}}}, {"critic": "unknown key: this recipe does not have it"}),
    ],
)
def test_a_spec_of_preferences(more: dict[str, Any], wanted: dict[str, str]) -> None:
    raw = {"schema": 1, **RUN, "data": DATA, "objective": DPO, **more}
    try:
        spec_from(raw)
        found = {}
    except SpecError as error:
        found = {problem.key: str(problem) for problem in error.problems}
    assert found.keys() == wanted.keys(), found
    for key, text in wanted.items():
        assert text in found[key]


def test_rows_are_tokens_of_the_model_that_learns(tmp_path: Path) -> None:
    """A reward model that is not `model.path` has its own tokenizer."""
    run = {"recipe": "reward_model", "name": "x", "steps": 2}
    own = {"reward_model": {"model": "own"}, "objective": {"kind": "bradley_terry"}}
    spec = spec_from({"schema": 1, "run": run, "model": {"path": "base"}, "data": DATA, **own})
    bodies = build_bodies(spec, tmp_path, tmp_path)
    assert bodies["data"]["model_path"] == bodies["reward_model"]["model"]["path"] == "own"


def test_a_reward_model_that_learns_has_no_logits_either() -> None:
    run = {"recipe": "reward_model", "name": "x", "steps": 2}
    own = {"reward_model": {"engine": {"kind": "ddp", "logits_chunk_tokens": 9}}}
    with pytest.raises(SpecError, match=r"reward_model\.engine\.logits_chunk_tokens .*no logits"):
        spec_from({"schema": 1, "run": run, "model": {"path": "base"}, "data": DATA, **own})


@pytest.mark.parametrize(("kind", "hint"), [("dpo", 'run.recipe = "preference"'), ("x", "write one of them")])
def test_an_objective_of_another_recipe_is_answered_also_where_there_is_one_kind(kind: str, hint: str) -> None:
    run = {"recipe": "reward_model", "name": "x", "steps": 2}
    with pytest.raises(SpecError) as caught:
        spec_from({"schema": 1, "run": run, "model": {"path": "base"}, "data": DATA, "objective": {"kind": kind}})
    (problem,) = caught.value.problems
    assert hint in problem.hint


def test_what_a_set_leaves_out_the_section_says_in_the_data_role_too(tmp_path: Path) -> None:
    data: dict[str, Any] = {"rows_per_step": 4, "max_tokens": 32, "prompt_column": "q", "split": "validation"}
    data["sets"] = [{"path": "a/b"}, {"path": "c/d", "split": "train", "prompt_column": "prompt"}]
    spec = spec_from({"schema": 1, **RUN, "data": data, "objective": DPO})
    travelled = DataConfig.model_validate_json(json.dumps(build_bodies(spec, tmp_path, tmp_path)["data"]))
    assert travelled.rows is not None
    found = [(one.prompt_column, one.split) for one in travelled.rows.rows.sources]
    assert found == [("q", "validation"), ("prompt", "train")]
