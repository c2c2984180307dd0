"""What people read of an error."""

from __future__ import annotations

import pytest

from specs.errors import RoleFailure


@pytest.mark.parametrize(
    ("verb", "step", "where"),
    [
        ("update", 3, "actor rank 1 on b, verb update, step 3: it ended"),
        ("start", None, "actor rank 1 on b, verb start: it ended"),
        ("", 3, "actor rank 1 on b, idle, step 3: it ended"),
    ],
)
def test_a_failure_says_who_did_what_when(verb: str, step: int | None, where: str) -> None:
    assert str(RoleFailure("actor", 1, host="b", verb=verb, step=step, cause="it ended")) == where
