"""One rank's shard of a flat buffer, as it is handed out to a rank that reads alone."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..comm.one_sided.partners import ShardPart
from ..numerics.block_quantizer import BlockQuantizer
from ..offload.pending_writes import PendingWrites


class ServedShard(NamedTuple):
    """A shard, and the form in which it is sent. It refers to no module and no process group.

    Attributes:
        memory: the shard, 1-D, of the stored dtype.
        writes: the background work on it; None where it is on the device.
        compute: the dtype in which modules compute.
        quantizer: the quantizer of values that are sent; None for no quantization.
    """

    memory: torch.Tensor
    writes: PendingWrites | None
    compute: torch.dtype
    quantizer: BlockQuantizer | None

    def part(self, part: ShardPart) -> torch.Tensor:
        """Return the shard or a part of it: contiguous, on the CPU. Called in any thread."""
        if self.writes is not None:
            # Not by `PendingWrites.wait`, which raises the error of a step once: the thread that trains must get that.
            for work in self.writes.works:
                work.wait()
        shard = self.memory.detach()
        if part.form == "stored":
            return shard[part.start : part.stop].cpu().contiguous()
        if self.quantizer is None:
            return shard.to("cpu", self.compute).contiguous()
        payload = torch.empty(self.quantizer.nbytes, dtype=torch.uint8, device=shard.device)
        self.quantizer.encode(shard.unsqueeze(0), payload.unsqueeze(0))
        return payload.cpu()
