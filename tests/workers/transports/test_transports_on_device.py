"""Buckets between two processes, on the transports for GPUs too: those are marked `gpu` and have the body that runs
here."""

from __future__ import annotations

import numpy as np
import pytest
from gpu import needs
from reader_process import ReaderProcess

from backends.weights.checksum import checksum_bytes
from workers.transports import open_writer, sweep
from workers.transports.base import Readers

CASES = [
    pytest.param("group", "cpu", {"address": "127.0.0.1", "device": "cpu"}, {}, id="gloo"),
    pytest.param("cuda_ipc", "cuda", {}, {}, id="cuda_ipc", marks=[pytest.mark.gpu, *needs(1)]),
    pytest.param(
        "group",
        "cuda",
        {"address": "127.0.0.1", "device": "cuda"},
        {"NCCL_HOSTID": "reader"},  # else NCCL refuses to put both on one GPU
        id="nccl",
        marks=[pytest.mark.gpu, *needs(1)],
    ),
]
NBYTES, BUCKETS, WINDOWS = 1 << 20, 5, 2


@pytest.mark.parametrize(("kind", "device", "options", "env"), CASES)
def test_buckets_reach_another_process_and_windows_are_used_again(kind, device, options, env) -> None:
    """Five buckets through two windows, twice, other bytes in each; the reader hashes what it finds."""
    entries = [{"name": "w", "dtype": "fp32", "shape": [NBYTES // 4], "nbytes": NBYTES, "offset": 0}]
    rng = np.random.default_rng(0)
    writer, reader = open_writer(kind, options), ReaderProcess(env)
    try:
        for again in (False, True):
            offer = writer.begin([NBYTES] * BUCKETS, WINDOWS, Readers([[0]], renew=not again))
            told = {"begin": offer, "transport": kind, "options": options, "replica": 0}
            assert reader.ask(told) == "ok"
            for bucket in range(BUCKETS):
                content_U = rng.integers(0, 256, NBYTES, dtype=np.uint8)
                fill(writer.window(bucket), content_U, device)
                writer.send(bucket, entries)
                assert reader.ask({"read": bucket, "entries": entries}) == [checksum_bytes(content_U)]
            assert reader.ask({"rest": True}) == "ok"
            writer.rest()
            sweep(offer["leftovers"])
    finally:
        reader.end()
        writer.close()


def fill(window, content_U, device):
    """A window of a transport for GPUs is device memory."""
    if device == "cpu":
        window[: len(content_U)] = content_U
        return
    import torch

    assert window.is_cuda
    window[: len(content_U)].copy_(torch.from_numpy(content_U))
