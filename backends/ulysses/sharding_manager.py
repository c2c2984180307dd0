"""The gear between two ways to share out work: by sample, as the driver does it, and by sequence.

Outside, each rank has samples of its own. Inside, the ranks of a sequence group have the same samples, and each
computes a part of every row.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from backends.ulysses.sequence_group import SequenceGroup
from backends.ulysses.shared_batch import SharedBatch, share_batch
from backends.ulysses.split_attention import sharing
from specs.wire.batch import Batch

States = dict[str, Tensor]
"""Device type → state of its generator."""

_innermost: ShardingManager | None = None  # of those that are entered


class ShardingManager:
    """A context manager: inside, its group is in effect, and random numbers come from generators of the group, which
    are the same on all its ranks and go on where they stopped. The previous group and generators come back at the end,
    also after an exception. It may be entered inside another, or again inside itself. A rank alone changes nothing."""

    def __init__(self, group: SequenceGroup, device: torch.device, seed: int) -> None:
        """`seed`: the same on all ranks of the group."""
        self.group, self._device = group, device
        self._states = {} if group.alone else _new_generators(device, seed)
        self._entered: list[tuple[AbstractContextManager[None], ShardingManager | None, States]] = []

    def __enter__(self) -> ShardingManager:
        global _innermost
        if not self.group.alone:
            before = _read_generators(self._device)
            if _innermost is not None:
                _innermost._states = before
            in_effect = sharing(self.group)
            in_effect.__enter__()
            self._entered.append((in_effect, _innermost, before))
            _innermost = self
            _set_generators(self._states)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _innermost
        if not self.group.alone:
            self._states = _read_generators(self._device)
            in_effect, _innermost, before = self._entered.pop()
            _set_generators(before if _innermost is None else _innermost._states)
            in_effect.__exit__(kind, error, trace)

    # ── batches ───────────────────────────────────────────────────────────────────────────────────

    def preprocess(self, batch: Batch) -> SharedBatch:
        """The group's samples. All its ranks call it together, with the same columns; some may have no sample."""
        return share_batch(batch, self.group.group, self._device)

    def postprocess(self, shared: SharedBatch, **columns: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
        """This rank's own part of columns of the group's batch (`_T` or `_B`, as in a `Batch`)."""
        return {name: column[shared.own_T if name.endswith("_T") else shared.own_B] for name, column in columns.items()}

    def joined(self, column: NDArray[np.float32]) -> NDArray[np.float32]:
        """A column of the group's batch of which each rank knows a part, 0 elsewhere: the sum over ranks, which all
        get."""
        if self.group.alone:
            return column
        total = torch.from_numpy(column).to(self._device)
        dist.all_reduce(total, group=self.group.group)
        return np.asarray(total.cpu().numpy())

    # ── random numbers ────────────────────────────────────────────────────────────────────────────

    def states(self) -> States:
        """States of the group's generators, as they are while it is not entered; nothing for a rank alone. The names
        say how large the group is: in another one they would not be the same on all ranks."""
        return {f"{self.group.size}.{name}": state for name, state in self._states.items()}

    def restore(self, states: States) -> None:
        """Go on from what `states` of as large a group gave; where there is nothing of it, as it is."""
        own = f"{self.group.size}."
        self._states |= {name.removeprefix(own): state for name, state in states.items() if name.startswith(own)}


def _new_generators(device: torch.device, seed: int) -> States:
    kinds = {torch.device("cpu"), device}
    return {kind.type: torch.Generator(kind).manual_seed(seed).get_state() for kind in kinds}


def _read_generators(device: torch.device) -> States:
    states = {"cpu": torch.get_rng_state()}
    return states if device.type == "cpu" else {**states, device.type: torch.cuda.get_rng_state()}


def _set_generators(states: States) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
