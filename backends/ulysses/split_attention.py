"""Attention over rows that several ranks share: each attends over all rows with some of the heads.

While a sequence group is in effect (`sharing`), a model runs on this rank's rows of a packed row, and every attention
function of transformers' registry, whichever the model calls, gets whole rows. Masks, layouts and the ends of sequences
are those of the whole row on every rank.

Letters: T tokens of the whole row, L of them this rank's, H query heads, KV key/value heads, D head dim, S ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from backends.ulysses.exchange import heads_to_rows, rows_to_heads
from backends.ulysses.sequence_group import ALONE, SequenceGroup
from specs.errors import ModelError
from specs.model_facts import shares_out, sharing_degrees
from specs.text import listed

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
# Tensors among the keyword arguments of an attention function, by what they are of. Any other is refused.
_OF_HEADS = ("s_aux", "sinks")
_OF_OWN_ROWS = ("position_ids", "cache_position")  # the function must not take them for those of all rows
_OF_WHOLE_ROW = ("cu_seq_lens_q", "cu_seq_lens_k")

# A plain global for the same reason as the current layout: recomputation on the autograd engine's threads reads it.
_in_effect: SequenceGroup = ALONE


# ── which group is in effect ──────────────────────────────────────────────────────────────────────


@contextmanager
def sharing(group: SequenceGroup) -> Iterator[None]:
    """Put `group` into effect; it must stay so until the backward pass is done (recomputation). For a rank alone, the
    registry is as it was."""
    previous = _in_effect
    _put(group)
    try:
        yield
    finally:
        _put(previous)


def _put(group: SequenceGroup) -> None:
    global _in_effect
    _in_effect = group
    if group.alone:
        _unwrap_registry()
    else:
        _wrap_registry()


def _wrap_registry() -> None:
    for name, function in list(ALL_ATTENTION_FUNCTIONS.items()):
        if not isinstance(function, _SplitAttention):
            ALL_ATTENTION_FUNCTIONS[name] = _SplitAttention(name, function)


def _unwrap_registry() -> None:
    for name, function in list(ALL_ATTENTION_FUNCTIONS.items()):
        if isinstance(function, _SplitAttention):
            del ALL_ATTENTION_FUNCTIONS[name]  # what is registered for all models shows again
            if ALL_ATTENTION_FUNCTIONS.get(name) is not function.whole:
                ALL_ATTENTION_FUNCTIONS[name] = function.whole


# ── attention ─────────────────────────────────────────────────────────────────────────────────────


class _SplitAttention:
    """An attention function for this rank's rows, made of one for whole rows."""

    def __init__(self, name: str, whole: AttentionFunction) -> None:
        self.name, self.whole = name, whole

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """query [1, H, L, D], key and value [1, KV, L, D] → [1, L, H, D]. Raises ModelError."""
        group, heads = _in_effect, query.shape[1]
        self._check_ends(module, query.shape[2] * group.size, attention_mask, kwargs)
        given = _whole_row_kwargs(module, heads, kwargs, group)
        key, value = (for_each_rank(each, heads, group) for each in (key, value))
        query, key, value = rows_to_heads((query, key, value), group)
        part = _with_own_heads(module, heads, query.shape[1] // key.shape[1], group)
        attended, _ = self.whole(part, query, key, value, attention_mask, **given)
        return heads_to_rows(attended, group), None

    def _check_ends(self, module: nn.Module, tokens: int, mask: Any, kwargs: Mapping[str, Any]) -> None:
        """Raises ModelError where the function cannot know where the sequences of the whole row end."""
        if mask is None and kwargs.get("cu_seq_lens_q") is None:
            wrong = "gets neither a mask nor the ends of sequences"
        elif mask is not None and mask.shape[1] != 1:
            wrong = f"has a mask for each of {mask.shape[1]} heads"
        elif mask is not None and mask.shape[-1] not in (1, tokens):  # 1: a layout's
            wrong = f"has a mask of {mask.shape[-1]} tokens, and the whole row has {tokens}"
        else:
            return
        raise _unsplittable(module, f"{self.name} attention {wrong}")


def for_each_rank(x: Tensor, heads: int, group: SequenceGroup) -> Tensor:
    """Keys or values [1, KV, L, D], repeated where they have fewer heads than there are ranks: each rank gets the one
    that its query heads use."""
    size, own = group.size, x.shape[1]
    if not shares_out(heads, own, size):
        raise ModelError(
            f"attention with {heads} query heads and {own} key-value heads cannot be shared by {size} ranks",
            hint=f"set sequence_parallel to {listed(sharing_degrees(heads, own))}",
        )
    return x if own % size == 0 else x.repeat_interleave(size // own, 1)


def _whole_row_kwargs(module: nn.Module, heads: int, kwargs: Mapping[str, Any], group: SequenceGroup) -> dict[str, Any]:
    """Keyword arguments as the function for whole rows takes them on this rank."""
    given: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name in _OF_OWN_ROWS:
            continue
        given[name] = value
        if isinstance(value, Tensor) and name not in _OF_WHOLE_ROW:
            if name not in _OF_HEADS or value.shape != (heads,):
                raise _unsplittable(module, f"its attention takes {name} of the shape {list(value.shape)}")
            given[name] = _own_heads(value, group)
    return given


def _with_own_heads(module: nn.Module, heads: int, query_heads_per_key: int, group: SequenceGroup) -> nn.Module:
    """The module as it would be with this rank's heads alone: some functions read these things from it."""
    part = object.__new__(type(module))
    part.__dict__.update(module.__dict__)
    if hasattr(module, "num_key_value_groups"):
        part.__dict__["num_key_value_groups"] = query_heads_per_key
    for name in _OF_HEADS:
        of_heads = getattr(module, name, None)
        if isinstance(of_heads, Tensor) and of_heads.shape == (heads,):
            part.__dict__[name] = _own_heads(of_heads, group)  # found before the parameter of that name
    return part


def _own_heads(of_heads: Tensor, group: SequenceGroup) -> Tensor:
    """[H] → [H/S]."""
    return of_heads.chunk(group.size)[group.rank]


def _unsplittable(module: nn.Module, why: str) -> ModelError:
    return ModelError(
        f"{type(module).__name__} cannot be shared by several ranks: {why}",
        hint="set sequence_parallel = 1 for this role",
    )
