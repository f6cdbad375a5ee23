"""An optimizer's step on one flat buffer in host memory: looked at in the thread that asks for it, done on the host thread.

To look is to take parameters, gradients, options and state as they are, without waiting for gradients that are on their way or
still to be scaled. The arithmetic is a task of the host thread, which first has those done. Until it has ended, the sharded
tensors over the memory wait (:mod:`.moving`); the user's counters are moved on at once.

Where the outcome could not be the same all is done at once: see :mod:`.host_step`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...errors import DiskError
from ...offload.host import Host
from ...offload.host_thread import TaskGroup
from ...offload.pending_writes import Work, flat_of
from ...shard_tensor.tensor import ShardTensor
from ...shard_tensor.unsharded_param import own_grad
from ...unit.flat_buffer import FlatBuffer
from ..elementwise.step import FlatStep
from ..engines_of_optimizer import params_of
from ..group_options import Options, Snapshot
from ..optimizer_proxy import Session, proxy_of

__all__ = ["HostUnits", "Looked"]


class Looked:
    """What the arithmetic of one flat buffer is called with."""

    __slots__ = ("flat", "given", "other", "session", "step")

    def __init__(self, flat: FlatBuffer, step: FlatStep, other: Any, session: Session, given: list[Snapshot]):
        self.flat, self.step, self.other, self.session, self.given = flat, step, other, session, given

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's, with options of their own."""
        return [given.group for given in self.given]


class HostUnits:
    """The steps of one optimizer, of a class of torch's own.

    Attributes:
        function: the class's ``step``, plain.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer: Any = weakref.ref(optimizer)
        self.function: Callable[..., Any] | None = None
        self._kinds: dict[type, type] = {}
        self._on_disk: dict[int, list[torch.Tensor]] = {}  # by id of the flat buffer: its state
        self._ahead: FlatBuffer | None = None  # what was read ahead last
        self._options: Sequence[Options] = ()
        self._fresh: list[Snapshot] = []
        self._together = TaskGroup()
        self._held: set[int] = set()  # the parameters of its groups, by id
        self._switches: dict[int, Any] = {}  # by id of the flat buffer: see `_switches`, in the latest step

    def begin(self, options: Sequence[Options]) -> None:
        """Begin a step, of which one part after the other is looked at and done. `options`: of the groups."""
        self._options, self._together = options, TaskGroup()
        self._held = set(map(id, params_of(self._optimizer())))

    def fresh_groups(self) -> list[dict[str, Any]]:
        """Return the groups for the FlatStep that is looked at."""
        return [given.group for given in self._fresh]

    def look(self, flat: FlatBuffer, step: FlatStep) -> Looked | None:
        """Take everything as it is now, and change nothing; None where there is no gradient for this optimizer, which then does
        not wait for another one's step on the buffer."""
        with torch._C.DisableTorchFunctionSubclass():
            if all(own_grad(p) is None or id(p) not in self._held for p in flat.params):
                return None
        flat.settle_step()
        step.count_as_before()
        step.announced, step.later = False, True
        self._fresh = [options.fresh() for options in self._options]
        other, session = proxy_of(self._optimizer(), step, self._kinds)
        session.groups()  # opens it
        return Looked(flat, step, other, session, self._fresh)

    def step(self, looked: Looked, following: FlatBuffer | None = None) -> None:
        """Do it, or have it done. `following`: what is likely to come behind it."""
        flat, step, optimizer = looked.flat, looked.step, self._optimizer()
        assert flat.host is not None and flat.gradients.home is not None
        if not any(runs.pieces for runs in step.all_runs):
            looked.session.end()
            return
        switches = _switches(optimizer, looked.groups)
        same = self._switches.get(id(flat)) == switches
        self._switches[id(flat)] = switches
        counters = step.count_apart() if same and _may_wait(optimizer, step, looked.groups) else None
        task = functools.partial(self._run, looked, optimizer, following)
        if counters is None:
            flat.settle()
            flat.host.host.forget_arrived()
            task()
            try:
                self._to_disk(flat, step)
            except DiskError as error:
                flat.host.host.give_up(error)
                raise
            _note_home(flat, step)
            for options, given in zip(self._options, looked.given, strict=True):
                options.stepped(given)
            return
        # Everything of the optimizer's that a step may read is as it is now, whatever becomes of it later.
        object.__setattr__(looked.other, "__dict__", dict(optimizer.__dict__))
        with torch.no_grad():
            users = [counter for held, _ in counters for counter in held]
            if users:
                torch._foreach_add_(users, 1)
            for runs in step.all_runs:
                runs.counters.follow()
                runs.counters.note()
        with torch._C.DisableTorchFunctionSubclass():
            # A graph that has saved a parameter must not be run any more: from now on, and not from when it is updated.
            torch.autograd.graph.increment_version([p for runs in step.all_runs for p in runs.stepped])
        step.announced = True
        host, arriving = flat.host.host, flat.gradients.home.moving.works
        behind = functools.partial(_behind, host, arriving, task, step, type(optimizer).__qualname__)
        work = host.thread.do(behind, self._together)
        _note_home(flat, step)
        flat.gradients.home.moving.begin(work, _gradients(flat))
        flat.host.moving.begin(work, [*flat.params, *(value for runs in step.all_runs for value in runs.elements())])

    def _run(self, looked: Looked, optimizer: Any, following: FlatBuffer | None) -> None:
        """Do the arithmetic of one flat buffer, whose gradients are there. `optimizer`: alive until then."""
        flat = looked.flat
        assert self.function is not None and flat.host is not None
        disk, kept = flat.host.host.disk, self._kept(flat)
        if disk is not None:
            if self._ahead is not None and self._ahead is not flat:
                disk.write_behind(self._kept(self._ahead))  # it did not follow: its memory is given back
            self._ahead = following
            if following is not None:
                disk.read_ahead(self._kept(following))
            disk.wait(kept)
        flat.host.settle_reads()
        looked.step.load()
        self.function(looked.other)
        looked.session.end()
        if flat.host.crosses:
            with torch.no_grad():
                flat.host.refresh()
        if disk is not None:
            disk.write_behind(kept)

    # -- on disk --------------------------------------------------------------------------------------------------
    def _kept(self, flat: FlatBuffer) -> list[torch.Tensor]:
        """Return what a step on a flat buffer needs from disk."""
        own = [flat.memory] if flat.host is not None and flat.host.host.offload.nvme_params else []
        return own + self._on_disk.get(id(flat), [])

    def _to_disk(self, flat: FlatBuffer, step: FlatStep) -> None:
        """Put state there that was made or replaced since. The next step finds it there, and looks at everything anew.

        Raises:
            DiskError: there is no space, or the disk has failed; what is in memory stays there.
        """
        disk = flat.host.host.disk if flat.host is not None else None
        if disk is None:
            return
        known = self._on_disk.get(id(flat), [])
        kept: dict[int, torch.Tensor] = {}
        for value in (value for runs in step.all_runs for value in runs.elements()):
            local = value._local
            flat_of = value._shard_state.flat
            base = local if flat_of is None else flat_of  # what was never stepped on here lies by itself
            if not any(base is one for one in known) and id(base) not in kept:
                kept[id(base)] = disk.allocate(f"state {value._spec.name}", base.numel(), base.dtype).copy_(base)
            else:
                kept.setdefault(id(base), base)
            place = kept[id(base)]
            if place is not base:
                at = local.storage_offset() - base.storage_offset()
                value._shard_state.local, value._shard_state.flat = place[at : at + local.numel()], place
        self._on_disk[id(flat)] = list(kept.values())
        disk.write_behind(kept.values())

    def forget(self) -> None:
        """Let go of everything that was kept for the next step."""
        self._on_disk, self._ahead, self._switches = {}, None, {}


def _behind(host: Host, works: Iterable[Work], task: Callable[[], None], step: FlatStep, name: str) -> None:
    """Do on the host thread what is to be done to the gradients, and then the step on them."""
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


def _may_wait(optimizer: Any, step: FlatStep, groups: Sequence[dict[str, Any]]) -> bool:
    scaled = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
    # What is no number may be what the step fails for, which its caller is to hear of. (Names of groups are the user's own.)
    known = optimizer.defaults
    plain = all(map(_is_number, (v for group in groups for k, v in group.items() if k in known)))
    graph = any(group.get("differentiable") or group.get("capturable") for group in groups)
    return step.as_left and not scaled and plain and not graph


def _is_number(option: Any) -> bool:
    if isinstance(option, (tuple, list)):
        return all(map(_is_number, option))
    return option is None or isinstance(option, (bool, int, float, torch.Tensor))


def _switches(optimizer: Any, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return which options are other than zero. Where that changes a step may make state (SGD's ``momentum``), or miss some,
    which is to be there, or heard of, when it returns."""
    return [{k: _is_on(v) for k, v in group.items() if k in optimizer.defaults} for group in groups]


def _is_on(option: Any) -> Any:
    if isinstance(option, (tuple, list)):
        return tuple(map(_is_on, option))
    # To read a tensor might be to wait for the device.
    return bool(option) if isinstance(option, (bool, int, float)) else option is not None


def _gradients(flat: FlatBuffer) -> list[Any]:
    """Return the gradients that a step reads."""
    with torch._C.DisableTorchFunctionSubclass():
        grads = [own_grad(p) for p in flat.params]
    return [grad for grad in grads if isinstance(grad, ShardTensor)]


def _note_home(flat: FlatBuffer, step: FlatStep) -> None:
    """Note where state is at home; see :func:`.pending_writes.pending_writes_of`."""
    assert flat.host is not None
    for base in (flat_of(value) for runs in step.all_runs for value in runs.elements()):
        if base is not None and not hasattr(base, "_home"):
            base._home = flat.host.moving
