"""Batches on their way to their step: with `rollout.max_staleness = n` the rollout works on up to n steps to come while
the actor trains.

The *version* of weights is the number of steps that the actor had finished when they were sent; a sample's *staleness*
in step s is s - 1 - version. (First steps in which a critic learns alone count as finished: `RlSpec.weights_version`.)
When the last batch that was sent out is the next to be learned from, the weights are
synced, and the n batches after it go out together:

    n = 0     sync 0, rollout 1, train 1 │ sync 1, rollout 2, train 2 │ …
    n = 1     rollout 1, 2 with 0 │ train 1 │ sync 1: rollout 3 ∥ train 2 │ sync 2: rollout 4 ∥ train 3 │ …
    n = 2     rollout 1, 2, 3 with 0 │ train 1, 2 │ sync 2: rollout 4, 5 ∥ train 3, 4 │ sync 4: …

So the schedule follows from the step alone, never from who was quicker: a run repeats, and a resumed run continues, to
the bit. Staleness is 1 to n in turn, and only every n-th step syncs.

With dynamic sampling a batch is refilled when it is taken, or before the weights that it was drawn with go: batches in
line one after the other, so that the prompts of refills follow from the step and the scores alone.

What waits in the queue belongs to a checkpoint, in its driver folder:

    driver/state.json                  cursor, and for each batch its step, its cursors and what grading said
    driver/ahead_000007.safetensors    columns of the batch of step 7, with its scores
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlctl.loop.dynamic_sampling import missing_groups, with_signal
from rlctl.loop.sampling import SAMPLES_SHOWN, Drawn, Greedy, PromptBatch, Sampler, Scored, Thrown
from specs.errors import CheckpointError
from specs.schema.metric import Metric, metrics
from specs.schema.recipes import RlSpec
from specs.wire.batch import Batch
from specs.wire.bodies import Prompts, PromptsDrawn
from specs.wire.messages import Verb
from specs.wire.role_config import Sampling

if TYPE_CHECKING:
    from rlctl.loop.sampling import Generation
    from rlctl.processes.calls import Call
    from specs.wire.messages import Message

METRICS: tuple[Metric, ...] = (
    Metric(
        name="rollout/versions_mean",
        meaning="Versions of the weights that drew a sample: above 1 where they changed while it was drawn.",
        when="`rollout.in_flight` is set",
    ),
    *metrics(
        "`rollout.max_staleness` is not 0, or samples were too old",
        {
            "rollout/staleness_mean [steps]": "How much older than the learning weights those were that sampled.",
            "rollout/staleness_max [steps]": "Of the oldest sample.",
            "rollout/dropped_stale": "Samples thrown away because they were too old, or at a resume not graded.",
            "rollout/overlap_s [s]": "Of the update, in which samples of later steps were drawn.",
        },
    ),
)


@dataclass
class Planned:
    """The batch of one step: still being sampled (`generation`), or drawn and refilled. `start` and `end`: the data
    cursor before and after it, refills apart."""

    step: int
    start: int
    end: int
    generation: Generation | None = None
    drawn: Drawn | None = None
    refills: int = 0  # how often prompts were drawn again

    def drop_stale(self, version: int, max_staleness: int) -> int:
        """Keep of a finished batch what is fresh beside weights of `version`. Returns how many samples went."""
        drawn = self.drawn
        assert drawn is not None
        self.drawn = drawn.fresh(version, max_staleness)
        return len(drawn.batch) - len(self.drawn.batch)


@dataclass
class SampleQueue:
    """The line of batches, the next to be trained on first. Prompts of a batch leave the data's cursor behind them
    when they are sent out."""

    spec: RlSpec
    sampler: Sampler
    position: int = 0  # the data cursor after the newest batch in line, or after the last that was trained on
    line: deque[Planned] = field(default_factory=deque)
    dropped: int = 0  # samples that were too old, since the last step
    _prompts: tuple[int, int, Call] | None = None  # cursor, batches, and where they come from: requested in advance

    @property
    def max_staleness(self) -> int:
        return self.spec.rollout.max_staleness

    @property
    def cursor(self) -> int:
        """The data cursor after the last batch that was trained on."""
        return self.line[0].start if self.line else self.position

    def newest(self, done: int) -> int:
        """The last step whose batch has been sent out, after `done` steps."""
        return self.line[-1].step if self.line else done

    def needs_weights(self, done: int) -> bool:
        """Return whether new weights go out after step `done`: nothing is in line beyond the next step's batch, and
        there is more to draw. After the last step too: what the run ends with is verified. Always, where they reach
        what is being drawn."""
        newest, steps = self.newest(done), self.spec.run.steps
        return self.spec.rollout.in_flight or (newest <= done + 1 and (newest < steps or done == steps))

    # ── one step ──────────────────────────────────────────────────────────────────────────────────

    def take(self, step: int) -> Drawn:
        """Send out all batches that may be drawn with the weights of now, and wait for that of `step`, without what is
        too old. It stays in line until `trained`."""
        self._send_out(step)
        planned = self.line[0]
        assert planned.step == step, f"step {step} cannot train on the batch of step {planned.step}"
        self._finish(planned)
        self.dropped += planned.drop_stale(self.spec.weights_version(step - 1), self.max_staleness)
        return self._finish(planned)

    def trained(self) -> None:
        """The step that took the first batch in line is over."""
        self.line.popleft()

    def wait_until_sampled(self) -> None:
        """Wait until nothing is being sampled, and nothing will be before weights are sent, unless they reach what
        is."""
        for planned in () if self.spec.rollout.in_flight else self.line:
            if planned.generation is not None and planned.drawn is None:
                if self.spec.algorithm.dynamic_sampling:
                    self._finish(planned)
                else:
                    planned.generation.wait()

    def _finish(self, planned: Planned) -> Drawn:
        """Wait for samples and scores; with dynamic sampling also for those of refills."""
        if planned.drawn is None:
            assert planned.generation is not None
            drawn = planned.generation.finish()
            dynamic = self.spec.algorithm.dynamic_sampling
            planned.drawn = self._refilled(planned, planned.generation, drawn) if dynamic else drawn
        return planned.drawn

    def _refilled(self, planned: Planned, generation: Generation, drawn: Drawn) -> Drawn:
        """Refill until there are as many groups with signal as prompts in a step, if the refills suffice. Broken off,
        it goes on where it was."""
        algorithm, wanted = self.spec.algorithm, self.spec.data.prompts_per_step
        while planned.refills < algorithm.max_refills and (count := missing_groups(drawn, wanted)):
            generation.extend(self.prompts_of(self.ask(count, planned.step).result()[0]))
            self.position, planned.refills = self.position + count, planned.refills + 1
            drawn = generation.finish()
        least = -(-algorithm.mini_batches_per_step // algorithm.group_size)
        return with_signal(drawn, least, planned.refills)

    def _send_out(self, step: int) -> None:
        done = step - 1
        if not self.needs_weights(done):
            return
        first, last = self.newest(done) + 1, min(step + self.max_staleness, self.spec.run.steps)
        if first > last:
            return
        prompts, ends = self._draw(last - first + 1, step)
        for index, batch_step in enumerate(range(first, last + 1)):
            generation = self.sampler.start(prompts[index], self._sampling(), batch_step, show=SAMPLES_SHOWN)
            self.line.append(Planned(batch_step, self.position, ends[index], generation))
            self.position = ends[index]
        if self.max_staleness and not self.spec.algorithm.dynamic_sampling:  # refills would move the cursor
            next_batches = 1 if self.spec.rollout.in_flight else self.max_staleness
            self._request_prompts(min(next_batches, self.spec.run.steps - last), step)

    def _request_prompts(self, batches: int, step: int) -> None:
        """Prompts to send out next, drawn while others are sampled, so that nobody waits for them."""
        self._prompts = None
        if batches > 0:
            self._prompts = (self.position, batches, self.ask(batches * self.spec.data.prompts_per_step, step))

    def _draw(self, batches: int, step: int) -> tuple[list[PromptBatch], list[int]]:
        """Prompts of so many steps, and the cursor after each."""
        if self._prompts is None or self._prompts[:2] != (self.position, batches):
            self._request_prompts(batches, step)
        assert self._prompts is not None, "there are batches to draw"
        answer, self._prompts = self._prompts[2].result()[0], None
        each = self.spec.data.prompts_per_step
        ends = [self.position + each * (index + 1) for index in range(batches)]
        assert PromptsDrawn.of(answer).position == ends[-1], "the training data has no end"
        prompts = self.prompts_of(answer)
        return [prompts.select(chosen) for chosen in np.split(np.arange(len(prompts.batch)), batches)], ends

    def ask(self, prompts: int, step: int) -> Call:
        """Have so many prompts drawn, each repeated for its group and, where the advantage compares with it, for a
        greedy completion; the answer also has the cursor after them."""
        size = self.spec.algorithm.group_size + self._greedy_rows
        request = Prompts(what="train", position=self.position, count=prompts, group_size=size)
        return self.sampler.data.post(Verb.PROMPTS, request, step=step)

    def prompts_of(self, answer: Message) -> PromptBatch:
        """Return the prompts that `ask` asked for; of each group that has one the last is for the greedy
        completion."""
        prompts, size = PromptBatch.of(answer), self.spec.algorithm.group_size
        if not self._greedy_rows:
            return prompts
        greedy_B = np.tile(np.arange(size + 1) == size, len(prompts.batch) // (size + 1))
        return PromptBatch(prompts.batch.with_columns(greedy_B=greedy_B.astype(np.uint8)), prompts.rows)

    @property
    def _greedy_rows(self) -> int:
        return int(self.spec.algorithm.advantage.greedy_baseline)

    def _sampling(self) -> Sampling:
        """Return how the samples that are learned from are drawn."""
        rollout = self.spec.rollout
        return Sampling(
            seed=self.spec.run.seed,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_response_tokens=self.spec.data.max_response_tokens,
        )

    # ── metrics ───────────────────────────────────────────────────────────────────────────────────

    def take_metrics(self, batch: Batch, step: int, training: tuple[float, float]) -> dict[str, float | int]:
        """How old the samples of `step` are, in steps, and how many were too old; nothing without running ahead.
        `training`: when the phase "train" began and ended."""
        dropped, self.dropped = self.dropped, 0
        if not (self.max_staleness or dropped):
            return {}
        staleness_B = self.spec.weights_version(step - 1) - batch["version_B"]
        versions = {"rollout/versions_mean": float(_versions_B(batch).mean())} if self.spec.rollout.in_flight else {}
        return {
            **versions,
            "rollout/staleness_mean": float(staleness_B.mean()),
            "rollout/staleness_max": int(staleness_B.max()),
            "rollout/dropped_stale": dropped,
            "rollout/overlap_s": self.overlap_s(*training),  # of the update, with others being sampled
        }

    def overlap_s(self, start: float, end: float) -> float:
        """Seconds between `start` and `end` (`time.perf_counter`) in which samples of later steps were drawn."""
        total, free_at = 0.0, 0.0
        for planned in self.line:
            if planned.generation is not None:
                begin = max(planned.generation.sent_at, free_at)
                free_at = planned.generation.written_at or end
                total += max(0.0, min(free_at, end) - max(begin, start))
        return total

    # ── checkpoints ───────────────────────────────────────────────────────────────────────────────

    def save(self, folder: Path) -> dict[str, Any]:
        """Wait for everything in line and write it to `folder`; returns what `state.json` says of it. Without running
        ahead there is nothing to keep but the cursor: an unfinished step is drawn again, with the same weights."""
        waiting = tuple(self.line) if self.max_staleness else ()
        ahead = [_write(folder, planned, self._finish(planned)) for planned in waiting]
        return {"position": self.cursor, "next": self.position if waiting else self.cursor, "ahead": ahead}

    def restore(self, folder: Path, state: Mapping[str, Any]) -> Mapping[int, int]:
        """Go on from what `save` wrote. A batch that would be too old in its step, or end the run for its failed
        grades, is left out with all after it. Their prompts are drawn again, unless refills drew the ones that follow:
        those must not come twice. Return how many samples that were, by step. Raises CheckpointError."""
        kept = [_read(folder, entry) for entry in state.get("ahead", ())]
        self.position, self.line = int(state.get("next", kept[-1].end if kept else state["position"])), deque()
        refilled = bool(kept) and self.position > kept[-1].end  # the prompts after the line were drawn for it, too
        left_out: dict[int, int] = {}
        for planned in kept:
            drawn = self._finish(planned)
            version = self.spec.weights_version(planned.step - 1)
            useless = drawn.scored.lost_more_than(self.spec.reward.max_failed_share)
            if left_out or useless or not len(drawn.fresh(version, self.max_staleness).batch):
                self.position = self.position if left_out or refilled else planned.start
                left_out[planned.step] = len(drawn.batch)
            else:
                self.line.append(planned)
        self.dropped = sum(left_out.values())
        return left_out


def _versions_B(batch: Batch) -> NDArray[np.int64]:
    """Return how many versions of the weights drew each sample; they only ever become newer."""
    return np.array([len(np.unique(each[each >= 0])) for each in batch.sequences("version_T")])


def _write(folder: Path, planned: Planned, drawn: Drawn) -> dict[str, Any]:
    from safetensors.numpy import save_file

    batch, scored = drawn.batch, drawn.scored
    columns = {**batch.columns, "reward_B": scored.reward_B, "scored_B": scored.scored_B, **scored.term_B}
    save_file({name: np.ascontiguousarray(column) for name, column in columns.items()}, _file(folder, planned.step))
    graded = {name: value for name, value in asdict(scored).items() if not name.endswith("_B")}
    return {"step": planned.step, "start": planned.start, "end": planned.end, **graded}


def _read(folder: Path, entry: Mapping[str, Any]) -> Planned:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    step = int(entry["step"])
    path = _file(folder, step)
    try:
        columns = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    scores = columns.pop("reward_B"), columns.pop("scored_B").astype(bool)
    term_B = {name: columns.pop(name) for name in list(columns) if name.startswith("term_")}
    kept = {each.name: entry[each.name] for each in fields(Scored) if not each.name.endswith("_B")}
    kept |= {name: kind(**kept[name]) for name, kind in (("thrown", Thrown), ("greedy", Greedy)) if kept[name]}
    scored = Scored(*scores, **{**kept, "zero_terms": tuple(kept["zero_terms"])}, term_B=term_B)
    return Planned(step, int(entry["start"]), int(entry["end"]), drawn=Drawn(Batch(columns), scored))


def _file(folder: Path, step: int) -> Path:
    return folder / f"ahead_{step:06d}.safetensors"
