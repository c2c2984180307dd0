"""A critic beside the actor in one step: who is asked what, in which order, and what neither learns from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_group import LocalGroup
from told_actor import STEPPED, drawn, rl_driver

from rlctl.recipes.rl import Rl
from specs.errors import NotFiniteError
from specs.wire.batch import Batch
from specs.wire.messages import Verb


class Learners:
    """Actor and critic that note, in one list, who was asked what and what with."""

    def __init__(self, ranks: dict[str, int], losses: dict[str, float]) -> None:
        self.asked: list[tuple[str, Verb]] = []
        self.told: dict[str, list[tuple[Batch, dict]]] = {role: [] for role in ranks}
        self.losses = losses
        self.groups = {role: LocalGroup(role, [self.verbs(role)] * count) for role, count in ranks.items()}

    def verbs(self, role):
        def update(call, emit):
            self.asked.append((role, Verb.UPDATE))
            self.told[role].append((call.batch, call.body["scale"]))
            sums = {"tokens": 1.0, "loss": self.losses[role], "logprob_gap": 0.0, "logprob_gap_max": 0.0}
            return {"sums": sums}, {}

        def step(call, emit):
            self.asked.append((role, Verb.STEP))
            return STEPPED, {}

        def values(call, emit):
            self.asked.append((role, Verb.VALUES))
            return {}, {"value_T": call.batch["tokens_T"].astype(np.float32)}

        def logprobs(call, emit):
            return {}, {"logprob_T": np.zeros(call.batch.num_tokens, np.float32)}

        return {Verb.UPDATE: update, Verb.STEP: step, Verb.VALUES: values, Verb.LOGPROBS: logprobs}


def ppo_driver(tmp_path: Path, learners: Learners, *overrides: str, **more: Any) -> Rl:
    return rl_driver(tmp_path, learners.groups, "algorithm.kind=ppo", *overrides, **more)


def test_values_return_to_their_tokens_and_both_learn_from_the_same_samples(tmp_path: Path) -> None:
    """Whatever the number of ranks of each: every loss token once, divided by the whole mini-batch."""
    learners = Learners({"actor": 1, "critic": 3}, {"actor": 0.1, "critic": 0.2})
    driver = ppo_driver(tmp_path, learners, "algorithm.gae_lambda=1.0", "algorithm.mini_batches_per_step=2")
    batch, scored = drawn()
    batch = batch.only([name for name in batch.columns if name != "old_logprob_T"])
    with_values = driver.add_model_columns(batch, 1)
    assert with_values["value_T"].tolist() == batch["tokens_T"].tolist()
    learned = driver.add_advantages(with_values, scored)
    updates = driver.update(learned, 1)
    assert [(role, len(reports)) for role, reports in updates.items()] == [("critic", 2), ("actor", 2)]
    for role in ("actor", "critic"):
        seen = [token for share, _ in learners.told[role] for token in share["tokens_T"].tolist()]
        assert sorted(seen) == batch["tokens_T"].tolist()
        scales = {tuple(scale.values()) for _, scale in learners.told[role]}
        assert len(scales) == 2
        assert sum(scale[0] for scale in scales) == batch["loss_mask_T"].sum()
    halves = [
        [set(learners.told[role][index][0]["tokens_T"].tolist()) for index in range(len(learners.told[role]))]
        for role in ("actor", "critic")
    ]
    assert [set().union(*halves[1][:3]), set().union(*halves[1][3:])] == halves[0]


def test_gradients_come_first_and_the_critics_before_the_actors(tmp_path: Path) -> None:
    learners = Learners({"actor": 1, "critic": 1}, {"actor": 0.1, "critic": 0.2})
    driver = ppo_driver(tmp_path, learners, devices=dict.fromkeys(("actor", "critic"), frozenset({0})))
    batch, scored = drawn()
    batch = batch.with_columns(value_T=np.zeros(batch.num_tokens, np.float32))
    driver.update(driver.add_advantages(batch, scored), 1)
    order = [("critic", Verb.UPDATE), ("actor", Verb.UPDATE), ("critic", Verb.STEP), ("actor", Verb.STEP)]
    assert learners.asked == order


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_neither_steps_where_the_loss_of_one_is_no_number(tmp_path: Path, role: str) -> None:
    learners = Learners({"actor": 1, "critic": 1}, {"actor": 0.1, "critic": 0.2, role: float("nan")})
    driver = ppo_driver(tmp_path, learners)
    driver.compute = lambda wanted, batch, step: {"now": batch["rollout_logprob_T"]}
    batch, scored = drawn()
    value_T = np.zeros(batch.num_tokens, np.float32)
    value_T[np.flatnonzero(batch["loss_mask_T"])[-1]] = 1e6
    batch = batch.with_columns(value_T=value_T)
    worst = rf"Worst sample: id {np.searchsorted(batch.offsets, value_T.argmax(), side='right') - 1},"
    said = worst if role == "critic" else "the actor moved"
    with pytest.raises(NotFiniteError, match=said):
        driver.update(driver.add_advantages(batch, scored), 1)
    assert Verb.STEP not in [verb for _, verb in learners.asked]
    assert not driver.window.is_open


def test_in_the_first_steps_the_critic_learns_alone(tmp_path: Path) -> None:
    learners = Learners({"actor": 1, "critic": 1}, {"actor": 0.1, "critic": 0.2})
    driver = ppo_driver(tmp_path, learners, "algorithm.critic_warmup_steps=2")
    batch, scored = drawn()
    batch = driver.add_advantages(batch.with_columns(value_T=np.zeros(batch.num_tokens, np.float32)), scored)
    assert [[*driver.update(batch, step)] for step in (1, 2, 3)] == [["critic"], ["critic"], ["critic", "actor"]]
    assert [driver.spec.weights_version(done) for done in range(5)] == [2, 2, 2, 3, 4]
    assert [driver.spec.optimizer_steps(role) for role in ("actor", "critic")] == [4, 6]
