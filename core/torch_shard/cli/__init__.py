"""The command line: ``torch-shard inspect | verify | consolidate | convert | diff | selftest | plan``.

Each command is one process, except for the self-test, which starts ranks.
"""

from __future__ import annotations

from .main import main

__all__ = ["main"]
