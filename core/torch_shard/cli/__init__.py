"""The command line: ``torch-shard inspect | verify | consolidate | convert | diff``. Each command is one process."""

from __future__ import annotations

from .main import main

__all__ = ["main"]
