"""The build of a rank, as it reports it. The driver compares it with the spec
(`rlctl/models/as_built_check.py`)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from specs.attention import FLASH
from specs.schema.engines.kernel_choice import OWN_MODULES
from specs.schema.table import Table
from specs.wire.model_flops import DecoderSize


class ModelBuilt(Table):
    """Read back from the model itself, never copied from the request."""

    model_class: str
    path: str  # config._name_or_path, or the folder that was read
    parameters: int  # every parameter counted once, tied ones too; without adapters
    trainable_parameters: int  # what the optimizer changes: all, or the adapters
    hidden_size: int
    layers: int
    vocab_size: int
    dtype: str  # of the forward pass: "fp32", "bf16"
    attn_implementation: str  # what the layers' own config says; several are joined with ","
    attn_function: str  # module and name of the function that is really called
    tied_embeddings: bool
    mesh: dict[str, int] = Field({})  # axis → ranks along it, e.g. {"replicate": 2, "shard": 8}; empty: not sharded
    options: dict[str, Any] | None = None  # its library's, read back from the library; None: not read back
    head: str = "lm"  # or "score": one number for each token
    recomputed_layers: int = 0  # those whose activations are computed again in the backward pass
    activation_offload: bool = False  # whether activations wait in host memory for the backward pass
    new_head: bool = False  # its weights are all zero: the checkpoint had none
    kernels: str = OWN_MODULES  # what computes norms, gated MLPs and rotations
    replaced_modules: dict[str, int] = Field({})  # kind of module → how many compute with other kernels than their own
    state_layers: dict[str, int] = Field({})  # kind of layer that carries a state, by sequence → how many
    size: DecoderSize | None = None  # what decides how much arithmetic it is; None: not known
    weights_checksum: str  # of all weights by name, at build time; "" where weights come by sync

    @property
    def shares_prompts(self) -> bool:
        """Return whether sequences of a row may share their prompt's computation (docs/engines.md)."""
        return not set(FLASH) & set(self.attn_implementation.split(","))


class AsBuilt(Table):
    """One rank's report."""

    role: str
    rank: int
    world_size: int
    host: str
    pid: int
    python: str
    device: str
    gpu: str = ""  # its UUID; "" on the CPU, and of an engine that computes in another process
    threads: int
    engine: str
    versions: dict[str, str]
    model: ModelBuilt | None  # None for a role that holds no model
