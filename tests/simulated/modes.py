"""Every operation of torch as reads and writes of a simulated device and its host.

Tensors stay on the CPU and are computed at once. Device memory reports the device ``cpu:0``, host memory ``cpu``: torch takes
these for one device, and the modes here keep them apart. Memory is the device's unless its allocation says otherwise.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .autograd import Backwards, BackwardThread
from .functional import NAMESPACE, FunctionalCollectives
from .memory import DEVICE, HOST, PINNED, Memory
from .streams import SimulatedStreams, site

CPU, ACCELERATOR = torch.device("cpu"), torch.device("cpu", 0)

_PLAIN = torch._C._disabled_torch_dispatch_impl  # of classes whose operations are torch's own
_FACTORIES = set(_device_constructors())
# Operations that take only the shape of their first argument, or nothing.
_READ_NOTHING = ("empty", "new_", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_WRITE_NOTHING = ("empty", "new_empty")
# Operations for which the host waits, because their result is the host's, or has a shape that depends on values.
_ANSWERS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique", "_unique2")
_TAKES_HOST_INDICES = ("index", "index_put", "index_put_")


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in tree_leaves(value) if isinstance(v, torch.Tensor)] if isinstance(value, (list, tuple)) else []


def _kind(device: torch.device) -> str | None:
    """Return the kind of memory that a call asks for by its device; None for no memory of the simulation."""
    if device.type != "cpu":
        return None
    return HOST if device.index is None else DEVICE


class World:
    """One simulated rank: its memory and streams, and how its operations are noted."""

    def __init__(self, streams: SimulatedStreams) -> None:
        self.streams, self.memory = streams, Memory(streams.hosts, streams.pool)
        self.backwards = Backwards(streams, self.memory)
        self.functional = FunctionalCollectives(self)
        self.threads = threading.local()  # .kind: of memory that the running call asks for
        self.failures: list[str] = []  # errors that nobody raises: of finalizers

    def note(
        self,
        name: str,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        fresh: list[torch.Tensor],
        like: list[torch.Tensor],
        crosses: bool = False,
    ) -> None:
        """Note an operation.

        Args:
            name: its name.
            reads, writes: tensors.
            fresh: tensors over memory that it has allocated.
            like: tensors of whose kind that memory is, unless the call asks for another.
            crosses: it may copy between host and device.
        """
        where = f"{name} at {site()}"
        new = set(map(id, fresh))
        kinds = {self.memory.kind(t) for t in (*reads, *writes) if id(t) not in new}
        kind = getattr(self.threads, "kind", None)
        if kind is None:
            kind = HOST if like and all(self.memory.kind(t) != DEVICE for t in like) else DEVICE
        for tensor in fresh:
            self.memory.allocate(tensor.untyped_storage(), kind, self.streams.current(), where)
        if fresh:
            kinds.add(kind)
        if crosses and DEVICE in kinds and len(kinds) > 1:
            return  # noted by `copy`, which knows how the copy is made
        if DEVICE not in kinds:
            self.by_host(where, reads, writes)
            return
        self.backwards.before_operation()
        agent, epoch = self.streams.launch()
        for tensor in (*reads, *writes):
            allocation = self.memory.of(tensor)
            if allocation is None or allocation.kind == DEVICE:
                continue
            # A number on the host is an argument of the kernel.
            is_argument = tensor.dim() == 0 or name in _TAKES_HOST_INDICES
            assert is_argument and not any(tensor is t for t in writes), f"{where}: host memory, from {allocation.made}"
            self.by_host(where, [tensor], [])
        for tensor in reads:
            if self.memory.kind(tensor) == DEVICE:
                self.memory.access(agent, epoch, tensor, where, writes=False)
        for tensor in writes:
            self.memory.access(agent, epoch, tensor, where, writes=True)
        if name in _ANSWERS:
            self.streams.host_waits(site(), agent.clock)

    def by_host(self, where: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """Note an operation of this thread itself."""
        host = self.streams.host()
        epoch = host.tick()
        for tensor in reads:
            self.memory.access(host, epoch, tensor, where, writes=False)
        for tensor in writes:
            self.memory.access(host, epoch, tensor, where, writes=True)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Make the allocator keep the memory of `tensor`, when it is freed, until `stream` is past its work."""
        with torch._C.DisableTorchFunction():
            found = self.memory.of(tensor)
        if found is not None and self.streams.orders():
            found.recorded.add(stream)

    def copy(self, into: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        """Note a copy between host and device."""
        where = f"a copy at {site()}"
        outward = self.memory.kind(into) != DEVICE
        host_side = into if outward else source
        pinned = self.memory.kind(host_side) == PINNED
        agent, epoch = self.streams.launch()
        if outward or pinned:
            self.memory.access(agent, epoch, source, where, writes=False)
            self.memory.access(agent, epoch, into, where, writes=True)
        else:  # to the device from pageable memory, which is read before the call returns
            self.by_host(where, [source], [])
            self.memory.access(agent, epoch, into, where, writes=True)
        if not pinned:
            self.streams.host_waits(site(), agent.clock)  # whatever was asked for
        elif not non_blocking:
            self.streams.host_waits(site(), agent.clock, "a copy that blocks")


class Operations(TorchDispatchMode):
    """Notes each operation below autograd."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)  # DTensor computes shapes
        if any(getattr(t, "__torch_dispatch__", _PLAIN) is not _PLAIN for t in types):
            return NotImplemented  # a wrapper: its own operations are seen
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        schema, world = func._schema, self.world
        namespace, _, name = schema.name.partition("::")
        if namespace == NAMESPACE:
            world.functional.note(name, args, out)
            return
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for index, argument in enumerate(schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(_tensors(value))
        if name == "lift_fresh" and world.memory.of(reads[0]) is None:
            # A number that torch itself has put into a tensor, if nobody has asked for it.
            kind = getattr(world.threads, "kind", None) or HOST
            world.memory.allocate(reads[0].untyped_storage(), kind, world.streams.current(), site())
            return
        known = {t.untyped_storage()._cdata for t in (*reads, *writes)}
        results = _tensors(out) if not isinstance(out, torch.Tensor) else [out]
        fresh = [t for t in results if t.untyped_storage()._cdata not in known]
        if not fresh and not writes and results:
            return  # a view
        like = reads
        if name.startswith(_READ_NOTHING):
            reads = []
        if name in ("copy_", "_to_copy"):
            into = writes[0] if writes else fresh[0]
            source = reads[0]
            world.note(name, reads, [into], fresh, like, crosses=True)
            if (world.memory.kind(into) == DEVICE) != (world.memory.kind(source) == DEVICE):
                blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
                world.copy(into, source, not blocking)
            return
        if name.startswith(_WRITE_NOTHING):
            world.note(name, reads, [], fresh, like)
            return
        world.note(name, reads, [*writes, *fresh], fresh, like)


class Calls(TorchFunctionMode):
    """Tells host from device: which memory a call asks for, and on which device a tensor says that it is."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._call(func, args, dict(kwargs or {}))
        with torch._C.DisableTorchFunction():
            self.world.backwards.see(result)
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if getattr(func, "__self__", None) is _DEVICE:
            return self._device(args[0], func(*args))
        if func in (torch.Tensor.to, torch.Tensor.cpu) and self._plain(args[0]):
            return self._to(args[0], func is torch.Tensor.cpu, args[1:], kwargs)
        if func in (torch.Tensor.tolist, torch.Tensor.numpy) and self._plain(args[0]):
            self._read(args[0], func.__name__)
            return func(*args, **kwargs)
        if func is torch.Tensor.is_pinned:
            return self._kind_of(args[0]) == PINNED
        asked = kwargs.get("device")
        if asked is None and func not in _FACTORIES:
            return func(*args, **kwargs)
        kind = PINNED if kwargs.pop("pin_memory", False) else _kind(torch.device(asked or CPU))
        with self._asking(kind):
            made = func(*args, **kwargs)
        if func in _FACTORIES and kind is not None and type(made).__torch_dispatch__ is _PLAIN:
            with torch._C.DisableTorchFunction():
                memory, streams = self.world.memory, self.world.streams
                if memory.of(made) is None:  # from Python's numbers, below the other mode
                    memory.allocate(made.untyped_storage(), kind, streams.current(), site())
        return made

    @contextlib.contextmanager
    def _asking(self, kind: str | None) -> Iterator[None]:
        """Return a context whose calls ask for memory of a kind."""
        threads = self.world.threads
        before, threads.kind = getattr(threads, "kind", None), kind
        try:
            yield
        finally:
            threads.kind = before

    @staticmethod
    def _plain(tensor: Any) -> bool:
        return type(tensor).__torch_dispatch__ is _PLAIN and tensor.device.type == "cpu"

    def _kind_of(self, tensor: torch.Tensor) -> str:
        with torch._C.DisableTorchFunction():
            return self.world.memory.kind(tensor)

    def _to(self, tensor: torch.Tensor, to_cpu: bool, args: Any, kwargs: Any) -> Any:
        """Move a tensor between host and device, which torch would take for one."""
        target = CPU if to_cpu else kwargs.pop("device", None)
        flags = []
        for value in () if to_cpu else args:
            if isinstance(value, torch.Tensor):
                target, kwargs["dtype"] = self._device(value, value.device), value.dtype
            elif isinstance(value, (str, torch.device)):
                target = torch.device(value)
            elif isinstance(value, torch.dtype):
                kwargs["dtype"] = value
            else:
                flags.append(value)
        kwargs.update(zip(("non_blocking", "copy"), flags, strict=False))
        if target is not None and torch.device(target).type != "cpu":
            return torch.Tensor.to(tensor, target, **kwargs)
        on_device = self._kind_of(tensor) == DEVICE
        kind = DEVICE if on_device else HOST
        wanted = kind if target is None else _kind(torch.device(target))
        if wanted == kind:
            return torch.Tensor.to(tensor, kwargs.pop("dtype", None) or tensor.dtype, **kwargs)
        kwargs.pop("copy", None)
        # torch page-locks what it copies to in the background.
        with self._asking(PINNED if wanted == HOST and kwargs.get("non_blocking") else wanted):
            return torch.ops.aten._to_copy.default(tensor, **kwargs)

    def _device(self, tensor: Any, plain: torch.device) -> torch.device:
        """Return the device that a tensor is on, where torch says `plain`."""
        with torch._C.DisableTorchFunction():
            state = getattr(tensor, "_shard_state", None)
            local = tensor if state is None else state.local if state.is_here else state.aside[0]
            if plain.type != "cpu" or type(local).__torch_dispatch__ is not _PLAIN:
                return plain
            return ACCELERATOR if self.world.memory.kind(local) == DEVICE else CPU

    def _read(self, tensor: torch.Tensor, name: str) -> None:
        """Note that the host reads values by itself."""
        world = self.world
        with torch._C.DisableTorchFunction():
            if world.memory.kind(tensor) != DEVICE:
                world.by_host(f"{name} at {site()}", [tensor], [])
                return
            assert name == "tolist", "numpy() of device memory"
            agent, epoch = world.streams.launch()
            world.memory.access(agent, epoch, tensor, f"tolist at {site()}", writes=False)
            world.streams.host_waits(site(), agent.clock)


_DEVICE = torch.Tensor.device


def run_backward(thread: BackwardThread, original: Any) -> Any:
    """Return autograd's function that runs a backward, which runs it in `thread`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return thread.run(lambda: original(*args, **kwargs))

    return run


def make_wrapper(original: Any) -> Any:
    """Return torch's function that makes wrappers of tensors, for which both devices are one."""

    def made(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = torch.device(torch.device(kwargs["device"]).type)
        return original(*(CPU if a == ACCELERATOR and isinstance(a, torch.device) else a for a in args), **kwargs)

    return made


@contextlib.contextmanager
def resizes(world: World) -> Iterator[None]:
    """Return a context in which storages that are resized give their memory back, or get new memory."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        if storage.nbytes() == size:
            return original(storage, size)
        kind = world.memory.free(storage)
        result = original(storage, size)
        if size:
            world.memory.allocate(storage, kind, world.streams.current(), site())
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
