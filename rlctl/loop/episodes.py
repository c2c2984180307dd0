"""Episodes on their way: the reward role runs them, the rollout draws their turns, and here is what lies between.

With `rollout.repeatable` turns are drawn in waves. The groups of a replica are split into cohorts; the wave of a cohort
is drawn when each of its open episodes has asked for its next turn. Two cohorts of a replica are under way and take
turns; one that has ended makes room for the next. So what is drawn together follows from what was written alone, never
from who was quicker, and while the environments of one cohort work, another is sampled. Otherwise what is asked for is
drawn at once, in whatever slot is free.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlctl.loop.rollouts import Rollouts
from rlctl.loop.sampling import PREFIX_COUNTS, Drawn, Generation, group_shards, in_id_order
from specs.schema.metric import Metric, metrics
from specs.wire import bodies
from specs.wire.batch import Batch
from specs.wire.messages import COLUMNS, Verb

if TYPE_CHECKING:
    from rlctl.loop.sampling import Sampler
    from rlctl.processes.calls import Call
    from specs.wire.bodies import What
    from specs.wire.messages import Message
    from specs.wire.role_config import Sampling

_EPISODES = "the spec has an `[environment]`"
METRICS: tuple[Metric, ...] = (
    *metrics(
        _EPISODES,
        {
            "episode/turns_mean": "Turns of the model in an episode.",
            "episode/tool_calls_mean": "Tool calls in an episode.",
            "episode/tool_errors": "Tool calls that raised, or that no tool could take.",
            "episode/parse_errors": "Turns whose tool calls did not parse.",
            "episode/lost": "Episodes whose environment crashed or hung: they are not learned from.",
            "episode/stop_<reason> [share]": "Episodes that ended for this reason.",
            "episode/prefix_reused [share]": "Prompt tokens that the sampler had computed in an earlier turn.",
            "time/environment_s [s]": "Calls of environments, added up over all episodes, many of which run at once.",
        },
        in_eval=True,
    ),
    *metrics(
        "the agent returns metrics",
        {"reward/agent_<name>": "Mean of what agents returned by this name, over the episodes that did."},
        in_eval=True,
    ),
    *metrics(
        _EPISODES,
        {"reward/failed_environment_lost": "Episodes without a score: their environment crashed or hung."},
    ),
)

COHORTS = 2  # of a replica that are under way: one is sampled while the environments of the other work


class Cohort:
    """Episodes whose turns are drawn together."""

    def __init__(self, prompts: Batch) -> None:
        self.prompts = prompts
        self.open = set(prompts["rollout_B"].tolist())
        self._asking: set[int] = set()  # those that have asked for a turn
        self._asked: list[Batch] = []

    @property
    def ready(self) -> bool:
        """Whether every open episode has asked for a turn; an agent may ask for several."""
        return len(self._asking) == len(self.open)

    def ask(self, turns: Batch) -> None:
        self._asked.append(turns)
        self._asking.update(turns["rollout_B"].tolist())

    def end(self, rollout: int) -> None:
        self.open.discard(rollout)
        self._asking.discard(rollout)

    def take(self) -> Batch:
        """Return the turns that were asked for, in the order of their ids."""
        asked, self._asked, self._asking = self._asked, [], set()
        return in_id_order(Batch.concat(asked))


@dataclass
class Line:
    """Cohorts of a replica. The first of those under way is drawn next."""

    replica: int
    under_way: deque[Cohort]
    waiting: deque[Cohort]


class TurnRelay:
    """Has the turns drawn that episodes of a batch ask for, and takes them back to who waits for them."""

    def __init__(
        self, sampler: Sampler, what: What, sampling: Sampling, step: int, start: Callable[[Batch], None]
    ) -> None:
        """`start` begins the episodes of some prompts."""
        self.rollout, self.reward, self.sampling, self.step = sampler.rollout, sampler.reward, sampling, step
        self.in_order = sampler.spec.rollout.in_order
        self.drawing: dict[int, Batch] = {}  # by id: what it was sent out with
        self._sampler, self._counts, self._start = sampler, sampler.prefix_counts[what], start
        self._closed = False
        self._home_of: dict[int, int] = {}  # by rollout: the rank that runs it
        self._cohort_of: dict[int, Cohort] = {}  # by rollout
        self._lines: list[Line] = []

    def begin(self, prompts: Batch, processes: int) -> None:
        """Begin episodes, at once, or cohort by cohort. `processes`: how many can be open, wherever they run: all of a
        cohort must be, or they would wait for each other."""
        if not self.in_order:
            self._start(prompts)
            return
        replicas = self.rollout.here
        at_once = max(1, min(COHORTS, processes // len(replicas)))
        most = max(1, processes // (at_once * len(replicas)))
        for replica, mine in zip(replicas, group_shards(prompts["group_B"], len(replicas)), strict=True):
            pieces = np.array_split(mine, max(at_once, -(-len(mine) // most)))
            cohorts = [Cohort(prompts.select(piece)) for piece in pieces if len(piece)]
            self._cohort_of |= {rollout: cohort for cohort in cohorts for rollout in cohort.open}
            self._lines.append(Line(replica, deque(cohorts[:at_once]), deque(cohorts[at_once:])))
        for line in self._lines:
            for cohort in [*line.under_way]:
                self._start(cohort.prompts)

    def ask(self, batch: Batch, rank: int) -> None:
        """Have turns drawn, for episodes of a rank."""
        rollouts = batch["rollout_B"].tolist()
        self._home_of.update(dict.fromkeys(rollouts, rank))
        if not self.in_order:
            self._draw_anywhere(batch)
            return
        parts: dict[Cohort, list[int]] = defaultdict(list)
        for index, rollout in enumerate(rollouts):
            parts[self._cohort_of[rollout]].append(index)
        for cohort, indices in parts.items():
            cohort.ask(batch.select(indices))
        self._draw_waves()

    def ended(self, rollouts: Collection[int]) -> None:
        """Note that these episodes will ask no more."""
        for rollout in rollouts:
            if (cohort := self._cohort_of.pop(rollout, None)) is not None:
                cohort.end(rollout)
        self._draw_waves()

    def forget(self, ids: Collection[int]) -> None:
        """Let the replicas drop what they keep for these samples."""
        for replica in self.rollout.ready:
            self._sampler.forgotten[replica] += ids

    def close(self) -> None:
        """Let turns that no replica could draw go: all episodes have ended, or were lost and begin again."""
        self._closed = True

    def _draw_waves(self) -> None:
        """Draw what is due. A cohort that has ended makes room when its turn comes, not before: which one takes its
        place must not depend on which of several was quicker."""
        for line in self._lines:
            while line.under_way and line.under_way[0].ready:
                cohort = line.under_way.popleft()
                if cohort.open:
                    line.under_way.append(cohort)
                    self._draw(cohort.take(), line.replica)
                elif line.waiting:
                    line.under_way.append(line.waiting.popleft())
                    self._start(line.under_way[-1].prompts)

    def _draw_anywhere(self, batch: Batch) -> None:
        """Draw turns where there is a replica; those of a group stay together, so that it can keep what they share."""
        replicas = self.rollout.ready
        place_B = batch["group_B"] % max(len(replicas), 1)
        for place, replica in enumerate(replicas):
            if len(chosen := np.flatnonzero(place_B == place)):
                self._draw(batch.select(chosen), replica)
        if not replicas:
            for id_ in batch["id_B"].tolist():
                self.drawing.pop(id_, None)
            self._sampler.stranded.append(partial(self._draw_late, batch))

    def _draw_late(self, batch: Batch) -> None:
        if not self._closed:
            self._draw_anywhere(batch)

    def _draw(self, batch: Batch, replica: int) -> None:
        ids = batch["id_B"]
        self.drawing |= dict.fromkeys(ids.tolist(), batch)
        columns = {**batch.columns, "prefix_B": _prefixes(batch), "group_B": ids}  # each comes back when it is done
        self.rollout.post(
            Verb.GENERATE,
            bodies.Generate(sampling=self.sampling, keep=True, forget=self._sampler.forgotten.pop(replica, [])),
            tensors=columns,
            step=self.step,
            ranks=[replica],
            on_part=self._hand_back,
            on_done=partial(self._drawn, batch),
            alone=self.in_order,
        )

    def _hand_back(self, message: Message) -> None:
        batch = message.batch
        for id_ in batch["id_B"].tolist():
            del self.drawing[id_]
        home_B = np.array([self._home_of[rollout] for rollout in batch["rollout_B"].tolist()])
        needed = batch.only(COLUMNS[Verb.TURNS].needs)
        for rank in np.unique(home_B).tolist():
            turns = needed.select(np.flatnonzero(home_B == rank))
            self.reward.post(Verb.TURNS, tensors=turns.columns, step=self.step, ranks=[rank])

    def _drawn(self, batch: Batch, call: Call) -> None:
        """Have what a lost replica had not finished drawn by another."""
        for answer in call.answers.values():
            self._counts.update({name: answer.body.get(name, 0) for name in PREFIX_COUNTS})
        if call.failed:
            left = [place for place, id_ in enumerate(batch["id_B"].tolist()) if self.drawing.get(id_) is batch]
            self._draw_anywhere(batch.select(left))


class EpisodeGeneration(Generation):
    """A batch of episodes on its way."""

    relay: TurnRelay
    _running = 0  # calls
    _finished = False

    def finish(self) -> Drawn:
        drawn = super().finish()
        counts = {**drawn.scored.counts, **self._agents_metrics()}
        return replace(drawn, scored=replace(drawn.scored, counts=counts))

    def _agents_metrics(self) -> dict[str, float]:
        """Return the means of what agents returned, of each rollout once; greedy ones are no part of them."""
        prompts, returned = self.prompts.batch, defaultdict[str, list[float]](list)
        greedy = set(prompts["rollout_B"][prompts["greedy_B"] != 0].tolist()) if "greedy_B" in prompts else set()
        for part in self._parts:
            rollout_B, id_B = part.batch["rollout_B"], part.batch["id_B"]
            first_R = Rollouts.of(rollout_B).first_R
            for id_, rollout in zip(id_B[first_R].tolist(), rollout_B[first_R].tolist(), strict=True):
                for name, value in part.grading.request.episodes[str(id_)]["metrics"].items():
                    if rollout not in greedy:
                        returned[f"agent_{name.replace('/', '_')}"].append(value)
        return {name: float(np.mean(sorted(values))) for name, values in returned.items()}

    def _send(self, prompts: Batch) -> None:
        self._finished, line = False, self._sampler.episodes
        line.append(lambda: self._begin(prompts))
        if len(line) == 1 or not self._in_order:
            line[-1]()

    @property
    def _in_order(self) -> bool:
        return self._sampler.spec.rollout.in_order

    def _begin(self, prompts: Batch) -> None:
        self.relay = TurnRelay(self._sampler, self._what, self._sampling, self.step, self._start)
        self.relay.begin(prompts, min(one.processes for one in self._sampler.spec.environments))

    def _start(self, prompts: Batch) -> None:
        """Send episodes to the ranks of the reward role, group by group in turn."""
        ranks = self._sampler.reward.ready
        self._running += max(1, len(ranks))
        if not ranks:
            self._sampler.unbegun.append(partial(self._start_late, prompts))
        for rank, chosen in zip(ranks, group_shards(prompts["group_B"], len(ranks)), strict=True):
            shard = prompts.select(chosen)
            self._sampler.reward.post(
                Verb.EPISODES,
                bodies.Episodes(rows=self.prompts.rows_of(shard)),
                tensors=shard.columns,
                step=self.step,
                ranks=[rank],
                on_part=self._hear,
                on_done=partial(self._ended, shard),
            )

    def _start_late(self, prompts: Batch) -> None:
        self._running -= 1
        self._start(prompts)

    def _hear(self, message: Message) -> None:
        part = bodies.EpisodePart.of(message)
        if part.kind == "samples":
            self.relay.forget(message.tensors["id_B"].tolist())
            self._grade(self._with_versions(message.batch), part.episodes)
            return
        if message.tensors:
            self.relay.ask(message.batch, part.rank)
        self.relay.ended(part.ended)

    def _with_versions(self, batch: Batch) -> Batch:
        """Let samples of which nothing was drawn, for their environment was lost before, count as fresh."""
        version_B = batch["version_B"]
        if self._what == "train" and (version_B < 0).any():
            fresh = self._sampler.spec.weights_version(self.step - 1)
            return Batch({**batch.columns, "version_B": np.where(version_B < 0, fresh, version_B)})
        return batch

    def _ended(self, prompts: Batch, call: Call) -> None:
        """Count a call that is over. After the last one the next batch of episodes begins, where they follow each
        other. What a lost rank ran is begun again by `wait`; the others' turns do not wait for it."""
        self._running -= 1
        if call.failed:
            self.relay.ended(prompts["rollout_B"].tolist())
        if not self._running:
            self.relay.close()
            line, self._finished = self._sampler.episodes, True
            line.popleft()
            if line and self._in_order:
                line[0]()

    def wait(self) -> None:
        sampler = self._sampler
        while not self._finished:
            self._tick()
        left = self._unanswered()
        while len(left) and self.relay.drawing:
            sampler.reward.tick()
        if len(left):
            self._send(left)
            self.wait()

    def _tick(self) -> None:
        """Wait a moment. Turns of any batch that no replica could draw are drawn once replicas are restored; episodes
        that found no rank begin where there are ranks again."""
        sampler = self._sampler
        if sampler.stranded:
            sampler.sync.restore(self.step)
            stranded, sampler.stranded = sampler.stranded, []
            for draw in stranded:
                draw()
        sampler.graders.wait(self.step)
        if sampler.reward.ready:
            unbegun, sampler.unbegun = sampler.unbegun, []
            for start in unbegun:
                start()


def _prefixes(batch: Batch) -> NDArray[np.int64]:
    """Return equal numbers for equal prompts."""
    numbers: dict[bytes, int] = {}
    prompts = batch.sequences("tokens_T")
    return np.array([numbers.setdefault(prompt.tobytes(), len(numbers)) for prompt in prompts], dtype=np.int64)
