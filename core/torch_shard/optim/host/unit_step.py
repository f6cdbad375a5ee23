"""An optimizer's step on one flat buffer in host memory: prepared in the thread that asks for it, done on the host thread.

To prepare a step is to take parameters, gradients, options and state as they are, without waiting for gradients that are on
their way or still to be scaled. The arithmetic is a task of the host thread, which first waits for those. Who waits for the task,
and when the arithmetic is done at once instead: see :mod:`.step`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import DiskError
from ...offload.host import Host
from ...offload.host_thread import TaskGroup
from ...offload.pending_writes import Work
from ...shard_tensor.host_memory import flat_of
from ...shard_tensor.tensor import ShardTensor
from ...shard_tensor.unsharded_param import own_grad
from ...unit.flat_buffer import FlatBuffer
from ..elementwise.step import FlatStep
from ..engines_of_optimizer import params_of
from ..group_options import copied_options
from ..optimizer_proxy import Session, proxy_of


class Prepared(NamedTuple):
    """A prepared step on one flat buffer, with the proxy that the arithmetic is called with."""

    flat: FlatBuffer
    step: FlatStep
    proxy: Any
    session: Session


class HostUnits:
    """The steps of one optimizer, whose ``step`` is a function of torch's own, on flat buffers in host memory.

    Attributes:
        function: torch's step function, without its hooks.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer: Any = weakref.ref(optimizer)
        self.function: Callable[..., Any] | None = None
        self._classes: dict[type, type] = {}  # of proxies
        self._on_disk: dict[FlatBuffer, list[torch.Tensor]] = {}  # the state of each flat buffer
        self._ahead: FlatBuffer | None = None  # the buffer that was read ahead last
        self._groups: list[dict[str, Any]] = []  # with the options at the beginning of the step
        self._together = TaskGroup()
        self._held: set[int] = set()  # the ids of the optimizer's parameters
        self._switches: dict[FlatBuffer, Any] = {}  # `_switches` of each buffer's last step that was done at once

    def begin(self) -> None:
        """Begin a step, of which one flat buffer after the other is prepared and stepped."""
        optimizer = self._optimizer()
        # Copies, because the user may edit the options while the arithmetic is done.
        self._groups, self._together = [copied_options(group) for group in optimizer.param_groups], TaskGroup()
        self._held = set(map(id, params_of(optimizer)))

    def prepare(self, flat: FlatBuffer, step: FlatStep) -> Prepared | None:
        """Take everything as it is now, and change nothing.

        Returns:
            None if there is no gradient for this optimizer, which then does not wait for another one's step on the buffer.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if all(own_grad(p) is None or id(p) not in self._held for p in flat.params):
                return None
        flat.wait_for_step()
        step.announced, step.later, step.given_groups = False, True, self._groups
        proxy, session = proxy_of(self._optimizer(), step, self._classes)
        session.groups()  # which opens the step
        return Prepared(flat, step, proxy, session)

    def step(self, prepared: Prepared, following: FlatBuffer | None) -> None:
        """Do the arithmetic, or have the host thread do it. `following` is the buffer that is likely to be stepped next."""
        flat, step, optimizer = prepared.flat, prepared.step, self._optimizer()
        assert flat.host is not None and flat.gradients.host is not None
        if not any(runs.pieces for runs in step.all_runs):
            prepared.session.end()
            return
        switches = _switches(optimizer, self._groups)
        task = functools.partial(self._run, prepared, optimizer, following)
        if self._switches.get(flat) != switches or not _may_wait(optimizer, step):
            flat.wait_for_host()
            flat.host.host.forget_arrived()
            task()
            try:
                self._to_disk(flat, step)
            except DiskError as error:
                flat.host.host.give_up(error)
                raise
            _note_pending_writes(flat, step)
            self._switches[flat] = switches
            return
        # A copy of all attributes that a step may read, since they may change later.
        object.__setattr__(prepared.proxy, "__dict__", dict(optimizer.__dict__))
        with torch.no_grad():
            for runs in step.all_runs:
                runs.counters.advance()
        with torch._C.DisableTorchFunctionSubclass():
            # A graph that has saved a parameter must not run from now on, not only when the parameter has been updated.
            torch.autograd.graph.increment_version([p for runs in step.all_runs for p in runs.stepped])
        step.announced = True
        host, arriving = flat.host.host, flat.gradients.host.pending_writes.works
        after_gradients = functools.partial(_run_after, host, arriving, task, step, type(optimizer).__qualname__)
        work = host.thread.do(after_gradients, self._together)
        _note_pending_writes(flat, step)
        flat.gradients.host.pending_writes.begin(work, _gradients(flat))
        flat.host.pending_writes.begin(
            work, [*flat.params, *(value for runs in step.all_runs for value in runs.elements)]
        )

    def _run(self, prepared: Prepared, optimizer: Any, following: FlatBuffer | None) -> None:
        """Do the arithmetic on one flat buffer, whose gradients have arrived. The argument `optimizer` keeps it alive."""
        flat = prepared.flat
        assert self.function is not None and flat.host is not None
        disk, kept = flat.host.host.disk, self._kept(flat)
        if disk is not None:
            if self._ahead is not None and self._ahead is not flat:
                # Another buffer came, so the memory of that one is given back.
                disk.write_behind(self._kept(self._ahead))
            self._ahead = following
            if following is not None:
                disk.read_ahead(self._kept(following))
            disk.wait(kept)
        flat.host.wait_for_reads()
        self.function(prepared.proxy)
        prepared.session.end()
        if flat.host.crosses:
            with torch.no_grad():
                flat.host.refresh()
        if disk is not None:
            disk.write_behind(kept)

    # -- on disk --------------------------------------------------------------------------------------------------
    def _kept(self, flat: FlatBuffer) -> list[torch.Tensor]:
        """Return what a step on a flat buffer needs from disk."""
        own = [flat.memory] if flat.host is not None and flat.host.host.offload.nvme_params else []
        return own + self._on_disk.get(flat, [])

    def _to_disk(self, flat: FlatBuffer, step: FlatStep) -> None:
        """Move state to disk that was made or replaced by the last step. The next step takes everything anew.

        Raises:
            DiskError: there is no space, or the disk has failed; the state stays in memory.
        """
        disk = flat.host.host.disk if flat.host is not None else None
        if disk is None:
            return
        known = self._on_disk.get(flat, [])
        kept: dict[int, torch.Tensor] = {}
        for value in (value for runs in step.all_runs for value in runs.elements):
            local = value._local
            flat_state = value._shard_state.flat
            base = local if flat_state is None else flat_state  # state from elsewhere lies by itself
            if not any(base is one for one in known) and id(base) not in kept:
                kept[id(base)] = disk.allocate(f"state {value._spec.name}", base.numel(), base.dtype).copy_(base)
            else:
                kept.setdefault(id(base), base)
            place = kept[id(base)]
            if place is not base:
                at = local.storage_offset() - base.storage_offset()
                value._shard_state.local, value._shard_state.flat = place[at : at + local.numel()], place
        self._on_disk[flat] = list(kept.values())
        disk.write_behind(kept.values())

    def forget(self) -> None:
        """Drop everything that was kept for the next step."""
        self._on_disk, self._ahead, self._switches = {}, None, {}


def _run_after(host: Host, works: Iterable[Work], task: Callable[[], None], step: FlatStep, name: str) -> None:
    """Wait for the work on the gradients, on the host thread, and then do the step on them."""
    for work in works:
        work.finish()
    host.forget_arrived()
    try:
        task()
    except Exception as error:
        numbers = [str(n) for n, runs in enumerate(step.all_runs) if runs.pieces]
        names = [spec.name for runs in step.all_runs for spec in runs.specs[:1]]
        raise RuntimeError(
            f"{name}.step() has failed in parameter group {', '.join(numbers)} ({names[0]} and what is stepped with it): {error}"
        ) from error


def _may_wait(optimizer: Any, step: FlatStep) -> bool:
    scaled = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
    return step.as_left and not scaled and all(runs.has_counters_only() for runs in step.all_runs)


def _switches(optimizer: Any, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the options with True or False in place of each number: False if it is zero.

    Where this changes, a step may fail, or make state (SGD's ``momentum``) that is to be there when it returns. Names of groups
    are the user's own.
    """
    return [{k: _switch(v) for k, v in group.items() if k in optimizer.defaults} for group in groups]


def _switch(option: Any) -> Any:
    if isinstance(option, (tuple, list)):
        return tuple(map(_switch, option))
    if isinstance(option, torch.Tensor):
        return torch.Tensor  # to read it might be to wait for the device
    return bool(option) if isinstance(option, (bool, int, float)) else option


def _gradients(flat: FlatBuffer) -> list[Any]:
    """Return the gradients that a step reads."""
    with torch._C.DisableTorchFunctionSubclass():
        grads = [own_grad(p) for p in flat.params]
    return [grad for grad in grads if isinstance(grad, ShardTensor)]


def _note_pending_writes(flat: FlatBuffer, step: FlatStep) -> None:
    """Note whose writes the state waits for; see :func:`~torch_shard.shard_tensor.host_memory.pending_writes_of`."""
    assert flat.host is not None
    for base in (flat_of(value) for runs in step.all_runs for value in runs.elements):
        if base is not None and not hasattr(base, "_pending_writes"):
            base._pending_writes = flat.host.pending_writes
