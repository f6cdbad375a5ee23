"""An optimizer's step in host memory: unit by unit, beside what the training thread does next.

``optimizer.step()`` looks at everything as any other step does, takes gradients and options as they are then, and hands the
arithmetic to the host thread: one task for each flat buffer, in the order in which forward comes to them. Until a task has ended
the sharded tensors over its memory wait (:mod:`torch_shard.offload.pending_writes`); the user's counters are moved on at once.
The next forward comes to the first unit when that one has been updated, and to the others as they are.

Where the outcome could not be the same, all is done before ``step`` returns: in the first step, which makes the state; with
gradients that the user has assigned; for classes with other scalars than counters of steps (NAdam, ASGD); with a GradScaler
that hands its scale to a fused step; with options that have become zero, or other than zero, for which the step may make state;
and with options that are no numbers and new, for which it may fail. Optimizers that are not torch's own step as they do without
offload, in the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import ShardError
from ...unit.flat_buffer import FlatBuffer
from ..checks import refuse_unreduced
from ..elementwise.step import REST, FlatStep, is_step_of_torchs
from ..engines_of_optimizer import params_of, runtimes_of
from ..registry import Kind
from .unit_step import HostUnits

if TYPE_CHECKING:
    from ...runtime.runtime import Runtime


def steps_on_host(optimizer: Any, runtimes: list[Runtime]) -> bool:
    """Return True if a step of kind ``"elementwise"`` is a :class:`HostStep`."""
    # A step over several engines is one step over all of them, in the training thread.
    return len(runtimes) == 1 and runtimes[0].host is not None and is_step_of_torchs(optimizer)


def refuse_offloaded(optimizer: Any, runtimes: list[Runtime], kind: Kind | None) -> None:
    """Raise if an optimizer of this kind can't step on parameters, or keep state, where ``ShardConfig.offload`` has put them.

    Raises:
        ShardError: on all ranks; nothing was changed.
    """
    for runtime in runtimes:
        host = runtime.host
        if host is None or (kind == "elementwise" and steps_on_host(optimizer, runtimes)):
            continue
        if kind == "matrix" and host.streams.exist:
            why = "needs full matrices, which it can't have where parameters are in host memory (ShardConfig.offload)"
        elif host.disk is not None:
            why = "would keep its state in memory, and Offload(nvme=...) is to keep it on disk"
        else:
            continue
        cls = type(optimizer)
        raise ShardError(
            f"rank {runtime.collectives.world_rank}: {cls.__module__}.{cls.__qualname__} {why}. Use an element-wise class of "
            "torch.optim (AdamW) for the parameters of one sharded model, or another setting. Nothing was changed."
        )


class HostStep(FlatStep):
    """The steps of one optimizer on shards in host memory. Its own loop gets only the parameters that are not sharded."""

    def __init__(self, optimizer: Any, runtime: Runtime) -> None:
        super().__init__(optimizer, runtime, REST)
        self.runtime = runtime
        self.units = HostUnits(optimizer)
        self._steps: dict[FlatBuffer, FlatStep] = {}

    def open(self) -> None:
        optimizer = self._optimizer()
        if runtimes_of(optimizer) != [self.runtime]:
            raise ShardError(
                f"rank {self.runtime.collectives.world_rank}: {type(optimizer).__qualname__} holds parameters of several sharded "
                "models since its closure has run. Add them between two steps."
            )
        refuse_unreduced(optimizer, self.runtime)
        self.units.begin()
        held = len(optimizer.state)
        # All buffers are prepared before the first is stepped, so that a step which is refused has changed nothing.
        found = [self.units.prepare(flat, step) for flat, step in self._in_order(optimizer)]
        prepared = [one for one in found if one is not None]
        for number, one in enumerate(prepared):
            self.units.step(one, prepared[number + 1].flat if number + 1 < len(prepared) else None)
        if len(optimizer.state) > held:
            _sort_state(optimizer, held)
        super().open()

    def _in_order(self, optimizer: Any) -> list[tuple[FlatBuffer, FlatStep]]:
        """Return the flat buffers in the order of the next forward, as far as the last one tells, with their steps."""
        units = list(dict.fromkeys([*self.runtime.reductions.used, *self.runtime.units]))
        flats = [flat for unit in units for flat in unit.flats]
        if not self._steps.keys() >= set(flats):
            self._steps = {flat: FlatStep(optimizer, self.runtime, flat) for flat in flats}
        return [(flat, self._steps[flat]) for flat in flats]

    def forget(self) -> None:
        for flat, step in self._steps.items():
            flat.wait_for_host()
            step.forget()
        self._steps = {}
        self.units.forget()
        super().forget()


def _sort_state(optimizer: Any, held: int) -> None:
    """Sort the state that was made since there were `held` entries in torch's order, that of the groups.

    Users go through the state in this order.
    """
    state = optimizer.state
    made = set(map(id, list(state)[held:]))
    for p in params_of(optimizer):
        if id(p) in made:
            state[p] = state.pop(p)
