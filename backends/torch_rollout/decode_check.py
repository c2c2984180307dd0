"""Checks with the first weights that decoding through the cache equals the model's own forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from backends.packed.layout import PackedLayout
from backends.packed.packed_attention import use_layout
from backends.packed.state_layers import LayerState, PromptPlan, use_rows
from backends.torch_rollout.kept_prefixes import KeptPrefix
from backends.torch_rollout.kv_cache import KvCache, LayerTensors, PromptLayout, split
from backends.torch_rollout.runner import Forward, packed_positions, prefill
from backends.weights.tensor_bytes import wire_dtype
from specs.errors import ModelError
from specs.rounding import Tolerance

LIKELIEST = 16  # tokens that are compared at each position
TOLERANCE = {"fp32": Tolerance(1e-3, 512, "fp32"), "bf16": Tolerance(0.06, 4, "bf16")}
"""Two right forward passes of 16 layers in bf16 were up to 1.5 spacings apart; one layer with other weights 35 and
more, wrong positions 9 and more."""


@dataclass(frozen=True)
class Comparison:
    """Two computations of the same log-probs: how far they are apart, and how far they may be. Both in nats."""

    gap: float
    allowed: float

    @property
    def same(self) -> bool:
        return self.gap <= self.allowed  # not for NaN

    @classmethod
    def of(cls, expected: Tensor, actual: Tensor, dtype: torch.dtype) -> Comparison:
        """The gap of logits [T, V], as a model of `dtype` gave them. The gap is that of the worst position: the mean
        over the tokens that are likeliest there, where the model puts its mass and the logits are largest."""
        count = min(LIKELIEST, expected.shape[-1])
        largest = float(expected.float().abs().max())
        expected, actual = (logits.float().log_softmax(-1) for logits in (expected, actual))
        likeliest = expected.topk(count).indices
        gaps_T = (expected - actual).gather(-1, likeliest).abs().mean(-1)
        return cls(float(gaps_T.max()), TOLERANCE[wire_dtype(dtype)].at(largest))


def kept_of_a_token(model: PreTrainedModel, device: torch.device) -> tuple[LayerTensors, dict[int, LayerState]]:
    """Return what layers keep of a sequence of one token, keys and values, a state, or both: seen in a forward pass
    rather than read from a config."""
    layout = PromptLayout([1], device, model.config.get_text_config().num_hidden_layers)
    rows = PromptPlan([1], device)
    token = torch.zeros(1, dtype=torch.int64, device=device)
    with use_layout(layout), use_rows(rows):
        model(input_ids=token[None], position_ids=token[None], attention_mask=layout.mask, use_cache=False)
    if not layout.kept:
        raise ModelError(f"{type(model).__name__} does not call attention through transformers' AttentionInterface")
    return layout.kept, rows.ended


@torch.inference_mode()
def check_decoding(model: PreTrainedModel, forward: Forward, device: torch.device) -> None:
    """Two short sequences, ragged: prompt at once and token by token, and as later turns of what the cache then holds,
    against the plain forward pass of each alone.

    Raises ModelError: catches a state that is not kept, and positions or masks that a packed row breaks.
    """
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(vocab, (length,), generator=generator) for length in (8, 9)]
    prompts = [4, 5]
    alone = [model(input_ids=s[None].to(device), use_cache=False).logits[0] for s in sequences]
    expected = torch.cat([torch.cat([x[start - 1 :], x[-1:]]) for x, start in zip(alone, prompts, strict=True)])
    found = Comparison.of(expected, torch.cat(_by_cache(model, forward, device, sequences, prompts)), model.dtype)
    if not found.same:
        raise ModelError(
            f"{type(model).__name__} decoded through the cache is off by {found.gap:.3g} nats from its own forward "
            f"pass (allowed {found.allowed:.3g})",
            hint="the torch rollout engine cannot run this model",
        )


def _by_cache(
    model: PreTrainedModel, forward: Forward, device: torch.device, sequences: list[Tensor], prompts: list[int]
) -> list[Tensor]:
    """Logits [length - prompt + 2, V] of each sequence from the last prompt token on; the last ones once more, by a
    later turn where those keep a prefix."""
    ready = prefill([s[:n].numpy() for s, n in zip(sequences, prompts, strict=True)], forward, device)
    cache = KvCache(*kept_of_a_token(model, device), len(sequences), max(map(len, sequences)), device, model.dtype)
    cache.fill(0, ready)
    logits = [ready[0].block.logits]
    for step in range(len(sequences[0]) - prompts[0]):
        positions = torch.tensor([n + step for n in prompts])
        tokens = torch.stack([s[p] for s, p in zip(sequences, positions.tolist(), strict=True)]).to(device)
        cache.begin_step(positions.numpy(), positions.to(device), split(positions.numpy() + 1))
        with use_rows(cache.states):
            logits.append(forward(tokens, positions.to(device), cache))
    last = logits[-1]
    if forward.keeps_prefixes:
        whole, held = [s.numpy() for s in sequences], prompts[::-1]
        kept = [KeptPrefix(s[:n], cache.copy_of(slot, n)) for slot, (s, n) in enumerate(zip(whole, held, strict=True))]
        last = prefill(whole, forward, device, kept)[0].block.logits
    logits.append(last)
    return list(torch.stack(logits, 1))


def compare_forwards(
    expected: Forward, actual: Forward, vocab: int, device: torch.device, dtype: torch.dtype
) -> Comparison:
    """Two forwards of a model of `dtype` on random tokens."""
    lengths = [5, 8]
    tokens_T = torch.randint(vocab, (13,), generator=torch.Generator().manual_seed(0)).to(device)
    positions = packed_positions(lengths, device)
    first, second = (f(tokens_T, positions, PackedLayout(lengths, device)) for f in (expected, actual))
    return Comparison.of(first, second, dtype)
