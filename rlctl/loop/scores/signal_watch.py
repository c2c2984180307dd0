"""Warns of a step that teaches little or nothing, while it can still be put right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlctl.show.text_format import FEW_FINISH, number, share
from specs.schema.environment import BY_ITSELF, STOP_REASONS

if TYPE_CHECKING:
    from rlctl.loop.sampling import Scored
    from specs.schema.recipes import RlSpec

MOST_MASKED = 0.5  # share of a step's loss tokens that a correction may leave out without a word
SILENT, SILENT_STEPS = 0.9, 10  # share of silent groups, and the steps in a row after which it is a collapse


class SignalWatch:
    """Looks at the scores of an attempt's first step, and at every step's metrics until it has warned of each."""

    def __init__(self, spec: RlSpec, warn: Callable[[str], None]) -> None:
        self._spec, self._warn = spec, warn
        self._seen_first = False
        self._said: set[str] = set()  # metrics that it has warned of
        self._silent_steps, self._next_collapse = 0, SILENT_STEPS  # in a row; how many are the next warning

    def see(self, metrics: Mapping[str, Any], scored: Scored, step: int) -> None:
        """`metrics`: the step's line."""
        for name, words in self._later(metrics, scored):
            if name not in self._said:
                self._said.add(name)
                self._warn(f"step {step}: {words} Said once; {name} counts on")
        self._count_silent(metrics, scored, step)
        if self._seen_first:
            return
        self._seen_first = True
        if scored.scored_B.any():
            for words in self._scores(metrics, scored):
                self._warn(f"step {step}: {words}")

    def _count_silent(self, metrics: Mapping[str, Any], scored: Scored, step: int) -> None:
        """Warn of a run that has stopped learning: after 10 steps in a row, then after 20, 40, …, each of them once."""
        learns = scored.thrown is not None and scored.thrown.signal
        if learns or not self._spec.algorithm.advantage.equal_is_silent or metrics["reward/silent_groups"] < SILENT:
            self._silent_steps = 0
            return
        self._silent_steps += 1
        if self._silent_steps == self._next_collapse:
            self._next_collapse *= 2
            self._warn(
                f"step {step}: for {self._silent_steps} steps in a row all completions score the same in "
                f"{share(SILENT)} of the groups or more, so that next to nothing is learned "
                f"(reward/mean {number(metrics['reward/mean'])}; {share(metrics['rollout/repeated'])} of the "
                "completions repeat another of their group). See samples.jsonl: the policy may have collapsed, or "
                "mastered the task"
            )

    def _later(self, metrics: Mapping[str, Any], scored: Scored) -> Iterator[tuple[str, str]]:
        """Return what may come at any step: the metric that tells of it, and words."""
        for role in self._spec.losses:
            if skipped := metrics.get(name := f"{role}/skipped_updates", 0):
                yield name, f"{skipped} optimizer steps of the {role} left out: the gradient was not finite."
        if excluded := metrics.get("correction/not_finite", 0):
            yield "correction/not_finite", f"{excluded} tokens left out: the actor's log-prob is not finite."
        if scored.thrown is not None and not scored.thrown.signal:
            refills = scored.thrown.refills
            words = f"in every group all scores are equal, after {refills} refills too: nothing to learn."
            yield "reward/silent_groups", words
        if metrics["rollout/finished"] < FEW_FINISH:
            yield "rollout/finished", self._truncated(metrics)
        if lone := metrics.get("reward/lone_groups", 0):
            least = self._spec.algorithm.advantage.min_group
            words = f"groups with fewer than {least} completions that could be graded: {lone}. With nothing to compare,"
            yield "reward/lone_groups", f"{words} their advantages are 0."
        table, masked = self._spec.algorithm.correction, metrics.get("correction/masked", 0.0)
        if table is not None and masked > MOST_MASKED:
            low, high = table.band
            yield (
                "correction/masked",
                f"algorithm.correction masks {masked:.0%} of the loss tokens: the ratio trainer / sampler is not "
                f"within {low:g} and {high:g}. Widen the band, or lower rollout.max_staleness.",
            )

    def _truncated(self, metrics: Mapping[str, Any]) -> str:
        finished, limit = share(metrics["rollout/finished"]), self._spec.data.max_response_tokens
        if self._spec.environments:
            shares = {each: metrics[f"episode/stop_{each}"] for each in STOP_REASONS if each not in BY_ITSELF}
            others = ", ".join(f"{each} {share(of_all)}" for each, of_all in shares.items() if of_all)
            return f"{finished} of the episodes end by themselves; {others}. samples.jsonl shows them turn by turn."
        return (
            f"{finished} of the completions end by themselves, the others are truncated at "
            f"data.max_response_tokens = {limit}. Where answers need more room, raise it; else samples.jsonl "
            "(completion_raw) shows what the model writes instead of its end token. Random weights first learn to end."
        )

    def _scores(self, metrics: Mapping[str, Any], scored: Scored) -> Iterator[str]:
        advantage, terms = self._spec.algorithm.advantage, self._spec.reward.terms
        if not advantage.needs_teacher and metrics["reward/std"] == 0.0:
            yield (
                f"all completions score {number(metrics['reward/mean'])}, which tells none from another. Either none "
                "earns more yet, or the reward cannot be right: samples.jsonl in the run directory has what was graded"
            )
            return
        if advantage.equal_is_silent and scored.thrown is None and metrics["reward/silent_groups"] == 1.0:
            yield (
                "in every group all completions score the same, so that the reward teaches nothing: it tells prompts "
                "apart, not completions; or algorithm.group_size is too small for a score that is rarely earned"
            )
        for index in scored.zero_terms:
            if not terms[index].is_penalty:
                yield f"reward.terms.{index} ({terms[index].kind}) gives every completion 0"
