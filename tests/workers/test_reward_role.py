"""The reward role through its handlers: build, data, prompts, scores, and the error that each bad input gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specs
from backends.protocol import Rank
from backends.text import TextCodec, load_codec
from specs.as_built import AsBuilt
from specs.batch import Batch
from specs.errors import DataError, ModelError, RewardError
from specs.messages import COLUMNS, PROMPT_COLUMNS, Kind, Message, Verb, parse
from workers.judge.pool import Verdict
from workers.reward import Reward, weigh

DIGITS = str(Path(specs.__file__).parent / "builtin" / "tiny-digits")
PARTIAL = {"kind": "exact_match", "partial": True, "weight": 2.0}


class Role:
    """Calls handlers as the serve loop does: every answer goes over the wire's own encoding."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.role = Reward(Rank())
        self.handlers = self.role.handlers()

    def call(self, verb: Verb, body: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Message:
        message = parse(Message(Kind.CALL, body or {}, verb, 1, tensors or {}).frames())
        answer_body, answer_tensors = self.handlers[verb](message, lambda body, tensors: None)
        return parse(Message(Kind.ANSWER, answer_body, verb, 1, answer_tensors).frames())

    def build(self, terms: list[dict[str, Any]], **reward: Any) -> Message:
        config = {
            "model_path": reward.pop("model_path", DIGITS),
            "trust_remote_code": False,
            "data": {
                "train": reward.pop("train", "builtin:sort-digits"),
                "prompts_per_step": 4,
                "max_prompt_tokens": 8,
                "max_response_tokens": 8,
            },
            "eval": {"every": 1, "prompts": 8},
            "reward": {"terms": terms, **reward},
            "seed": 3,
            "spec_dir": str(self.folder),
            "run_dir": str(self.folder / "run"),
        }
        return self.call(Verb.BUILD, config)

    def score(self, answers: Batch, **body: Any) -> Message:
        needed = answers.only(COLUMNS[Verb.SCORE].needs)
        return self.call(Verb.SCORE, {"what": "train", **body}, dict(needed.columns))


@pytest.fixture
def role(tmp_path: Path) -> Iterator[Role]:
    role = Role(tmp_path)
    yield role
    role.call(Verb.CLOSE)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return load_codec(DIGITS)


def answered(prompts: Batch, codec: TextCodec, answers: list[str]) -> Batch:
    """Prompts with an answer behind each, ended by the end token."""
    end = codec.tokenizer.eos_token_id
    ids = [[*one, end] for one in codec.encode(answers, rendered=True)]
    pairs = list(zip(prompts.sequences("tokens_T"), ids, strict=True))
    return Batch(
        {
            "tokens_T": np.concatenate([np.array([*prompt, *answer], dtype=np.int64) for prompt, answer in pairs]),
            "loss_mask_T": np.concatenate([np.repeat([0, 1], [len(p), len(a)]).astype(np.uint8) for p, a in pairs]),
            "length_B": np.array([len(p) + len(a) for p, a in pairs], dtype=np.int64),
            **{name: prompts[name] for name in ("group_B", "id_B", "row_B")},
        }
    )


def test_from_build_to_score(role: Role, codec: TextCodec) -> None:
    report = AsBuilt.model_validate(role.build([PARTIAL, {"kind": "overlong", "buffer_tokens": 4}]).body)
    assert (report.role, report.model) == ("reward", None)
    opened = role.call(Verb.OPEN_DATA).body
    assert (opened["rows"], opened["eval_rows"], opened["longest_prompt_tokens"]) == (9992, 8, 5)
    drawn = role.call(Verb.PROMPTS, {"what": "train", "position": 0, "count": 3, "group_size": 2})
    assert set(drawn.tensors) == {*PROMPT_COLUMNS, "length_B"}
    assert drawn.body["position"] == 3

    prompts = drawn.batch
    texts = codec.decode([ids.tolist() for ids in prompts.sequences("tokens_T")])
    right = ["".join(sorted(text[:4])) for text in texts]
    answers = [right[0], right[1][:2], "", right[3] * 2, right[4], right[5]]
    scored = role.score(answered(prompts, codec, answers), samples=2)

    # overlong: answers of 5, 3, 1, 9, 5 and 5 tokens against a slope from 4 to 8
    np.testing.assert_allclose(scored.tensors["term_0_B"], [1, 0.5, 0, 0.5, 1, 1])
    np.testing.assert_allclose(scored.tensors["term_1_B"], [-0.25, 0, 0, -1, -0.25, -0.25])
    np.testing.assert_allclose(scored.tensors["reward_B"], [1.75, 1, 0, 0, 1.75, 1.75])
    assert scored.tensors["reward_B"].dtype == np.float32
    assert scored.tensors["scored_B"].tolist() == [1] * 6
    assert scored.body["failures"] == {"timeouts": 0, "crashes": 0, "exceptions": 0, "bad_values": 0}
    first, last = scored.body["samples"]
    assert first == {
        "id": int(prompts["id_B"][0]),
        "prompt": texts[0],
        "completion": right[0],
        "answer": right[0],
        "reward": 1.75,
        "scored": True,
        "terms": [1.0, -0.25],
    }
    assert last["completion"] == right[5]


def test_evaluation_is_judged_against_its_own_rows(role: Role, codec: TextCodec) -> None:
    role.build([PARTIAL])
    role.call(Verb.OPEN_DATA)
    prompts = role.call(Verb.PROMPTS, {"what": "eval", "position": 0, "count": 8, "group_size": 1}).batch
    answers = ["".join(sorted(codec.decode([ids.tolist()])[0][:4])) for ids in prompts.sequences("tokens_T")]
    scored = role.score(answered(prompts, codec, answers), what="eval")
    assert scored.tensors["reward_B"].tolist() == [2.0] * 8


def test_failures_are_counted_and_saved(role: Role, codec: TextCodec) -> None:
    (role.folder / "rewards.py").write_text(
        "import os, time\n"
        "def score(prompt, completion, row):\n"
        "    assert prompt == row['prompt']\n"
        "    if completion == '1': os._exit(9)\n"
        "    if completion == '2': time.sleep(60)\n"
        "    if completion == '3': return None\n"
        "    if completion == '4': raise ValueError('four')\n"
        "    return 1\n",
        "utf-8",
    )
    role.build([{"kind": "function", "path": "rewards.py:score"}], timeout_s=1.5, fallback=-7.0)
    role.call(Verb.OPEN_DATA)
    prompts = role.call(Verb.PROMPTS, {"position": 0, "count": 3, "group_size": 2}).batch
    scored = role.score(answered(prompts, codec, list("012345")))
    assert scored.tensors["reward_B"].tolist() == [1, -7, -7, -7, -7, 1]
    assert scored.tensors["scored_B"].tolist() == [1, 0, 0, 0, 0, 1]
    assert scored.body["failures"] == {"timeouts": 1, "crashes": 1, "exceptions": 1, "bad_values": 1}
    lines = (role.folder / "run" / "reward_failures.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["cause"] for record in records] == ["crashes", "timeouts", "bad_values", "exceptions"]
    assert [record["completion"] for record in records] == list("1234")
    assert [record["id"] for record in records] == prompts["id_B"][1:5].tolist()
    assert records[0]["row"].startswith("builtin:sort-digits row ")
    assert "ValueError: four" in records[3]["text"]


def test_a_sample_without_an_answer_is_judged_as_empty(role: Role) -> None:
    role.build([{"kind": "regex", "pattern": "^$"}])
    role.call(Verb.OPEN_DATA)
    prompts = role.call(Verb.PROMPTS, {"position": 0, "count": 1, "group_size": 2}).batch
    scored = role.score(prompts.with_columns(loss_mask_T=np.zeros(prompts.num_tokens, dtype=np.uint8)))
    assert scored.tensors["reward_B"].tolist() == [1.0, 1.0]


def test_a_sum_beyond_float32_is_a_bad_value() -> None:
    verdicts = [Verdict((1.0, 1.0)), Verdict((1e300, 0.0)), Verdict((3e38, 3e38)), Verdict(cause="crashes")]
    columns, checked = weigh(verdicts, np.array([1.0, 1.0]), 0.5)
    assert columns["reward_B"].tolist() == [2.0, 0.5, 0.5, 0.5]
    assert [verdict.cause for verdict in checked] == ["", "bad_values", "bad_values", "crashes"]
    assert all(np.isfinite(column).all() for column in columns.values())


def test_an_empty_batch_is_legal(role: Role) -> None:
    role.build([PARTIAL])
    role.call(Verb.OPEN_DATA)
    prompts = role.call(Verb.PROMPTS, {"position": 0, "count": 1, "group_size": 1}).batch.select([])
    scored = role.score(prompts.with_columns(loss_mask_T=np.zeros(0, dtype=np.uint8)), samples=4)
    assert scored.tensors["reward_B"].shape == (0,)
    assert scored.body["samples"] == []


def test_bad_input(role: Role) -> None:
    with pytest.raises(RewardError, match=r"reward\.terms\[1\]: .*gone\.py does not exist"):
        role.build([PARTIAL, {"kind": "function", "path": "gone.py:score"}])
    role.call(Verb.CLOSE)
    with pytest.raises(ModelError, match="no usable tokenizer"):
        role.build([PARTIAL], model_path=str(role.folder))
    role.call(Verb.CLOSE)
    role.build([PARTIAL], train="gone.jsonl")
    with pytest.raises(DataError, match=r"gone\.jsonl does not exist"):
        role.call(Verb.OPEN_DATA)
