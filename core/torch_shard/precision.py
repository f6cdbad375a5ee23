"""An earlier import path of :class:`torch_shard.Precision` and :func:`torch_shard.norms_in`."""

from __future__ import annotations

from .config.precision import NORMS, Precision, norms_in

__all__ = ["NORMS", "Precision", "norms_in"]
