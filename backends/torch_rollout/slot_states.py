"""The states of layers that carry one (`backends/packed/state_layers.py`), a row for each slot of the cache.

Letters: n active slots, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from backends.packed.state_layers import Layer, LayerState


class _InPlace(LayerState):
    """States of the active slots, which a layer overwrites with those one token later."""

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, inputs: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        assert self.conv is not None
        whole = torch.cat([self.conv, inputs], -1)
        self.conv.copy_(whole[..., -conv_kernel_size:])
        return whole

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        assert self.recurrent is not None
        return self.recurrent.copy_(state)


class SlotStates:
    """State of each layer in each slot; `StateRows` for decoding, where row i of a step belongs to slot i."""

    def __init__(self, like: Mapping[int, LayerState], slots: int) -> None:
        """`like`: layer → its state after some sequences."""

        def room(state: Tensor | None) -> Tensor | None:
            return None if state is None else state.new_zeros(slots, *state.shape[1:])

        self._layers = {number: LayerState(room(state.conv), room(state.recurrent)) for number, state in like.items()}

    def grown(self, slots: int) -> SlotStates:
        """Return the same states with room for more slots."""
        more = SlotStates(self._layers, slots)
        for room, held in zip(more._rooms(), self._rooms(), strict=True):
            room[: len(held)] = held
        return more

    def run(self, number: int, layer: Layer, hidden_TE: Tensor) -> Tensor:
        active = (None if each is None else each[: len(hidden_TE)] for each in self._layers[number].tensors)
        return layer(hidden_TE[:, None], _InPlace(*active))[:, 0]

    def fill(self, start: int, prompts: Tensor, ended: Mapping[int, LayerState]) -> None:
        """Slots start, start+1, … begin where these prompts of `ended` did end."""
        for number, states in ended.items():
            for room, state in zip(self._layers[number].tensors, states.select(prompts).tensors, strict=True):
                if room is not None and state is not None:
                    room[start : start + len(prompts)] = state

    def copy(self, to: Tensor, of: Tensor) -> None:
        """Slots `to` take what slots `of` held."""
        for room in self._rooms():
            room.index_copy_(0, to, room.index_select(0, of))

    def _rooms(self) -> list[Tensor]:
        return [room for layer in self._layers.values() for room in layer.tensors if room is not None]
