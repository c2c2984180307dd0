"""Recipes that learn from rows: supervised fine-tuning, preferences, reward models (`RowsRecipe.step`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlctl.loop import finite_check, step_metrics
from rlctl.loop.driver import Arrived, Driver, StepRecord, UpdateWindow
from rlctl.loop.prompt_evaluation import PromptEvaluation
from rlctl.loop.residency import Residency
from rlctl.loop.step_metrics import Updates
from rlctl.recipes.reference import PrecomputedReference, Reference, unlike_rows
from specs.errors import NotFiniteError
from specs.schema.algorithms.algorithm import AnyLoss
from specs.schema.metric import Metric, metrics
from specs.schema.recipes import RowsSpec, sampling_of
from specs.schema.roles import RoleName
from specs.wire import bodies
from specs.wire.as_built import ModelBuilt
from specs.wire.batch import Batch
from specs.wire.messages import Verb

if TYPE_CHECKING:
    from rlctl.loop.recovery import SteadyGrading, SteadySync
    from rlctl.processes.calls import Call
    from rlctl.processes.group import Group
    from rlctl.show.progress import Progress

PROOF_PROMPTS = 2
METRICS: tuple[Metric, ...] = metrics(
    "the run learns from rows",
    {
        "data/epoch [epochs]": "Epochs drawn, of the source that is furthest.",
        "data/tokens [tokens]": "Tokens of the step's rows.",
        "data/learned_tokens [tokens]": "Tokens of these that the objective is about.",
    },
)


class RowsRecipe(Driver):
    """Drives the model that learns through rows, and its reference where the objective compares with one."""

    def __init__(
        self,
        spec: RowsSpec,
        groups: Mapping[str, Group],
        residency: Residency,
        window: UpdateWindow,
        progress: Progress,
        built: Mapping[RoleName, ModelBuilt] | None = None,
        ref_logprobs: Path = Path(),
        draws: int | None = None,
        sync: SteadySync | None = None,
        grading: SteadyGrading | None = None,
    ) -> None:
        """`ref_logprobs`: the file for a reference's log-probs that are computed once, of the first `draws`, or of all
        rows. `sync` gives the rollout its weights, where completions are sampled to evaluate the model; `grading`
        restores failed graders."""
        super().__init__(spec, groups, residency, window, progress, built)
        self.spec = spec
        self.reference: Reference | None = None
        if spec.objective.needs_ref:
            self.reference = PrecomputedReference(ref_logprobs, draws) if spec.precomputes_ref else Reference()
        self.position = self.drawn = 0  # rows that were learned from, and with those of a step that is not over
        self.epoch = 0.0
        self.drawing: Call | None = None  # of the next step's rows
        self.held_out: Batch | None = None
        self.generated: PromptEvaluation | None = None
        if (sampling := sampling_of(spec)) is not None:
            assert sync is not None, "a rollout has weights"
            sampler = self.make_sampler(sampling, groups, sync, grading)
            self.generated = PromptEvaluation(sampler, self.phase, progress.warning)

    # ── one step ──────────────────────────────────────────────────────────────────────────────────

    def step(self, step: int) -> StepRecord:
        """Draw rows, compare with the reference, learn. The next rows are drawn meanwhile."""
        self.clock.start()
        with self.phase("train", step):
            rows = self.draw(step)
            batch = self.with_kl(self.with_reference(rows, step), step)
            updates: Updates = {role: [ranks] for role, ranks in self.learn(batch, step).items()}
        self.position = self.drawn
        self.window.close()
        return StepRecord(self.collect(step, batch, updates), [])

    def draw(self, step: int) -> Batch:
        """Return the step's rows, and have those of the next one drawn."""
        answer = (self.drawing or self._ask(self.position, step)).result()[0]
        drawn = bodies.RowsDrawn.of(answer)
        self.drawn, self.epoch = drawn.position, drawn.epoch
        self.drawing = self._ask(self.drawn, step + 1) if step < self.spec.run.steps else None
        return answer.batch

    def _ask(self, position: int, step: int) -> Call:
        request = bodies.DrawRows(what="train", position=position, count=self.spec.data.rows_per_step)
        return self.data.post(Verb.ROWS, request, step=step)

    def with_reference(self, rows: Batch, step: int) -> Batch:
        """Return rows with the log-probs of the reference, where the objective compares with one."""
        if self.reference is None:
            return rows
        return rows.with_columns(ref_logprob_T=self.reference.logprobs(self, rows, step))

    def with_kl(self, rows: Batch, step: int) -> Batch:
        """Return rows with the KL that the actor now has from the reference, where the objective reads that."""
        if self.reference is None or not self.spec.objective.needs_kl:
            return rows
        unlike = unlike_rows(rows, self.spec.data.max_tokens)
        return rows.with_columns(kl_B=self.reference.kl(self, unlike, step))

    def learn(self, batch: Batch, step: int) -> dict[RoleName, list[step_metrics.RankReport]]:
        """Take the optimizer step on these rows."""
        return self.one_update(batch, batch, [self.spec.lead], step)

    def loss_of(self, role: RoleName) -> AnyLoss:
        return self.spec.objective

    def loss_scale(self, mini: Batch) -> bodies.LossScale:
        tokens_B = mini.sum_by_sequence("loss_mask_T")
        return bodies.LossScale(
            num_loss_tokens=int(tokens_B.sum()),
            num_sequences=int((tokens_B > 0).sum()),
            max_response_tokens=self.spec.data.max_tokens,
            num_units=len(np.unique(mini["unit_B"])),
            num_chosen_tokens=int(tokens_B[mini["chosen_B"] > 0].sum()),
        )

    def not_finite(self, role: RoleName, found: str, mini: Batch, step: int) -> NotFiniteError:
        return finite_check.of_rows_update(found, mini, role)

    def collect(self, step: int, batch: Batch, updates: Updates) -> dict[str, Any]:
        """Return the step's metrics."""
        times = self.clock.metrics()
        return {
            "step": step,
            **step_metrics.of_updates(self.spec.losses, updates),
            "data/epoch": self.epoch,
            "data/tokens": batch.num_tokens,
            "data/learned_tokens": int(batch["loss_mask_T"].sum()),
            **times,
            "perf/tokens_per_s": batch.num_tokens / times["time/step_s"],
        }

    # ── around the steps ──────────────────────────────────────────────────────────────────────────

    def prepare(self) -> None:
        """Compute what the reference says of the rows, where that is done once."""
        if self.reference is not None:
            with self.phase("train", 0, "log-probs of the reference"):
                self.reference.prepare(self)

    def evaluate(self, step: int, arrived: Arrived | None = None) -> StepRecord:
        evaluation = self.spec.eval
        assert evaluation is not None, "the spec asks for none"
        with self.phase("train", step, f"evaluation {evaluation.name}"):
            if self.held_out is None:
                request = bodies.DrawRows(what="eval", position=0, count=evaluation.rows)
                self.held_out = self.with_reference(self.data.call(Verb.ROWS, request, step=step)[0].batch, step)
            sums = self.measure(self.with_kl(self.held_out, step), step)
        found = step_metrics.of_loss(self.spec.objective, sums)
        shown = {name.partition("/")[2]: value for name, value in found.items()}
        if self.spec.objective.unit == "token":
            shown["perplexity"] = float(np.exp(min(shown["nll"], 700.0)))
        metrics = {f"eval/{evaluation.name}/{name}": value for name, value in shown.items()}
        if self.generated is None:
            return StepRecord(metrics, [])
        written = self.evaluate_generated(self.generated, step, arrived)
        return StepRecord({**metrics, **written.metrics}, written.samples)

    def evaluate_generated(self, generated: PromptEvaluation, step: int, arrived: Arrived | None) -> StepRecord:
        """Give the rollout the weights after `step` steps; return what it completes with them, graded."""
        sync = generated.sampler.sync
        generated.sampler.graders.restore(step)
        sync.weights.actor_finished(step)
        with self.phase("sync", step):
            sent = sync.run(step)
        record = generated.run(step, arrived)
        return StepRecord({**sent.metrics(), **record.metrics, **sync.take_metrics()}, record.samples)

    def measure(self, batch: Batch, step: int) -> list[Mapping[str, float]]:
        """Return what each rank reports of the objective on these rows, without gradients."""
        answers = self._post_update(self.spec.lead, batch, step, Verb.EVALUATE).result()
        return [bodies.Updated.of(answer).sums for answer in answers]

    def proof_prompts(self) -> list[list[int]]:
        """Return the first rows up to what is learned of them; of a reward model whole."""
        request = bodies.DrawRows(what="train", position=0, count=PROOF_PROMPTS)
        batch = self.data.call(Verb.ROWS, request)[0].batch
        whole = self.spec.objective.of_scores
        found = []
        for tokens, mask in zip(batch.sequences("tokens_T"), batch.sequences("loss_mask_T"), strict=True):
            found.append(tokens[: len(tokens) if whole else max(1, int(np.argmax(mask)))].tolist())
        return found[:PROOF_PROMPTS]

    def save(self, folder: Path) -> dict[str, Any]:
        return {"position": self.position}

    def restore(self, folder: Path, state: Mapping[str, Any]) -> Mapping[int, int]:
        self.begin_at(folder, state)
        return {}

    def begin_at(self, folder: Path, state: Mapping[str, Any]) -> None:
        self.position, self.drawing = int(state["position"]), None
