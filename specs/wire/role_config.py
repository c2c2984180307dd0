"""Build requests: what one rank is told when it builds, its own part of the spec, nothing more.

Travels as the body of the `build` verb. Paths are absolute; every default is resolved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from specs.attention import Attention
from specs.schema.engines.engine_registry import RolloutEngineTable, TrainEngineTable
from specs.schema.environment import EnvironmentSection
from specs.schema.eval_sets import Evaluation
from specs.schema.objectives import Unit
from specs.schema.recipes import RlSpec, RowsSpec, sampling_of
from specs.schema.rewards import compares_answer, judged_columns, reads_whole_rows
from specs.schema.role_section import DType, Lora, Optimizer
from specs.schema.roles import DATA, REWARD, ROLLOUT, HeadKind, RoleName
from specs.schema.rows import RowsEval, RowsSection
from specs.schema.sections import DataSection
from specs.schema.spec import RewardSection, Spec
from specs.schema.table import Table


class ModelConfig(Table):
    """Which model to build, and how. Shared by trainers and rollouts."""

    path: str  # an existing folder, or a hub id
    from_scratch: bool
    seed: int
    dtype: DType
    attn_implementation: Attention
    trust_remote_code: bool
    device: str  # "cpu" or "cuda": the rank's visible device
    max_sequence_tokens: int
    computes_in: DType | None = None  # of the forward pass, where the weights are held in another than `dtype`
    learns: bool = False  # whether a backward pass is computed
    head: HeadKind = "lm"  # "value" is made, of zeros, where the files have none; so is "reward" if it learns


class TrainConfig(Table):
    """Build request of a role with a train engine. `optimizer` is None for a role that never learns."""

    role: RoleName
    model: ModelConfig
    engine: TrainEngineTable
    optimizer: Optimizer | None
    lora: Lora | None = None
    total_optimizer_steps: int
    micro_batch_tokens: int
    sequence_parallel: int = 1  # ranks that share samples
    gradient_checkpointing: bool | int  # how many of the first layers, True: all
    activation_offload: bool = False
    temperature: float  # log-probs are those of softmax(logits / temperature)


class RolloutConfig(Table):
    """Build request of a rollout replica."""

    role: RoleName = ROLLOUT
    model: ModelConfig
    engine: RolloutEngineTable
    lora: Lora | None = None  # of the actor, where the engine applies adapters itself
    max_prompt_tokens: int
    max_response_tokens: int
    stop: tuple[str, ...]


class TextConfig(Table):
    """Which tokenizer a role without a model reads. Relative paths in the spec start at `spec_dir`."""

    model_path: str
    trust_remote_code: bool
    spec_dir: str
    today: str = ""  # for chat templates that write it, as 2026-01-31; empty: the day it is


class RowsConfig(Table):
    """Which rows the data role serves, where a run learns from rows. `unit`: what the objective is a mean of; rows hold
    a pair of completions for "pair", and a label for "sequence". `of_scores`: their last token gets a score."""

    rows: RowsSection
    eval: RowsEval | None
    unit: Unit
    of_scores: bool = False

    @property
    def held_out(self) -> int:
        """Return how many rows, the last of the first source, are evaluated on and not trained on."""
        return self.eval.rows if self.eval is not None and not self.eval.data else 0

    @staticmethod
    def of(spec: RowsSpec) -> RowsConfig:
        objective, data = spec.objective, spec.data
        if data.sets:  # once a set has travelled, its own keys are not told from its defaults
            data = data.model_copy(update={"sets": data.sources})
        return RowsConfig(rows=data, eval=spec.eval, unit=objective.unit, of_scores=objective.of_scores)


class DataConfig(TextConfig):
    """Build request of the data role."""

    role: RoleName = DATA
    data: DataSection | None = None  # of prompts, which are sampled from
    rows: RowsConfig | None = None  # of rows, which are learned from
    evals: tuple[Evaluation, ...] = ()
    max_prompt_tokens: int = 0  # of a prompt that is sampled from
    answer_column: str = ""
    needs_answer: bool = False  # a row without `answer_column` is a bad one
    needs_columns: tuple[str, ...] = ()  # what else every row must have, for scoring
    tools_column: str = ""  # with what the chat template shows; empty: an environment's tools are
    environments: tuple[str, ...] = ()  # of which every row must name one, where there are several
    tells_messages: bool = False  # whether rows travel with the conversation that their prompt was made from
    row_columns: tuple[str, ...] | None = None  # what scoring reads of a row; None: all of it
    seed: int

    @staticmethod
    def of(spec: Spec, tokenizer: str, spec_dir: Path) -> DataConfig:
        """Return what the data role reads, with the tokenizer at a path or of a hub id."""
        found: dict[str, Any] = {
            "model_path": tokenizer,
            "trust_remote_code": spec.model.trust_remote_code,
            "spec_dir": str(spec_dir),
            "seed": spec.run.seed,
            "data": spec.data if isinstance(spec, RlSpec) else None,
            "rows": RowsConfig.of(spec) if isinstance(spec, RowsSpec) else None,
        }
        if (sampling := sampling_of(spec)) is not None:
            terms, answer = sampling.reward_terms, sampling.answer_column
            judged = judged_columns(terms)
            found |= {
                "evals": sampling.evaluations,
                "max_prompt_tokens": sampling.max_prompt_tokens,
                "answer_column": answer,
                "needs_answer": compares_answer(terms),
                "needs_columns": judged,
                "environments": [one.name for one in sampling.environments] if len(sampling.environments) > 1 else (),
                "tools_column": spec.data.tools_column
                if isinstance(spec, RlSpec) and not sampling.environments
                else "",
                "tells_messages": sampling.needs_reward_model or bool(sampling.environments),
                "row_columns": None
                if reads_whole_rows(terms) or sampling.environments
                else tuple(dict.fromkeys((answer, *judged))),
            }
        return DataConfig(**found)


class ScoreText(Table):
    """How samples become tokens of a reward model."""

    path: str  # of its tokenizer
    trust_remote_code: bool
    max_sequence_tokens: int
    chat: str  # `data.chat`: whether prompts go through the actor's chat template


class RewardConfig(TextConfig):
    """Build request of the reward role."""

    role: RoleName = REWARD
    reward: RewardSection
    answer_column: str
    max_response_tokens: int
    run_dir: str
    score_text: ScoreText | None = None  # None: no reward model
    environments: tuple[EnvironmentSection, ...] = ()
    environment_column: str = ""  # that names a row's environment, where there are several
    seed: int = 0
    sources: dict[
        str, str
    ]  # path → code of terms and environments as it was when the run started (`workers/grading/reward_sources.py`)


# Of roles that hold a tokenizer instead of a model.
TEXT_CONFIGS: dict[RoleName, type[TextConfig]] = {DATA: DataConfig, REWARD: RewardConfig}


class Sampling(Table):
    """How one `generate` samples. A token's randomness depends on `seed`, its sample's id and its position alone,
    never on which replica or slot it got, nor on what else was in the batch. `max_response_tokens` limits what one call
    adds to a prompt: a later turn has the whole of it again."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False
    max_response_tokens: int = Field(gt=0)
