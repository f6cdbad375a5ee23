"""Checkpoints: sharded, written by all ranks, loaded on any number of them.

:func:`save` and :func:`load` are ``engine.save`` and ``engine.load``. What is on disk is torch.distributed.checkpoint's format
with a manifest beside it; :mod:`.folder` says how it gets there in one step.
"""

from __future__ import annotations

from .pending import PendingSave
from .sharded_load import load
from .sharded_save import save, save_contents

__all__ = ["PendingSave", "load", "save", "save_contents"]
