"""A model cut across vLLM's own worker processes (`tensor_parallel`): weights and adapters reach their parts, log-probs
are the trainer's, and the end of one worker is the end of the sampler, told as such. Two workers, one real vLLM."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from optional import needs_vllm
from rollout_helpers import make_prompts
from train_helpers import learn
from vllm_process import RemoteVllm, VllmProcess
from vllm_syncing import EXACT, LORA, ONE, check_samples, config_of, gap, sync, sync_on_device

from backends.train.engine import HfTrainEngine
from specs.errors import SamplerDied, SyncError
from specs.wire.role_config import RolloutConfig, Sampling

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(400)]


def sharded_config() -> RolloutConfig:
    config = config_of(LORA)
    return config.model_copy(update={"engine": config.engine.model_copy(update={"tensor_parallel": 2})})


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    """With a folder of its own for temporary files: vLLM leaves its sockets there."""
    folder = tmp_path_factory.mktemp("t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        process = VllmProcess()
    yield process
    process.close()
    assert not [path for path in folder.rglob("*") if path.is_socket()]


@pytest.fixture
def engine(process: VllmProcess) -> RemoteVllm:
    """As just started: no model, no adapters."""
    return RemoteVllm(process, sharded_config())


def test_parts_of_every_weight_and_adapter_arrive(trainer: HfTrainEngine, engine: RemoteVllm) -> None:
    """Checksums are read back from both parts (in `sync`); scores and samples have the trainer's log-probs. The model
    has one key-value head, which both workers hold."""
    assert engine.built().mesh == {"tensor": 2}
    assert engine.built().parameters == trainer.built().parameters
    assert sync(trainer, engine)[0] == "apart"
    assert gap(trainer, engine) < EXACT
    for seed in range(2):
        learn(trainer, 1, first=10 + seed)
        assert gap(trainer, engine) > 100 * EXACT, "the step must be large enough to see"
        assert (sync_on_device(trainer, engine) if seed else sync(trainer, engine)[0]) == "adapters"
        assert gap(trainer, engine) < EXACT
        check_samples(trainer, engine, make_prompts(), seed=seed, tokens=15)


def test_after_level_2_all_parts_come_again(trainer: HfTrainEngine, engine: RemoteVllm) -> None:
    sync(trainer, engine)
    engine.sleep(2)
    engine.wake(["weights"])
    with pytest.raises(SyncError, match=f"1 weights did not arrive, first {ONE}"):
        sync(trainer, engine, lambda weight, data: None if weight.spec.name == ONE else (weight.spec, data))
    assert sync_on_device(trainer, engine) == "apart"
    assert gap(trainer, engine) < EXACT
    engine.wake(["kv_cache"])


def test_the_end_of_one_worker_is_the_samplers(trainer: HfTrainEngine, engine: RemoteVllm) -> None:
    """In the middle of an answer; the other worker ends too, and no shared memory is left. Last in this file: nothing
    comes after it."""
    sync(trainer, engine)
    workers = _workers_of(engine.process.child.pid)
    assert len(workers) == 2
    segments = {
        line.split("/dev/shm/")[1]
        for line in Path(f"/proc/{workers[0]}/maps").read_text().splitlines()
        if "cpushm" in line
    }
    through_memory = "avx512f" in Path("/proc/cpuinfo").read_text()  # elsewhere vLLM's all-reduce is gloo's
    assert len(segments) == (2 if through_memory else 0), "vLLM's all-reduce goes another way"
    assert all(segment.endswith("(deleted)") for segment in segments), segments
    sampling = Sampling(seed=1, max_response_tokens=85)
    prompts = make_prompts(groups=128, group_size=8)  # for seconds, also on a fast machine
    engine.process.begin("generate", {"sampling": sampling.model_dump()}, prompts.columns)
    time.sleep(0.5)
    os.kill(workers[1], signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(SamplerDied, match=r"vLLM's worker process \S+ ended with exit code -9"):
        _to_the_end(engine.process)
    assert time.monotonic() - killed < 100
    with pytest.raises(SamplerDied):
        engine.process.call("score", {"temperature": 1.0}, prompts.only(["tokens_T", "length_B"]).columns)


def _to_the_end(process: VllmProcess) -> None:
    while "part" in process.answer()[0]:
        pass


def _workers_of(process: int) -> list[int]:
    """Processes of vLLM's workers that `process` started, by rank."""
    found = []
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, listed.read_text().split()):
            name = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"Worker_TP" in name:
                found.append((name, child))
    return [child for _, child in sorted(found)]
