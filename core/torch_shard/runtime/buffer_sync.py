"""Buffers (running statistics and the like) follow rank 0, as under DDP: they are broadcast before a forward, coalesced."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from ..comm.broadcast_buffers import broadcast_coalesced
from ..comm.collectives import Collectives


class BufferSync:
    """Broadcasts a model's buffers from rank 0 of the mesh, one collective per dtype, except those of names `ignored`."""

    def __init__(self, collectives: Collectives, ignored: frozenset[str]) -> None:
        self.collectives, self.ignored = collectives, ignored
        # True if the next forward must broadcast: the first one, and each that follows one with gradients outside of no_sync(),
        # as under DDP.
        self.due = True

    def synchronise(self, root: nn.Module) -> None:
        """Broadcast the buffers of `root`; call right after the ranks have agreed to begin a forward. Collective."""
        # Under tensor parallelism a buffer may belong to a rank's own part of the model, so that data-parallel groups don't
        # share buffers.
        what = "the broadcast of buffers"
        broadcast_coalesced(self.collectives, self._buffers(root), what, arrived=True, within_data_parallel=True)

    def signature(self, root: nn.Module) -> tuple[int, str]:
        """Return a number that tells buffers of different sizes apart, and a text for an error."""
        sizes = [(b.numel(), b.dtype.itemsize) for b in self._buffers(root)]
        text = f"broadcasts {len(sizes)} buffers of {sum(n for n, _ in sizes)} elements"
        return zlib.crc32(str(sizes).encode()), text

    def _buffers(self, root: nn.Module) -> list[torch.Tensor]:
        return [b for name, b in root.named_buffers() if name not in self.ignored]
