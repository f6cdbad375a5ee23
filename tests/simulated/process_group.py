"""A process group whose collectives run on streams of a simulated device, as NCCL's do, and send by Gloo.

It is a backend of torch.distributed under the name of one that this build of torch does not have. Its collectives on host memory
are Gloo's. As with NCCL, a group's communicator is made in its first collective on the device, where the host waits for the
other ranks without a limit. So this may happen only where they are known to come, directly behind a collective of the hosts:
elsewhere two ranks that come to two new communicators in different order wait for each other, outside of any watchdog.
A collective on the device takes memory of the device alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from .clocks import Agent, Clock
from .memory import DEVICE
from .modes import World
from .streams import Event, site

BACKEND = "hccl"

world: World | None = None
"""The simulation of this process; None where none runs."""

_met = 0  # hosts that have met in the latest collective on host memory, if no communicator has run one since

_IN_REGISTERED_MEMORY = ("all-gather", "coalesced all-gather", "reduce-scatter", "all-reduce")
_LIMIT = 60.0  # seconds for the partners to come


class SimulatedWork(dist.Work):
    """A collective in flight. To wait for it orders the current stream, as with NCCL; the values are there already."""

    def __init__(self, own: World, clock: Clock, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._world, self._event = own, Event(own.streams)
        self._event._clock = clock
        self._stash: list[torch.Tensor] | None = tensors  # NCCL's works hold them until somebody has waited

    def is_completed(self) -> bool:
        return self._event.query()

    def wait(self, timeout: Any = None) -> bool:
        streams = self._world.streams
        if streams.orders():
            self._event.wait(streams.current())
        self._stash = None
        return True


class SimulatedGroup(dist.ProcessGroup):
    own_streams = False
    """Collectives that are asked to run on the current stream run on the group's all the same, as older backends do."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._stream: Agent | None = None
        self._name = ""
        self._registered: list[Any] = []  # pools of memory

    def getBackendName(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _run(
        self,
        name: str,
        start: Callable[[], Any],
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        opts: Any,
        finish: Callable[[], Any] | None = None,
    ) -> Any:
        own = world
        with _unseen():
            work = start()
        with torch._C.DisableTorchFunction():
            kinds = set() if own is None else {own.memory.kind(t) for t in (*reads, *writes) if t.numel()}
        on_device = DEVICE in kinds
        if own is not None and on_device and len(kinds) > 1:
            own.failures.append(f"{name} at {site()}: memory of the host beside the device's")
        global _met
        if own is None or not on_device:
            _met = self.size()
            return work
        if self._stream is not None:
            _met = 0
        elif _met < self.size():
            own.failures.append(f"{name} at {site()}: makes a communicator where a rank may be missing")
        deadline = time.monotonic() + _LIMIT
        while not work.is_completed():
            assert time.monotonic() < deadline, f"{name} at {site()}: the partners did not come"
            time.sleep(0.0005)
        with _unseen():
            work.wait()
            if finish is not None:
                finish()
        streams, where = own.streams, f"{name} at {site()}"
        if self._registered and name in _IN_REGISTERED_MEMORY:
            self._check_registered(own, where, writes if "gather" in name else [*reads, *writes])
        here, _ = streams.launch()
        if self._stream is None:
            self._stream = streams.add(Agent(f"the communicator {self.group_name}"))
        asynchronous = self.own_streams or getattr(opts, "asyncOp", True)
        agent = self._stream if asynchronous else here
        agent.join(here.clock)
        epoch = agent.tick()
        with torch._C.DisableTorchFunction():
            for tensor in reads:
                own.memory.access(agent, epoch, tensor, where, writes=False)
            for tensor in writes:
                own.memory.access(agent, epoch, tensor, where, writes=True)
        return SimulatedWork(own, dict(agent.clock), [*reads, *writes]) if asynchronous else None

    # -- registered memory, as torch's backend for NCCL has it -----------------------------------------------------
    def _get_backend(self, device: Any) -> SimulatedGroup:
        return self

    @property
    def mem_allocator(self) -> Any:
        return "memory for communicators"

    def register_mem_pool(self, pool: Any) -> None:
        assert self._stream is not None, "the communicator does not exist before its first collective"
        self._registered.append(pool)

    def _check_registered(self, own: World, where: str, tensors: list[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunction():
            for tensor in tensors:
                allocation = own.memory.of(tensor)
                if tensor.numel() and (allocation is None or allocation.pool not in self._registered):
                    own.failures.append(f"{where}: memory that is not registered")

    # -- the methods of torch's process groups --------------------------------------------------------------------
    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        def finish() -> None:
            if _is_mean(opts):
                tensors[0].div_(self.size())

        return self._run(
            "all-reduce", lambda: self._inner.allreduce(tensors, _summing(opts)), [], tensors, opts, finish
        )

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        own = opts.rootRank == self.rank()
        reads, writes = (tensors, []) if own else ([], tensors)
        return self._run("broadcast", lambda: self._inner.broadcast(tensors, *_given(opts)), reads, writes, opts)

    def all_gather_single(self, output: Any, sent: Any, opts: Any = None) -> Any:
        start = _method(self._inner, "all_gather_single", "_allgather_base")
        return self._run("all-gather", lambda: start(output, sent, *_given(opts)), [sent], [output], opts)

    def all_gather_single_coalesced(self, outputs: Any, sent: Any, opts: Any = None) -> Any:
        one = _method(self._inner, "all_gather_single", "_allgather_base")

        def start() -> Any:
            works = [one(output, each, *_given(opts)) for output, each in zip(outputs, sent, strict=True)]
            for work in works[:-1]:
                work.wait()
            return works[-1]

        return self._run("coalesced all-gather", start, sent, outputs, opts)

    def reduce_scatter_single(self, output: Any, sent: Any, opts: Any = None) -> Any:
        total = torch.Tensor()

        def start() -> Any:  # Gloo's own reduce-scatter ends only when it is waited for
            nonlocal total
            total = sent.clone()
            return self._inner.allreduce([total], _summing(opts))

        def finish() -> None:
            output.copy_(total.view(self.size(), -1)[self.rank()].view(output.shape))
            if _is_mean(opts):
                output.div_(self.size())

        return self._run("reduce-scatter", start, [sent], [output], opts, finish)

    def all_to_all_single(self, output: Any, sent: Any, to: Any, given: Any, opts: Any = None) -> Any:
        start = _method(self._inner, "all_to_all_single", "alltoall_base")
        return self._run("all-to-all", lambda: start(output, sent, to, given, *_given(opts)), [sent], [output], opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        reads = [t for ts in inputs for t in ts]
        return self._run("scatter", lambda: self._inner.scatter(outputs, inputs, *_given(opts)), reads, outputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        writes = [t for ts in outputs for t in ts]
        return self._run("gather", lambda: self._inner.gather(outputs, inputs, *_given(opts)), inputs, writes, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        writes = [t for ts in outputs for t in ts]
        return self._run(
            "all-gather", lambda: self._inner.allgather(outputs, inputs, *_given(opts)), inputs, writes, opts
        )

    def barrier(self, opts: Any = None) -> Any:
        return self._inner.barrier()

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Return a context whose operations are not the device's."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _is_mean(opts: Any) -> bool:
    return opts is not None and opts.reduceOp == dist.ReduceOp.AVG


def _summing(opts: Any) -> Any:
    """Return the options of an all-reduce by Gloo, which does not divide, for those of a reduction."""
    given = dist.AllreduceOptions()
    if opts is not None and not _is_mean(opts):
        given.reduceOp = opts.reduceOp
    return given


def _given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)


def _method(inner: Any, *names: str) -> Any:
    return next(getattr(inner, name) for name in names if hasattr(inner, name))


def register() -> None:
    """Make the backend known to torch.distributed. May be called again."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, SimulatedGroup, devices=["cpu"])
