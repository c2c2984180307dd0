"""Which rows of a row each rank has."""

from __future__ import annotations

import numpy as np
import pytest

from backends.ulysses import split_attention
from backends.ulysses.sequence_group import ALONE, SequenceGroup
from backends.ulysses.split_attention import sharing


@pytest.mark.parametrize(("size", "tokens"), [(1, 7), (2, 7), (4, 8), (4, 21)])
def test_the_parts_of_a_row_make_the_whole_in_order(size: int, tokens: int) -> None:
    groups = [SequenceGroup(None, size, rank) for rank in range(size)]
    (padding,) = {group.padding(tokens) for group in groups}
    assert 0 <= padding < size
    parts = [group.own_rows(tokens + padding) for group in groups]
    assert len({len(part) for part in parts}) == 1
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(tokens + padding))


def test_a_group_is_in_effect_until_its_block_is_left_by_an_error_too() -> None:
    outer, inner = SequenceGroup(None, 2, 0), SequenceGroup(None, 4, 3)
    assert split_attention._in_effect is ALONE
    with sharing(outer):
        with sharing(inner):
            assert split_attention._in_effect is inner
        with pytest.raises(ZeroDivisionError), sharing(inner):
            1 / 0  # noqa: B018
        assert split_attention._in_effect is outer
    assert split_attention._in_effect is ALONE
