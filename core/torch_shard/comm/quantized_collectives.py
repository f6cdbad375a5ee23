"""Quantized gathers and reductions in flight: values are encoded, sent, and decoded here.

On GPUs encoding and decoding run on the gather stream and the reduction stream, before and after the collective. Over Gloo
values are decoded when the collective is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config.param_dtypes import Dtypes
from ..layout.flat_layout import FlatLayout, slot_view
from ..numerics.block_quantizer import BlockQuantizer
from .collectives import Collectives, outside_inference
from .gradient_reduction import Reduction


class QuantizedGather:
    """A gather in flight, like :class:`~torch_shard.comm.work.Pending`, which is complete once its values are decoded."""

    def __init__(
        self, c: Collectives, quantizer: BlockQuantizer, sent: torch.Tensor, full: torch.Tensor, what: str
    ) -> None:
        """Start the gather; `sent` is this rank's payload, 1-D. Collective; call under ``c.gathering()``."""
        self._quantizer, self._full = quantizer, full
        with torch.no_grad():
            payloads = torch.empty(c.size, quantizer.nbytes, dtype=torch.uint8, device=full.device)
            self._payloads: torch.Tensor | None = payloads
            self._pending = c.all_gather(payloads.view(-1), sent, what)
        if c.gather_stream is not None:
            self._decode()
            assert self._pending.event is not None
            c.streams.record(c.gather_stream, event=self._pending.event)  # anew, after the decoding

    def _decode(self) -> None:
        if self._payloads is None:
            return
        with torch.no_grad(), outside_inference():
            self._quantizer.decode(self._payloads, self._full.view(len(self._payloads), -1))
        self._payloads = None

    @property
    def event(self) -> Any:
        """The event after the decoding; None on the CPU."""
        return self._pending.event

    def wait_at_most(self, seconds: float) -> bool:
        """Wait for at most `seconds`; return False if the collective is still running."""
        return self._pending.wait_at_most(seconds)

    def wait(self) -> None:
        """Return when the gathered values may be read by the current stream."""
        self._pending.wait()
        self._decode()


class QuantizedGradients:
    """The quantized reductions of one flat buffer's gradients, with the residual that quantization has lost so far."""

    def __init__(self, quantizer: BlockQuantizer, layout: FlatLayout, dtypes: Dtypes, collectives: Collectives) -> None:
        assert dtypes.quantized is not None
        self.quantizer, self.layout, self.collectives = quantizer, layout, collectives
        self._inter_replica_dtype = dtypes.reduce  # the inter-replica all-reduce is not quantized
        self._residual_dtype = dtypes.quantized.residual_dtype(dtypes)
        self.residual: torch.Tensor | None = None  # in the full layout, of this rank's own gradients

    @property
    def nbytes(self) -> int:
        """The bytes of the residual."""
        return 0 if self.residual is None else self.residual.nbytes

    @property
    def buffers(self) -> list[tuple[int, torch.dtype]]:
        """The buffers that a reduction takes by ``Collectives.take``, beside the gradients: for payloads sent and received."""
        return 2 * [(self.collectives.size * self.quantizer.nbytes, torch.uint8)]

    def forget(self) -> None:
        """Drop the residual after a failed backward: values may have been encoded that no rank has received."""
        self.residual = None

    def start(
        self, grad: torch.Tensor, held: Sequence[bool], dtype: torch.dtype, what: str, streams: Sequence[Any]
    ) -> QuantizedReduction:
        """Start the reduction of `grad`, whose buffer is given back by the reduction. Collective.

        Args:
            grad: 1-D, in the full layout, divided by the number of ranks; zero where this rank has no gradient.
            held: True for each parameter of which this rank has a gradient.
            dtype: the dtype of the sum.
            what: the name of the operation, for error messages.
            streams: the streams that have written to `grad`, for which the current one has waited.
        """
        c, quantizer = self.collectives, self.quantizer
        with torch.no_grad(), outside_inference(), c.reducing():
            begun = c.reduced()
            sent, received = (c.take(*buffer) for buffer in self.buffers)
            self._encode(grad, held, sent.view(c.size, -1))
            pending = c.all_to_all(received, sent, c.size * [quantizer.nbytes], c.size * [quantizer.nbytes], what)
            inter_replica = "" if c.replica_channel is None else f"{what}, between replicas"
            reduction = QuantizedReduction(
                c,
                sent,
                received,
                pending,
                begun,
                streams,
                inter_replica_dtype=self._inter_replica_dtype,
                quantizer=quantizer,
            )
            if c.reduce_stream is None:
                c.give(grad)
                if inter_replica:
                    reduction.queue_inter_replica(inter_replica)
                return reduction
            # Hazard: the memory of `grad` must not be reused before the stream has encoded it.
            reduction.own = grad
            reduction.total = torch.empty(
                quantizer.numel, dtype=self._inter_replica_dtype if inter_replica else dtype, device=grad.device
            )
            quantizer.decode_sum(received.view(c.size, -1), reduction.total)
            if inter_replica:
                reduction.pending = c.followed(pending, c.all_reduce_between_replicas(reduction.total, inter_replica))
            elif pending.event is not None:
                c.streams.record(c.reduce_stream, event=pending.event)  # anew, after the sum
            return reduction

    def _encode(self, grad: torch.Tensor, held: Sequence[bool], payloads: torch.Tensor) -> None:
        rows = self.collectives.size
        if self._residual_dtype is None:
            self.quantizer.encode(grad.view(rows, -1), payloads)
            return
        if self.residual is None:
            self.residual = torch.zeros(grad.numel(), dtype=self._residual_dtype, device=grad.device)
        # For a parameter without a gradient on this rank, perhaps no rank has one, and then the payload is not used. Its
        # residual is therefore kept for a later reduction.
        views = [slot_view(self.residual, s) for s, has in zip(self.layout.slots, held, strict=True) if not has]
        waiting = [(view, view.clone()) for view in views]
        for view, _ in waiting:
            view.zero_()
        self.quantizer.encode(grad.view(rows, -1), payloads, self.residual.view(rows, -1))
        for view, before in waiting:
            view.copy_(before)


@dataclass(eq=False, kw_only=True)
class QuantizedReduction(Reduction):
    """A gradient reduction in flight whose payloads are quantized: ``grad`` and ``received`` are payloads."""

    quantizer: BlockQuantizer
    own: torch.Tensor | None = None  # the gradients, where a CUDA stream may still read them

    def _own_sum(self, dtype: torch.dtype, narrow: bool = False) -> torch.Tensor:
        c = self.collectives
        with torch.no_grad(), outside_inference():
            total = torch.empty(self.quantizer.numel, dtype=dtype, device=self.received.device)
            self.quantizer.decode_sum(self.received.view(c.size, -1), total)
        c.give(self.grad)
        c.give(self.received)
        return total
