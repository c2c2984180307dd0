"""The samples of ranks that compute together: each brings its own, and all have those of all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed as dist

from backends import activity
from backends.ulysses.sequence_group import all_gather
from specs.wire.batch import Batch
from specs.wire.wire_tensors import decode, encode


@dataclass(frozen=True)
class SharedBatch:
    """The samples of all ranks of a group, in the order of ranks, and which of them are this rank's."""

    batch: Batch
    own_T: slice
    own_B: slice


def share_batch(batch: Batch, group: dist.ProcessGroup | None, device: torch.device) -> SharedBatch:
    """All ranks of the group call it together, with the same columns; some may have no sample. None: a rank alone."""
    if group is None:
        return SharedBatch(batch, slice(None), slice(None))
    batches = [Batch(decode(blob)) for blob in _gathered(encode(batch.columns), group, device)]
    before = batches[: group.rank()]
    token, sample = sum(each.num_tokens for each in before), sum(len(each) for each in before)
    own_T, own_B = slice(token, token + batch.num_tokens), slice(sample, sample + len(batch))
    joined = Batch.concat(batches)
    activity.describe_samples(len(joined), joined.num_tokens, ranks=len(batches))
    return SharedBatch(joined, own_T, own_B)


def sum_of_ranks(
    column: NDArray[np.float32], group: dist.ProcessGroup | None, device: torch.device
) -> NDArray[np.float32]:
    """Return a column of the group's batch whole, of which each rank knows a part and has 0 elsewhere. A collective."""
    if group is None:
        return column
    total = torch.from_numpy(column).to(device)
    dist.all_reduce(total, group=group)
    return np.asarray(total.cpu().numpy())


def _gathered(blob: bytearray, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """Each rank's bytes: first how many, then, all filled up to the most, themselves."""
    sizes = torch.zeros(group.size(), dtype=torch.int64, device=device)
    own = torch.tensor([len(blob)], dtype=torch.int64, device=device)
    all_gather(sizes, own, group)
    lengths = sizes.tolist()
    filled = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    filled[: len(blob)].copy_(torch.frombuffer(blob, dtype=torch.uint8))
    every = torch.empty(group.size() * len(filled), dtype=torch.uint8, device=device)
    all_gather(every, filled, group)
    parts = every.cpu().view(group.size(), -1)
    return [part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]
