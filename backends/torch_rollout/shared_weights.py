"""Where the sampler's weights lie: those that one matrix product reads lie one after another.

They may lie in memory that another process can map, so that the actor on the same host writes them where the sampler
reads them. That file in memory has no name and lives as long as somebody maps it or holds its descriptor.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from backends.protocol import WeightMemory

ALIGNMENT = 64  # bytes, as torch's own memory


def can_share(device: torch.device) -> bool:
    return device.type == "cpu" and hasattr(os, "memfd_create") and hasattr(mmap, "MADV_REMOVE")


def own_memory(
    weights: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], together: Iterable[Sequence[Tensor]]
) -> None:
    """Give weights memory of this process alone. What they held is lost. Of each group `together` the memory is one,
    so that nothing is ever copied to bring them together."""
    shape = {id(tensor): torch.Size(shapes[name]) for name, tensor in weights.items()}
    for group in _groups(weights, together):
        sizes = [shape[id(tensor)].numel() for tensor in group]
        block = torch.empty(sum(sizes), dtype=group[0].dtype, device=group[0].device)
        for tensor, part in zip(group, block.split(sizes), strict=True):
            tensor.data = part.view(shape[id(tensor)])


class SharedWeights:
    """Gives a model's weights such memory. What they held is lost. Those that belong `together` lie one after another.
    Raises OSError where the memory cannot be had."""

    def __init__(self, weights: Mapping[str, Tensor], together: Iterable[Sequence[Tensor]]) -> None:
        first_byte, nbytes = _places(_groups(weights, together))
        self._descriptor = os.memfd_create("rlctl-weights")
        try:
            os.ftruncate(self._descriptor, nbytes)
            self._map = mmap.mmap(self._descriptor, nbytes)
        except OSError:
            os.close(self._descriptor)
            raise
        whole_U = torch.frombuffer(self._map, dtype=torch.uint8)
        place = {name: first_byte[id(tensor)] for name, tensor in weights.items()}
        for name, tensor in weights.items():
            bytes_U = whole_U[place[name] : place[name] + tensor.nbytes]
            tensor.data = bytes_U.view(tensor.dtype).view(tensor.shape)
        self.shared = WeightMemory(self._descriptor, place)

    def free(self) -> None:
        """Give all pages back, whoever maps them still: whoever reads there finds zeros."""
        self._map.madvise(mmap.MADV_REMOVE)
        os.close(self._descriptor)


def _groups(weights: Mapping[str, Tensor], together: Iterable[Sequence[Tensor]]) -> Iterable[Sequence[Tensor]]:
    grouped = set()
    for group in together:
        grouped |= {id(tensor) for tensor in group}
        yield group
    yield from ([tensor] for tensor in weights.values() if id(tensor) not in grouped)


def _places(groups: Iterable[Sequence[Tensor]]) -> tuple[dict[int, int], int]:
    """First byte of each tensor by its id, and the bytes of all."""
    first_byte, end = {}, 0
    for group in groups:
        end += -end % ALIGNMENT
        for tensor in group:
            first_byte[id(tensor)] = end
            end += tensor.nbytes
    return first_byte, end
