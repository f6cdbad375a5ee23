"""The command line: ``accelerate-shard config | env``."""

from __future__ import annotations

from .main import main

__all__ = ["main"]
