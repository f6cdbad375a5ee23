"""Activation offload: the inputs that checkpointed layers keep wait for backward in host memory.

One step, of three layers; each line is a stream of a GPU::

    compute  | layer 0 | layer 1 | layer 2 | loss | again 2, backward 2 | again 1, backward 1 | again 0, backward 0 |
    out      |  in 0   |  in 1   |  in 2   |
    back                                          |         in 1        |         in 0        |

A layer's input is copied out beside the layer's own forward. Its memory is given back where the next offloaded layer
begins: there compute waits for the copy, so that at most two inputs are on the device, and a layer that is shorter than its
copy waits for it. The input of the last layer stays until backward, which needs it first. When backward comes to a layer, the
copy back of the input of the one before it is started; the one before is the one that the forward had.

The copies are made by torch's saved-tensor hooks. They are around the call of the checkpoint, and so see what it keeps. Inside
of it they would replace the hooks that checkpointing is made of, and the layer would keep all that it computes. For the same
reason nothing is copied where other hooks are in force: a checkpoint around the layer, or the user's ``save_on_cpu``.

Without a GPU the same copies are made between two places in host memory.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch

from .comm.streams import streams_of
from .config.offload import MIN_ACTIVATION_BYTES
from .errors import ConfigError, ShardError
from .offload.host_buffers import HostBuffer, HostBuffers
from .shard_tensor.unsharded_param import is_of_unit
from .utils.autograd_private import graph_task, saved_tensors_hooks

__all__ = ["MIN_BYTES", "ActivationOffload"]

MIN_BYTES = MIN_ACTIVATION_BYTES
"""Smaller tensors stay on the device by default."""


class ActivationOffload:
    """Copies what autograd keeps to host memory, and back ahead of backward. One for a model, and not between threads.

    For checkpoints of one's own, of either kind; ``activation_offload=`` of the front ends, and
    :func:`~torch_shard.activation_checkpointing.checkpointed_layers`, do the same for layers by class::

        offload = ActivationOffload()
        for layer in self.layers:
            with offload.inputs():
                x = checkpoint(layer, x, use_reentrant=False)

    A reentrant checkpoint saves its inputs behind the layer: there compute waits for copies, in place of running beside them.

    Copied are dense tensors of any dtype that are not parameters, and not views of parameters that the engine has gathered. A
    tensor that several layers take, such as a mask, is copied once. What is edited through ``.data`` meanwhile leaves no
    trace, here as in autograd. A copy of the model, and a pickled one, has one of its own, which is empty.

    Args:
        min_bytes: smaller tensors stay where they are.

    Attributes:
        copied_out: bytes that were copied to the host, since it was made.
        copied_back: bytes that were copied from there.
        late: copies back that were started only when backward was there.

    Raises:
        ConfigError: `min_bytes` is not a positive number.

    Not collective.
    """

    def __init__(self, min_bytes: int = MIN_BYTES) -> None:
        if isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 1:
            raise ConfigError(f"min_bytes must be a positive number of bytes, not {min_bytes!r}.")
        self.min_bytes = min_bytes
        self.copied_out = self.copied_back = self.late = 0
        self._devices: dict[torch.device, _Device] = {}
        # All references are weak: the graph alone holds what is kept, so that nothing is left of a graph that is dropped.
        self._copies: weakref.WeakValueDictionary[Any, _Copy] = weakref.WeakValueDictionary()
        self._on_device: list[weakref.ref[_Copy]] = []
        self._last: weakref.ref[_Call] | None = None

    def __reduce__(self) -> Any:
        return ActivationOffload, (self.min_bytes,)

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that are held now, in use or for the next step."""
        return sum(device.pool.held for device in self._devices.values())

    @property
    def host_bytes_in_use(self) -> int:
        """The bytes of host memory that hold something which a backward may need."""
        for device in self._devices.values():
            device.pool.collect()
        return sum(device.pool.in_use for device in self._devices.values())

    def inputs(self) -> contextlib.AbstractContextManager[Any]:
        """Keep in host memory, until backward, what one call of a checkpoint saves. Enter it around that call.

        It does nothing inside of another checkpoint, which keeps nothing of what is in it, in what backward recomputes, and
        where other hooks for saved tensors are in force.

        Raises (in the forward):
            HostMemoryError: there is no host memory for it, on this rank.

        Raises (in backward):
            ShardError: what was kept was changed in place after the checkpoint had it. Plain torch raises an error then, too.
        """
        if graph_task() != -1 or saved_tensors_hooks(True) is not None:
            return contextlib.nullcontext()
        self._let_go()
        call = _Call(self)
        return torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack)

    def _let_go(self) -> None:
        """Free the device memory of tensors that have been copied to the host."""
        on_device, self._on_device = self._on_device, []
        for ref in on_device:
            copy = ref()
            if copy is not None:
                copy.let_go()

    def _copy(self, tensor: torch.Tensor) -> _Copy | None:
        """Return a tensor's copy on the host, which may still be under way; None where the tensor stays on the device."""
        if not self.moves(tensor):
            return None
        storage, version = tensor.untyped_storage(), tensor._version
        key = (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), version)
        copy = self._copies.get(key)
        # The address may belong to other memory by now.
        if copy is None or copy.storage() is not storage:
            copy = _Copy(self, tensor, storage, version)
            self._copies[key] = copy
            self.copied_out += copy.nbytes
        elif copy.source is None:
            copy.stay(tensor, version)
        self._on_device.append(weakref.ref(copy))
        return copy

    def moves(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` is copied to the host, rather than kept on the device."""
        return (
            # Not parameters, ShardTensors and other classes, whose memory is their own affair.
            type(tensor) is torch.Tensor
            and tensor.layout == torch.strided
            and tensor.device.type != "meta"
            and tensor.nbytes >= self.min_bytes
            and not (tensor.requires_grad and tensor.is_leaf)  # the user's own, who keeps it
            and not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg())
            and not is_of_unit(tensor)
            and _is_dense(tensor)
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


class _OnDevice:
    """Memory on the device that a side stream reads (a tensor being copied out) or writes (one coming back)."""

    def __init__(self, tensor: torch.Tensor, version: int, event: Any, stream: Any) -> None:
        self.tensor, self.version, self.event, self.stream = tensor, version, event, stream
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


class _Copy:
    """The values of one tensor on the host."""

    def __init__(
        self, offload: ActivationOffload, tensor: torch.Tensor, storage: torch.UntypedStorage, version: int
    ) -> None:
        self.offload = offload
        self.shape, self.stride, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.storage, self.was_changed = weakref.ref(storage), False
        self.nbytes = tensor.nbytes
        self.own = offload._device(self.device)
        self.buffer: HostBuffer = self.own.pool.take(self.nbytes)
        self.host = self.buffer.memory[: self.nbytes].view(self.dtype)
        with torch.no_grad():
            source = tensor.detach()  # without the graph; its version is still the tensor's
            event = self._run(self.own.out, self.host, _flat(source))
        # Keeps the memory until compute waits for the copy.
        self.source: _OnDevice | None = _OnDevice(source, version, event, self.own.out)
        self.live: weakref.ref[_OnDevice] = weakref.ref(self.source)

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

    def on_device(self) -> tuple[_OnDevice, bool]:
        """Return the values on the device, which may be on their way, and True if a copy had to be started for this."""
        there = self.source or self.live()
        if there is not None:
            return there, False
        with torch.no_grad():
            # Memory of the stream that computes, to which it goes back; the copy waits for those who had it before.
            tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
            event = self._run(self.own.back, _flat(tensor), self.host)
        there = _OnDevice(tensor, tensor._version, event, self.own.back)
        self.live = weakref.ref(there)
        self.offload.copied_back += self.nbytes
        return there, True

    def stay(self, tensor: torch.Tensor, version: int) -> None:
        """Keep the tensor on the device while another layer that takes it runs: backward may begin at that layer."""
        self.source = _OnDevice(tensor.detach(), version, None, None)
        self.live = weakref.ref(self.source)

    def let_go(self) -> None:
        """Drop the tensor of which this is the copy."""
        if self.source is not None:
            # Compute has not waited for the copy so far: it may hold either value.
            self.was_changed |= self.source.was_changed
            self.source.wait()
            self.source = None


class _Kept:
    """What autograd keeps in place of a tensor."""

    def __init__(self, copy: _Copy) -> None:
        self.copy = copy
        self.there: _OnDevice | None = None  # set while it is wanted on the device

    def ask(self) -> bool:
        """Start to copy the tensor back, unless it is on the device; return True if a copy was started."""
        if self.there is not None:
            return False
        self.there, copied = self.copy.on_device()
        return copied

    def take(self) -> torch.Tensor:
        self.ask()
        there, self.there = self.there, None  # a second backward copies it from the host once more
        assert there is not None
        copy = self.copy
        if copy.was_changed or there.was_changed:
            raise ShardError(
                f"activation_offload: the input of a checkpointed layer, {copy.dtype} of shape {tuple(copy.shape)}, was changed "
                "in place after the layer had it, and backward needs what it was. Change a copy of it (x = x + y in place of "
                "x += y)."
            )
        tensor = there.wait()
        if copy.source is there:
            copy.source = None  # its memory is backward's now
        return tensor


class _Call:
    """One call of a checkpoint. All tensors that are kept of it come back together."""

    def __init__(self, offload: ActivationOffload) -> None:
        self.offload = offload
        self.kept: list[weakref.ref[_Kept]] = []
        self.before: weakref.ref[_Call] | None = None
        self.asked = -1  # by which backward

    def pack(self, tensor: torch.Tensor) -> Any:
        copy = self.offload._copy(tensor)
        if copy is None:
            return tensor
        if not self.kept:
            self.before, self.offload._last = self.offload._last, weakref.ref(self)
        kept = _Kept(copy)
        self.kept.append(weakref.ref(kept))
        return kept

    def unpack(self, kept: Any) -> torch.Tensor:
        if not isinstance(kept, _Kept):
            return kept  # type: ignore[no-any-return]
        task = graph_task()
        if task != -1:
            self.offload.late += self._ask(task)
            before = None if self.before is None else self.before()
            if before is not None:
                before._ask(task)
        return kept.take()

    def _ask(self, task: int) -> int:
        """Ask for all tensors that are kept, once in a backward; return how many copies were started."""
        if self.asked == task:
            return 0
        self.asked = task
        found = [kept for kept in (ref() for ref in self.kept) if kept is not None]
        return sum(kept.ask() for kept in found)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements are one block of memory, in whatever order."""
    if tensor.is_contiguous():
        return True
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim])).is_contiguous()
