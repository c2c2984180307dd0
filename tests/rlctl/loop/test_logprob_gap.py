"""The budget of the log-prob gap: what is counted, and runs whose sampler really reports wrong log-probs."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest
import warm
from faulty_engines import LIES_FROM, install
from running import REPO, metrics, preset
from running import warm_rlctl as rlctl
from safetensors import safe_open

from rlctl.loop.logprob_gap import HEADER, Gap, GapLimits, gap_limits, worst_samples
from specs.load.load import load_spec
from specs.wire.batch import Batch

pytestmark = pytest.mark.slow

# ── the parts ─────────────────────────────────────────────────────────────────────────────────────


def batch_of(sampler, trainer, prompt=2):
    """Sequences of `prompt` tokens and an answer each; log-probs of the answers as given."""
    lengths = [prompt + len(answer) for answer in sampler]

    def column(parts, head, dtype):
        return np.concatenate([np.array([*[head] * prompt, *part], dtype=dtype) for part in parts])

    batch = Batch(
        {
            "tokens_T": np.arange(sum(lengths)),
            "loss_mask_T": column([[1] * len(answer) for answer in sampler], 0, np.uint8),
            "rollout_logprob_T": column(sampler, 9.0, np.float32),  # a prompt's values must not count
            "length_B": np.array(lengths),
            "id_B": np.arange(len(lengths)) + 100,
            "rollout_B": np.arange(len(lengths)) + 200,
        }
    )
    return batch, column(trainer, 0.0, np.float32)


def test_a_hole_in_the_mask_has_no_gap():
    """A tool's reply of two tokens after the first that was sampled; what stands in the columns there means nothing."""
    batch, trainer_T = batch_of([[-1, 7, np.nan, -2, -5], [-1, -1]], [[-1.5, 0, 0, -2, -4], [-1, -2]])
    batch["loss_mask_T"][3:5] = 0
    gap = Gap.of_batch(batch, trainer_T)
    assert (gap.mean, gap.largest) == (pytest.approx((0.5 + 0 + 1 + 0 + 1) / 5), 1.0)
    worst = worst_samples(batch, trainer_T)
    assert [(sample.index, sample.position) for sample in worst] == [(0, 2), (1, 1)]
    assert [sample.mean for sample in worst] == [0.5, 0.5]


def test_a_gap_that_is_no_number_is_the_worst():
    batch, trainer_T = batch_of([[-1], [-1, np.nan]], [[-9], [-1, -1]])
    assert worst_samples(batch, trainer_T)[0].index == 1
    assert GapLimits(None, 1.0, None, {}, print).broken_by(Gap(float("nan"), 0.0))


def test_a_gap_is_summed_over_ranks():
    ranks = [
        {"tokens": 3.0, "logprob_gap": 0.3, "logprob_gap_max": 0.2},
        {"tokens": 1.0, "logprob_gap": 0.5, "logprob_gap_max": 0.5},
        {"tokens": 0.0, "logprob_gap": 0.0, "logprob_gap_max": 0.0},
    ]
    gap = Gap.of_sums(ranks)
    assert (gap.mean, gap.largest) == (pytest.approx(0.2), 0.5)
    budget = GapLimits(None, 0.2001, None, {}, print)
    assert not budget.broken_by(gap)
    assert budget.broken_by(Gap(0.21, 0.5))
    assert not GapLimits(None, None, None, {}, print).broken_by(Gap(99.0, 99.0))


def budget_of(tmp_path, *sets):
    return gap_limits(load_spec(preset("quickstart", tmp_path), list(sets)))


def test_defaults_follow_precision_and_what_sampling_leaves_out(tmp_path):
    assert budget_of(tmp_path) == (1e-4, 1e-2)
    assert budget_of(tmp_path, "actor.dtype=bf16") == (0.03, 0.3)
    assert budget_of(tmp_path, "rollout.dtype=bf16") == (0.03, 0.3)
    assert budget_of(tmp_path, "rollout.max_logprob_gap=2.0") == (1e-4, 2.0)
    cut = -np.log(0.9)
    assert budget_of(tmp_path, "rollout.top_p=0.9") == pytest.approx((cut + 1e-4, cut + 1e-2))
    learned = budget_of(tmp_path, "rollout.max_staleness=2")
    assert learned == pytest.approx((2 * 0.5 + 1e-4, 2 * 1.0 + 1e-2)), "what two steps may teach comes on top"
    assert budget_of(tmp_path, "rollout.top_k=5") == (None, None)
    assert budget_of(tmp_path, "rollout.top_k=5", "rollout.max_logprob_gap=2.0") == (None, 2.0)


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return f"{REPO}:{install(tmp_path_factory.mktemp('site'))}"


def run_with(kind, site, tmp_path, *options, name="fake"):
    run = tmp_path / "run"
    given = (f'rollout.engine.kind="{kind}"', "run.steps=5", "checkpoint.every=100", *options)
    sets = [part for option in given for part in ("--set", option)]
    return run, rlctl("train", preset(name, tmp_path), "--run-dir", run, *sets, PYTHONPATH=site)


def kept(path):
    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name) for name in [*file.keys()]}, json.loads(file.metadata()[HEADER])


def rescored(path, *args):
    command = [sys.executable, REPO / "scripts" / "rescore.py", path, *args]
    return warm.run(command, env=os.environ, timeout_s=120)


SMALL_TORCH = ("data.prompts_per_step=4", "algorithm.group_size=4", "algorithm.mini_batches_per_step=1")
# Next to nothing is learned, so that the gap of samples drawn ahead is the lie alone.
AHEAD = ("rollout.max_staleness=1", "rollout.max_logprob_gap=0.01", "actor.optimizer.lr=1e-12")
CASES = [("lying-fake", "fake", AHEAD), ("lying-torch", "quickstart", SMALL_TORCH)]


@pytest.mark.parametrize(("kind", "name", "options"), CASES, ids=["running ahead", "torch"])
def test_a_sampler_that_lies_is_stopped_before_its_samples_teach(kind, name, options, site, tmp_path):
    more = ("rollout.engine.nats=4.0", "eval.every=100") if name == "quickstart" else ("rollout.engine.nats=4.0",)
    run, done = run_with(kind, site, tmp_path, *options, *more, name=name)
    assert done.returncode == 1, done.stdout + done.stderr
    path = next(run.glob("gap_step_*.safetensors"))
    columns, about = kept(path)
    step = about["step"]
    assert max(line["step"] for line in metrics(run)) == step - 1
    # What is kept: both log-probs of every token, and only one answer is wrong, from its second token on.
    batch = Batch({name: column for name, column in columns.items() if name != "trainer_logprob_T"})
    gap_T = np.abs(columns["rollout_logprob_T"] - columns["trainer_logprob_T"]) * columns["loss_mask_T"]
    wrong_T = gap_T > 1e-3
    liar = int(np.argsort(columns["id_B"])[1])
    start, stop = batch.offsets[liar], batch.offsets[liar + 1]
    answer = start + np.flatnonzero(columns["loss_mask_T"][start:stop])
    assert np.flatnonzero(wrong_T).tolist() == answer[1:].tolist()
    assert gap_T[answer[1:]] == pytest.approx(4.0, abs=1e-3)
    error = " ".join(done.stderr.split())
    for part in (f"step {step}:", f"id {columns['id_B'][liar]} ", "rollout.max_logprob_gap", str(path), "hint:"):
        assert part in error, error
    # The state before the update was saved, and the batch scores there as the trainer had it: the sampler is at fault.
    assert (run / "checkpoints" / f"step_{step - 1:06d}").is_dir()
    (run / "checkpoints" / "step_000001 (copy)").mkdir()  # what a person put there is not ours
    again = rescored(path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "the sampler's log-probs are off" in again.stdout
    row = again.stdout.split("loss token\n")[1].splitlines()[0].split()
    assert int(row[0]) == columns["id_B"][liar]
    assert int(row[-1]) == 1, "the second token of the answer is the first that is wrong"


def test_a_batch_that_was_written_in_half_is_named(tmp_path):
    (path := tmp_path / "gap_step_000012.safetensors").write_bytes(b"half a header")
    done = rescored(path)
    assert done.returncode == 2, done.stderr
    assert f"error: {path} is not a kept batch" in done.stderr


def test_a_small_lie_is_a_warning(site, tmp_path):
    run, done = run_with("lying-fake", site, tmp_path, "rollout.engine.nats=0.05", "rollout.engine.after=0")
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [line["rollout/logprob_gap_warnings"] for line in metrics(run) if line["step"] > 0]
    lies = len(counts) - LIES_FROM + 1
    assert counts == [0] * (LIES_FROM - 1) + list(range(1, lies + 1))
    assert done.stdout.count("over rollout.warn_logprob_gap") == 1
    assert not list(run.glob("gap_step_*"))
