"""Every verb's body is a class of its own, which refuses an unknown key, a missing one and another type by name."""

from __future__ import annotations

from typing import Any

import pytest

from specs.errors import ChannelError
from specs.schema.algorithms.algorithm_tables import PpoClip
from specs.wire import bodies
from specs.wire.messages import Kind, Message, Verb, parse
from specs.wire.role_config import Sampling

SENT = {"name": "w", "dtype": "fp32", "shape": [2, 3], "nbytes": 24, "checksum": "c0ffee", "offset": 64}
SCALE = {"num_loss_tokens": 7, "num_sequences": 2, "max_response_tokens": 8, "num_units": 0, "num_chosen_tokens": 0}
LOSS = PpoClip(anchor="current", kl_coef=0.1).model_dump()
SAMPLING = Sampling(seed=1, max_response_tokens=8).model_dump()


@pytest.mark.parametrize(
    ("verb", "body", "wrong", "said"),
    [
        (Verb.EXPORT_BUCKET, {"bucket": 3}, {"bucket": "3"}, "bucket: "),  # nothing is converted
        (Verb.SLEEP, {"level": 2}, {"level": 3}, "level: "),
        (Verb.SLEEP, {"level": 2}, {"level": 2, "stranger": 1}, "stranger: unknown key"),
        (Verb.LOAD, {"folder": "/x"}, {}, "folder: missing"),
        (Verb.WAKE, {"tags": ["kv_cache", "weights"]}, {"tags": ["kv_cash"]}, r"tags\.0: "),
        (Verb.UPDATE, {"loss": LOSS, "scale": SCALE}, {"loss": LOSS, "scale": {**SCALE, "x": 1}}, r"scale\.x: "),
        (Verb.UPDATE, {"loss": LOSS, "scale": SCALE}, {"loss": {**LOSS, "clip": 1.0}, "scale": SCALE}, "loss: "),
        (
            Verb.IMPORT_BUCKET,
            {"bucket": 0, "entries": [SENT]},
            {"bucket": 0, "entries": [{**SENT, "offset": "64"}]},
            r"entries\.0\.offset: ",
        ),
        (Verb.GENERATE, {"sampling": SAMPLING}, {"sampling": {**SAMPLING, "temprature": 1.0}}, r"sampling\.temprature"),
    ],
)
def test_a_body_is_refused_by_name(verb: Verb, body: dict[str, Any], wrong: dict[str, Any], said: str) -> None:
    shape = getattr(bodies, verb.title().replace("_", ""))

    def read(sent: dict[str, Any]) -> Any:
        return bodies.read(shape, parse(Message(Kind.CALL, sent, verb, 1).frames()))

    assert body.items() <= read(body).model_dump(mode="json").items()
    with pytest.raises(ChannelError, match=f"^{verb}: {said}"):
        read(wrong)


def test_numbers_of_rows_arrive_as_they_are() -> None:
    values = {"big": 2**70, "most": float("inf"), "none": float("nan"), "nested": [{"x": None}]}
    row = bodies.Row(where="x.jsonl:1", prompt="", values=values)
    sent = bodies.Score(what="train", samples=[], rows={"0": row}).model_dump(mode="json")
    found = bodies.read(bodies.Score, parse(Message(Kind.CALL, sent, Verb.SCORE, 1).frames()))
    assert repr(found.rows["0"].values) == repr(values), "as a reward function gets them"


def test_what_a_rank_answers_is_checked_when_the_driver_reads_it() -> None:
    answer = Message(Kind.ANSWER, {"grad_norm": 1.0, "lr": 0.1, "skipped": False, "used_GiB": 1.0}, Verb.STEP)
    with pytest.raises(ChannelError, match=r"^step: peak_GiB: missing"):
        bodies.Stepped.of(answer)
