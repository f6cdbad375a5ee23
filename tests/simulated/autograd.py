"""Runs a backward in a thread of its own, and each node on the stream of its forward, as autograd does on a device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .clocks import Agent, Clock
from .memory import Memory
from .streams import SimulatedStreams

_STREAM = "simulated stream"  # the entry of a node's metadata


class Backwards:
    """The streams of the nodes of autograd's graphs. A node waits for whatever has made the gradients that it is given."""

    def __init__(self, streams: SimulatedStreams, memory: Memory) -> None:
        self._streams, self._memory = streams, memory
        self._threads = (
            threading.local()
        )  # .caller: the stream that has begun the running backward; .used: of its nodes
        self._made: dict[int, Clock] = {}  # by the address of a gradient's storage: what was before its end

    def see(self, result: Any) -> None:
        """Note that the nodes of a result's graph which are new have been made on the current stream."""
        nodes = []
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            node = getattr(tensor, "grad_fn", None) if isinstance(tensor, torch.Tensor) else None
            if node is not None:
                nodes.append(node)
                if _STREAM not in node.metadata:  # hooks of tensors come before those of nodes
                    tensor.register_hook(self._on_tensor(self._streams.current()))
        while nodes:
            node = nodes.pop()
            if _STREAM in node.metadata:
                continue
            node.metadata[_STREAM] = self._streams.current()
            node.register_prehook(self._before(node.metadata))
            node.register_hook(self._after)
            nodes += [parent for parent, _ in node.next_functions if parent is not None]

    def _before(self, metadata: dict[str, Any]) -> Any:
        def enter(gradients: tuple[Any, ...]) -> None:
            stream = metadata[_STREAM]
            self._enter(stream)
            self._used.add(stream)
            for gradient in gradients:
                if gradient is not None:
                    stream.join(self._made_before(gradient))
                    self._keep(gradient, stream)

        return enter

    def _on_tensor(self, stream: Agent) -> Any:
        def enter(gradient: torch.Tensor) -> None:
            self._enter(stream)

        return enter

    def _enter(self, stream: Agent) -> None:
        self._streams.set_current(stream)
        self._threads.between = False

    def before_operation(self) -> None:
        """Order the operations of autograd itself, which adds gradients up between two nodes, behind all nodes so far."""
        if getattr(self._threads, "between", False):
            current = self._streams.current()
            for stream in self._used:
                current.join(stream.clock)

    def _keep(self, gradient: torch.Tensor, stream: Agent) -> None:
        """Keep a gradient's memory for `stream`, as autograd does if another one has made it."""
        with torch._C.DisableTorchFunction():
            allocation = self._memory.of(gradient)
        if allocation is not None and allocation.owner is not stream:
            allocation.recorded.add(stream)

    def _after(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        self._threads.between = True
        clock = dict(self._streams.current().clock)
        with torch._C.DisableTorchFunction():
            for gradient in inputs:
                if gradient is not None:
                    self._made[gradient.untyped_storage()._cdata] = clock

    def _made_before(self, gradient: torch.Tensor) -> Clock:
        with torch._C.DisableTorchFunction():
            known = self._made.pop(gradient.untyped_storage()._cdata, None)
            allocation = self._memory.of(gradient)
        clock: Clock = known or {}
        for span in [] if allocation is None else allocation.spans:
            write = span.write
            if (
                write is not None and clock.get(write.agent, 0) < write.epoch
            ):  # a sum of gradients, which no node has made
                _join(clock, write.agent.clock)
        return clock

    @property
    def _used(self) -> set[Agent]:
        if not hasattr(self._threads, "used"):
            self._threads.used = set()
        return self._threads.used  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Surround a backward in the thread that runs it: at its end the current stream waits for all of its nodes."""
        before, self._threads.caller = getattr(self._threads, "caller", None), self._streams.current()
        try:
            yield
        finally:
            self.leave()
            self._threads.caller = before

    def leave(self) -> None:
        """Go back to the stream that has begun the backward, which waits for the nodes so far."""
        caller, self._threads.between = self._threads.caller, False
        self._streams.set_current(caller)
        for stream in self._used:
            caller.join(stream.clock)
        self._used.clear()


class BackwardThread:
    """Autograd's thread of the device, which runs the backwards of all other threads; used as a context.

    A backward begun in it, as reentrant checkpoints do, runs there at once.
    """

    def __init__(self, streams: SimulatedStreams, backwards: Backwards) -> None:
        self._streams, self._backwards = streams, backwards
        self._pool = ThreadPoolExecutor(1, "autograd", streams.enter_thread)
        self._thread, self._host = self._pool.submit(lambda: (threading.get_ident(), streams.host())).result()

    def __enter__(self) -> BackwardThread:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def run(self, backward: Callable[[], Any]) -> Any:
        """Run a backward, and return its result. The calling thread waits for it, but not for the device."""
        if threading.get_ident() == self._thread:
            with self._backwards.running():
                return backward()
        caller, modes = self._streams.host(), _get_current_dispatch_mode_stack()
        try:
            return self._pool.submit(self._run, backward, dict(caller.clock), self._streams.current(), modes).result()
        finally:
            caller.join(self._host.clock)

    def _run(self, backward: Callable[[], Any], before: Clock, stream: Agent, modes: list[Any]) -> Any:
        self._host.join(before)
        own = set(map(type, _get_current_dispatch_mode_stack()))
        with contextlib.ExitStack() as stack:
            for mode in modes:  # autograd takes those of the calling thread along
                if type(mode) not in own:
                    stack.enter_context(mode)
            stack.enter_context(self._streams.use(stream))
            stack.enter_context(self._backwards.running())
            return backward()


def _join(clock: Clock, other: Clock) -> None:
    for agent, epoch in other.items():
        clock[agent] = max(epoch, clock.get(agent, 0))
