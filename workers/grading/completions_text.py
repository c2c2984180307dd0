"""The text that the policy wrote in each sample, without that of tools and environments, which must not earn reward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backends.hf.tokenizer import TextCodec
from specs.wire.batch import Batch


def completion_texts(batch: Batch, codec: TextCodec, *, special_tokens: bool = False) -> list[str]:
    """Decode each run of loss tokens; several turns are joined by line breaks, so that the end of one turn and the
    start of the next do not merge into a new word or number. Needs `tokens_T`, `loss_mask_T`. `special_tokens`: the
    text has them too, for people; no reward sees them."""
    cuts = [stretches(mask) for mask in batch.sequences("loss_mask_T")]
    tokens = batch.sequences("tokens_T")
    pieces = [tokens[i][start:stop].tolist() for i, found in enumerate(cuts) for start, stop in found]
    texts = codec.decode(pieces, special_tokens=special_tokens)
    ends = np.cumsum([len(found) for found in cuts], dtype=np.int64).tolist()
    return [_joined(texts[end - len(found) : end]) for found, end in zip(cuts, ends, strict=True)]


def prompt_texts(batch: Batch, codec: TextCodec) -> list[str]:
    """Decode what stands before each sample's first loss token: what the model saw, special tokens included, and not
    what its tokenizer dropped."""
    tokens, masks = batch.sequences("tokens_T"), batch.sequences("loss_mask_T")
    firsts = [next((start for start, _ in stretches(mask)), len(mask)) for mask in masks]
    pieces = [ids[:first].tolist() for ids, first in zip(tokens, firsts, strict=True)]
    return codec.decode(pieces, special_tokens=True)


def longest_stretches(batch: Batch) -> list[int]:
    """Tokens of each sample's longest stretch: what `max_response_tokens`, a limit per call, is compared with."""
    return [
        max((stop - start for start, stop in stretches(mask)), default=0) for mask in batch.sequences("loss_mask_T")
    ]


def stretches(mask: NDArray[np.integer]) -> list[tuple[int, int]]:
    """Start and stop of each run of ones: [0, 1, 1, 0, 1] → [(1, 3), (4, 5)]."""
    edges = np.flatnonzero(np.diff(mask != 0, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _joined(texts: Sequence[str]) -> str:
    return "\n".join(text for text in texts if text)
