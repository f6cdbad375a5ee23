"""Which optimizers the engine knows, and how users declare their own: ``torch_shard.optim.register``."""

from __future__ import annotations

from .registry import Kind, kind_of, register

__all__ = ["Kind", "kind_of", "register"]
