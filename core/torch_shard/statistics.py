"""An earlier import path of :class:`torch_shard.Statistics`."""

from __future__ import annotations

from .comm.traffic_statistics import Statistics

__all__ = ["Statistics"]
