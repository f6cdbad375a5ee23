"""The tests of this folder run on GPUs only."""

from __future__ import annotations

import pytest


@pytest.fixture
def device() -> str:
    """In the body of a test under ``@ranks`` this rank's GPU; ranks share one where there are too few."""
    return "cuda"
