"""Checkpoints: sharded, written by all ranks, or full, in the files of plain torch; loaded on any number of ranks.

:func:`save`, :func:`save_full` and :func:`load` are the engine's. A sharded checkpoint has torch.distributed.checkpoint's
format on disk, with a manifest beside it. A full one is a file of ``torch.save``, or safetensors. Both appear in one step
(:mod:`.format.atomic_directory`).
"""

from __future__ import annotations

from .full.save import save_full
from .sharded.async_save import PendingSave
from .sharded.load import load, load_contents
from .sharded.save import save, save_contents

__all__ = ["PendingSave", "load", "load_contents", "save", "save_contents", "save_full"]
