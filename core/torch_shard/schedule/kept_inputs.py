"""When the inputs of checkpointed layers are copied to the host and back, in training and in its prediction.

The decisions are made by torch's saved-tensor hooks around the call of a checkpoint, which see what the checkpoint keeps. How a
tensor is copied is left to subclasses: :mod:`torch_shard.activation_offload`, which also describes what is where at what time,
makes the copies, and :mod:`torch_shard.plan.offloaded_inputs` writes them down.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from ..utils.autograd_private import graph_task, saved_tensors_hooks


class OnDevice(ABC):
    """A tensor on the device, which a copy may be reading (to the host) or writing (from the host)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @abstractmethod
    def wait(self) -> torch.Tensor:
        """Make later computation wait for the copy; return the tensor."""


OnDeviceT = TypeVar("OnDeviceT", bound=OnDevice)


class HostCopy(ABC, Generic[OnDeviceT]):
    """The copy of one tensor on the host."""

    def __init__(self, storage: torch.UntypedStorage, source: OnDeviceT) -> None:
        self.storage = weakref.ref(storage)
        self.keep(source)

    @abstractmethod
    def copy_back(self) -> OnDeviceT:
        """Start to copy the values to new memory on the device."""

    @abstractmethod
    def resident(self, tensor: torch.Tensor) -> OnDeviceT:
        """Return `tensor`, which is on the device, and of which no copy is under way."""

    def keep(self, source: OnDeviceT) -> None:
        """Keep the tensor's memory on the device, until :meth:`let_go`."""
        self.source: OnDeviceT | None = source
        self.live: weakref.ref[OnDeviceT] = weakref.ref(source)

    def let_go(self) -> None:
        """Drop the tensor of which this is the copy, once the copy has ended."""
        if self.source is not None:
            self.source.wait()
            self.source = None

    def on_device(self) -> tuple[OnDeviceT, bool]:
        """Return the values on the device, which may be on their way, and True if a copy had to be started for this."""
        there = self.source or self.live()
        if there is not None:
            return there, False
        there = self.copy_back()
        self.live = weakref.ref(there)
        return there, True

    def take(self, there: OnDeviceT) -> torch.Tensor:
        """Hand the values over to backward, which frees their memory."""
        tensor = there.wait()
        if self.source is there:
            self.source = None
        return tensor


class KeptInputs(ABC, Generic[OnDeviceT]):
    """The copies on the host that autograd keeps in place of the inputs of a model's layers.

    Attributes:
        min_bytes: smaller tensors stay on the device.
        late: the number of copies back that were started only when backward needed them.
    """

    def __init__(self, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.late = 0
        # All references are weak: the graph alone holds what is kept, so that nothing is left of a graph that is dropped.
        self._copies: weakref.WeakValueDictionary[Any, HostCopy[OnDeviceT]] = weakref.WeakValueDictionary()
        self._on_device: list[weakref.ref[HostCopy[OnDeviceT]]] = []
        self._last: weakref.ref[_Call] | None = None

    @abstractmethod
    def _new_copy(self, tensor: torch.Tensor) -> HostCopy[OnDeviceT]:
        """Start to copy a tensor to the host."""

    def moves(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` is copied to the host, rather than kept on the device."""
        of_user = tensor.requires_grad and tensor.is_leaf  # the user keeps it on the device anyway
        return tensor.nbytes >= self.min_bytes and not of_user and _is_dense(tensor)

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context, around one call of a checkpoint, that keeps on the host what the checkpoint saves."""
        if graph_task() != -1 or saved_tensors_hooks(True) is not None:
            return contextlib.nullcontext()
        on_device, self._on_device = self._on_device, []
        for copy in (ref() for ref in on_device):
            if copy is not None:
                copy.let_go()
        call = _Call(self)
        return torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack)

    def _copy_of(self, tensor: torch.Tensor) -> HostCopy[OnDeviceT]:
        """Return the copy of a tensor, of which there is one for all layers that take the tensor."""
        storage = tensor.untyped_storage()
        place = (storage._cdata, tensor.storage_offset())
        key = (place, tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor._version)
        copy = self._copies.get(key)
        # The address may belong to other memory by now.
        if copy is None or copy.storage() is not storage:
            copy = self._copies[key] = self._new_copy(tensor)
        elif copy.source is None:
            # The tensor stays on the device while another layer that takes it runs: backward may begin at that layer.
            copy.keep(copy.resident(tensor.detach()))
        self._on_device.append(weakref.ref(copy))
        return copy


class _Kept:
    """The object that autograd keeps in place of a tensor."""

    def __init__(self, copy: HostCopy[Any]) -> None:
        self.copy = copy
        self.there: Any = None  # set while it is wanted on the device

    def ask(self) -> bool:
        """Start to copy the tensor back, unless it is on the device; return True if a copy was started."""
        if self.there is not None:
            return False
        self.there, copied = self.copy.on_device()
        return copied

    def take(self) -> torch.Tensor:
        """Return the tensor on the device, and let go of it."""
        self.ask()
        there, self.there = self.there, None  # a second backward copies it from the host once more
        return self.copy.take(there)


class _Call:
    """One call of a checkpoint. All tensors that are kept of it come back together."""

    def __init__(self, inputs: KeptInputs[Any]) -> None:
        self.inputs = inputs
        self.kept: list[weakref.ref[_Kept]] = []
        self.before: weakref.ref[_Call] | None = None
        self.asked = -1  # the graph task of the last backward that asked for the tensors

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd keeps of `tensor`; the hook of torch's saved tensors, as is :meth:`unpack`."""
        if not self.inputs.moves(tensor):
            return tensor
        kept = _Kept(self.inputs._copy_of(tensor))
        if not self.kept:
            self.before, self.inputs._last = self.inputs._last, weakref.ref(self)
        self.kept.append(weakref.ref(kept))
        return kept

    def unpack(self, kept: Any) -> torch.Tensor:
        """Return the tensor; in a backward, start the copies back of this call and the one before it in the forward."""
        if not isinstance(kept, _Kept):
            return kept  # type: ignore[no-any-return]
        task = graph_task()
        if task != -1:
            self.inputs.late += self._ask(task)
            before = None if self.before is None else self.before()
            if before is not None:
                before._ask(task)
        return kept.take()

    def _ask(self, task: int) -> int:
        """Ask for all kept tensors, once in a backward; return the number of copies that were started."""
        if self.asked == task:
            return 0
        self.asked = task
        return sum(kept.ask() for kept in (ref() for ref in self.kept) if kept is not None)


def checkpoint_keeping(
    inputs: KeptInputs[Any], forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call the forward of a layer in a checkpoint whose inputs are kept on the host."""
    # A checkpoint saves positional arguments by autograd's hooks, and keeps keyword arguments as they are.
    names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and inputs.moves(value)]
    rest = {name: value for name, value in kwargs.items() if name not in names}
    call = functools.partial(_with_names, forward, names, rest)
    with inputs.hooks():
        return checkpoint(call, *args, *(kwargs[name] for name in names), use_reentrant=False)


def _with_names(forward: Callable[..., Any], names: Sequence[str], rest: Mapping[str, Any], *given: Any) -> Any:
    first = len(given) - len(names)
    return forward(*given[:first], **dict(zip(names, given[first:], strict=True)), **rest)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements are one block of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
