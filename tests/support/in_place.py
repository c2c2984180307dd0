"""Weights written into the memory that the torch sampler shares, as an actor in another process does it."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import torch

from backends.hf.hf_model import tensor_bytes
from backends.torch_rollout.engine import TorchRolloutEngine
from backends.weights.checksum import checksum_bytes


def write_in_place(engine: TorchRolloutEngine, source: Mapping[str, torch.Tensor]) -> mmap.mmap:
    """As an actor does in another process: through a mapping of its own, which it keeps."""
    shared = engine.share_weights()
    assert shared is not None
    mapped = mmap.mmap(shared.descriptor, 0)
    for spec in engine.weight_specs():
        start = shared.place[spec.name]
        mapped[start : start + spec.nbytes] = tensor_bytes(source[spec.name]).tobytes()
        halves = (spec.nbytes // 2, spec.nbytes - spec.nbytes // 2)
        assert engine.import_in_place(spec, iter(halves)) == checksum_bytes(tensor_bytes(source[spec.name]))
    engine.finish_import()
    return mapped
