"""The plan: which parameters form a unit, in which order, and the bytes they take."""

from __future__ import annotations

from .memory_estimate import PredictedBytes
from .plan import BufferInfo, ParamInfo, Plan, UnitPlan

__all__ = ["BufferInfo", "ParamInfo", "Plan", "PredictedBytes", "UnitPlan"]
