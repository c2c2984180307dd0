"""Keys that the sections of roles share: where a role runs, and how a model is held and learns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from specs.attention import Attention
from specs.schema.table import NonEmpty, PathText, Table, unusable

DType = Literal["fp32", "bf16"]


class RoleSection(Table):
    """The keys of every role's section: where it runs and with what."""

    launcher: Literal["python", "torchrun", "deepspeed", "srun"] = "python"
    """How the role's processes are started. Several ranks of one model want `torchrun`, `deepspeed`, or inside a
    SLURM job `srun`."""
    processes: int = Field(1, ge=1, le=4096)
    """Processes of this role, on all its nodes together."""
    nodes: int = Field(1, ge=1, le=512)
    """Hosts that share the processes evenly."""
    devices: tuple[int, ...] = ()
    """GPU numbers on each node, one per process there; empty: CPU."""
    python: PathText = ""
    """Interpreter of this role, relative to the spec file; empty: the one that runs rlctl."""
    env: dict[str, str] = Field({})
    """Extra environment variables of this role."""
    threads: int | None = Field(None, gt=0)
    """CPU threads per process; unset: shared out by the plan."""

    @property
    def hosts(self) -> range:
        """Numbers of its hosts. 0 is the driver's."""
        return range(self.nodes)

    @property
    def leaves_host(self) -> bool:
        """Whether some of its processes are on other hosts than the driver's."""
        return self.hosts != range(1)


class ModelRole(RoleSection):
    """A role that holds a language model."""

    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the forward pass: bf16, which trains with fp32 master weights, or fp32. `auto`: bf16 on GPUs, fp32
    on the CPU."""
    attn_implementation: Attention | None = None
    """This role's attention; unset: `model.attn_implementation`."""
    micro_batch_tokens: int = Field(8192, gt=0)
    """Most tokens in one forward pass of a rank. A hard limit: no sequence may be longer than it times
    `sequence_parallel`."""
    sequence_parallel: int = Field(1, ge=1)
    """Ranks that share samples: each computes a part of every row, and attention exchanges rows for heads (Ulysses,
    Jacobs et al. 2023). A row has up to so many times `micro_batch_tokens`."""

    @property
    def row_tokens(self) -> int:
        """Most tokens of a row, however many ranks share it."""
        return self.micro_batch_tokens * self.sequence_parallel


class Restartable(RoleSection):
    """A role whose ranks each work by themselves: the loss of one can be made good, or borne."""

    max_restarts: int = Field(3, ge=0)
    """How often processes that crashed or hang are started again before the run fails, in all and per attempt; 0:
    never."""
    min_processes: int | None = Field(None, ge=1)
    """Fewest processes that the run starts or continues with. One that is not there within `run.start_timeout_s`, or
    whose host cannot be reached, is taken in when it comes. One that cannot be built, or started again (restarts
    used up, or its host silent), is left out until the next attempt. Unset: all are needed."""


class Optimizer(Table):
    """AdamW (Loshchilov & Hutter 2019) and its schedule, counted in optimizer steps."""

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates."""
    eps: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay; on matrices only."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Where linear and cosine end, as a share of `lr`."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Global gradient norm is clipped to this; 0: never."""


class Lora(Table):
    """Low-rank adapters (Hu et al. 2021): only they learn, the model's own weights stay."""

    rank: int = Field(16, gt=0)
    """Rank of the adapters."""
    alpha: float = Field(32.0, gt=0)
    """Adapters are scaled by alpha / rank."""
    targets: tuple[NonEmpty, ...] = Field(("all-linear",), min_length=1)
    """Names of the linear layers that get one (`q_proj`, …); `all-linear`: every one but the head."""


def some_layers(value: Any) -> bool | int:
    """Accept true, false, or a number of layers."""
    if isinstance(value, bool) or (isinstance(value, int) and value > 0):
        return value
    raise unusable("must be true, false, or a number of layers above 0", "true: all layers; 8: the first eight")


class LearningRole(ModelRole):
    """A role that learns."""

    gradient_checkpointing: Annotated[bool | int, PlainValidator(some_layers)] = False
    """Recompute activations in the backward pass to save memory: `true`: of all layers; N: of the first N layers."""
    activation_offload: bool = False
    """Let activations wait in host memory for the backward pass; with `gradient_checkpointing` what enters each
    layer, which is little and overlaps with the computation."""
    optimizer: Optimizer = Optimizer()
    """Optimizer and schedule."""
    lora: Lora | None = None
    """Train low-rank adapters instead of the whole model; beside them a critic's head learns whole."""
