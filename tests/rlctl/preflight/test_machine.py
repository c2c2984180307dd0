"""What a run needs of the machine beyond files: shared memory for the libraries below its engines."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from small_spec import raw_spec

from rlctl.preflight import machine
from specs.load.load import spec_from

Usage = namedtuple("Usage", "total used free")
CUT_BY_VLLM = ('rollout.engine.kind="vllm"', "rollout.engine.tensor_parallel=2")
ON_TWO_GPUS = ('actor.launcher="torchrun"', "actor.processes=2", "actor.devices=[0, 1]")


def warnings(folder: Path, *overrides: str) -> list[str]:
    spec = spec_from(raw_spec(), list(overrides))
    found = machine.machine_problems(spec, folder, {}, folder, starting=False, here=True)[1]
    return [str(problem) for problem in found if "shared memory" in problem.message]


@pytest.mark.parametrize(
    ("overrides", "free_MiB", "said"),
    [
        ((), 0, None),  # the transport `shm` and the engines of rlctl's own need none
        (CUT_BY_VLLM, 64, "rollout.engine.kind: its libraries want 240 MiB of shared memory"),
        (CUT_BY_VLLM, 300, None),
        (ON_TWO_GPUS, 64, "actor.engine.kind: its libraries want 1,024 MiB of shared memory"),
        (ON_TWO_GPUS, 2048, None),
    ],
)
def test_a_small_dev_shm_is_named_where_it_is_needed(tmp_path, monkeypatch, overrides, free_MiB, said):
    real = shutil.disk_usage
    usage = Usage(64 << 20, 0, free_MiB << 20)
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage if path == tmp_path else real(path))
    found = warnings(tmp_path, *overrides)
    assert len(found) == (said is not None)
    if said:
        assert found[0].startswith(said)
        assert "--shm-size" in found[0]
