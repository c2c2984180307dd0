"""Turns between episodes that ask and replicas that draw, in every order in which they may come: what is drawn
together, who waits for whom, and what a lost replica or rank leaves behind."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlctl.loop.episodes import EpisodeGeneration, TurnRelay
from rlctl.loop.sampling import PromptBatch, SampledPart
from specs.wire.batch import Batch
from specs.wire.bodies import Row
from specs.wire.messages import Kind, Message, Verb
from specs.wire.role_config import Sampling

SAMPLING = Sampling(seed=0, max_response_tokens=4)


def turns_of(rollouts: list[int], group_size: int = 2) -> Batch:
    """Prompts, or turns that are asked for: a rollout's id is its number."""
    ids = np.array(rollouts, dtype=np.int64)
    return Batch(
        {
            "tokens_T": np.repeat(ids, 2),
            "length_B": np.full(len(ids), 2),
            "position_B": np.zeros_like(ids),
            **{f"{name}_B": ids for name in ("id", "rollout")},
            **{f"{name}_B": ids // group_size for name in ("group", "row")},
        }
    )


@dataclass
class Posted:
    verb: Verb
    batch: Batch
    rank: int
    on_part: Any
    on_done: Any
    body: Any = None

    def answer(self, ids: list[int]) -> None:
        """Send what was drawn for some of them."""
        drawn = self.batch.select(np.flatnonzero(np.isin(self.batch["id_B"], ids)))
        columns = {"loss_mask_T": np.tile([0, 1], len(drawn)), "rollout_logprob_T": np.zeros(2 * len(drawn))}
        columns["version_T"] = np.tile([-1, 0], len(drawn))
        ends = {"finished_B": np.ones(len(drawn)), "version_B": np.zeros(len(drawn))}
        self.on_part(Message(Kind.PART, tensors={**drawn.columns, **columns, **ends}))

    def end(self, *, lost: bool = False) -> None:
        self.on_done(SimpleNamespace(failed={self.rank} if lost else set(), answers={}))


@dataclass
class Ranks:
    """A role whose ranks do what a test tells them."""

    size: int
    posted: list[Posted] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)

    @property
    def here(self) -> list[int]:
        return list(range(self.size))

    @property
    def ready(self) -> list[int]:
        return [rank for rank in self.here if rank not in self.lost]

    def post(self, verb: Verb, body: Any = None, *, tensors: Any, ranks: list[int], **more: Any) -> None:
        call = Posted(verb, Batch(dict(tensors)), ranks[0], more.get("on_part"), more.get("on_done"), body)
        if call.rank in self.lost:
            call.end(lost=True)
        else:
            self.posted.append(call)


def relay_of(rollout: Ranks, *, in_order: bool, start: Any = lambda prompts: None) -> TurnRelay:
    return TurnRelay(sampler_of(rollout, Ranks(1), in_order=in_order), "train", SAMPLING, 1, start)  # type: ignore[arg-type]


def play(turns: list[int], replicas: int, processes: int, seed: int, at_once: int = 1) -> list[tuple[int, list[int]]]:
    """Episodes of so many turns, which ask for as many as `at_once` in one go; all that may happen next happens in a
    random order. Returns what was drawn together, by replica."""
    chance, rollout = random.Random(seed), Ranks(replicas)
    queue: list[int] = []  # begun, without a process
    left: dict[int, int] = {}  # with a process, and how many turns are left
    waiting: dict[int, int] = {}  # for so many turns

    def begin(prompts: Batch) -> None:
        queue.extend(prompts["rollout_B"].tolist())

    def act(number: int) -> None:
        if not left[number]:
            del left[number]
            relay.ended([number])
            return
        asked = min(left[number], at_once)
        waiting[number], left[number] = asked, left[number] - asked
        for branch in range(asked):
            turn = turns_of([number])
            relay.ask(Batch({**turn.columns, "id_B": turn["id_B"] + 100 * branch}), 0)

    relay = relay_of(rollout, in_order=True, start=begin)
    relay.begin(turns_of([*range(len(turns))]), processes)
    waves: dict[int, list[list[int]]] = {replica: [] for replica in range(replicas)}
    while queue or left:
        while queue and len(left) < processes:
            number = queue.pop(0)
            left[number] = turns[number]
        idle = [number for number in left if number not in waiting]
        first = {call.rank: call for call in reversed(rollout.posted)}  # one at a time on each replica
        assert idle or first, f"{left} wait for each other"
        chosen = chance.choice([*idle, *first.values()])
        if isinstance(chosen, int):
            act(chosen)
            continue
        rollout.posted.remove(chosen)
        drawn = chosen.batch["id_B"].tolist()
        waves[chosen.rank].append([*drawn])
        chance.shuffle(drawn)
        for id_ in drawn:
            chosen.answer([id_])
            waiting[id_ % 100] -= 1
            waiting = {number: count for number, count in waiting.items() if count}
        chosen.end()
    assert not relay.drawing
    return [(replica, wave) for replica in waves for wave in waves[replica]]


TURNS = [3, 1, 2, 4, 1, 1, 5, 2, 3, 3, 1, 2]


@pytest.mark.parametrize(("replicas", "processes"), [(1, 64), (1, 5), (2, 8), (1, 1), (2, 1), (3, 2), (3, 7)])
def test_what_is_drawn_together_follows_from_counts(replicas: int, processes: int) -> None:
    """Whoever is quicker, and however few can be open at once."""
    waves = play(TURNS, replicas, processes, seed=0)
    assert Counter(number for _, wave in waves for number in wave) == dict(enumerate(TURNS))
    assert all(len(wave) <= processes for _, wave in waves)
    for seed in range(1, 12):
        assert play(TURNS, replicas, processes, seed) == waves


def test_two_cohorts_take_turns() -> None:
    assert play([2, 2, 1, 2], 1, 64, seed=3) == [(0, [0, 1]), (0, [2, 3]), (0, [0, 1]), (0, [3])]


@pytest.mark.parametrize("at_once", [2, 3])
def test_episodes_that_ask_for_several_turns_at_once(at_once: int) -> None:
    for seed in range(12):
        waves = play(TURNS, 1, 64, seed, at_once)
        assert Counter(id_ % 100 for _, wave in waves for id_ in wave) == dict(enumerate(TURNS))


def test_the_turn_of_a_lost_replica_is_drawn_once_more_and_no_earlier_one() -> None:
    """An episode that has asked for its next turn while its last call is still open."""
    rollout = Ranks(2)
    relay = relay_of(rollout, in_order=False)
    relay.begin(turns_of([0, 1]), 8)
    relay.ask(turns_of([0, 1]), 0)
    (first,) = rollout.posted
    first.answer([0])
    relay.ask(turns_of([0]), 0)
    second = rollout.posted[-1]
    assert (first.rank, second.rank) == (0, 0)
    rollout.lost.add(0)
    rollout.posted.clear()
    first.end(lost=True)
    second.end(lost=True)
    assert [(call.rank, call.batch["id_B"].tolist()) for call in rollout.posted] == [(1, [1]), (1, [0])]


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("over", [True, False])
def test_turns_wait_for_a_replica_where_there_is_none(in_order: bool, over: bool) -> None:
    """Unless the episodes that asked for them are over, too."""
    rollout, started = Ranks(1, lost={0}), list[Batch]()
    sampler = sampler_of(rollout, Ranks(1), in_order=in_order)
    relay = TurnRelay(sampler, "train", SAMPLING, 1, started.append)  # type: ignore[arg-type]
    relay.begin(turns_of([0, 1]), 8)
    relay.ask(turns_of([0, 1]), 0)
    assert (len(sampler.stranded), len(relay.drawing), rollout.posted) == (1 + in_order, 0, [])
    if over:
        relay.close()
    rollout.lost.clear()
    for draw in sampler.stranded:
        draw()
    drawn = [] if over else [0, 1]
    assert sorted(number for call in rollout.posted for number in call.batch["id_B"]) == drawn
    assert sorted(relay.drawing) == drawn


def sampler_of(rollout: Ranks, reward: Ranks, *, in_order: bool) -> SimpleNamespace:
    def restore(step: int) -> None:
        rollout.lost.clear()

    spec = SimpleNamespace(rollout=SimpleNamespace(in_order=in_order), environments=[SimpleNamespace(processes=64)])
    kept = {"episodes": deque(), "prefix_counts": {"train": Counter()}, "forgotten": defaultdict(list)}
    found_none, sync = {"unbegun": [], "stranded": []}, SimpleNamespace(restore=restore)
    return SimpleNamespace(spec=spec, rollout=rollout, reward=reward, sync=sync, **kept, **found_none)


def generation_of(sampler: SimpleNamespace, rollouts: list[int]) -> EpisodeGeneration:
    rows = {str(row): Row(where="", prompt="", values={}) for row in range(4)}
    what = PromptBatch(turns_of(rollouts), rows), SAMPLING, 1, "train", 0, lambda arrived, total: None
    return EpisodeGeneration(sampler, *what)  # type: ignore[arg-type]


def test_what_a_batch_kept_to_its_end_is_dropped_with_the_turns_of_the_next() -> None:
    rollout = Ranks(1)
    sampler = sampler_of(rollout, Ranks(1), in_order=False)
    before, after = generation_of(sampler, [0, 1]), generation_of(sampler, [2, 3])
    before.start()
    before.relay.forget([0, 1])
    after.start()
    after.relay.ask(turns_of([2, 3]), 0)
    assert rollout.posted[-1].body.forget == [0, 1]


def test_the_others_do_not_wait_for_the_episodes_of_a_lost_rank() -> None:
    """Two ranks of the reward role run the episodes of one cohort; one is lost. What it ran begins again at the end."""
    rollout, reward = Ranks(1), Ranks(2)
    generation = generation_of(sampler_of(rollout, reward, in_order=True), [0, 1, 2, 3, 4, 5, 6, 7])
    generation.start()
    begun = {call.rank: [] for call in reward.posted}
    for call in reward.posted:
        begun[call.rank] += [(call, call.batch["rollout_B"].tolist())]
    assert [numbers for _, numbers in begun[0]] == [[0, 1], [4, 5]]
    for call, numbers in begun[0]:
        body = {"kind": "turns", "rank": 0}
        call.on_part(Message(Kind.PART, body, tensors=turns_of(numbers).columns))
    assert rollout.posted == [], "the others of their cohorts have not asked"
    reward.lost.add(1)
    for call, _ in begun[1]:
        call.end(lost=True)
    assert [call.batch["id_B"].tolist() for call in rollout.posted] == [[0, 1], [4, 5]]


@pytest.mark.parametrize("in_order", [True, False])
def test_episodes_begin_when_there_is_a_rank_again(in_order: bool) -> None:
    """The only rank of the reward role is lost with a batch, and another batch follows it."""
    reward, played = Ranks(1), list[int]()
    sampler = sampler_of(Ranks(1), reward, in_order=in_order)
    generations = [generation_of(sampler, [0, 1, 2, 3]), generation_of(sampler, [4, 5, 6, 7])]

    def wait(step: int) -> None:
        """Restore the rank; then it plays what it has."""
        reward.lost.clear()
        calls, reward.posted = reward.posted, []
        for call in calls:
            numbers = call.batch["rollout_B"].tolist()
            played.extend(numbers)
            generations[numbers[0] // 4]._parts.append(SampledPart(call.batch, grading=None))  # type: ignore[arg-type]
            call.on_part(Message(Kind.PART, {"kind": "turns", "rank": 0, "ended": numbers}))
            call.end()

    sampler.graders = SimpleNamespace(wait=wait)
    for one in generations:
        one.start()
    reward.lost.add(0)
    calls, reward.posted = reward.posted, []
    for call in calls:
        call.end(lost=True)
    for one in generations:
        one.wait()
    assert sorted(played) == [*range(8)], "each once"
    assert not sampler.episodes


def test_a_batch_waits_for_one_that_follows_it_and_has_lost_the_only_replica() -> None:
    """In order: a rank of the reward role is lost with the first batch, whose episodes begin again behind the second's.
    Episodes have one turn."""
    rollout, reward = Ranks(1), Ranks(1)
    sampler = sampler_of(rollout, reward, in_order=True)
    generations = [generation_of(sampler, [0, 1, 2, 3]), generation_of(sampler, [4, 5, 6, 7])]
    begun: list[Posted] = []

    def ask() -> None:
        for call in reward.posted:
            if call.verb is Verb.EPISODES:
                begun.append(call)
                call.on_part(Message(Kind.PART, {"kind": "turns", "rank": 0}, tensors=call.batch.columns))
        reward.posted.clear()

    def wait(step: int) -> None:
        assert rollout.posted or reward.posted, "nobody does anything"
        ask()
        for call in [*rollout.posted]:
            numbers = call.batch["id_B"].tolist()
            rollout.posted.remove(call)
            call.answer(numbers)
            call.end()
            generations[numbers[0] // 4]._parts.append(SampledPart(call.batch, grading=None))  # type: ignore[arg-type]
            (episodes,) = (one for one in begun if one.batch["id_B"].tolist() == numbers)
            episodes.on_part(Message(Kind.PART, {"kind": "turns", "rank": 0, "ended": numbers}))
            episodes.end()

    sampler.graders = SimpleNamespace(wait=wait)
    for one in generations:
        one.start()
    first, reward.posted = reward.posted, []
    for call in first:
        call.end(lost=True)
    rollout.lost.add(0)
    ask()
    for one in generations:
        one.wait()
    assert not sampler.episodes
