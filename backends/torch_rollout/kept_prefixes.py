"""Keys and values of sequences that wait for their next turn, and attention that continues from them.

Letters: n sequences of a batch, S their longest whole, Q the most new tokens of one, T new tokens of the row, W tokens
of all wholes, H query heads, KV key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from backends.completions import SampleRequest
from backends.packed.layout import groups_of_like_length, masked_attention
from backends.packed.packed_attention import Reach, Scoring, additive_mask
from backends.torch_rollout.kv_cache import LayerTensors, layer_of


@dataclass(frozen=True)
class KeptPrefix:
    """Tokens that went through the model, and what every layer made of them."""

    tokens: NDArray[np.int64]
    kept: LayerTensors  # layer → [tokens, KV, D] twice


class KeptPrefixes:
    """Prefixes by the id of their sample, of at most `limit` tokens together. What does not fit is not kept: episodes
    come back in the order in which they were kept, so that making room would drop what is asked for next."""

    def __init__(self, limit: int) -> None:
        self.limit, self.tokens = limit, 0
        self.held: dict[int, KeptPrefix] = {}

    def put(self, name: int, prefix: KeptPrefix) -> None:
        self.forget([name])
        if self.tokens + len(prefix.tokens) <= self.limit:
            self.held[name] = prefix
            self.tokens += len(prefix.tokens)

    def take(self, request: SampleRequest) -> KeptPrefix | None:
        """Return what is kept of a request's sample, and keep it no longer; None where the request does not
        continue it."""
        found = self.held.get(request.id)
        if found is None:
            return None
        self.forget([request.id])
        count = len(found.tokens)
        goes_on = count < len(request.tokens) and np.array_equal(request.tokens[:count], found.tokens)
        return found if goes_on else None

    def forget(self, names: Collection[int]) -> None:
        for name in names:
            if name in self.held:
                self.tokens -= len(self.held.pop(name).tokens)

    def clear(self) -> None:
        self.forget(list(self.held))


@dataclass(frozen=True)
class _Group:
    """Sequences that are attended as one batch: rows of their new tokens and of their wholes, and the new tokens'
    positions. Right-padded: the last is repeated."""

    new_nQ: Tensor
    whole_nS: Tensor
    position_nQ: Tensor


class ContinuedLayout:
    """Attention of new tokens, packed in a row, of sequences whose beginnings are kept; of some of them nothing may be.

    `kept[layer]` is as a `PromptLayout` leaves it: keys and values of the whole sequences, one after another.
    """

    def __init__(self, prefixes: Sequence[KeptPrefix | None], lengths: Sequence[int], device: torch.device) -> None:
        """`lengths`: how many new tokens each sequence has."""
        self.mask: Tensor | None = torch.zeros(1, 1, 1, 1, device=device)  # 4-D: the model then builds none
        self.kept: LayerTensors = {}
        self._prefixes, self._lengths = prefixes, list(lengths)
        new_B = np.array(self._lengths)
        kept_B = np.array([0 if prefix is None else len(prefix.tokens) for prefix in prefixes])
        whole_B = kept_B + new_B
        first_B, start_B = np.cumsum(new_B) - new_B, np.cumsum(whole_B) - whole_B
        order = np.argsort(-whole_B, kind="stable")
        inverse_T = np.zeros(int(new_B.sum()), dtype=np.int64)
        self._groups: list[_Group] = []
        padded = 0
        for count, longest in groups_of_like_length(whole_B[order].tolist()):
            chosen, order = order[:count, None], order[count:]
            place_nQ = np.minimum(np.arange(int(new_B[chosen].max())), new_B[chosen] - 1)
            new_nQ, position_nQ = first_B[chosen] + place_nQ, kept_B[chosen] + place_nQ
            inverse_T[new_nQ] = padded + np.arange(new_nQ.size).reshape(new_nQ.shape)
            padded += new_nQ.size
            whole_nS = start_B[chosen] + np.minimum(np.arange(longest), whole_B[chosen] - 1)
            columns = (torch.from_numpy(column).to(device) for column in (new_nQ, whole_nS, position_nQ))
            self._groups.append(_Group(*columns))
        self._inverse_T = torch.from_numpy(inverse_T).to(device)
        self._masks: dict[tuple[int, Reach], Tensor] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: Scoring) -> Tensor:
        layer = layer_of(module)
        query_T = query[0].transpose(0, 1)
        keys_W, values_W = self.kept[layer] = self._whole(layer, 0, key), self._whole(layer, 1, value)
        outputs = []
        for number, group in enumerate(self._groups):
            q, k, v = (
                rows.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
                for rows, index in ((query_T, group.new_nQ), (keys_W, group.whole_nS), (values_W, group.whole_nS))
            )
            mask = self._mask(number, how.reach, q)
            if how.function is None:
                out = masked_attention(q, k, v, mask, how.scaling).transpose(1, 2)
            else:
                out = how.function(q, k, v, mask)
            outputs.append(out.flatten(0, 1))
        return torch.cat(outputs).index_select(0, self._inverse_T)[None]

    def _whole(self, layer: int, side: int, new: Tensor) -> Tensor:
        """[1, KV, T, D] of the new tokens → [W, KV, D]. `side`: 0 for keys, 1 for values."""
        parts: list[Tensor] = []
        for prefix, part in zip(self._prefixes, new[0].transpose(0, 1).split(self._lengths), strict=True):
            parts += [part] if prefix is None else [prefix.kept[layer][side], part]
        return torch.cat(parts)

    def _mask(self, number: int, reach: Reach, like: Tensor) -> Tensor:
        """[n, 1, Q, S] of 0 and -inf."""
        if (number, reach) not in self._masks:
            group = self._groups[number]
            key_position = torch.arange(group.whole_nS.shape[1], device=like.device)
            hidden = reach.hides(group.position_nQ[..., None], key_position)
            self._masks[number, reach] = additive_mask(hidden, like.dtype)[:, None]
        return self._masks[number, reach]
