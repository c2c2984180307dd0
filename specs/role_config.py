"""What one rank is told when it builds: its own part of the spec, nothing more.

Travels as the body of the `build` verb. Paths are absolute; every default is resolved.
"""

from __future__ import annotations

from pydantic import Field

from specs.attention import Attention
from specs.engine_tables import RolloutEngineTable, TrainEngineTable
from specs.run_sections import DataSection, EvalSection
from specs.schema import DType, Lora, Optimizer, RewardSection, RoleName
from specs.table import Table


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


class TrainConfig(Table):
    """Build request of actor and ref. `optimizer` is None for a role that never learns."""

    role: RoleName
    model: ModelConfig
    engine: TrainEngineTable
    optimizer: Optimizer | None
    lora: Lora | None = None
    total_optimizer_steps: int
    micro_batch_tokens: int
    gradient_checkpointing: bool
    temperature: float  # log-probs are those of softmax(logits / temperature)


class RolloutConfig(Table):
    """Build request of a rollout replica."""

    role: RoleName = "rollout"
    model: ModelConfig
    engine: RolloutEngineTable
    lora: Lora | None = None  # of the actor, where the engine applies adapters itself
    max_prompt_tokens: int
    max_response_tokens: int
    stop: tuple[str, ...]


class RewardConfig(Table):
    """Build request of the reward role, which also holds tokenizer and data."""

    role: RoleName = "reward"
    model_path: str
    trust_remote_code: bool
    data: DataSection
    eval: EvalSection | None
    reward: RewardSection
    seed: int
    spec_dir: str  # relative paths in the spec start here
    run_dir: str


class Sampling(Table):
    """How one `generate` samples. A sequence's randomness depends on `seed` and its id alone,
    never on which replica or slot it got, nor on what else was in the batch."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False
    max_response_tokens: int = Field(gt=0)
