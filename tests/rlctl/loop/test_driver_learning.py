"""What the driver tells the actor to learn: advantages of each group by itself, and what every rank divides by."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from local_group import LocalGroup
from local_run import bigram_folder, local_run
from running import preset
from told_actor import LIMIT, RANKS, drawn, driver_of, rl_driver

from specs.schema.algorithms.algorithm_tables import PRESETS
from specs.wire.batch import Batch
from specs.wire.messages import Verb


@pytest.mark.parametrize(
    ("adapters", "updates", "asked"),
    [
        (True, 2, {"old_logprob_T": ("actor", True), "ref_logprob_T": ("actor", False)}),
        (True, 1, {"ref_logprob_T": ("actor", False)}),
        (False, 2, {"old_logprob_T": ("actor", True), "ref_logprob_T": ("ref", True)}),
        (False, 1, {"ref_logprob_T": ("ref", True)}),
    ],
)
def test_the_reference_is_asked_and_of_an_actor_with_adapters_the_model_below_them(
    tmp_path: Path, adapters: bool, updates: int, asked: dict[str, tuple[str, bool]]
) -> None:
    """Each answers with its own number, by which the columns tell whom they came from."""
    numbers = {("actor", True): 1.0, ("actor", False): 2.0, ("ref", True): 3.0}

    def logprobs(role):
        def answer(call, emit):
            number = numbers[role, call.body["adapters"]]
            return {}, {"logprob_T": np.full(call.batch.num_tokens, number, np.float32)}

        return LocalGroup(role, [{Verb.LOGPROBS: answer}] * RANKS)

    options = ["algorithm.kl_coef=0.1", f"algorithm.mini_batches_per_step={updates}"]
    options += ["model.from_scratch=false", "actor.lora.rank=4"] if adapters else []
    groups = {role: logprobs(role) for role in (("actor",) if adapters else ("actor", "ref"))}
    driver = rl_driver(tmp_path, groups, *options, name="quickstart")
    batch, _ = drawn()
    names = [name for name in batch.columns if name != "old_logprob_T"]
    learned = driver.add_model_columns(batch.only(names), 1)
    assert {name: set(learned[name].tolist()) for name in learned.columns if name not in names} == {
        name: {numbers[whom]} for name, whom in asked.items()
    }


def test_a_mini_batch_without_loss_tokens_steps_nothing(tmp_path: Path) -> None:
    """Nor is β steered by a step that has none."""
    sets = ("algorithm.kl_coef=0.5", "algorithm.kl_target=0.1", "ref.engine.kind=fake")
    driver, actor = driver_of(tmp_path, *sets, "algorithm.mini_batches_per_step=2")
    batch, scored = drawn()
    batch = Batch({**batch.columns, "loss_mask_T": np.zeros_like(batch["loss_mask_T"])})
    updates = driver.update(driver.add_advantages(batch, scored), 1)
    assert (updates, actor.told) == ({}, [[], []])
    driver.kl.after_step({}, 32, learned="actor" in updates)
    assert driver.kl.coef == 0.5


@pytest.mark.parametrize("asked", [False, True])
def test_what_was_cut_off_is_left_out_of_the_loss(tmp_path: Path, asked: bool) -> None:
    """Every sample of a rollout of which one was cut off; scores of such rollouts count in their groups all the same,
    and nothing divides by their tokens."""
    driver, actor = driver_of(tmp_path, f"algorithm.mask_truncated={str(asked).lower()}")
    batch, scored = drawn()
    rollout_B = batch["rollout_B"].copy()
    rollout_B[9] = rollout_B[8]  # one attempt left both
    finished_B = np.arange(len(batch)) % 4 != 1  # 9 was cut off, 8 was not
    batch = Batch({**batch.columns, "rollout_B": rollout_B, "finished_B": finished_B.astype(np.uint8)})
    learned = driver.add_advantages(batch, scored)
    driver.update(learned, 1)
    kept_B = finished_B & (np.arange(len(batch)) != 8) if asked else np.ones(len(batch), bool)
    want = {}
    for index, (mask_T, advantage_T) in enumerate(
        zip(learned.sequences("loss_mask_T"), learned.sequences("advantage_T"), strict=True)
    ):
        want[index] = ((mask_T * kept_B[index]).tolist(), advantage_T.tolist())
    got = {}
    for told in actor.told:
        for part, scale in told:
            masks, values = part.sequences("loss_mask_T"), part.sequences("advantage_T")
            starts = [int(tokens[0]) for tokens in part.sequences("tokens_T")]
            at = np.searchsorted(batch.offsets, starts)
            got |= {int(i): (m.tolist(), a.tolist()) for i, m, a in zip(at, masks, values, strict=True)}
            assert scale["num_loss_tokens"] == sum(sum(mask) for mask, _ in want.values())
            assert scale["num_sequences"] == sum(any(mask) for mask, _ in want.values())
    assert got == want
    assert sum(any(mask) for mask, _ in want.values()) > len(batch) // 3


@pytest.mark.parametrize("pieces", [1, 4])
def test_every_rank_divides_by_the_whole_mini_batch(tmp_path: Path, pieces: int) -> None:
    """By that of its optimizer step: neither by its own share nor by the step's whole batch."""
    driver, actor = driver_of(tmp_path, f"algorithm.mini_batches_per_step={pieces}")
    batch, scored = drawn()
    driver.update(driver.add_advantages(batch, scored), 1)
    seen: list[int] = []
    for shares in zip(*actor.told, strict=True):
        counts = [[sum(mask.tolist()) for mask in share.sequences("loss_mask_T")] for share, _ in shares]
        whole = np.concatenate(counts)
        want = {
            "num_loss_tokens": int(whole.sum()),
            "num_sequences": int((whole > 0).sum()),
            "max_response_tokens": LIMIT,
            "num_units": 0,
            "num_chosen_tokens": 0,
        }
        assert [scale for _, scale in shares] == [want] * RANKS
        seen += [int(token) for share, _ in shares for token in share["tokens_T"]]
    assert len(actor.told[0]) == pieces
    assert sorted(seen) == batch["tokens_T"].tolist(), "every token is learned from once"


@pytest.mark.parametrize("kind", PRESETS)
def test_every_kind_learns_by_its_name_alone(tmp_path: Path, kind: str) -> None:
    """To write a 7, which is within a bigram model's reach; ratios differ from 1 in the second update of a step. One
    that has a teacher learns from one that likes 7."""
    task = ('reward.terms=[{kind="regex", pattern="7"}]', "actor.optimizer.lr=0.3", "algorithm.mini_batches_per_step=2")
    if PRESETS[kind].advantage_table.needs_teacher:
        teacher = bigram_folder(tmp_path / "teacher", likes="7")
        task = (*task, f'ref.model="{teacher}"', "ref.engine.kind=fake")
    with local_run(preset("fake", tmp_path), tmp_path / "run", f"algorithm.kind={kind}", *task) as run:
        records = run.steps(6)
    first, last = records[0].metrics, records[-1].metrics
    assert first["actor/grad_norm"] > 0
    assert math.isfinite(first["actor/loss"])
    assert first["reward/mean"] < 0.6
    assert last["reward/mean"] > 0.8


def test_a_student_comes_near_its_teacher(tmp_path: Path) -> None:
    """The reverse KL starts where that of a uniform distribution to the teacher's at the sampler's temperature does (at
    another it would be 1.57 instead of 0.35 nats, or the reverse), and falls, although every score is 0."""
    vocabulary, liked, by, temperature = 15, 2, 4.0, 2.0
    teacher = bigram_folder(tmp_path / "teacher", likes="37", by=by)
    with local_run(
        preset("fake", tmp_path),
        tmp_path / "run",
        *("algorithm.kind=distill", "algorithm.group_size=1", "data.prompts_per_step=48"),
        *(f'ref.model="{teacher}"', "ref.engine.kind=fake"),
        *('reward.terms=[{kind="regex", pattern="no such text"}]', f"rollout.temperature={temperature}"),
        *("actor.optimizer.lr=0.5", "run.steps=16"),
    ) as run:
        lines = [record.metrics for record in run.steps(16)]
    logit = by / temperature
    normaliser = math.log(vocabulary - liked + liked * math.exp(logit))
    kl = np.array([line["actor/kl"] for line in lines])
    assert kl[0] == pytest.approx(normaliser - liked / vocabulary * logit - math.log(vocabulary), rel=0.25)
    assert abs(kl[-3:].mean()) < 0.25 * kl[0]
    assert all(line["reward/mean"] == 0 for line in lines)
    assert all("reward/kl_penalty" not in line for line in lines)
