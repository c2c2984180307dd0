"""Decode the text that the policy wrote in each sample, without that of tools and environments, which must not earn
reward."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backends.hf.tokenizer import TextCodec
from specs.wire.batch import Batch


class Stretches(NamedTuple):
    """The runs of loss tokens of a batch, in order: places in its `_T` columns, and the sample of each."""

    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    sample: NDArray[np.int64]


def stretches(batch: Batch) -> Stretches:
    """Find them: masks [0, 1, 1, 0, 1] and [1] give places 1–3 and 4–5 of sample 0, and 5–6 of sample 1."""
    mask_T, offsets = batch["loss_mask_T"] != 0, batch.offsets
    # A run ends where its sample does, so a gap stands before and behind each.
    gaps_T = np.insert(mask_T, offsets, False)
    edges = np.flatnonzero(gaps_T[1:] != gaps_T[:-1])
    sample = np.searchsorted(offsets + np.arange(len(offsets)), edges[::2], side="right") - 1
    return Stretches(edges[::2] - sample, edges[1::2] - sample, sample)


def completion_texts(batch: Batch, codec: TextCodec, *, special_tokens: bool = False) -> list[str]:
    """Decode each run of loss tokens; several turns are joined by line breaks, so that the end of one turn and the
    start of the next do not merge into a new word or number. Needs `tokens_T`, `loss_mask_T`. `special_tokens`: the
    text has them too, for people; no reward sees them."""
    found, tokens = stretches(batch), batch["tokens_T"].tolist()
    pieces = [tokens[start:stop] for start, stop in zip(found.start.tolist(), found.stop.tolist(), strict=True)]
    texts = codec.decode(pieces, special_tokens=special_tokens)
    first = np.searchsorted(found.sample, np.arange(len(batch) + 1)).tolist()  # stretch of each sample
    return ["\n".join(text for text in texts[start:stop] if text) for start, stop in pairwise(first)]


def prompt_texts(batch: Batch, codec: TextCodec) -> list[str]:
    """Decode what stands before each sample's first loss token: what the model saw, special tokens included, and not
    what its tokenizer dropped."""
    found, tokens = stretches(batch), batch["tokens_T"].tolist()
    stop_B = batch.offsets[1:].copy()
    np.minimum.at(stop_B, found.sample, found.start)
    return codec.decode(
        [tokens[start:stop] for start, stop in zip(batch.offsets.tolist(), stop_B.tolist(), strict=False)],
        special_tokens=True,
    )


def longest_stretches(batch: Batch) -> list[int]:
    """Return the tokens of each sample's longest stretch: what `max_response_tokens`, a limit per call, is compared
    with."""
    found, longest_B = stretches(batch), np.zeros(len(batch), np.int64)
    np.maximum.at(longest_B, found.sample, found.stop - found.start)
    return [int(tokens) for tokens in longest_B]
