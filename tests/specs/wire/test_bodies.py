"""Every verb's body: a class of its own, which refuses an unknown key, a missing one and another type by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from running import preset

from rlctl.processes.role_configs import build_bodies
from specs.errors import ChannelError
from specs.load.load import load_spec
from specs.schema.algorithms.algorithm_tables import PpoClip
from specs.wire import bodies
from specs.wire.messages import Kind, Message, Verb, parse
from specs.wire.role_config import Sampling

WEIGHT = {"name": "w", "dtype": "fp32", "shape": [2, 3], "nbytes": 24}
SENT = {**WEIGHT, "checksum": "c0ffee", "offset": 64}
TRANSPORT = {"transport": "folder", "options": {"folder": "/x"}, "form": "merged"}
SCALE = {"num_loss_tokens": 7, "num_sequences": 2, "max_response_tokens": 8}
LOSS = PpoClip(anchor="current", kl_coef=0.1).model_dump()
SAMPLING = Sampling(seed=1, max_response_tokens=8).model_dump()


def examples(folder: Path) -> dict[tuple[Verb, type[BaseModel]], dict[str, Any]]:
    """A good body for each class of each verb, as JSON."""
    spec = load_spec(preset("fake", folder), [])
    built = build_bodies(spec, folder, folder)
    found: dict[tuple[Verb, type[BaseModel]], dict[str, Any]] = {}
    for shape in bodies.REQUESTS[Verb.BUILD]:
        name = next(role for role, body in built.items() if fits(shape, body))
        found[Verb.BUILD, shape] = dict(built[name])
    of_verbs: dict[Verb, dict[str, Any]] = {
        Verb.PROMPTS: {"what": "train", "position": 0, "count": 2, "group_size": 4},
        Verb.SCORE: {
            "what": "eval",
            "samples": 0,
            "rows": {"7": {"where": "x.jsonl:8", "prompt": "1+1", "values": {"answer": 2}, "messages": None}},
        },
        Verb.RENDER: {
            "what": "train",
            "rows": {"7": {"where": "x.jsonl:8", "prompt": "1+1", "values": {}, "messages": [{"role": "user"}]}},
        },
        Verb.JUDGE: {"what": "train", "rows": {"7": {"where": "", "prompt": "1+1", "values": {}, "messages": None}}},
        Verb.AWAIT_JUDGES: {"what": "train", "tickets": [1], "lost": [2]},
        Verb.GENERATE: {"sampling": SAMPLING},
        Verb.SLEEP: {"level": 2},
        Verb.WAKE: {"tags": ["kv_cache", "weights"]},
        Verb.LOGPROBS: {"adapters": False},
        Verb.UPDATE: {"loss": spec.loss.model_dump(), "scale": SCALE},
        Verb.SAVE: {"folder": "/x", "proof_prompts": [[1, 2]], "proof_tokens": 16},
        Verb.LOAD: {"folder": "/x"},
        Verb.EXPORT_BEGIN: {**TRANSPORT, "dtype": "bf16", "bucket_bytes": 4096, "readers": 2, "renew": True},
        Verb.EXPORT_BUCKET: {"bucket": 0},
        Verb.EXPORT_END: {"broken_off": True},
        Verb.IMPORT_BEGIN: {**TRANSPORT, "specs": [WEIGHT], "offer": {"stem": "y"}},
        Verb.IMPORT_BUCKET: {"bucket": 0, "entries": [SENT]},
        Verb.IMPORT_END: {"version": 3},
    }
    found |= {(verb, bodies.REQUESTS[verb][0]): body for verb, body in of_verbs.items()}
    nothing = {
        (verb, shape): {} for verb, shapes in bodies.REQUESTS.items() for shape in shapes if shape is bodies.Nothing
    }
    return {**found, **nothing, (Verb.PROBE, bodies.Probe): {"temperature": 1}}


def fits(shape: type[BaseModel], body: Any) -> bool:
    return set(body) <= set(shape.model_fields)


def read(verb: Verb, shape: type[BaseModel], body: dict[str, Any]) -> BaseModel:
    return bodies.read(shape, parse(Message(Kind.CALL, body, verb, 1).frames()))


@pytest.mark.parametrize("verb", list(Verb))
def test_every_verb_has_bodies_that_refuse_what_they_do_not_know(verb: Verb, tmp_path: Path) -> None:
    good = examples(tmp_path)
    for shape in bodies.REQUESTS[verb]:
        body = good[verb, shape]
        typed = read(verb, shape, body)
        assert json.loads(json.dumps(typed.model_dump(mode="json"))) | body == typed.model_dump(mode="json")
        with pytest.raises(ChannelError, match=f"^{verb}: stranger: unknown key"):
            read(verb, shape, {**body, "stranger": 1})
        for name, field in shape.model_fields.items():
            if field.is_required():
                with pytest.raises(ChannelError, match=f"^{verb}: {name}: missing"):
                    read(verb, shape, {key: value for key, value in body.items() if key != name})
            if name in body:
                with pytest.raises(ChannelError, match=f"^{verb}: {name}"):
                    read(verb, shape, {**body, name: [{"neither": "this"}]})


@pytest.mark.parametrize(
    ("verb", "body", "key"),
    [
        (Verb.EXPORT_BUCKET, {"bucket": "3"}, "bucket"),  # nothing is converted
        (Verb.SLEEP, {"level": 3}, "level"),
        (Verb.WAKE, {"tags": ["kv_cash"]}, r"tags\.0"),
        (Verb.UPDATE, {"loss": LOSS, "scale": {**SCALE, "x": 1}}, r"scale\.x"),
        (Verb.UPDATE, {"loss": {**LOSS, "clip": 1.0}, "scale": SCALE}, "loss"),
        (Verb.IMPORT_BUCKET, {"bucket": 0, "entries": [{**SENT, "offset": "64"}]}, r"entries\.0\.offset"),
        (Verb.GENERATE, {"sampling": {**SAMPLING, "temprature": 1.0}}, r"sampling\.temprature"),
    ],
)
def test_what_is_inside_a_body_is_checked_too(verb: Verb, body: dict[str, Any], key: str) -> None:
    with pytest.raises(ChannelError, match=f"^{verb}: {key}: "):
        read(verb, bodies.REQUESTS[verb][0], body)


def test_what_a_rank_answers_is_checked_when_the_driver_reads_it() -> None:
    answer = Message(Kind.ANSWER, {"grad_norm": 1.0, "lr": 0.1, "skipped": False, "used_GiB": 1.0}, Verb.STEP)
    with pytest.raises(ChannelError, match=r"^step: peak_GiB: missing"):
        bodies.Stepped.of(answer)
