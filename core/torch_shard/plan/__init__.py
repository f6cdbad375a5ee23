"""The plan: which parameters form a unit, in which order, and the bytes they take; and the search for settings that fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .memory_estimate import PredictedBytes
from .plan import BufferInfo, ParamInfo, Plan, UnitPlan

if TYPE_CHECKING:
    from .search_results import Candidate, Estimate, Replay, Search
    from .settings_search import search

__all__ = [
    "BufferInfo",
    "Candidate",
    "Estimate",
    "ParamInfo",
    "Plan",
    "PredictedBytes",
    "Replay",
    "Search",
    "UnitPlan",
    "search",
]


def __getattr__(name: str) -> Any:
    if name in ("Candidate", "Estimate", "Replay", "Search", "search"):  # which training does not need
        from . import settings_search

        return getattr(settings_search, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
