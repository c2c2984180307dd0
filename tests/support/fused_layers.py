"""TransformerEngine's layers by their names, computed by Megatron-core's own: to test what belongs to them on the CPU.

TransformerEngine joins a norm with the multiplication behind it in one module (`layer_norm_weight`, `weight`, `bias`).
Here such a module norms and multiplies with what Megatron-core brings; the specification of a layer, the names, and
what is cut and summed are as with TransformerEngine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from megatron.core.extensions import transformer_engine
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from backends.megatron import packed_stage
from backends.megatron.packed_stage import RmsNorm


class FusedLinear(ColumnParallelLinear):  # type: ignore[misc]
    def __init__(self, input_size: int, output_size: int, *, config: Any, **more: Any) -> None:
        super().__init__(input_size, output_size, config=config, **more)
        norm = RmsNorm(config, input_size, config.layernorm_epsilon)
        self.layer_norm_weight = norm.weight
        self.norm = norm.forward  # no module: the weight is this one's

    def forward(self, input_: Tensor, *more: Any, **named: Any) -> Any:
        return super().forward(self.norm(input_), *more, **named)


class FusedProvider(LocalSpecProvider):  # type: ignore[misc]
    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return FusedLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return RmsNorm


@contextmanager
def instead_of_transformer_engine() -> Iterator[None]:
    with (
        patch.object(transformer_engine, "HAVE_TE", True),
        patch.object(gpt_layer_specs, "TESpecProvider", FusedProvider, create=True),
        patch.object(packed_stage, "TENorm", RmsNorm),
    ):
        yield
