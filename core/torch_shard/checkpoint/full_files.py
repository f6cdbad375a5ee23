"""An earlier import path of :func:`.full.open_files.open_full`."""

from __future__ import annotations

from .full.open_files import FullFile, open_full

__all__ = ["FullFile", "open_full"]
