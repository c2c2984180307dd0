"""Where completions begin and end, with holes anywhere and samples without loss tokens."""

from __future__ import annotations

import numpy as np

from specs.wire.batch import Batch
from workers.grading.completions_text import longest_stretches, stretches


def test_stretches_of_many_masks_are_those_of_each() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        masks = [rng.integers(0, 2, rng.integers(1, 7)).astype(np.uint8) for _ in range(rng.integers(1, 6))]
        length_B = np.array([len(mask) for mask in masks], np.int64)
        batch = Batch({"length_B": length_B, "loss_mask_T": np.concatenate(masks)})
        wanted, first = [], 0
        for sample, mask in enumerate(masks):
            text = "".join(map(str, mask.tolist()))
            at = 0
            for run in text.split("0"):
                wanted += [(first + at, first + at + len(run), sample)] if run else []
                at += len(run) + 1
            first += len(mask)
        found = stretches(batch)
        assert list(zip(*map(np.ndarray.tolist, found), strict=True)) == wanted
        longest = [max((stop - start for start, stop, of in wanted if of == n), default=0) for n in range(len(masks))]
        assert longest_stretches(batch) == longest
