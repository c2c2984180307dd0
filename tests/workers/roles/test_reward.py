"""The data role and the reward role through their handlers, from prompts to scores, and the error that each bad input
gives."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from given_up import LIMIT_S, given_up
from judge_server import Asked, judge_server, says, status
from local_group import replied
from probe_groups import wait_until

import specs
from backends.hf.tokenizer import TextCodec, load_codec
from backends.protocol import Rank
from rlctl.processes.role_configs import build_bodies
from specs.errors import ModelError
from specs.load.load import spec_from
from specs.wire.as_built import AsBuilt
from specs.wire.batch import Batch
from specs.wire.messages import COLUMNS, PROMPT_COLUMNS, Kind, Message, Verb, parse
from specs.wire.role_config import ScoreText
from workers.data.prompts import PromptTable
from workers.episodes.trajectory import BRANCH_BITS
from workers.grading.score_text import ScoreTexts
from workers.roles import handlers_of
from workers.roles.data import Data
from workers.roles.reward import Reward
from workers.serve import Handlers

DIGITS = str(Path(specs.__file__).parent / "builtin" / "tiny-digits")
PARTIAL = {"kind": "exact_match", "partial": True, "weight": 2.0}


class Role:
    """Calls handlers of both roles as the serve loop does: every answer goes over the wire's own encoding."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reward_role = Reward(Rank())
        self.data, self.reward = handlers_of(Data(Rank())), handlers_of(self.reward_role)
        self.rows: dict[str, Any] = {}  # as they came with the last prompts
        self._threads = ThreadPoolExecutor(2)

    def call(self, verb: Verb, body: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Message:
        handlers = self.data if verb in (Verb.OPEN_DATA, Verb.PROMPTS) else self.reward
        answer = self._call(handlers, verb, body, tensors)
        self.rows = answer.body["rows"] if verb is Verb.PROMPTS else self.rows
        return answer

    def _call(
        self,
        handlers: Handlers,
        verb: Verb,
        body: dict[str, Any] | None = None,
        tensors: dict[str, Any] | None = None,
    ) -> Message:
        message = parse(Message(Kind.CALL, body or {}, verb, 1, tensors or {}).frames())
        answer_body, answer_tensors = replied(handlers, handlers[verb](message, lambda body, tensors: None))
        return parse(Message(Kind.ANSWER, answer_body, verb, 1, answer_tensors).frames())

    def build(self, terms: list[dict[str, Any]], **reward: Any) -> Message:
        """Build both roles; the answer is the reward role's. `then` happens before, when the run has started."""
        then = reward.pop("then", lambda: None)
        path = reward.pop("model_path", DIGITS)
        raw = {
            "schema": 1,
            "run": {"name": "graded", "steps": 1, "seed": 3},
            "model": {"path": path},
            "data": {
                "train": reward.pop("train", "builtin:sort-digits"),
                "prompts_per_step": 4,
                "max_prompt_tokens": 8,
                "max_response_tokens": 8,
            },
            "eval": {"every": 1, "prompts": reward.pop("held_out", 8)},
            "reward": {"terms": terms, **reward},
            "algorithm": {"kind": "grpo", "group_size": 2},
        }
        bodies = build_bodies(spec_from(raw), self.folder, self.folder / "run")
        then()
        answer = self._call(self.reward, Verb.BUILD, bodies["reward"])
        self._call(self.data, Verb.BUILD, bodies["data"])
        return answer

    def opened(self, count: int, group_size: int) -> Message:
        """Open the data; return the first prompts."""
        self.call(Verb.OPEN_DATA)
        return self.call(Verb.PROMPTS, {"what": "train", "position": 0, "count": count, "group_size": group_size})

    def later(self, answers: Batch, **body: Any) -> Future[Message]:
        """Their scores to come."""
        return self._threads.submit(self.score, answers, **body)

    def score(self, answers: Batch, samples: int = 0, **body: Any) -> Message:
        """`samples`: how many, spread over the batch, come back as text."""
        places = np.linspace(0, len(answers) - 1, min(samples, len(answers))).astype(int)
        body = {"samples": answers["id_B"][places].tolist(), "rows": self.rows, **body}
        if "finished_B" not in answers:
            answers = answers.with_columns(finished_B=np.ones(len(answers), dtype=np.uint8))
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
            "finished_B": np.array([i % 2 == 0 for i in range(len(pairs))], dtype=np.uint8),
            **{name: prompts[name] for name in ("group_B", "rollout_B", "id_B", "row_B")},
        }
    )


def test_what_a_tool_said_is_not_graded(role: Role, codec: TextCodec) -> None:
    """Two completions with a tool's reply between, and another reply after them."""
    pattern = {"kind": "regex", "pattern": r"\A1\n23\Z"}
    role.build([pattern, {"kind": "regex", "pattern": "9"}, {"kind": "overlong", "buffer_tokens": 4}])
    prompts = role.opened(1, 2).batch
    end = codec.tokenizer.eos_token_id
    one, reply, two = codec.encode(["1", "9999", "23"], rendered=True)
    (prompt, _), tokens = prompts.sequences("tokens_T"), [*one, end, *reply, *two, end]
    mask = np.repeat([0, 1, 0, 1, 0, 1], [len(prompt), len(one) + 1, len(reply), len(two) + 1, 2, 0])
    nothing = np.zeros(len(prompt) + len(reply), np.uint8)
    batch = Batch(
        {
            "tokens_T": np.array([*prompt, *tokens, *reply[:2], *prompt, *reply], dtype=np.int64),
            "loss_mask_T": np.concatenate([mask, nothing]).astype(np.uint8),
            "length_B": np.array([len(mask), len(nothing)]),
            "finished_B": np.array([1, 0], dtype=np.uint8),
            **{name: prompts[name] for name in ("group_B", "rollout_B", "id_B", "row_B")},
        }
    )
    scored = role.score(batch, samples=2)
    assert scored.tensors["term_0_B"].tolist() == [1, 0]
    assert scored.tensors["term_1_B"].tolist() == [0, 0], "nines are the tool's"
    assert scored.tensors["term_2_B"].tolist() == [0, 0], "no turn of more than 4 tokens, though there are 5 in all"
    assert [sample["completion"] for sample in scored.body["samples"]] == ["1\n23", ""]
    assert [sample["completion_raw"] for sample in scored.body["samples"]] == ["1<eos>\n23<eos>", ""]


def test_samples_of_a_rollout_are_graded_as_one_text(role: Role, codec: TextCodec) -> None:
    """A rollout that was branched: what it shares with its first sample is off the mask of the second."""
    role.build([{"kind": "regex", "pattern": r"\A1\n23\Z"}, {"kind": "overlong", "buffer_tokens": 8}])
    prompts = role.opened(1, 2).batch
    three = prompts.select(np.array([0, 0, 1]))
    three["id_B"][1] += 1 << BRANCH_BITS
    batch = answered(three, codec, ["1", "23", "1"])
    scored = role.score(batch, samples=3)
    assert scored.tensors["term_0_B"].tolist() == [1, 1, 0]
    assert scored.tensors["term_1_B"].tolist() == [-3 / 8, -3 / 8, -2 / 8], "its longest turn counts"
    assert [sample["completion"] for sample in scored.body["samples"]] == ["1\n23", "1\n23", "1"]
    assert [sample["completion_raw"] for sample in scored.body["samples"]] == ["1<eos>", "23<eos>", "1<eos>"]
    assert [sample["id"] for sample in scored.body["samples"]] == batch["id_B"].tolist()


def test_from_build_to_score(role: Role, codec: TextCodec) -> None:
    report = AsBuilt.model_validate(role.build([PARTIAL, {"kind": "overlong", "buffer_tokens": 4}]).body)
    assert (report.role, report.model) == ("reward", None)
    opened = role.call(Verb.OPEN_DATA).body
    assert (opened["rows"], opened["eval_rows"], opened["longest_prompt_tokens"]) == (9992, {"heldout": 8}, 5)
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
    assert scored.tensors["scored_B"].tolist() == [1] * 6
    assert scored.body["failures"] == {"timeouts": 0, "crashes": 0, "exceptions": 0, "bad_values": 0}
    first, last = scored.body["samples"]
    assert first == {
        "id": int(prompts["id_B"][0]),
        "prompt": texts[0],
        "completion": right[0],
        "completion_raw": f"{right[0]}<eos>",
        "finished": True,
        "answer": right[0],
    }
    assert (last["completion"], last["finished"]) == (right[5], False)


def test_samples_show_what_the_model_saw(role: Role, codec: TextCodec) -> None:
    """The tokenizer of the digits has no letters: they are in the row's prompt, and never reach the model."""
    (role.folder / "rows.jsonl").write_text('{"prompt": "sort 31>", "answer": "13"}\n' * 2)
    role.build([PARTIAL], train="rows.jsonl", held_out=1)
    drawn = role.opened(1, 1)
    scored = role.score(answered(drawn.batch, codec, ["13"]), samples=1)
    assert scored.body["samples"][0]["prompt"] == "31>"
    assert role.rows["0"]["prompt"] == "sort 31>", "a reward function is given the text of the row"


def test_failures_are_counted_and_saved(role: Role, codec: TextCodec) -> None:
    (role.folder / "rewards.py").write_text(
        "import os, time\n"
        "def score(prompt, completion, row):\n"
        "    assert prompt == row['prompt']\n"
        "    if completion == '1': os._exit(9)\n"
        "    if completion == '2': time.sleep(600)\n"
        "    if completion == '3': return None\n"
        "    if completion == '4': raise ValueError('four')\n"
        "    return 1\n",
        "utf-8",
    )
    role.build([{"kind": "function", "path": "rewards.py:score"}], timeout_s=LIMIT_S)
    prompts = role.opened(3, 2).batch
    assert role.reward_role._pool is not None
    with given_up(role.reward_role._pool, "2"):
        scored = role.score(answered(prompts, codec, list("012345")))
    assert scored.tensors["term_0_B"].tolist() == [1, 0, 0, 0, 0, 1]
    assert scored.tensors["scored_B"].tolist() == [1, 0, 0, 0, 0, 1]
    assert scored.body["failures"] == {"timeouts": 1, "crashes": 1, "exceptions": 1, "bad_values": 1}
    assert scored.body["first_failure"].startswith("the process")
    lines = (role.folder / "run" / "reward_failures.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["cause"] for record in records] == ["crashes", "timeouts", "bad_values", "exceptions"]
    assert [record["completion"] for record in records] == list("1234")
    assert [record["id"] for record in records] == prompts["id_B"][1:5].tolist()
    assert records[0]["row"].startswith("builtin:sort-digits row ")
    assert "ValueError: four" in records[3]["text"]


def test_a_model_without_a_tokenizer(role: Role) -> None:
    with pytest.raises(ModelError, match="no usable tokenizer"):
        role.build([PARTIAL], model_path=str(role.folder))


def rows_file(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return "rows.jsonl"


def test_of_a_row_travels_what_a_term_may_read(role: Role) -> None:
    rows = [{"prompt": f"12{index}", "answer": "1", "notes": {"by": ["hand", None]}} for index in range(9)]
    train = rows_file(role.folder, rows)
    role.build([PARTIAL], train=train)
    role.opened(1, 4)
    ((number, sent),) = role.rows.items()
    assert sent == {
        "where": f"{role.folder / train}:{int(number) + 1}",
        "prompt": rows[int(number)]["prompt"],
        "values": {"answer": "1"},
    }
    role.call(Verb.CLOSE)

    (role.folder / "rewards.py").write_text(
        "def score(prompt, completion, row): return row['notes'] and 1.0\n", "utf-8"
    )
    role.build([{"kind": "function", "path": "rewards.py:score"}], train=train)
    role.opened(1, 4)
    assert [sent["values"] for sent in role.rows.values()] == [rows[int(number)] for number in role.rows]


def test_values_that_json_does_not_know_travel_as_text(tmp_path: Path) -> None:
    day = datetime.date(2026, 2, 3)
    table = PromptTable("rows", rows=[{"day": day, "answer": 1.5}], prompts=["p"], wheres=["rows:1"])
    assert table.rows_of(np.zeros(3, np.int64), None) == {
        "0": {"where": "rows:1", "prompt": "p", "values": {"day": "2026-02-03", "answer": 1.5}}
    }


def test_a_process_that_is_started_again_grades_by_the_code_of_the_start(
    role: Role, codec: TextCodec, tmp_path: Path
) -> None:
    file, helper = tmp_path / "r.py", tmp_path / "r_helper.py"
    file.write_text("import r_helper\ndef score(completion):\n    return r_helper.ONE\n")
    helper.write_text("ONE = 1.0\n")
    role.build([{"kind": "function", "path": "r.py:score"}], then=lambda: helper.write_text("ONE = 2.0\n"))
    prompts = role.opened(1, 2).batch
    assert role.score(answered(prompts, codec, ["1", "22"])).tensors["term_0_B"].tolist() == [1.0, 1.0]


def test_what_a_reward_model_cannot_read_is_lost_once(role: Role, codec: TextCodec, tmp_path: Path) -> None:
    """Of two that are too long for it, a reward function has raised on one."""
    (tmp_path / "r.py").write_text("def score(completion):\n    return 1 / (len(completion) - 5)\n")
    role.build([{"kind": "function", "path": "r.py:score"}])
    said = ["1", "22", "55555", "444444"]
    prompts = role.opened(2, 2).batch
    config = {"path": DIGITS, "trust_remote_code": False, "chat": "never"}
    most = len(prompts.sequences("tokens_T")[0]) + len("22") + 1
    role.reward_role._score_texts = ScoreTexts(ScoreText(**config, max_sequence_tokens=most), codec)
    found = role.score(answered(prompts, codec, said))
    assert found.tensors["scored_B"].tolist() == [1, 1, 0, 0]
    assert {cause: count for cause, count in found.body["failures"].items() if count} == {
        "exceptions": 1,
        "model_overlong": 1,
    }
    ends = np.cumsum(found.tensors["rendered_B"])
    read = codec.decode([one.tolist() for one in np.split(found.tensors["rendered_T"], ends)[:4]])
    assert [one[-len(text) :] for one, text in zip(read, said, strict=True)] == ["1", "22", "", ""]


def test_judges_hold_up_nobody(role: Role, codec: TextCodec, tmp_path: Path) -> None:
    """What a host grades itself it grades while judges wait, of several parts at once. A completion is lost once."""
    release = threading.Event()
    scores = {"1": says("0.5"), "22": says("0.25")}

    def waits(handler: Any, asked: Asked) -> None:
        assert release.wait(60)
        scores.get(asked.text.partition(":")[2], status(400, b"<html>\n  not you\n</html>"))(handler, asked)

    with judge_server(always=waits) as server:
        judge = {"kind": "judge", "base_url": server.base_url, "model": "m", "prompt": "rate:{completion}"}
        (tmp_path / "r.py").write_text(
            "def score(prompt, completion, row):\n"
            f"    open({str(tmp_path / 'graded')!r}, 'a').write('1')\n"
            "    return 1 / (len(completion) - 3)\n"
        )
        own = {"kind": "function", "path": "r.py:score"}
        role.build([{**judge, "min_score": 0, "max_score": 1, "weight": 4.0}, own])
        prompts = role.opened(2, 2).batch
        later = [
            role.later(answered(prompts, codec, said), samples=1)
            for said in (["1", "22", "333", "4444"], ["4444", "22", "1", "1"])
        ]
        graded = tmp_path / "graded"
        assert wait_until(lambda: graded.exists() and len(graded.read_text()) == 8), "both, before a judge has replied"
        assert not any(one.done() for one in later)
        release.set()
        first, second = (one.result(60) for one in later)
    assert first.tensors["scored_B"].tolist() == [1, 1, 0, 0]
    assert second.tensors["scored_B"].tolist() == [0, 1, 1, 1]
    assert first.tensors["term_0_B"].tolist() == [0.5, 0.25, 0, 0]
    assert second.tensors["term_0_B"].tolist() == [0, 0.25, 0.5, 0.5]
    assert first.tensors["term_1_B"].tolist() == [-0.5, -1.0, 0.0, 1.0]
    assert set(first.tensors) == {"scored_B", "term_0_B", "term_1_B"}
    own = {"timeouts": 0, "crashes": 0, "exceptions": 1, "bad_values": 0}
    assert {cause: first.body["failures"][cause] for cause in own} == own
    assert first.body["failures"]["judge_errors"] == 1, "that of 333 was lost already"
    assert first.body["first_failure"].endswith(f", sample {prompts['id_B'][2]})")
    said = second.body["first_failure"]
    assert said.startswith("reward.terms[0]: HTTP 400: <html> not you </html> (")
    assert said.endswith(f", sample {prompts['id_B'][0]})")
    lines = (tmp_path / "run" / "reward_failures.jsonl").read_text().splitlines()
    found = [(record["completion"], record["cause"]) for record in map(json.loads, lines)]
    assert sorted(found) == [("333", "exceptions"), ("4444", "judge_errors"), ("4444", "judge_errors")]
