"""Evaluation on prompts: their completions, graded, with the weights that the rollout has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from rlctl.loop.driver import Arrived, StepRecord
from rlctl.loop.sampling import PromptBatch, Sampler
from rlctl.loop.scores import eval_metrics
from rlctl.loop.scores.reward_failure_watch import RewardFailureWatch
from specs.phases import Phase
from specs.schema.eval_sets import Evaluation

EnterPhase = Callable[[Phase, int, str], AbstractContextManager[None]]


class PromptEvaluation:
    """Completes every set of prompts of a run and tells how well that went."""

    def __init__(self, sampler: Sampler, phase: EnterPhase, warn: Callable[[str], None]) -> None:
        self.sampler, self.phase, self.spec = sampler, phase, sampler.spec
        self._failures = RewardFailureWatch(1.0, warn)  # it ends no run
        self._prompts: dict[str, PromptBatch] = {}  # by evaluation

    def run(self, step: int, arrived: Arrived | None = None) -> StepRecord:
        """Return the metrics of every set and all of the completions, with the weights after `step` steps, which the
        rollout must have. `arrived` is told of each set how many completions of all are here."""
        record = StepRecord({}, [])
        for one in self.spec.evaluations:
            self.sampler.sync.resend_if_asleep(step)  # a reward model may have graded the set before
            with self.phase("rollout", step, f"evaluation {one.name}"):
                self._run(one, step, record, arrived)
        return record

    def _run(self, one: Evaluation, step: int, record: StepRecord, arrived: Arrived | None) -> None:
        sampler, passes = self.sampler, one.passes(self.spec.reward_terms)
        if one.name not in self._prompts:
            self._prompts[one.name] = sampler.held_out(one, step)
        on_arrival = partial(arrived or (lambda evaluation, arrived, total: None), one)
        prompts, sampling = self._prompts[one.name], sampler.measured(one)
        drawn = sampler.start(prompts, sampling, step, "eval", on_arrival=on_arrival).finish()
        self._failures.see(drawn.scored, f"evaluation {one.name}")
        found = {**eval_metrics.evaluated(drawn, passes), **sampler.take_prefix_share("eval")}
        record.metrics.update({f"eval/{one.name}/{name.rpartition('/')[2]}": value for name, value in found.items()})
        solved: dict[int, dict[str, bool]] = {}
        if passes is not None:
            passed_B = eval_metrics.passed(drawn, passes)
            solved = {int(id_): {"passed": bool(was)} for id_, was in zip(drawn.batch["id_B"], passed_B, strict=True)}
        samples = drawn.scored.samples
        record.samples.extend({"name": one.name, **sample, **solved.get(sample["id"], {})} for sample in samples)
