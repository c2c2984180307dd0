"""What the driver tells the actor to learn: advantages of each group by itself, and what every rank divides by."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from local_group import LocalGroup
from local_run import bigram_folder, local_run
from running import preset

from rlctl.loop.driver import Driver, UpdateWindow
from rlctl.loop.residency import Residency
from rlctl.loop.sampling import Scored
from specs.load.keys import kind_of, tables_of
from specs.load.load import load_spec
from specs.schema.algorithms.algorithm import Algorithm
from specs.schema.algorithms.algorithm_tables import AlgorithmTable
from specs.wire.batch import Batch
from specs.wire.messages import Verb

GROUPS, SIZE, RANKS, LIMIT = 8, 4, 2, 8  # the preset `fake`: 8 prompts × 4 completions of at most 8 tokens


STEPPED = {"grad_norm": 1.0, "lr": 0.1, "skipped": False, "peak_GiB": 0.0}


class Actor:
    """Two ranks that note what each is told to learn."""

    def __init__(self) -> None:
        self.told: list[list[tuple[Batch, dict[str, int]]]] = [[] for _ in range(RANKS)]
        ranks = [
            {Verb.UPDATE: self.updater(rank), Verb.STEP: lambda call, emit: (STEPPED, {})} for rank in range(RANKS)
        ]
        self.group = LocalGroup("actor", ranks)

    def updater(self, rank):
        def update(call, emit):
            self.told[rank].append((call.batch, call.body["scale"]))
            return {"sums": {"tokens": 1.0, "logprob_gap": 0.0, "logprob_gap_max": 0.0}}, {}

        return update


def drawn() -> tuple[Batch, Scored]:
    """A prompt token and 0 to 3 loss tokens, with two of a tool after the first of them; rewards of a group lie near 10
    times its number, and one was not graded."""
    rng = np.random.default_rng(3)
    masks = [[0, 1, 0, 0, 1, 1][: 3 + count] if count else [0] for count in rng.integers(0, 4, GROUPS * SIZE)]
    length_B, group_B = np.array([len(mask) for mask in masks]), np.repeat(np.arange(GROUPS), SIZE)
    mask_T = np.concatenate(masks).astype(np.uint8)
    zeros_T = np.zeros(len(mask_T), np.float32)
    columns = {"tokens_T": np.arange(len(mask_T)), "loss_mask_T": mask_T, "length_B": length_B, "group_B": group_B}
    columns |= {"rollout_logprob_T": zeros_T, "old_logprob_T": zeros_T, "id_B": np.arange(len(group_B))}
    columns["rollout_B"] = columns["id_B"] + 50
    reward_B = (10 * group_B + rng.normal(size=len(group_B))).astype(np.float32)
    scored_B = np.ones(len(group_B), dtype=bool)
    scored_B[5] = False
    return Batch(columns), Scored(reward_B, scored_B, {}, {}, [])


def driver_of(tmp_path: Path, *overrides: str) -> tuple[Driver, Actor]:
    spec, actor, rollout = load_spec(preset("fake", tmp_path), [*overrides]), Actor(), LocalGroup("rollout", [{}])
    groups = {
        "actor": actor.group,
        "rollout": rollout,
        "data": LocalGroup("data", [{}]),
        "reward": LocalGroup("reward", [{}]),
    }
    budget = SimpleNamespace(broken_by=lambda gap: False)
    steady = SimpleNamespace(restore=None)
    return Driver(spec, groups, Residency(False, [rollout]), steady, budget, UpdateWindow(), None), actor


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
    spec, rollout = load_spec(preset("quickstart", tmp_path), options), LocalGroup("rollout", [{}])
    roles = ("actor",) if adapters else ("actor", "ref")
    groups = {role: logprobs(role) for role in roles} | {
        "rollout": rollout,
        "data": LocalGroup("data", [{}]),
        "reward": LocalGroup("reward", [{}]),
    }
    driver = Driver(
        spec, groups, Residency(False, [rollout]), SimpleNamespace(restore=None), None, UpdateWindow(), None
    )
    batch, _ = drawn()
    names = [name for name in batch.columns if name != "old_logprob_T"]
    learned = driver.add_model_columns(batch.only(names), 1)
    assert {name: set(learned[name].tolist()) for name in learned.columns if name not in names} == {
        name: {numbers[whom]} for name, whom in asked.items()
    }


@pytest.mark.parametrize("scale", ["std", "none"])
def test_advantages_are_of_each_group_by_itself(tmp_path: Path, scale: str) -> None:
    driver, _ = driver_of(tmp_path, f"algorithm.scale={scale}")
    batch, scored = drawn()
    learned = driver.add_advantages(batch, scored)
    for group in range(GROUPS):
        graded = [i for i in range(group * SIZE, (group + 1) * SIZE) if scored.scored_B[i]]
        rewards = [float(scored.reward_B[i]) for i in graded]
        mean = sum(rewards) / len(rewards)
        std = (sum((one - mean) ** 2 for one in rewards) / (len(rewards) - 1)) ** 0.5
        for index, reward in zip(graded, rewards, strict=True):
            want = (reward - mean) / (std + 1e-6 if scale == "std" else 1.0)
            got_T, mask_T = (learned.sequences(name)[index] for name in ("advantage_T", "loss_mask_T"))
            np.testing.assert_allclose(got_T, want * mask_T, rtol=1e-4, atol=1e-5)
    assert not learned.sequences("advantage_T")[5].any(), "what was not graded teaches nothing"


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
        }
        assert [scale for _, scale in shares] == [want] * RANKS
        seen += [int(token) for share, _ in shares for token in share["tokens_T"]]
    assert len(actor.told[0]) == pieces
    assert sorted(seen) == batch["tokens_T"].tolist(), "every token is learned from once"


@pytest.mark.parametrize("table", tables_of(AlgorithmTable))
def test_every_kind_learns_by_its_name_alone(tmp_path: Path, table: type[Algorithm]) -> None:
    """To write a 7, which is within a bigram model's reach; ratios differ from 1 in the second update of a step. One
    that has a teacher learns from one that likes 7."""
    task = ('reward.terms=[{kind="regex", pattern="7"}]', "actor.optimizer.lr=0.3", "algorithm.mini_batches_per_step=2")
    if table.advantage_table.needs_teacher:
        teacher = bigram_folder(tmp_path / "teacher", likes="7")
        task = (*task, f'ref.model="{teacher}"', "ref.engine.kind=fake")
    with local_run(preset("fake", tmp_path), tmp_path / "run", f"algorithm.kind={kind_of(table)}", *task) as run:
        records = run.steps(6)
    first, last = records[0].metrics, records[-1].metrics
    assert first["actor/grad_norm"] > 0
    assert math.isfinite(first["actor/loss"])
    assert first["reward/mean"] < 0.6
    assert last["reward/mean"] > 0.8


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_student_comes_near_its_teacher(tmp_path: Path, temperature: float) -> None:
    """The reverse KL starts where that of a uniform distribution to the teacher's at the sampler's temperature does (at
    another it would be 1.57 instead of 0.35 nats, or the reverse), and falls, although every score is 0."""
    vocabulary, liked, by = 15, 2, 4.0
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
