"""Checkpoints: sharded, written by all ranks, or full, in the files of plain torch; loaded on any number of ranks.

:func:`save`, :func:`save_full` and :func:`load` are the engine's. What a sharded one is on disk is torch.distributed.checkpoint's
format with a manifest beside it; a full one is a file of ``torch.save``, or safetensors. :mod:`.folder` says how it gets there in
one step.
"""

from __future__ import annotations

from .full.save import save_full
from .sharded.async_save import PendingSave
from .sharded.load import load, load_contents
from .sharded.save import save, save_contents

__all__ = ["PendingSave", "load", "load_contents", "save", "save_contents", "save_full"]
