"""How many examples hypothesis draws: few and always the same ones in the quick tests, many new ones in the exhaustive set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# On a busy machine drawing may take long, too.
_SLOW = [HealthCheck.too_slow]


def quick(count: int) -> settings:
    """Draw `count` examples, the same ones each time."""
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=_SLOW)


def many(count: int) -> Callable[[Any], Any]:
    """Draw `count` examples, others each time, in the exhaustive set only."""

    def decorate(test: Any) -> Any:
        return pytest.mark.exhaustive(settings(max_examples=count, deadline=None, suppress_health_check=_SLOW)(test))

    return decorate
