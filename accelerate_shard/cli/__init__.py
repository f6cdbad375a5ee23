"""The command line: ``accelerate-shard config | test | env``."""

from __future__ import annotations

from .main import main

__all__ = ["main"]
