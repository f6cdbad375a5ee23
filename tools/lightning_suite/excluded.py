"""Tests that cannot hold for another strategy than DDP, and why: by file and function, below Lightning's ``tests``."""

from __future__ import annotations

__all__ = ["EXCLUDED"]

EXCLUDED: dict[str, str] = {}
