"""A pipeline stage of Megatron-core's GPT model, on packed rows.

Megatron-core brings the layers, their tensor parallelism and what flows between stages. Three parts of its local layers
are replaced: attention, which keeps the sequences of a row apart as everywhere in rlctl (`backends/packed/layout.py`);
rotary positions, which it counts along the row and which here start anew with each sequence; and RMSNorm, which in
torch's form does not go with sequence parallelism. A stage ends with hidden states: the head is `vocab_head.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from backends.megatron.layouts import padded_vocabulary
from backends.packed.layout import PackedLayout
from specs.errors import ModelError


@dataclass
class PackedRow(PackedSeqParams):  # type: ignore[misc]
    """One packed row on its way through the layers, which pass it on as it is."""

    layout: PackedLayout | None = None
    position_T: Tensor | None = None


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention inside each sequence of the row. Query [T, 1, H, D], others [T, 1, KV, D] → [T, 1, H·D]."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any
    ):
        super().__init__(config=config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedRow | None = None,
        **_: Any,
    ) -> Tensor:
        assert packed_seq_params is not None
        assert packed_seq_params.layout is not None
        heads_first = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        out_THD = packed_seq_params.layout.attend(self, *heads_first, scaling=None, sliding_window=None)[0]
        return out_THD.flatten(1)[:, None]


class PackedRope(nn.Module):
    """Rotary angles [T, 1, 1, D] of the row's positions, from the frequencies of the Hugging Face model."""

    def __init__(self, inverse_frequency: Tensor) -> None:
        super().__init__()
        self.inverse_frequency = inverse_frequency

    def get_rotary_seq_len(self, *arguments: Any) -> PackedRow:
        """What Megatron hands on to `forward`: the row, in the place of a length."""
        row: PackedRow = arguments[-1]
        return row

    def forward(self, row: PackedRow, **_: Any) -> Tensor:
        assert row.position_T is not None
        angle_TF = torch.outer(row.position_T.float(), self.inverse_frequency)
        return torch.cat([angle_TF, angle_TF], dim=-1)[:, None, None]


class RmsNorm(nn.Module):
    """Zhang & Sennrich 2019, computed in fp32 as Hugging Face does it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        weight: Any = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=_device()))
        weight.sequence_parallel = config.sequence_parallel  # Megatron sums its gradients then
        self.weight: nn.Parameter = weight

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Stage(GPTModel):  # type: ignore[misc]
    """The layers of one pipeline stage. `score`: on the last one of a model that gives one number for each token."""

    score: nn.Linear

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    def head_weight(self) -> Tensor:
        """This tensor rank's rows of the output layer, on the last stage."""
        weight: Tensor = self.output_layer.weight
        return weight if weight is not None else self.shared_embedding_or_output_weight()


@dataclass(frozen=True)
class Axes:
    """Ranks along the axes that cut a model."""

    tensor: int
    pipeline: int
    sequence: bool = False  # activations between the cut layers are cut along the row


def transformer_config(
    model: PreTrainedModel,
    axes: Axes,
    *,
    dtype: torch.dtype,
    recompute: bool | int,
    stage: int,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> TransformerConfig:
    """Megatron's configuration of a Hugging Face model. `recompute`: the layers whose activations are recomputed, the
    first so many of the model, or all. `more`: options that the spec adds. Raises ModelError for what its layers do not
    compute."""
    text: Any = model.config.get_text_config()
    if text.hidden_act != "silu":
        raise ModelError(f"Megatron's layers here compute silu, and this model {text.hidden_act}")
    if set(getattr(text, "layer_types", None) or ()) - {"full_attention"}:
        raise ModelError("the engine megatron has no sliding window, which this model has")
    each = text.num_hidden_layers // axes.pipeline
    layers = each if recompute is True else min(each, max(0, int(recompute) - stage * each))  # of this stage
    recomputed = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}
    heads = text.num_attention_heads
    qk_norm = any(name.endswith("q_norm.weight") for name, _ in model.named_parameters())
    qkv_bias = any(name.endswith("q_proj.bias") for name, _ in model.named_parameters())
    return TransformerConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_attention_heads=heads,
        num_query_groups=getattr(text, "num_key_value_heads", None) or heads,
        kv_channels=getattr(text, "head_dim", None) or text.hidden_size // heads,
        ffn_hidden_size=text.intermediate_size,
        layernorm_epsilon=text.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=qk_norm,
        add_bias_linear=False,
        add_qkv_bias=qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=axes.tensor,
        pipeline_model_parallel_size=axes.pipeline,
        sequence_parallel=axes.sequence,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the other one takes rows of one length alone
        calculate_per_token_loss=True,  # gradients are summed over ranks; losses divide by global counts
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        async_tensor_model_parallel_allreduce=torch.cuda.is_available(),
        **(recomputed if layers else {}),
        **more,
    )


def build_stage(
    model: PreTrainedModel, config: TransformerConfig, *, tied: bool, scores: bool, positions: int
) -> Stage:
    """This rank's stage of a Hugging Face model on meta, its weights unset."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    inner = layer.submodules
    inner.input_layernorm = inner.pre_mlp_layernorm = RmsNorm
    attention = inner.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    layers = config.num_layers // config.pipeline_model_parallel_size
    text: Any = model.config.get_text_config()
    stage: Stage = Stage(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RmsNorm),
        vocab_size=padded_vocabulary(text.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
    )
    stage.rotary_pos_emb = PackedRope(inverse_frequency(model).to(_device()))
    if scores and stage.post_process:
        del stage.output_layer
        stage.score = nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
    stage.to(_device())
    return stage


def inverse_frequency(model: PreTrainedModel) -> Tensor:
    """Of the model's rotary embedding, scaling of long contexts included. Raises ModelError where that also scales
    attention itself."""
    rope: Any = model.base_model.rotary_emb
    if float(rope.attention_scaling) != 1.0:
        raise ModelError(f"the engine megatron does not scale rotary values by {rope.attention_scaling}")
    frequency: Tensor = rope.inv_freq
    return frequency.float()


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
