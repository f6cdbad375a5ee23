"""The public import path of :func:`.full.open_files.open_full`, which opens a file of full tensors without an engine."""

from __future__ import annotations

from .full.open_files import FullFile, open_full

__all__ = ["FullFile", "open_full"]
