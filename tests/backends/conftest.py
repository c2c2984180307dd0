"""What tests of engines share."""

from __future__ import annotations

import pytest

from backends.train.role_group import leave_group


@pytest.fixture
def without_group() -> None:
    """An engine of another test that was not closed may have left this process in a group."""
    leave_group()
