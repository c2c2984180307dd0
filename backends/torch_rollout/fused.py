"""A fused forward pass for Llama-like models.

Decoding a small model costs kernel launches, not arithmetic: transformers makes some 40 per layer, this some 15. The
projections of queries, keys and values lie in one matrix, those of gate and up in another; the model's own
parameters become views of them, so nothing is held twice and syncs write through. Rotary embeddings are computed once,
in a table. Which models qualify is decided by their class, and then by comparison: a model for which this does not
give the generic path's log-probs keeps the generic path.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from backends.hf.matmul import add_linear, linear
from backends.packed.packed_attention import Layout, Reach, Scoring
from backends.torch_rollout.decode_check import compare_forwards
from backends.torch_rollout.runner import ROPE_BY_LENGTH, Forward, GenericForward

_ACTIVATIONS = {"silu": F.silu, "swish": F.silu}
LEAST_TABLE = 4096  # positions of the rotary table: what is scored may be longer than what is sampled
_MODELS = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


def choose_forward(model: PreTrainedModel, device: torch.device, max_len: int) -> Forward:
    """The fused path where it fits and proves equal, else the generic one; that it does not is said. Needs weights."""
    generic = GenericForward(model)
    if not _fits(model):
        return generic
    fused = FusedForward(model, device, max_len)
    found = compare_forwards(generic, fused, model.config.vocab_size, device, model.dtype)
    if found.same:
        return fused
    what = f"off by {found.gap:.3g} nats from the model's own (allowed {found.allowed:.3g})"
    print(f"fused forward of {type(model).__name__}: {what}; sampling by the slower path", file=sys.stderr, flush=True)
    return generic


def _fits(model: PreTrainedModel) -> bool:
    if type(model).__name__ not in _MODELS or model.config.hidden_act not in _ACTIVATIONS:
        return False
    if getattr(model.model.rotary_emb, "rope_type", "dynamic") in ROPE_BY_LENGTH:  # no table
        return False
    return all(layer.mlp.down_proj.bias is None for layer in model.model.layers)


def side_by_side(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Parameters that the fused path wants one after another in memory."""
    for layer in model.model.layers if _fits(model) else ():
        for parts in _joined_layers(layer):
            yield [part.weight for part in parts]
            if parts[0].bias is not None:
                yield [part.bias for part in parts]


def _joined_layers(layer: nn.Module) -> tuple[tuple[nn.Linear, ...], tuple[nn.Linear, ...]]:
    attention: Any = layer.self_attn  # of one of _MODELS
    mlp: Any = layer.mlp
    return (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)


@dataclass(frozen=True)
class FusedLinear:
    """Several linear layers of one input, as one. `weight` is the memory that the layers' parameters view."""

    weight: Tensor
    bias: Tensor | None

    @staticmethod
    def of(*parts: nn.Linear) -> FusedLinear:
        biased = parts[0].bias is not None
        return FusedLinear(_join([p.weight for p in parts]), _join([p.bias for p in parts]) if biased else None)


def _join(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor of all their rows, of which they become views, if they are not yet."""
    first, rows = parameters[0].data, sum(len(p) for p in parameters)
    ends = [p.data_ptr() + p.nbytes for p in parameters]
    one_memory = len({p.untyped_storage().data_ptr() for p in parameters}) == 1
    if one_memory and ends[:-1] == [p.data_ptr() for p in parameters[1:]]:
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    joined = torch.cat([p.data for p in parameters])
    for parameter, view in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
        parameter.data = view
    return joined


class FusedForward(Forward):
    """`Forward` for Llama, Mistral, Qwen2 and Qwen3."""

    capturable = True

    def __init__(self, model: PreTrainedModel, device: torch.device, max_len: int) -> None:
        self.model = model
        self.layers = list(model.model.layers)
        self.num_layers, self.carries_state, self.keeps_prefixes = len(self.layers), False, True
        self.eps = float(model.config.rms_norm_eps)
        # Mistral reads it from the config, the Qwens from the layer, Llama has none.
        everywhere = model.config.sliding_window if type(model).__name__ == "MistralForCausalLM" else None
        self.reaches = [Reach(getattr(layer.self_attn, "sliding_window", everywhere)) for layer in self.layers]
        self.eps_tensor = torch.tensor(self.eps, device=device)
        self.rotary = self._rotary_tables(max(max_len, LEAST_TABLE), device)
        self.join()

    def _rotary_tables(self, max_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and signed sin [max_len, D]: [x1, x2] becomes [x1, x2]·cos + [x2, x1]·[-sin, sin]."""
        like = torch.zeros(1, device=device, dtype=self.model.dtype)
        cos, sin = self.model.model.rotary_emb(like, torch.arange(max_len, device=device)[None])
        half = sin.shape[-1] // 2
        return cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)

    @torch.inference_mode(False)
    def join(self) -> None:
        """Put the projections side by side."""
        joined = [[FusedLinear.of(*parts) for parts in _joined_layers(layer)] for layer in self.layers]
        self.qkv, self.gate_up = [qkv for qkv, _ in joined], [gate_up for _, gate_up in joined]

    def release(self) -> None:
        self.qkv, self.gate_up = [], []

    def __call__(self, tokens_T: Tensor, position_T: Tensor, layout: Layout, keep: Tensor | None = None) -> Tensor:
        base = self.model.model
        x = F.embedding(tokens_T, base.embed_tokens.weight)
        cos, signed_sin = (table.index_select(0, position_T)[:, None] for table in self.rotary)
        for number in range(len(self.layers)):
            x = self._layer(number, x, cos, signed_sin, layout)
        if keep is not None:
            x = x.index_select(0, keep)
        head = self.model.lm_head
        return linear(self._norm(x, base.norm), head.weight, head.bias)

    def _layer(self, number: int, x: Tensor, cos: Tensor, signed_sin: Tensor, layout: Layout) -> Tensor:
        block, qkv = self.layers[number], self.qkv[number]
        attention = block.self_attn
        dim = attention.head_dim
        heads = linear(self._norm(x, block.input_layernorm), qkv.weight, qkv.bias).unflatten(-1, (-1, dim))
        kv_heads = attention.k_proj.weight.shape[0] // dim
        query_heads = heads.shape[1] - 2 * kv_heads
        if hasattr(attention, "q_norm"):
            query = self._norm(heads[:, :query_heads], attention.q_norm)
            key = self._norm(heads[:, query_heads : query_heads + kv_heads], attention.k_norm)
            rotated = torch.cat([query, key], 1)
        else:
            rotated = heads[:, : query_heads + kv_heads]
        rotated = torch.addcmul(rotated * cos, rotated.roll(dim // 2, -1), signed_sin)
        query, key = (t.transpose(0, 1)[None] for t in rotated.split([query_heads, kv_heads], 1))
        value = heads[:, query_heads + kv_heads :].transpose(0, 1)[None]
        out = layout.attend(attention, query, key, value, Scoring(attention.scaling, self.reaches[number]))
        x = add_linear(x, out[0].flatten(1), attention.o_proj)
        gate, up = linear(
            self._norm(x, block.post_attention_layernorm), self.gate_up[number].weight, self.gate_up[number].bias
        ).chunk(2, -1)
        return add_linear(x, F.silu(gate, inplace=True).mul_(up), block.mlp.down_proj)

    def _norm(self, x: Tensor, norm: nn.Module) -> Tensor:
        weight = cast(Tensor, norm.weight)
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        # On CPU rms_norm is made of nine calls; this is five, and four of them are on one number per row.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps_tensor, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight)
