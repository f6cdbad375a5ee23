"""Activation offload: the inputs that checkpointed layers keep wait for backward in host memory.

One step, of three layers; each line is a stream of a GPU::

    compute  | layer 0 | layer 1 | layer 2 | loss | again 2, backward 2 | again 1, backward 1 | again 0, backward 0 |
    out      |  in 0   |  in 1   |  in 2   |
    back                                          |         in 1        |         in 0        |

A layer's input is copied out beside the layer's own forward. Its memory is given back where the next offloaded layer
begins: there compute waits for the copy, so that at most two inputs are on the device, and a layer that is shorter than its
copy waits for it. The input of the last layer stays until backward, which needs it first. When backward comes to a layer, the
copy back of the input of the layer before it, in the forward's order, is started.

The copies are made by torch's saved-tensor hooks. They are around the call of the checkpoint, and so see what it keeps. Inside
of it they would replace the hooks that checkpointing is made of, and the layer would keep all that it computes. For the same
reason nothing is copied where other hooks are in force: a checkpoint around the layer, or the user's ``save_on_cpu``.

Without a GPU the same copies are made between two places in host memory.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .comm.streams import streams_of
from .config.offload import MIN_ACTIVATION_BYTES
from .errors import ConfigError, ShardError
from .offload.host_buffers import HostBuffer, HostBuffers
from .schedule.kept_inputs import HostCopy, KeptInputs, OnDevice
from .shard_tensor.unsharded_param import is_of_unit

__all__ = ["MIN_BYTES", "ActivationOffload"]

MIN_BYTES = MIN_ACTIVATION_BYTES
"""Smaller tensors stay on the device by default."""


class ActivationOffload(KeptInputs["_OnDevice"]):
    """Copies of what autograd keeps, in host memory until shortly before backward needs it.

    Use one object for each model, in one thread at a time. It is for checkpoints that your own code calls, reentrant or not.
    ``activation_offload=`` of the front ends, and :func:`~torch_shard.activation_checkpointing.checkpointed_layers`, do the same
    for layers by class::

        offload = ActivationOffload()
        for layer in self.layers:
            with offload.inputs():
                x = checkpoint(layer, x, use_reentrant=False)

    A reentrant checkpoint saves its inputs after the layer, so that computation waits for the copies instead of overlapping them.

    Dense tensors of any dtype are copied, except parameters and views of parameters that the engine has gathered. A tensor that
    several layers take, such as a mask, is copied once. An edit through ``.data`` meanwhile goes unnoticed, here as in autograd.
    A copy of the model, or a pickled one, has an ``ActivationOffload`` of its own, which is empty.

    Args:
        min_bytes: smaller tensors stay where they are.

    Attributes:
        copied_out: the bytes that were copied to the host so far.
        copied_back: the bytes that were copied back so far.
        late: the number of copies back that were started only when backward needed them.

    Raises:
        ConfigError: `min_bytes` is not a positive number.

    Not collective.
    """

    def __init__(self, min_bytes: int = MIN_BYTES) -> None:
        if isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 1:
            raise ConfigError(f"min_bytes must be a positive number of bytes, not {min_bytes!r}.")
        super().__init__(min_bytes)
        self.copied_out = self.copied_back = 0
        self._devices: dict[torch.device, _Device] = {}

    def __reduce__(self) -> Any:
        return ActivationOffload, (self.min_bytes,)

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that are held now, for use in this step or the next."""
        return sum(device.pool.held for device in self._devices.values())

    @property
    def host_bytes_in_use(self) -> int:
        """The bytes of host memory that hold something which a backward may need."""
        for device in self._devices.values():
            device.pool.collect()
        return sum(device.pool.in_use for device in self._devices.values())

    def inputs(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context, around one call of a checkpoint, that keeps what it saves in host memory until backward.

        The context does nothing inside of another checkpoint, which keeps nothing of what is inside; in a recomputation in
        backward; and under other hooks for saved tensors.

        Raises (in the forward):
            HostMemoryError: this rank has no host memory for a copy.

        Raises (in backward):
            ShardError: a saved tensor was changed in place afterwards, for which plain torch raises an error, too.
        """
        return self.hooks()

    def _new_copy(self, tensor: torch.Tensor) -> _Copy:
        """Start to copy a tensor to the host."""
        copy = _Copy(self, tensor)
        self.copied_out += copy.nbytes
        return copy

    def moves(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` is copied to the host, rather than kept on the device."""
        return (
            # Not parameters, ShardTensors and other classes, whose memory is their own affair.
            type(tensor) is torch.Tensor
            and tensor.layout == torch.strided
            and tensor.device.type != "meta"
            and super().moves(tensor)
            and not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg())
            and not is_of_unit(tensor)
            and not streams_of(tensor.device).is_capturing()
        )

    def _device(self, device: torch.device) -> _Device:
        if device not in self._devices:
            self._devices[device] = _Device(device)
        return self._devices[device]


class _Device:
    """Host memory for what a device keeps, and the streams on which copies are made."""

    def __init__(self, device: torch.device) -> None:
        self.pool = HostBuffers(device)
        self.streams = streams_of(device)
        self.out, self.back = self.streams.new(), self.streams.new()


class _OnDevice(OnDevice):
    """Memory on the device that a side stream reads (a tensor being copied out) or writes (a tensor coming back)."""

    def __init__(self, tensor: torch.Tensor, version: int, event: Any, stream: Any) -> None:
        super().__init__(tensor)
        self.version, self.event, self.stream = version, event, stream
        self.waited = event is None

    @property
    def was_changed(self) -> bool:
        """True if the tensor was changed in place."""
        return self.tensor._version != self.version

    def wait(self) -> torch.Tensor:
        """Make the current stream, which computes with the tensor, wait for the copy; return the tensor."""
        if self.event is not None:
            # Hazards: reading what has not come back yet; and giving memory that is still read to the stream's next allocation.
            streams_of(self.tensor.device).wait(self.event)
            self.waited = True
        return self.tensor

    def __del__(self) -> None:
        if not self.waited:
            # A graph was dropped with a copy under way. No stream is known here that could wait, so the allocator has to wait.
            self.tensor.record_stream(self.stream)


class _Copy(HostCopy[_OnDevice]):
    """The values of one tensor on the host."""

    def __init__(self, offload: ActivationOffload, tensor: torch.Tensor) -> None:
        self.offload = offload
        self.shape, self.stride, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.was_changed = False
        self.nbytes = tensor.nbytes
        self.own = offload._device(self.device)
        self.buffer: HostBuffer = self.own.pool.take(self.nbytes)
        self.host = self.buffer.memory[: self.nbytes].view(self.dtype)
        with torch.no_grad():
            source = tensor.detach()  # without the graph; its version is still the tensor's
            event = self._run(self.own.out, self.host, _flat(source))
        # The storage is kept until compute waits for the copy.
        super().__init__(tensor.untyped_storage(), _OnDevice(source, source._version, event, self.own.out))

    def __del__(self) -> None:
        if hasattr(self, "host"):  # else there was no memory for it
            self.own.pool.give(self.buffer)

    def _run(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy `source` to `target` on `stream`; return the event behind the copy, None on the CPU."""
        streams = self.own.streams
        # Hazards: copying out what compute has not written yet, and copying into memory that compute, which had it before, still
        # uses.
        with streams.follow(stream):
            # Hazards: overwriting on the host what an earlier user's copy back still reads; reading what is not there yet.
            streams.wait(self.buffer.event)
            target.copy_(source, non_blocking=True)
            self.buffer.event = streams.record()
        return self.buffer.event

    def copy_back(self) -> _OnDevice:
        with torch.no_grad():
            # The memory is allocated on, and freed to, the computing stream; the copy waits for its earlier users.
            tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
            event = self._run(self.own.back, _flat(tensor), self.host)
        self.offload.copied_back += self.nbytes
        return _OnDevice(tensor, tensor._version, event, self.own.back)

    def resident(self, tensor: torch.Tensor) -> _OnDevice:
        return _OnDevice(tensor, tensor._version, None, None)

    def let_go(self) -> None:
        if self.source is not None:
            # Compute has not waited for the copy so far, which may hold either value.
            self.was_changed |= self.source.was_changed
        super().let_go()

    def take(self, there: _OnDevice) -> torch.Tensor:
        if self.was_changed or there.was_changed:
            raise ShardError(
                f"activation_offload: the input of a checkpointed layer, {self.dtype} of shape {tuple(self.shape)}, was changed "
                "in place after the layer had it, and backward needs what it was. Change a copy of it (x = x + y in place of "
                "x += y)."
            )
        return super().take(there)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
