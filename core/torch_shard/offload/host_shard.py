"""One flat buffer's shard in host memory, and its way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..comm.streams import Streams
from ..numerics.block_quantizer import BlockQuantizer
from .host import Host
from .pending_writes import Copying, PendingWrites


class Crossing:
    """A copy to the device that a unit waits for as for a gather (:class:`~torch_shard.comm.work.Pending`)."""

    def __init__(self, event: Any, streams: Streams) -> None:
        self.event, self._streams = event, streams

    def wait_at_most(self, seconds: float) -> bool:
        """Return True: a copy always ends."""
        return True

    def wait(self) -> None:
        """Return when the values may be read by the current stream."""
        self._streams.wait(self.event)


class HostShard:
    """One flat buffer's shard in host memory, on which optimizers step.

    What crosses to the device is the shard itself. Where modules compute in another dtype it is a copy in that dtype, made when
    the shard was stepped on, so that half as many bytes cross; where quantized shards are sent, the quantized values.

    Attributes:
        shard: 1-D, in the dtype that is stored.
        pending_writes: the work on the shard, and on its optimizer state.
    """

    def __init__(self, host: Host, shard: torch.Tensor, params: Sequence[Any]) -> None:
        """Note where things are, and copy nothing. `params`: the sharded tensors over the shard, read when they are needed."""
        self.host, self.shard, self._params = host, shard, params
        self.pending_writes = PendingWrites(host)
        self._compute = shard.dtype
        self._quantizer: BlockQuantizer | None = None
        self._cast: torch.Tensor | None = None  # in host memory, in the dtype of computation or quantized
        self._resident: torch.Tensor | None = None  # on the device
        self._fresh = (-1, 0)  # which values of the shard these hold
        self._read: Copying | None = None

    def compute_in(self, dtype: torch.dtype, quantizer: BlockQuantizer | None) -> None:
        """Set what :meth:`copy_to` copies from now on: values of `dtype`, or the payload of `quantizer`."""
        self._compute, self._quantizer, self._cast, self._resident = dtype, quantizer, None, None
        self.outdate()

    def prepare(self) -> None:
        """Take memory for what crosses in another dtype than the shard's. Until then the shard itself crosses.

        Raises:
            HostMemoryError: there is no memory.
        """
        if self._cast is not None:
            return
        if self._quantizer is not None:
            self._cast = self.host.empty(self._quantizer.nbytes, torch.uint8)
        elif self._compute != self.shard.dtype or self.host.offload.nvme_params:  # the disk is not read for each gather
            self._cast = self.host.empty(self.shard.numel(), self._compute)

    def _present(self) -> torch.Tensor:
        """Return the tensor that crosses, or that is on the device already, with the values that the shard has now."""
        if not self.crosses:
            return self.shard
        exposed = self.pending_writes.exposed  # asked first, since it may change `_values`
        if exposed or self._fresh != self._values:
            self.refresh()
        held = self._cast if self._resident is None else self._resident
        assert held is not None
        return held

    @property
    def _values(self) -> tuple[int, int]:
        """A key that changes when the shard was written to, or may have been where no version shows it."""
        return self.shard._version, self.pending_writes.ended

    def refresh(self) -> None:
        """Make what crosses from the shard's values, on the thread that has changed the shard."""
        self.wait_for_reads()
        if self._cast is not None and self._quantizer is not None:
            self._quantizer.encode(self.shard.unsqueeze(0), self._cast.unsqueeze(0))
        elif self._cast is not None:
            self._cast.copy_(self.shard)
        if not self.host.offload.params:
            source = self.shard if self._cast is None else self._cast
            if self._resident is None:
                self._resident = torch.empty(source.numel(), dtype=source.dtype, device=self.host.device)
            # Blocks this thread, so that the next gather finds it done on any stream.
            self._resident.copy_(source)
        self._fresh = self._values

    def outdate(self) -> None:
        """Note that the shard has changed in a way that its version does not show."""
        self._fresh = (-1, 0)

    @property
    def crosses(self) -> bool:
        """True if something besides the shard has to be made after each step."""
        return self._cast is not None or not self.host.offload.params

    def copy_to(self, own: torch.Tensor) -> Crossing | None:
        """Fill `own`, on the device, with values in the dtype of computation, or quantized ones, on the current stream.

        No write to the shard may be pending.

        Returns:
            The copy to wait for; None if it was made at once.
        """
        source = self._present()
        own.copy_(source, non_blocking=True)
        if not self.host.streams.exist:
            return None
        event = self.host.streams.record()
        # This is noted for values that are kept on the device, too, since a step would overwrite them.
        self._read = Copying(event, writes=False)
        if source is self.shard:
            # Hazard: an edit of a parameter by the user would reach the copy that is still under way.
            self.pending_writes.restore_if_done()
            self.pending_writes.begin(self._read, self._params)
        return Crossing(event, self.host.streams)

    def wait_for_reads(self) -> None:
        """Wait for the last copy to the device, which may still read what the host is about to overwrite."""
        if self._read is not None:
            self._read.wait()
            self._read = None
