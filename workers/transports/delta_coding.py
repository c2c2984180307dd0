"""The changed words of a weight, written small: where they are, and by how much they differ from those before.

An update at a small learning rate leaves most bf16 weights as they were, and moves the others by one or few steps of
their grid. So a delta has two streams, each deflated: gaps between changed words, and differences of words as integers
modulo 2^bits, folded so that small ones of either sign are small (zigzag), byte by byte of all. On weights of a real
training that is half of what XOR deflated takes, at twice the speed.

W: words of a weight, C: those that changed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specs.errors import SyncError

_LEVEL = 1  # of deflate: more takes twice as long for a twentieth
_PIECE_WORDS = 1 << 20  # compared at once, so that the cache holds them
_SKIP = 255  # a gap's byte that says: so many words and no change yet
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Delta:
    """The two streams, deflated."""

    gaps: bytes
    values: bytes

    @property
    def nbytes(self) -> int:
        return len(self.gaps) + len(self.values)


def delta_of(before: Bytes, after: Bytes, word_bytes: int) -> Delta | None:
    """Encode what leads from `before` to `after`, contiguous and of equal length. None: it would be as long as
    `after`."""
    old_W, new_W = before.view(_WORDS[word_bytes]), after.view(_WORDS[word_bytes])
    places, differences, changed = [], [], 0
    for first in range(0, len(new_W), _PIECE_WORDS):
        old, new = old_W[first : first + _PIECE_WORDS], new_W[first : first + _PIECE_WORDS]
        here = np.flatnonzero(old != new)
        places.append(here + first)
        differences.append(new[here] - old[here])
        changed += len(here)
        if 2 * changed > len(new_W):
            return None
    if not changed:
        return Delta(b"", b"")
    delta = Delta(_deflated(_gaps(np.concatenate(places))), _deflated(_planes(np.concatenate(differences))))
    return delta if delta.nbytes < len(after) else None


def apply(delta: Delta, held: Bytes, word_bytes: int, name: str) -> None:
    """Turn the version before, in `held`, into the one after. Raises SyncError naming the weight `name` where the delta
    is not whole."""
    if not delta.nbytes:
        return
    held_W = held.view(_WORDS[word_bytes])
    gaps = _inflated(delta.gaps, 2 * len(held_W) + 1, name)
    place_C = np.cumsum(gaps, dtype=np.int64)[gaps != _SKIP]
    place_C += np.arange(len(place_C))
    planes = _inflated(delta.values, len(place_C) * word_bytes, name)
    if len(planes) != len(place_C) * word_bytes or not len(place_C) or place_C[-1] >= len(held_W):
        raise SyncError(f"the delta of weight {name} does not fit it")
    held_W[place_C] += _differences(planes, held_W.dtype)


def _gaps(place_C: NDArray[np.int64]) -> Bytes:
    gap_C = np.diff(place_C, prepend=-1) - 1
    skips_C = gap_C // _SKIP
    end_C = np.cumsum(skips_C + 1)
    stream = np.full(end_C[-1], _SKIP, dtype=np.uint8)
    stream[end_C - 1] = gap_C % _SKIP
    return stream


def _planes(difference_C: NDArray[np.generic]) -> Bytes:
    signed_C = difference_C.view(f"i{difference_C.itemsize}")
    folded_C = (signed_C << 1) ^ (signed_C >> (8 * signed_C.itemsize - 1))
    return np.ascontiguousarray(folded_C.view(np.uint8).reshape(-1, signed_C.itemsize).T).reshape(-1)


def _differences(planes: Bytes, words: np.dtype[np.generic]) -> NDArray[np.generic]:
    folded_C = np.ascontiguousarray(planes.reshape(words.itemsize, -1).T).reshape(-1).view(words)
    one = words.type(1)
    unfolded_C: NDArray[np.generic] = (folded_C >> one) ^ (~(folded_C & one) + one)
    return unfolded_C


def _deflated(stream: Bytes) -> bytes:
    return zlib.compress(stream.data, _LEVEL)


def _inflated(stream: bytes, most: int, name: str) -> Bytes:
    """At most `most` bytes of it."""
    reader = zlib.decompressobj()
    try:
        whole = reader.decompress(stream, most + 1)
    except zlib.error as error:
        raise SyncError(f"the delta of weight {name} is broken: {error}") from None
    if not reader.eof or len(whole) > most:
        raise SyncError(f"the delta of weight {name} does not fit it")
    return np.frombuffer(whole, dtype=np.uint8)
