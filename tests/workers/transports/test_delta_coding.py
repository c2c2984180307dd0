"""Deltas of weights: exact on every width, small where little changed, refused where they are not whole."""

from __future__ import annotations

import numpy as np
import pytest

from specs.errors import SyncError
from workers.transports.delta_coding import _PIECE_WORDS, Delta, apply, delta_of


def changed(before: np.ndarray, places: list[int], seed: int = 1) -> np.ndarray:
    after = before.copy()
    after[places] = np.random.default_rng(seed).integers(0, 256, len(places), dtype=np.uint8)
    return after


@pytest.mark.parametrize("word_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("places", [[], [0], [4095], [0, 1, 2, 4094], [*range(0, 4096, 97)], [254, 255, 256, 3000]])
def test_a_delta_leads_to_the_next_version_to_the_bit(word_bytes: int, places: list[int]) -> None:
    before = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
    after = changed(before, places)
    delta = delta_of(before, after, word_bytes)
    assert delta is not None
    held = before.copy()
    apply(delta, held, word_bytes, "w")
    assert held.tobytes() == after.tobytes()


def test_words_that_wrap_and_gaps_beyond_a_piece() -> None:
    before = np.zeros(2 * (_PIECE_WORDS + 500_000), dtype=np.uint8)
    after = before.copy()
    words, ends = after.view(np.uint16), [0, 3, _PIECE_WORDS - 1, _PIECE_WORDS, _PIECE_WORDS + 499_999]
    words[ends] = [0xFFFF, 0x8000, 0x7FFF, 1, 0x8001]
    delta = delta_of(before, after, 2)
    assert delta is not None
    assert delta.nbytes < 200
    apply(delta, before, 2, "w")
    assert before.tobytes() == after.tobytes()


def test_what_changed_all_over_has_no_delta() -> None:
    rng = np.random.default_rng(0)
    before, after = (rng.integers(0, 256, 4096, dtype=np.uint8) for _ in range(2))
    assert delta_of(before, after, 2) is None


@pytest.mark.parametrize("spoil", ["cut gaps", "cut values", "shorter weight", "noise"])
def test_a_delta_that_is_not_whole_names_its_weight(spoil: str) -> None:
    before = np.zeros(4096, dtype=np.uint8)
    delta = delta_of(before, changed(before, [*range(0, 4096, 9)]), 2)
    assert delta is not None
    spoiled = {
        "cut gaps": Delta(delta.gaps[: len(delta.gaps) // 2], delta.values),
        "cut values": Delta(delta.gaps, delta.values[: len(delta.values) // 2]),
        "shorter weight": delta,
        "noise": Delta(b"noise", delta.values),
    }[spoil]
    held = np.zeros(64 if spoil == "shorter weight" else 4096, dtype=np.uint8)
    with pytest.raises(SyncError, match="weight model"):
        apply(spoiled, held, 2, "model")
    assert not held.any()
