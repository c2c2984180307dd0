"""The figures of packing that docs/benchmarks.md states hold: waste and evenness, on fixed seeds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from bench_packing import BUDGET, SHAPES, Figures, as_rlctl, gsm8k, long_tail, make_batch, plain, two_kinds  # noqa: E402

from specs.wire.model_flops import DecoderSize  # noqa: E402

DATA = os.environ.get("RLCTL_TEST_DATA")
SIZE = DecoderSize.of(SHAPES["7B"])


@pytest.mark.skipif(DATA is None, reason="RLCTL_TEST_DATA is not set")
@pytest.mark.parametrize(("groups", "size", "ranks"), [(16, 8, 2), (64, 8, 4), (64, 8, 8), (256, 4, 16), (128, 16, 64)])
def test_on_the_lengths_of_gsm8k_hardly_a_row_is_wasted(groups: int, size: int, ranks: int) -> None:
    assert SIZE is not None
    batch = make_batch(gsm8k(Path(str(DATA)) / "gsm8k" / "train.jsonl")(groups, size, 1))
    figures = Figures.of(batch, SIZE, as_rlctl(batch, SIZE, ranks, BUDGET))
    assert figures.waste < 0.02
    assert figures.sdpa < 0.02, "nor what sdpa fills up"
    assert figures.imbalance < 1.05
    assert figures.idle == 0


@pytest.mark.parametrize("lengths", [long_tail, two_kinds])
@pytest.mark.parametrize(("groups", "size", "ranks"), [(16, 8, 2), (64, 8, 4), (64, 8, 8), (256, 4, 16), (128, 16, 64)])
def test_on_a_long_tail_ranks_have_even_work(lengths, groups: int, size: int, ranks: int) -> None:
    assert SIZE is not None
    batch = make_batch(lengths(groups, size, 1))
    figures = Figures.of(batch, SIZE, as_rlctl(batch, SIZE, ranks, BUDGET))
    assert figures.imbalance < 1.05
    assert figures.waste < 0.03
    assert figures.lock_step < 1.15, "what ranks take that wait for one another; 1.24 when each evened out its own"
    assert figures.idle == 0, "all ranks make as many micro-batches, and each has work"


def test_even_tokens_are_not_even_work() -> None:
    """What this is compared with: without it the bounds above do not hold."""
    assert SIZE is not None
    batch = make_batch(long_tail(64, 8, 1))
    figures = Figures.of(batch, SIZE, plain(batch, SIZE, 8, BUDGET))
    assert figures.imbalance > 1.05
    assert figures.idle > 0
