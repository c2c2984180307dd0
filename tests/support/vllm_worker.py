"""Runs a vLLM rollout engine for the tests, in the interpreter that has vLLM: calls come on stdin, answers leave on
stdout.

A frame is a line of JSON, `{"nbytes": …}` in it, and that many bytes of tensors. No pickle.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from off_the_host import nothing_over_the_host

from backends.completions import Completion, SampleRequest
from backends.hf.model_shape import model_shape
from backends.protocol import Rank, WeightSpec
from backends.registry import rollout_engine
from specs.schema.engines.engine_table import RolloutTable
from specs.wire import wire_tensors
from specs.wire.batch import Batch
from specs.wire.role_config import RolloutConfig, Sampling

Arrays = Mapping[str, NDArray[Any]]


def vllm_alone(config: RolloutConfig) -> RolloutTable:
    """Return the settings that vLLM starts with, without those that are the engine's around it."""
    return config.engine.model_copy(update={"keep_cache": False})


def send(pipe: BinaryIO, body: dict[str, Any], arrays: Arrays | None = None) -> None:
    blob = wire_tensors.encode(arrays or {})
    pipe.write(json.dumps({**body, "nbytes": len(blob)}).encode() + b"\n")
    pipe.write(blob)
    pipe.flush()


def receive(pipe: BinaryIO) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Raises EOFError when the other side is gone."""
    line = pipe.readline()
    if not line:
        raise EOFError
    body = json.loads(line)
    return body, dict(wire_tensors.decode(pipe.read(body["nbytes"])))


class Server:
    """One vLLM; a second `build` gives a fresh engine around it."""

    def __init__(self, pipe: BinaryIO) -> None:
        self.pipe = pipe
        self.engine: Any = None

    def build(self, body: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
        config = RolloutConfig.model_validate(body["config"])
        if self.engine is None:
            self.engine = rollout_engine("vllm").build(config, Rank())
        else:
            self.renew(config)
        return {"built": self.engine.built().model_dump()}

    def renew(self, config: RolloutConfig) -> None:
        """A fresh engine around the vLLM that runs, whose weights are dropped."""
        old = self.engine
        now, then = (
            each.model_copy(update={"lora": None, "engine": vllm_alone(each)}) for each in (config, old.config)
        )
        assert now == then, "another model or other settings want a process of their own"
        old.sleep(2)
        old.wake(["weights", "kv_cache"])
        self.engine = type(old)(config, config.engine, model_shape(config.model, config.lora), old.llm)

    def weight_specs(self, body: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
        return {"specs": [[s.name, s.dtype, list(s.shape), s.nbytes] for s in self.engine.weight_specs()]}

    def weight_form(self, body: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
        return {"form": self.engine.weight_form()}

    def import_weight(self, body: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
        name, dtype, shape, nbytes = body["spec"]
        return {"checksum": self.engine.import_weight(WeightSpec(name, dtype, tuple(shape), nbytes), arrays["bytes_U"])}

    def import_from_device(self, body: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
        """The bytes lie in one window, one after another. A worker in this process must not take them over the host."""
        specs = [WeightSpec(name, dtype, tuple(shape), nbytes) for name, dtype, shape, nbytes in body["specs"]]
        window_U = torch.from_numpy(arrays["window_U"].copy())
        buffers = window_U.split(body["lengths"])
        alone = self.engine.table.tensor_parallel == 1
        with nothing_over_the_host() if alone else nullcontext():
            return {"checksums": self.engine.import_from_device(list(zip(specs, buffers, strict=True)))}

    def open_requests(self, body: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
        return {"count": self.engine.open_requests}

    def add(self, body: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
        tokens = np.split(arrays["tokens_T"], np.cumsum(body["lengths"])[:-1]) if body["lengths"] else []
        self.engine.add(
            [
                SampleRequest(id_, prompt, Sampling.model_validate(sampling), position, prefix)
                for prompt, (id_, sampling, position, prefix) in zip(tokens, body["facts"], strict=True)
            ]
        )
        return {}

    def step(self, body: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        return self._completions(self.engine.step())

    def suspend(self, body: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        return self._completions(self.engine.suspend())

    def _completions(self, found: Sequence[Completion]) -> tuple[dict[str, Any], Arrays]:
        lengths, finished = [len(one.tokens) for one in found], [one.finished for one in found]
        columns = {
            "tokens_T": np.concatenate([np.zeros(0, np.int64), *(one.tokens for one in found)]),
            "logprob_T": np.concatenate([np.zeros(0, np.float32), *(one.logprobs for one in found)]),
        }
        return {"ids": [one.id for one in found], "lengths": lengths, "finished": finished}, columns

    def abort(self, body: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
        self.engine.abort(body["ids"])
        return {}

    def generate(self, body: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
        def emit(part: Batch) -> None:
            send(self.pipe, {"part": True}, part.columns)

        counters = self.engine.generate(Batch(dict(arrays)), Sampling.model_validate(body["sampling"]), emit)
        return {"counters": dict(counters)}

    def score(self, body: dict[str, Any], arrays: Arrays) -> NDArray[np.float32]:
        return self.engine.score(Batch(dict(arrays)), body["temperature"])

    def forget_adapters(self, body: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
        self.engine.request = None
        return {}

    def finish_import(self, body: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
        self.engine.finish_import()
        return {}

    def is_idle(self, body: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
        core = self.engine.llm.llm_engine.engine_core.engine_core
        return {"idle": not core.scheduler.has_requests() and not core.batch_queue}

    def places(self, body: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Tell how many requests the worker holds, and for how many it is made."""

        def count(worker: Any) -> tuple[int, int]:
            return len(worker.model_runner.requests), worker.scheduler_config.max_num_seqs

        ((held, most),) = self.engine.llm.collective_rpc(count)
        return {"held": held, "most": most}

    def sleep(self, body: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
        self.engine.sleep(body["level"])
        return {}

    def wake(self, body: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
        self.engine.wake(body["tags"])
        return {}

    def run(self, source: BinaryIO) -> None:
        while True:
            try:
                body, arrays = receive(source)
            except EOFError:
                return
            try:
                answer = getattr(self, body["call"])(body, arrays)
            except Exception as error:  # the edge: the test must see it
                traceback.print_exc()
                send(self.pipe, {"error": type(error).__name__, "message": str(error)})
                continue
            if isinstance(answer, np.ndarray):
                send(self.pipe, {}, {"logprob_T": answer})
            elif isinstance(answer, tuple):
                send(self.pipe, *answer)
            else:
                send(self.pipe, answer)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # vLLM prints
    if not torch.cuda.is_available():
        from vllm.model_executor.models import registry

        # vLLM asks another process, lest a GPU be opened, about each class of models that it has not met on a machine.
        registry._run_in_subprocess = lambda ask: ask()
    Server(answers).run(sys.stdin.buffer)
