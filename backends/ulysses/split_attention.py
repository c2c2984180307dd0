"""Attention over rows that several ranks share.

While a sequence group is in effect (`sharing`), a model runs on this rank's rows of each packed row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from backends.ulysses.sequence_group import ALONE, SequenceGroup

# A plain global for the same reason as the current layout: recomputation on the autograd engine's threads reads it.
_in_effect: SequenceGroup = ALONE


@contextmanager
def sharing(group: SequenceGroup) -> Iterator[None]:
    """Put `group` into effect; it must stay so until the backward pass is done (recomputation)."""
    global _in_effect
    previous, _in_effect = _in_effect, group
    try:
        yield
    finally:
        _in_effect = previous


def group_in_effect() -> SequenceGroup:
    return _in_effect
