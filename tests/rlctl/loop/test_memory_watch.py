"""Memory held after sleep: what counts as a leak, and a run whose sampler really leaks."""

import json
from itertools import pairwise

import numpy as np
import pytest
from faulty_engines import install
from running import REPO, metrics, preset, warm_rlctl

from rlctl.loop.memory_watch import MIN_SLOPE_MIB, WARM_UP, WINDOW, MemoryWatch
from specs.errors import MemoryGrowthError

KEY = "mem/rollout_asleep_GiB"
MIB = 2.0**-10  # GiB


def watch(values, max_growth_GiB=1e9):
    """What a watch says of a series: its warnings. Raises as it does."""
    warnings = []
    seen = MemoryWatch(max_growth_GiB, warnings.append)
    for step, value in enumerate(values, start=1):
        seen.see({KEY: value, "mem/actor_peak_GiB": float(step)}, step)
    return warnings


def noise(mib, count=60):
    return np.random.default_rng(5).normal(0.0, mib * MIB, count)


FLAT = {
    "flat": np.full(60, 4.0),
    "noisy": 4.0 + noise(40),
    "warming up": 4.0 + np.concatenate([np.arange(WARM_UP) * 0.5, np.full(56, 2.0)]),
    "one jump": 4.0 + np.where(np.arange(60) < 30, 0.0, 2.0) + noise(2),
    "two jumps, far apart": 4.0 + np.select([np.arange(60) < 20, np.arange(60) < 42], [0.0, 1.0], 2.0) + noise(2),
    "falling": 4.0 - 0.02 * np.arange(60),
    "up and down": 4.0 + 0.5 * np.sin(np.arange(60) / 1.5),
    "slower than it matters": 4.0 + 0.5 * MIN_SLOPE_MIB * MIB * np.arange(60),
}
LEAKING = {
    "line": 4.0 + 10 * MIB * np.arange(60),
    "noisy line": 4.0 + 25 * MIB * np.arange(60) + noise(40),
    "by chunks": 4.0 + 64 * MIB * (np.arange(60) // 4),
    "after being flat": 4.0 + 30 * MIB * np.maximum(0, np.arange(60) - 30),
}


@pytest.mark.parametrize("series", FLAT.values(), ids=FLAT)
def test_what_does_not_grow_is_not_reported(series):
    assert watch(series, max_growth_GiB=1e-3) == []


@pytest.mark.parametrize("series", LEAKING.values(), ids=LEAKING)
def test_what_grows_is_reported_once_and_then_ends_the_run(series):
    warnings = watch(series)
    assert len(warnings) == 1
    assert KEY in warnings[0]
    with pytest.raises(MemoryGrowthError, match=KEY) as error:
        watch(series, max_growth_GiB=0.1)
    assert "run.max_memory_growth_GiB = 0.1" in error.value.message
    assert "hint: " in str(error.value)


def test_a_sampler_that_leaks_is_named_then_stopped(tmp_path):
    """Its engine keeps 12 MiB more each time it sleeps."""
    site, run = install(tmp_path / "site"), tmp_path / "run"
    options = ('run.colocate="always"', "run.steps=60", "checkpoint.every=100", 'rollout.engine.kind="leaking"')
    sets = [part for option in (*options, "run.max_memory_growth_GiB=0.25") for part in ("--set", option)]
    done = warm_rlctl("train", preset("fake", tmp_path), "--run-dir", run, *sets, PYTHONPATH=f"{REPO}:{site}")
    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert said.count(f"warning: {KEY} grows by ") == 1
    assert f"memory is not released: {KEY}" in done.stderr
    lines = [line for line in metrics(run) if line["step"] > 0]
    assert WARM_UP + WINDOW < len(lines) < 40
    growth = [after[KEY] - before[KEY] for before, after in pairwise(lines[5:])]
    assert float(np.median(growth)) / MIB == pytest.approx(12.0, abs=1.0)
    # What was learned is kept, and may go on.
    manifest = next((run / "checkpoints").glob("step_*/manifest.json"))
    assert json.loads(manifest.read_text())["step"] == lines[-1]["step"]
