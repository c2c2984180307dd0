"""Checks with the first weights that decoding through the cache equals the model's own forward pass."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from backends.packed.layout import PackedLayout
from backends.packed.packed_attention import use_layout
from backends.torch_rollout.kv_cache import KvCache, LayerShape, PromptLayout
from backends.torch_rollout.prefill import prefill
from backends.torch_rollout.runner import Forward, packed_positions
from backends.torch_rollout.segments import split
from specs.errors import ModelError

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}  # of log-probs, nats
"""Wrong attention shows as whole nats; rounding does not come near."""


def attention_shapes(model: PreTrainedModel, device: torch.device) -> dict[int, LayerShape]:
    """Shapes of every layer's keys and values, seen in a forward pass of one token rather than read from a config."""
    layout = PromptLayout([1], device)
    token = torch.zeros(1, dtype=torch.int64, device=device)
    with use_layout(layout):
        model(input_ids=token[None], position_ids=token[None], attention_mask=layout.mask, use_cache=False)
    if not layout.kept:
        raise ModelError(f"{type(model).__name__} does not call attention through transformers' AttentionInterface")
    return {
        layer: LayerShape(key.shape[1], key.shape[2], value.shape[2]) for layer, (key, value) in layout.kept.items()
    }


@torch.inference_mode()
def check_decoding(model: PreTrainedModel, forward: Forward, device: torch.device) -> None:
    """Two short sequences, ragged: prompt at once and token by token, against the plain forward pass of each alone.

    Raises ModelError: catches models with state besides attention, and positions or masks that a packed row breaks.
    """
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(vocab, (length,), generator=generator) for length in (7, 9)]
    wanted = [model(input_ids=s[None].to(device), use_cache=False).logits[0].float().log_softmax(-1) for s in sequences]
    got = _by_cache(model, forward, device, sequences, prompts=[3, 5])
    worst = max(float((w[start - 1 :] - g).abs().max()) for w, g, start in zip(wanted, got, (3, 5), strict=True))
    limit = TOLERANCE.get(model.dtype, 0.25)
    if not worst <= limit:  # also true for NaN
        raise ModelError(
            f"{type(model).__name__} decoded through the cache is off by {worst:.3g} nats from its own forward pass",
            hint="the torch rollout engine cannot run this model",
        )


def _by_cache(
    model: PreTrainedModel, forward: Forward, device: torch.device, sequences: list[Tensor], prompts: list[int]
) -> list[Tensor]:
    """log-probs [length - prompt + 1, V] of each sequence from the last prompt token on."""
    ready = prefill([s[:n].numpy() for s, n in zip(sequences, prompts, strict=True)], forward, device)
    cache = KvCache(attention_shapes(model, device), len(sequences), max(map(len, sequences)), device, model.dtype)
    cache.fill(0, [(prompt.first_row, prompt.length) for prompt in ready], ready[0].block.kept)
    logits = [ready[0].block.logits]
    for step in range(len(sequences[0]) - prompts[0]):
        positions = torch.tensor([n + step for n in prompts])
        tokens = torch.stack([s[p] for s, p in zip(sequences, positions.tolist(), strict=True)]).to(device)
        cache.begin_step(positions.numpy(), positions.to(device), split(positions.numpy() + 1))
        logits.append(forward(tokens, positions.to(device), cache))
    return list(torch.stack(logits, 1).float().log_softmax(-1))


def same_forward(one: Forward, other: Forward, vocab: int, device: torch.device, limit: float) -> bool:
    """Whether two forwards give the same log-probs on random tokens."""
    lengths = [5, 8]
    tokens_T = torch.randint(vocab, (13,), generator=torch.Generator().manual_seed(0)).to(device)
    positions = packed_positions(lengths, device)
    first, second = (
        f(tokens_T, positions, PackedLayout(lengths, device)).float().log_softmax(-1) for f in (one, other)
    )
    return bool((first - second).abs().max() <= limit)
