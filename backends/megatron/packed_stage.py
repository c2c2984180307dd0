"""A pipeline stage of Megatron-core's GPT model, on packed rows.

Megatron-core brings the layers, their tensor parallelism and what flows between stages: its local ones, or those that
it makes of TransformerEngine. Of both, attention is replaced, which keeps the sequences of a row apart as everywhere in
rlctl (`backends/packed/layout.py`), and rotary positions, which Megatron counts along the row and which here start
again with each sequence. Of the local ones, so is RMSNorm, which in torch's form does not go with sequence parallelism.
A stage ends with hidden states: the head is `vocab_head.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from backends.megatron.layouts import Experts, padded_vocabulary, part_of
from backends.megatron.own_options import with_options
from backends.megatron.weight_map import ModelMap
from backends.packed.layout import PackedLayout
from backends.packed.packed_attention import Scoring
from backends.train.rms_norm import rms_norm
from backends.ulysses.exchange import heads_to_rows, rows_to_heads
from backends.ulysses.sequence_group import ALONE, SequenceGroup
from backends.ulysses.split_attention import for_each_rank
from backends.weights.tensor_bytes import DTYPES
from specs.errors import ModelError
from specs.schema.engines.megatron_config import LOCAL, TRANSFORMER_ENGINE
from specs.schema.engines.megatron_table import MegatronTable
from specs.wire.role_config import TrainConfig


@dataclass
class PackedRow(PackedSeqParams):  # type: ignore[misc]
    """One packed row on its way through the layers, which pass it on as it is."""

    layout: PackedLayout | None = None
    position_T: Tensor | None = None
    context: SequenceGroup = ALONE  # who share the row: `layout` is of the whole row, all else of this rank's part


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention inside each sequence of the row. Query [T, 1, H, D], others [T, 1, KV, D] → [T, 1, H·D]. Ranks
    that share the row exchange rows for heads (Ulysses, Jacobs et al. 2023)."""

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
        context = packed_seq_params.context
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        if not context.alone:
            key, value = (for_each_rank(each, query.shape[1], context) for each in (key, value))
            query, key, value = rows_to_heads((query, key, value), context)
        out_1THD = packed_seq_params.layout.attend(self, query, key, value, Scoring())
        if not context.alone:
            out_1THD = heads_to_rows(out_1THD, context)
        return out_1THD[0].flatten(1)[:, None]


class PackedRope(nn.Module):
    """Rotary angles [T, 1, 1, D] of the row's positions, from the frequencies of the Hugging Face model."""

    def __init__(self, inverse_frequency: Tensor) -> None:
        super().__init__()
        self.inverse_frequency = inverse_frequency

    def get_rotary_seq_len(self, *arguments: Any) -> PackedRow:
        """Return what Megatron hands on to `forward`: the row, in the place of a length."""
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
        if x.device.type == "cpu" and x.dtype == torch.float32:
            return rms_norm(x, self.weight, self.eps)
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


def transformer_config(
    model: PreTrainedModel, model_map: ModelMap, table: MegatronTable, config: TrainConfig, stage: int
) -> TransformerConfig:
    """Return Megatron's configuration of a Hugging Face model, for one of its groups of layers. Raises ModelError for
    what its layers do not compute."""
    text: Any = model.config.get_text_config()
    if text.hidden_act != "silu":
        raise ModelError(f"Megatron's layers here compute silu, and this model {text.hidden_act}")
    each = text.num_hidden_layers // (table.pipeline_parallel * table.virtual_pipeline)
    recompute = config.gradient_checkpointing  # of the first so many layers of the model, or all
    layers = each if recompute is True else min(each, max(0, int(recompute) - stage * each))  # of this stage
    recomputed = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}
    free = {"transformer_impl": TRANSFORMER_ENGINE if model_map.fused_norms else LOCAL}
    dtype = DTYPES[config.model.dtype]
    settings: dict[str, Any] = dict(
        **table.settings(config.model.dtype, None).fixed,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_attention_heads=model_map.heads.query,
        num_query_groups=model_map.heads.key,
        kv_channels=model_map.heads.dim,
        ffn_hidden_size=text.intermediate_size,
        layernorm_epsilon=text.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=model_map.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=model_map.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        moe_token_dispatcher_type="alltoall",  # the other one takes rows of one length alone
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        async_tensor_model_parallel_allreduce=torch.cuda.is_available(),
        **(recomputed if layers else {}),
        **(_experts(text, model_map.experts) if model_map.experts else {}),
    )
    return with_options(TransformerConfig, settings, {**free, **table.megatron})


def _experts(text: Any, experts: Experts) -> dict[str, Any]:
    """Options of a router that takes the likeliest experts, as many for every token, and drops none. There is no
    auxiliary loss and no noise, as in the other engines."""
    if not hasattr(moe_utils, "te_general_gemm"):
        # Megatron-core 0.16's router asks for TransformerEngine's under this name, which does not exist without it.
        moe_utils.te_general_gemm = None
    chosen = text.num_experts_per_tok
    normalised = getattr(text, "norm_topk_prob", True)  # Mixtral always does so, and has no such key
    if normalised and chosen == 1:
        raise ModelError("Megatron does not normalise the weight of one expert per token, which this model does")
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.inner,
        "moe_router_topk": chosen,
        "moe_router_pre_softmax": not normalised,  # else it is over the chosen alone, which is the same normalised
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def build_stage(
    model: PreTrainedModel, model_map: ModelMap, config: TransformerConfig, *, stage: int, positions: int
) -> Stage:
    """A stage of a Hugging Face model on meta, its weights unset. `stage`: of all groups of layers, of which a rank may
    have several."""
    chunks = config.virtual_pipeline_model_parallel_size
    stages = config.pipeline_model_parallel_size * (chunks or 1)
    here = part_of(model_map.layers, stage, stages)
    layers = [_layer(config, model_map.experts if model_map.is_sparse(layer) else None) for layer in here]
    built: Stage = Stage(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=layers, layer_norm=TENorm if model_map.fused_norms else RmsNorm
        ),
        vocab_size=padded_vocabulary(model_map.vocabulary, config.tensor_model_parallel_size),
        max_sequence_length=positions,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        share_embeddings_and_output_weights=model_map.tied,
        position_embedding_type="rope",
        vp_stage=stage // config.pipeline_model_parallel_size if chunks else None,
    )
    built.rotary_pos_emb = PackedRope(inverse_frequency(model).to(_device()))
    if model_map.scores and built.post_process:
        del built.output_layer
        built.score = nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
    built.to(_device())
    return built


def _layer(config: TransformerConfig, experts: Experts | None) -> Any:
    """The specification of a layer with an MLP, or with experts."""
    what = {
        "num_experts": experts.count if experts else None,
        "moe_grouped_gemm": False,
        "qk_layernorm": config.qk_layernorm,
    }
    if config.transformer_impl == TRANSFORMER_ENGINE:
        layer = get_gpt_layer_with_transformer_engine_spec(**what)
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
        return layer
    layer = get_gpt_layer_local_spec(**what, normalization="RMSNorm")
    inner = layer.submodules
    inner.input_layernorm = inner.pre_mlp_layernorm = RmsNorm
    attention = inner.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return layer


def inverse_frequency(model: PreTrainedModel) -> Tensor:
    """The model's rotary frequencies, scaling of long contexts included. Raises ModelError where that also scales
    attention itself."""
    rope: Any = model.base_model.rotary_emb
    if float(rope.attention_scaling) != 1.0:
        raise ModelError(f"the engine megatron does not scale rotary values by {rope.attention_scaling}")
    frequency: Tensor = rope.inv_freq
    return frequency.float()


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
