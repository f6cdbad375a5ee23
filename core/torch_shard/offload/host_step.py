"""An optimizer's step in host memory: unit by unit, beside what the training thread does next.

``optimizer.step()`` looks at everything as any other step does, takes gradients and options as they are then, and hands the
arithmetic to the host thread: one task for each flat buffer, in the order in which forward comes to them. Until a task has ended
the sharded tensors over its memory wait (:mod:`.moving`); the user's counters are moved on at once. The next forward comes to
the first unit when that one has been updated, and to the others as they are.

Where the outcome could not be the same, all is done before ``step`` returns: the first step, which makes the state; gradients
that the user has put there; what counts anything else than steps in scalars (NAdam, ASGD); a GradScaler that hands its scale to
a fused step; options that are no numbers, for which it may fail. Optimizers that are not torch's own step as they do without
offload, in the training thread.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..counters import part_shared
from ..errors import DiskError, ShardError
from ..flat_buffer import FlatBuffer
from ..flat_step import REST, FlatStep, is_step_of_torchs
from ..group_options import Options
from ..held import runtimes_of
from ..leaf import own_grad
from ..optim import Kind
from ..shard_tensor import ShardTensor
from ..stand_in import Session, stand_in
from ..step_checks import refuse_unreduced
from .host_thread import Together

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["HostStep", "refuse_disk", "steps_on_host"]


def steps_on_host(optimizer: Any, runtimes: list[Runtime]) -> bool:
    """Whether a step of kind ``"elementwise"`` is a :class:`HostStep`."""
    # One over several engines is one step over all of them, in the training thread.
    return len(runtimes) == 1 and runtimes[0].host is not None and is_step_of_torchs(optimizer)


def refuse_disk(optimizer: Any, runtimes: list[Runtime], kind: Kind | None) -> None:
    """State on disk is moved by :class:`HostStep`. `kind`: of the optimizer.

    Raises:
        ShardError: on all ranks; `optimizer` steps another way, with ``Offload(nvme=...)``. Nothing was changed.
    """
    if kind == "elementwise" and steps_on_host(optimizer, runtimes):
        return
    for runtime in runtimes:
        if runtime.host is not None and runtime.host.disk is not None:
            cls = type(optimizer)
            raise ShardError(
                f"rank {runtime.collectives.world_rank}: {cls.__module__}.{cls.__qualname__} would keep its state in memory, and "
                "Offload(nvme=...) is to keep it on disk, which it can for the element-wise classes of torch.optim, each with "
                "the parameters of one sharded model. Use one of those, or leave nvme out. Nothing was changed."
            )


class HostStep:
    """The steps of one optimizer; see :class:`~torch_shard.stand_in.Work`. What it gives the optimizer's own loop is what is
    not sharded."""

    def __init__(self, optimizer: Any, runtime: Runtime) -> None:
        self._optimizer: Any = weakref.ref(optimizer)
        self.runtime = runtime
        self.function: Callable[..., Any] | None = None  # the class's step, plain
        self._rest = FlatStep(optimizer, runtime, REST)
        self._steps: dict[int, tuple[FlatBuffer, FlatStep]] = {}
        self._kinds: dict[type, type] = {}
        self._on_disk: dict[int, list[torch.Tensor]] = {}  # by id of the flat buffer: its state
        self._options: list[Options] = []
        self._fresh: list[dict[str, Any]] = []

    @property
    def state(self) -> Any:
        return self._rest.state

    # -- one step -------------------------------------------------------------------------------------------------
    def open(self) -> None:
        optimizer = self._optimizer()
        if runtimes_of(optimizer) != [self.runtime]:
            raise ShardError(
                f"rank {self.runtime.collectives.world_rank}: {type(optimizer).__qualname__} holds parameters of several sharded "
                "models since its closure has run. Add them between two steps."
            )
        self._options = [Options(group) for group in optimizer.param_groups]
        refuse_unreduced(optimizer, self.runtime)
        together = Together()
        held = len(optimizer.state)
        part_shared(optimizer.state)  # of which each flat buffer's step sees its own part
        order = self._in_order(optimizer)
        # First look at all of it, so that a step which is refused has changed nothing.
        looked = [self._look(optimizer, flat, step) for flat, step in order]
        following = [*(flat for flat, _ in order[1:]), None]
        for (flat, step), (other, session, groups), behind in zip(order, looked, following, strict=True):
            self._step(optimizer, flat, step, other, session, groups, together, behind)
        if len(optimizer.state) > held:
            _sort_state(optimizer, held)
        for options in self._options:
            options.write_back()
        assert self.runtime.host is not None
        self.runtime.host.forget_ended()  # all gradients have arrived
        self._rest.open()

    def _in_order(self, optimizer: Any) -> list[tuple[FlatBuffer, FlatStep]]:
        """As the next forward comes to them, as far as the last one tells."""
        units = list(dict.fromkeys([*self.runtime.reductions.used, *self.runtime.units]))
        flats = [flat for unit in units for flat in unit.flats]
        if any(id(flat) not in self._steps for flat in flats):
            fresh = self._fresh_groups
            self._steps = {id(flat): (flat, FlatStep(optimizer, self.runtime, flat, fresh)) for flat in flats}
        return [self._steps[id(flat)] for flat in flats]

    def _fresh_groups(self) -> list[dict[str, Any]]:
        return self._fresh

    def _look(self, optimizer: Any, flat: FlatBuffer, step: FlatStep) -> tuple[Any, Session, list[dict[str, Any]]]:
        """Take everything as it is now, and change nothing: what the arithmetic of one flat buffer is called with."""
        flat.settle()
        step.count_as_before()
        step.announced = False
        groups = self._fresh = [options.fresh() for options in self._options]
        other, session = stand_in(optimizer, step, self._kinds)
        session.groups()  # opens it
        return other, session, groups

    def _step(
        self,
        optimizer: Any,
        flat: FlatBuffer,
        step: FlatStep,
        other: Any,
        session: Session,
        groups: list[dict[str, Any]],
        together: Together,
        following: FlatBuffer | None,
    ) -> None:
        assert flat.host is not None and flat.gradients.home is not None and self.function is not None
        if not any(runs.pieces for runs in step.all_runs):
            session.end()
            return
        counters = step.count_apart() if self._may_wait(optimizer, step) else None
        task = functools.partial(self._run, optimizer, other, session, flat, following)
        if counters is None:
            task()
            try:
                self._to_disk(flat, step)
            except DiskError as error:
                flat.host.host.give_up(error)
                raise
            _note_home(flat, step)
            for options, group in zip(self._options, groups, strict=True):
                options.stepped(group)
            return
        # Everything of the optimizer's that a step may read is as it is now, whatever becomes of it later.
        object.__setattr__(other, "__dict__", dict(optimizer.__dict__))
        with torch.no_grad():
            users = [counter for held, _ in counters for counter in held]
            if users:
                torch._foreach_add_(users, 1)
            for runs in step.all_runs:
                runs.counters.follow()
        with torch._C.DisableTorchFunctionSubclass():
            # A graph that has saved a parameter must not be run any more: from now on, and not from when it is updated.
            torch.autograd.graph.increment_version([p for runs in step.all_runs for p in runs.stepped])
        step.announced = True
        host = flat.host.host
        work = host.thread.do(functools.partial(self._named, task, step, optimizer), together)
        _note_home(flat, step)
        flat.gradients.home.moving.begin(work, _gradients(flat))
        flat.host.moving.begin(work, [*flat.params, *(value for runs in step.all_runs for value in runs.elements())])

    @staticmethod
    def _may_wait(optimizer: Any, step: FlatStep) -> bool:
        scaled = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
        # What is no number may be what the step fails for, which its caller is to hear of. (Names of groups are the user's own.)
        known = optimizer.defaults
        plain = all(map(_is_number, (v for group in optimizer.param_groups for k, v in group.items() if k in known)))
        graph = any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups)
        return step.as_left and not scaled and plain and not graph

    def _run(
        self, optimizer: Any, other: Any, session: Session, flat: FlatBuffer, following: FlatBuffer | None
    ) -> None:
        """The arithmetic of one flat buffer. `following`: what comes behind it."""
        assert self.function is not None and flat.host is not None
        disk, kept = flat.host.host.disk, self._kept(flat)
        if disk is not None:
            if following is not None:
                disk.read_ahead(self._kept(following))
            disk.wait(kept)
        flat.host.settle_reads()
        self.function(other)
        session.end()
        if flat.host.crosses:
            with torch.no_grad():
                flat.host.refresh()
        if disk is not None:
            disk.write_behind(kept)

    # -- on disk --------------------------------------------------------------------------------------------------
    def _kept(self, flat: FlatBuffer) -> list[torch.Tensor]:
        """What a step on a flat buffer needs from disk."""
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
            base, local = value._flat, value._local
            if not any(base is one for one in known) and id(base) not in kept:
                kept[id(base)] = disk.allocate(f"state {value._spec.name}", base.numel(), base.dtype).copy_(base)
            else:
                kept.setdefault(id(base), base)
            place = kept[id(base)]
            if place is not base:
                at = local.storage_offset() - base.storage_offset()
                value._local, value._flat = place[at : at + local.numel()], place
        self._on_disk[id(flat)] = list(kept.values())
        disk.write_behind(kept.values())

    def _named(self, task: Callable[[], None], step: FlatStep, optimizer: Any) -> None:
        """On the host thread."""
        try:
            task()
        except Exception as error:
            numbers = [str(n) for n, runs in enumerate(step.all_runs) if runs.pieces]
            names = [spec.name for runs in step.all_runs for spec in runs.specs[:1]]
            raise RuntimeError(
                f"{type(optimizer).__qualname__}.step() has failed in parameter group {', '.join(numbers)} ({names[0]} and "
                f"what is stepped with it): {error}"
            ) from error

    # -- the rest -------------------------------------------------------------------------------------------------
    def groups(self) -> list[dict[str, Any]]:
        return self._rest.groups()

    def before(self, number: int) -> None:
        self._rest.before(number)

    def after(self, number: int) -> None:
        self._rest.after(number)

    def leave(self, number: int) -> None:
        self._rest.leave(number)

    def through(self) -> None:
        pass

    def pause(self) -> None:
        self._rest.pause()

    def zero_grad(self, given: Callable[[], None], users: Callable[[], None]) -> None:
        given()

    def close(self) -> None:
        self._rest.close()

    def forget(self) -> None:
        """Let go of everything that was kept for the next step."""
        for flat, step in self._steps.values():
            flat.settle()
            step.count_as_before()
            step.forget()
        self._steps, self._on_disk = {}, {}
        self._rest.forget()


def _sort_state(optimizer: Any, held: int) -> None:
    """What state has been made since there were `held` entries, in the order in which torch makes it, that of the groups, and not
    of units: users go through it."""
    state = optimizer.state
    made = set(map(id, list(state)[held:]))
    for p in (p for group in optimizer.param_groups for p in group["params"] if id(p) in made):
        state[p] = state.pop(p)


def _is_number(option: Any) -> bool:
    if isinstance(option, (tuple, list)):
        return all(map(_is_number, option))
    return option is None or isinstance(option, (bool, int, float, torch.Tensor))


def _gradients(flat: FlatBuffer) -> list[Any]:
    """Which a step reads."""
    with torch._C.DisableTorchFunctionSubclass():
        grads = [own_grad(p) for p in flat.params]
    return [grad for grad in grads if isinstance(grad, ShardTensor)]


def _note_home(flat: FlatBuffer, step: FlatStep) -> None:
    """Of state: see :func:`.moving.home_of`."""
    assert flat.host is not None
    for base in (value.__dict__.get("_flat") for runs in step.all_runs for value in runs.elements()):
        if base is not None and not hasattr(base, "_home"):
            base._home = flat.host.moving
