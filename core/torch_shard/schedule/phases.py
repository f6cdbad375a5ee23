"""The phases in which a unit is gathered."""

from __future__ import annotations

FORWARD, EVALUATION, BACKWARD = 0, 1, 2
PHASES = ("forward", "forward without gradients", "backward")
