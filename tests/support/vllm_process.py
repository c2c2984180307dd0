"""A vLLM rollout engine in the interpreter that has vLLM, behind the protocol of one that is here."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gpu import has_gpu
from numpy.typing import NDArray
from optional import VLLM_PYTHON
from rollout_helpers import rollout_config, write_model
from vllm_worker import receive, send
from warm import WarmPopen

from backends.completions import Completion, SampleRequest
from backends.protocol import Emit, Rank, RolloutEngine, WeightSpec
from specs import errors
from specs.schema.spec import WeightForm
from specs.wire.as_built import ModelBuilt
from specs.wire.batch import Batch
from specs.wire.role_config import RolloutConfig, Sampling

ROOT = Path(__file__).parents[2]
PACKAGES = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
# vLLM's attention on the CPU takes head dims from 32 on.
VLLM_SHAPE: dict[str, object] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


class VllmPopen(WarmPopen):
    """Starts a fork of a process that has imported vLLM, which takes as long as most of what is done with it."""

    python = str(VLLM_PYTHON)
    imported = ("backends.vllm_rollout.engine", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker")


class VllmProcess:
    """The child, and how to call it. It ends with its stdin."""

    def __init__(self) -> None:
        self.log = Path(tempfile.mkstemp(prefix="rlctl-vllm-", suffix=".log")[1])
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent), *PACKAGES])}
        start = subprocess.Popen if has_gpu() else VllmPopen  # what is imported may look for GPUs, and open them
        with self.log.open("wb") as log:
            self.child = start(
                [str(VLLM_PYTHON), str(Path(__file__).with_name("vllm_worker.py"))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, env=env,
            )  # fmt: skip
        atexit.register(self.close)

    def call(
        self, verb: str, body: Mapping[str, Any] | None = None, arrays: Mapping[str, NDArray[Any]] | None = None
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Raises what the engine raised, where it is one of rlctl's errors; else RuntimeError."""
        self.begin(verb, body, arrays)
        return self.answer()

    def begin(
        self, verb: str, body: Mapping[str, Any] | None = None, arrays: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        assert self.child.stdin is not None
        send(self.child.stdin, {"call": verb, **(body or {})}, arrays)

    def answer(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        assert self.child.stdout is not None
        try:
            body, arrays = receive(self.child.stdout)
        except EOFError:
            raise RuntimeError(f"the vLLM process ended:\n{self.log.read_text(errors='replace')[-3000:]}") from None
        if "error" in body:
            raise getattr(errors, body["error"], RuntimeError)(body["message"])
        return body, arrays

    def close(self) -> None:
        if self.child.poll() is None:
            assert self.child.stdin is not None
            self.child.stdin.close()
            try:
                self.child.wait(20)
            except subprocess.TimeoutExpired:
                print(f"the vLLM process {self.child.pid} does not end by itself", file=sys.stderr)
                self.child.kill()
                self.child.wait()
        self.log.unlink(missing_ok=True)


class RemoteVllm(RolloutEngine):
    """The protocol, call by call."""

    def __init__(self, process: VllmProcess, config: RolloutConfig) -> None:
        self.process = process
        answer, _ = process.call("build", {"config": config.model_dump(mode="json")})
        self.reported = ModelBuilt.model_validate(answer["built"])

    @classmethod
    def build(cls, config: RolloutConfig, rank: Rank) -> RemoteVllm:
        return cls(shared_process(), config)

    def built(self) -> ModelBuilt:
        return self.reported

    def weight_specs(self) -> Sequence[WeightSpec]:
        specs = self.process.call("weight_specs")[0]["specs"]
        return [WeightSpec(name, dtype, tuple(shape), nbytes) for name, dtype, shape, nbytes in specs]

    def weight_form(self) -> WeightForm:
        form: WeightForm = self.process.call("weight_form")[0]["form"]
        return form

    def import_weight(self, spec: WeightSpec, buffer: NDArray[np.uint8]) -> str:
        body = {"spec": [spec.name, spec.dtype, list(spec.shape), spec.nbytes]}
        checksum = self.process.call("import_weight", body, {"bytes_U": buffer})[0]["checksum"]
        assert isinstance(checksum, str)
        return checksum

    def import_from_device(self, weights: Sequence[tuple[WeightSpec, Any]]) -> list[str]:
        specs = [[spec.name, spec.dtype, list(spec.shape), spec.nbytes] for spec, _ in weights]
        window_U = np.concatenate([buffer.numpy() for _, buffer in weights])
        body = {"specs": specs, "lengths": [len(buffer) for _, buffer in weights]}
        checksums: list[str] = self.process.call("import_from_device", body, {"window_U": window_U})[0]["checksums"]
        return checksums

    def finish_import(self) -> None:
        self.process.call("finish_import")

    @property
    def open_requests(self) -> int:
        return int(self.process.call("open_requests")[0]["count"])

    def add(self, requests: Sequence[SampleRequest]) -> None:
        facts = [[one.id, one.sampling.model_dump(), one.position, one.prefix] for one in requests]
        tokens_T = np.concatenate([np.zeros(0, np.int64), *(one.tokens for one in requests)])
        lengths = [len(one.tokens) for one in requests]
        self.process.call("add", {"facts": facts, "lengths": lengths}, {"tokens_T": tokens_T})

    def step(self) -> list[Completion]:
        return self._completions("step")

    def suspend(self) -> list[Completion]:
        return self._completions("suspend")

    def _completions(self, verb: str) -> list[Completion]:
        body, columns = self.process.call(verb)
        bounds = np.cumsum([0, *body["lengths"]])
        return [
            Completion(id_, columns["tokens_T"][a:b], columns["logprob_T"][a:b], ended)
            for id_, ended, (a, b) in zip(body["ids"], body["finished"], pairwise(bounds), strict=True)
        ]

    def abort(self, ids: Collection[int] | None = None) -> None:
        self.process.call("abort", {"ids": None if ids is None else list(ids)})

    def generate(self, prompts: Batch, sampling: Sampling, emit: Emit) -> Mapping[str, int]:
        self.process.begin("generate", {"sampling": sampling.model_dump()}, prompts.columns)
        while True:
            answer, columns = self.process.answer()
            if "part" not in answer:
                counters: dict[str, int] = answer["counters"]
                return counters
            emit(Batch(columns))

    def score(self, batch: Batch, temperature: float) -> NDArray[np.float32]:
        return self.process.call("score", {"temperature": temperature}, batch.columns)[1]["logprob_T"]

    def sleep(self, level: int) -> None:
        self.process.call("sleep", {"level": level})

    def wake(self, tags: Sequence[str]) -> None:
        self.process.call("wake", {"tags": list(tags)})


@cache
def shared_process() -> VllmProcess:
    """One vLLM for many tests: it takes seconds to start."""
    return VllmProcess()


@cache
def shared_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="rlctl-vllm-"))
    return write_model(folder, **VLLM_SHAPE)


def fresh_vllm(**changes: int) -> RemoteVllm:
    """The shared vLLM as if just built: without weights."""
    return RemoteVllm.build(rollout_config(shared_folder(), "vllm", **changes), Rank())
