"""Statistics of one sharded model on this rank: traffic, waiting, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..comm.traffic_statistics import Statistics, StreamWaits, waits
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import own_grad
from ..utils.pytree import tensors_in

if TYPE_CHECKING:
    from .runtime import Runtime


def statistics(runtime: Runtime) -> Statistics:
    """Return the statistics up to now. Not collective."""
    c, gathered, host = runtime.collectives, runtime.gathered_bytes, runtime.host
    gathers, reductions, others = waits(c)
    return Statistics(
        c.all_bytes_sent,
        c.bytes_sent_across,
        gathers,
        reductions,
        others,
        gathered.now,
        gathered.peak,
        0.0 if host is None else host.waited,
        runtime.lone.count,
        runtime.lone.bytes_read,
    )


def time_waiting(runtime: Runtime, enabled: bool) -> None:
    """Start or stop to time the waits of streams; do nothing on the CPU. Not collective."""
    watchdog, streams = runtime.collectives.watchdog, runtime.collectives.streams
    if not enabled or not streams.exist:
        watchdog.stream_waits = None
    elif watchdog.stream_waits is None:
        watchdog.stream_waits = StreamWaits(streams)


def parameter_bytes(runtime: Runtime) -> int:
    """Return the bytes of this rank's shards."""
    return sum(flat.memory.nbytes for flat in runtime.flats)


def gradient_bytes(runtime: Runtime) -> int:
    """Return the bytes of this rank's gradients, including deferred ones and the residuals of error feedback."""
    total = 0
    for flat in runtime.flats:
        for held in (flat.gradients.flat, flat.gradients.quantized):
            total += held.nbytes if held is not None else 0
        with torch._C.DisableTorchFunctionSubclass():
            total += sum(own_bytes(grad) for grad in map(own_grad, flat.params) if grad is not None)
    return total


def optimizer_bytes(runtime: Runtime) -> int:
    """Return the bytes of this rank's state of the optimizers that have stepped the model."""
    entries = [entry for state in runtime.served.optimizer_states() for entry in state.values()]
    return sum(own_bytes(tensor) for entry in entries for tensor in tensors_in(entry))


def own_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that this rank has of a tensor, without waiting for a shard that is being written to."""
    count = tensor._spec.length if isinstance(tensor, ShardTensor) else tensor.numel()
    with torch._C.DisableTorchFunctionSubclass():
        return count * tensor.dtype.itemsize
