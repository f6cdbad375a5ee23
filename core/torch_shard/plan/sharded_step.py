"""One rank's step of a sharded model, made from the trace of the plain model's step.

Parameters, gradients and optimizer state of the plain model give way to the rank's shards, to gathered units, and to the buffers
of reductions; activations stay as they are. When a unit is gathered, prefetched and resharded is decided by
:class:`~torch_shard.schedule.unshard_schedule.UnshardSchedule`, which also decides it in training, and so for the order of
reductions and how many are in flight. The step is replayed three times. From the first two the schedule learns the order of the
units, and the third, which finds gradients and optimizer state of those before, is written down.

Not modelled: offload to disk, quantization, secondary shards (``reshard_after_forward``), ``no_sync()`` and steps in backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..config.offload import STAGED
from ..config.shard_config import ShardConfig
from ..errors import ConfigError
from ..schedule.phases import BACKWARD, EVALUATION, FORWARD
from ..schedule.unshard_schedule import UnshardSchedule
from .plan import Plan
from .replaced_storages import Replaced
from .replayed_reductions import ReplayedReductions
from .step_trace import (
    Allocation,
    CollectiveStart,
    CollectiveWait,
    Free,
    GradientAccumulated,
    GradientsCleared,
    HostUpdate,
    ModuleEnter,
    ModuleExit,
    NestedBackward,
    Operator,
    Phase,
    PhaseStart,
    StepTrace,
)
from .unit_stand_in import Log, UnitStandIn

_PIECE, _LIST = 1 << 17, 1 << 24  # elements that an optimizer steps on at a time: on the CPU, on a device


def sharded_step(
    trace: StepTrace,
    plan: Plan,
    config: ShardConfig,
    *,
    rank: int = 0,
    data_parallel: int | None = None,
    accumulates: bool = False,
) -> StepTrace:
    """Return what a step does on one rank when the model is sharded. Not collective; takes no memory.

    Args:
        trace: a step of the plain model, on the type of device that is meant, as :func:`.trace_for.trace_for` makes it.
        plan: the plan of the same model.
        config: the settings that the plan was made with.
        rank: the rank within its shard group, which decides on the sizes of its optimizer state.
        data_parallel: the number of ranks whose gradients are averaged; by default those among which the plan cuts parameters.
        accumulates: the gradients are added to those of micro-batches before, each of which was reduced.

    Raises:
        ConfigError: the plan has quantization, secondary shards, or offload to disk.
    """
    for setting in ("quantized", "reshard_after_forward"):
        if getattr(config, setting) is not None:
            raise ConfigError(f"{setting}: a step with this setting can't be replayed.")
    if plan.offload is not None and plan.offload.nvme is not None:
        raise ConfigError("offload.nvme: a step with this setting can't be replayed.")
    ranks = plan.world_size if data_parallel is None else data_parallel
    return _Replay(trace, plan, config, rank, ranks, accumulates).run()


class _Alone:
    """A stand-in for reads of the model by one rank alone, of which a replay has none."""

    running = False

    def unshard(self, unit: UnitStandIn) -> None:
        raise AssertionError("the schedule asks for this only while `running`")


class _Operations:
    """A stand-in for the operations that ranks compare: in a replay there is one rank."""

    def __init__(self) -> None:
        self.on_difference = lambda: None

    def note(self, code: int, text: str) -> None:
        pass

    def check(self, what: str) -> None:
        pass


@dataclass(eq=False)
class _Use:
    """A forward of a unit; see :class:`torch_shard.runtime.use.Use`."""

    unit: UnitStandIn
    start: int
    end: int
    saved: bool
    task: int = 0


class _Replay:
    """One replay."""

    def __init__(
        self, trace: StepTrace, plan: Plan, config: ShardConfig, rank: int, ranks: int, accumulates: bool
    ) -> None:
        self.accumulates, self.reduces = accumulates, ranks > 1
        self.trace, self.plan, self.rank = trace, plan, rank % plan.shard_ranks
        size = plan.shard_ranks
        last = max((e.storage for e in trace.events if isinstance(e, Allocation)), default=0)
        self.log = Log(trace.device, last)
        self.offload = plan.offload
        self.units = [UnitStandIn(unit, i, size, self.log, plan.offload) for i, unit in enumerate(plan.units)]
        self.flats = {p.name: flat for unit in self.units for flat in unit.flats for p in flat.params}
        self.triggered: dict[str, list[UnitStandIn]] = {}
        for unit, planned in zip(self.units, plan.units, strict=True):
            for module in planned.triggers:
                self.triggered.setdefault(module, []).append(unit)
        self.schedule = UnshardSchedule[UnitStandIn](config, size == 1 < ranks, _Operations(), _Alone())
        self.schedule.units.update({unit.index: unit for unit in self.units})
        self.reductions = ReplayedReductions(self.units, size, ranks, self.log)
        start = next((i for i, e in enumerate(trace.events) if isinstance(e, PhaseStart)), len(trace.events))
        self.before, self.step = trace.events[:start], trace.events[start:]
        indices = {p.name: unit.index for unit in self.units for p in unit.params}
        self.replaced = Replaced(self.before, self.step, {p.name: p for p in plan.params}, indices)
        for event in self.before:
            if isinstance(event, Allocation) and event.kind == "gradient" and event.name in self.flats:
                flat = self.flats[event.name]
                flat.with_grad.add(event.name)
                flat.grad = event.storage
        self.trained = [p.local_numel for p in plan.params if p.requires_grad]
        self.shrink = sum(flat.layout.shard_numel for unit in self.units for flat in unit.flats) / max(1, plan.numel)
        # Of the running step:
        self.keeps_grads = False
        self.clock = 0
        self.depth = 0  # running forwards of trigger modules and of the root
        self.is_open = self.records = False
        self.uses: dict[int, list[_Use]] = {}  # by the call of a module
        self.forward_order: dict[int, UnitStandIn] = {}
        self.last_order: dict[int, UnitStandIn] = {}  # that of the forward before
        self.armed = False
        self.tasks = [0]  # of autograd, the innermost last
        self.workspace: int | None = None  # of the optimizer

    # -- the whole ----------------------------------------------------------------------------------------------------

    def run(self) -> StepTrace:
        self.log.quiet = True
        self._run_step()
        self._run_step()
        self.log.quiet = False
        self._accumulate()
        self._begin()
        if self.offload is not None and any(isinstance(e, PhaseStart) and e.phase == "optimizer" for e in self.step):
            self._step_on_host()
        self._run_step()
        return StepTrace(self.trace.device, tuple(self.log.events), self.trace.notes)

    def _accumulate(self) -> None:
        """Let all parameters have gradients where a step accumulates, until its backward has ended."""
        self.keeps_grads = self.accumulates
        for flat in {id(flat): flat for flat in self.flats.values() if self.accumulates and flat.trains}.values():
            flat.grad, flat.with_grad = flat.grad or 0, set(flat.names)

    def _begin(self) -> None:
        """Write down what is there when a step begins that is not the first."""
        offload = self.offload
        host = offload is not None
        for unit in self.units:
            for flat in unit.flats:
                self.log.allocate(flat.shard_nbytes(flat.dtypes.stored), "parameter", unit.name, on_host=host)
                crossing = flat.shard_nbytes(flat.dtypes.compute)
                if offload is not None and flat.dtypes.casts:
                    self.log.allocate(crossing, "parameter", unit.name, on_host=True)
                if offload is not None and not offload.params:
                    self.log.allocate(crossing, "parameter", unit.name)
                if flat.spare is not None:
                    nbytes = flat.shard_nbytes(flat.dtypes.grad)
                    flat.spare = self.log.allocate(nbytes, "gradient", unit.name, on_host=True)
                if flat.grad is not None:
                    nbytes = flat.shard_nbytes(flat.dtypes.grad)
                    flat.grad = self.log.allocate(nbytes, "gradient", unit.name, on_host=host)
                if flat.full is not None:
                    flat.full = self.log.allocate(flat.full_nbytes, "gathered", unit.name)
        if host and (self.log.on_streams or self.plan.shard_ranks == 1):  # else Gloo's sums are as wide as gradients
            flats = [flat for unit in self.units for flat in unit.flats if flat.trains]
            arriving = [(flat, flat.dtypes.crossing(self.reduces)) for flat in flats]
            staged = max((flat.shard_nbytes(d) for flat, d in arriving if d != flat.dtypes.grad), default=0)
            for _ in range(STAGED if staged else 0):
                self.log.allocate(staged, "gradient", "", on_host=True)
        for event in (*self.before, *self.replaced.standing):
            if isinstance(event, Allocation) and event.storage not in self.replaced.absent:
                self.log.add(self._scaled(event))

    def _step_on_host(self) -> None:
        """Write down the work that the step before has left to the host: unit by unit, in the order of forward."""
        states = Counter[str]()
        for event in (*self.before, *self.replaced.standing):
            if isinstance(event, Allocation) and event.kind == "optimizer state" and event.name in self.flats:
                states[self.flats[event.name].unit] += self._scaled(event).nbytes
        for unit in dict.fromkeys([*self.last_order.values(), *self.units]):
            trained = [flat for flat in unit.flats if flat.trains]
            if trained:
                kept = sum(flat.shard_nbytes(flat.dtypes.stored) for flat in trained) + states[unit.name]
                grads = sum(flat.shard_nbytes(flat.dtypes.grad) for flat in trained)
                self.log.add(HostUpdate(unit.name, 2 * kept + grads))  # what is kept is read and written
                unit.updated_on_host = True

    def _scaled(self, event: Allocation) -> Allocation:
        """Return the allocation of optimizer state with the size that it has for a shard; any other as it is."""
        flat = self.flats.get(event.name)
        if event.kind != "optimizer state" or flat is None:
            return event
        index = next(i for i, p in enumerate(flat.params) if p.name == event.name)
        if event.nbytes < flat.params[index].local_numel:  # a counter, or a row's statistics
            return event
        begin, end = flat.layout.local_range(index, self.rank)
        shard = (end - begin) * flat.dtypes.stored.itemsize
        device = event.device if self.offload is None else "cpu"
        return replace(event, nbytes=event.nbytes * shard // self.replaced.nbytes[event.name], device=device)

    def _run_step(self) -> None:
        self._accumulate()
        self.uses.clear()
        for event in self.step:
            self.clock += 1
            if isinstance(event, Allocation):
                self._allocation(event)
            elif isinstance(event, Free):
                self._free(event)
            elif isinstance(event, Operator):
                self._operator(event)
            elif isinstance(event, PhaseStart):
                self._end_phase()
                self.log.add(event)
                self._begin_phase(event.phase)
            elif isinstance(event, ModuleEnter):
                self._enter(event)
                self.log.add(event)
            elif isinstance(event, ModuleExit):
                self.log.add(event)
                self._exit(event)
            elif isinstance(event, GradientAccumulated):
                self._gradient(event)
            elif isinstance(event, NestedBackward):
                self._nest(event)
            elif isinstance(event, GradientsCleared):
                self._clear(event.parameters)
            elif isinstance(event, (CollectiveStart, CollectiveWait)):  # a copy of an activation
                self.log.add(replace(event, number=-event.number))
        self._end_phase()

    # -- what the plain model does ------------------------------------------------------------------------------------

    def _allocation(self, event: Allocation) -> None:
        if event.storage in self.replaced.absent or event.storage in self.replaced.counted_apart:
            return
        self.log.add(replace(event, kind="temporary") if event.storage in self.replaced.handed_over else event)

    def _free(self, event: Free) -> None:
        name = self.replaced.grad_of.get(event.storage)
        if name is not None:
            self._clear((name,))
        elif event.storage not in self.replaced.absent and event.storage not in self.replaced.counted_apart:
            self.log.free(event.storage)

    def _operator(self, event: Operator) -> None:
        if event.outputs and self.replaced.absent.issuperset(event.outputs):
            return  # it makes what a sharded model does not have
        if event.phase == "optimizer":
            if self.offload is not None:  # see `_step_on_host`
                return
            event = replace(event, read=round(event.read * self.shrink), written=round(event.written * self.shrink))
        self.log.add(event)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _enter(self, event: ModuleEnter) -> None:
        if event.backward:
            for use in self.uses.get(event.call, ()):
                self._trigger(use)
            return
        if not self.depth:
            self.records = event.records
            if event.module == "" and not event.recompute:
                self.is_open = False
                self.schedule.reshard_unused()
        self.depth += event.module == ""
        for unit in self.triggered.get(event.module, ()):
            self._use(unit, event)

    def _use(self, unit: UnitStandIn, event: ModuleEnter) -> None:
        self.depth += 1
        use = _Use(unit, self.clock, self.clock, (event.call, unit.index) in self.replaced.saved)
        self.uses.setdefault(event.call, []).append(use)
        phase = BACKWARD if event.recompute else FORWARD if event.records else EVALUATION
        if phase != BACKWARD and not self.is_open:
            self.is_open = self.schedule.fresh = True
            self.schedule.note_changes(self.schedule.changes())
        if phase == FORWARD or (phase == EVALUATION and self.records):
            self.forward_order.setdefault(unit.index, unit)
        if unit.gathers:
            with torch.set_grad_enabled(event.records):  # the schedule asks
                self.schedule.unshard(unit, phase)
        if event.recompute and not unit.uses:
            unit.awaits_trigger = True
        unit.running += 1

    def _exit(self, event: ModuleExit) -> None:
        if event.backward:
            return
        for use in self.uses.get(event.call, ()):
            use.end = self.clock
            use.unit.running -= 1
            self.depth -= 1
        self.depth -= event.module == ""
        if not self.depth and self.schedule.keeps_on and not event.recompute:
            self.is_open = False

    # -- backward -----------------------------------------------------------------------------------------------------

    def _nest(self, event: NestedBackward) -> None:
        if event.begins:
            self.tasks.append(self.clock)
        else:
            self.schedule.end_nested(self.tasks.pop())

    def _arm(self) -> None:
        if self.armed:
            return
        self.armed = True
        self.schedule.begin_backward()
        self.reductions.begin(list(self.forward_order.values()))

    def _trigger(self, use: _Use) -> None:
        unit = use.unit
        if not unit.gathers:
            return
        self._arm()
        if use not in unit.uses:
            use.task = self.tasks[-1]
            unit.uses.append(use)
            unit.awaits_trigger = False
            self.schedule.reshard_behind(use)
        if use.saved:
            self.schedule.unshard(unit, BACKWARD)
        else:
            unit.wait()

    def _gradient(self, event: GradientAccumulated) -> None:
        flat = self.flats.get(event.parameter)
        if flat is None:  # it is not sharded
            return
        self._arm()
        became = event.arrived == event.storage and event.storage in self.replaced.handed_over
        self.reductions.accept(flat, event.parameter, event.storage if became else None)

    def _end_backward(self) -> None:
        self.armed = False
        self.schedule.end_backward()
        self.reductions.end()
        self.keeps_grads = False
        for unit in self.units:
            unit.awaits_trigger = False
            unit.uses.clear()
        self.schedule.reshard_unused()
        self.last_order, self.forward_order = self.forward_order, {}
        self.is_open = False

    # -- between ------------------------------------------------------------------------------------------------------

    def _clear(self, names: Sequence[str]) -> None:
        if self.keeps_grads:
            return
        for flat in dict.fromkeys(self.flats[name] for name in names if name in self.flats):
            flat.clear(names, self.log)

    def _begin_phase(self, phase: Phase) -> None:
        if phase == "optimizer":
            # The plain step takes all parameters at once on a device, and one after the other on the CPU.
            elements = sum(self.trained) if self.log.on_streams else max(self.trained, default=0)
            at_once = min(round(sum(self.trained) * self.shrink), _LIST) if self.log.on_streams else _PIECE
            stored = sum(p.nbytes for p in self.plan.params) / max(1, sum(self.replaced.nbytes.values()))
            nbytes = round(self.replaced.optimizer_temporaries * stored * min(at_once, elements) / max(1, elements))
            self.workspace = self.log.allocate(nbytes, "temporary", "", on_host=self.offload is not None)

    def _end_phase(self) -> None:
        if self.armed:
            self._end_backward()
        if self.workspace is not None:
            self.log.free(self.workspace)
            self.workspace = None
            for unit in self.units:
                unit.stale |= unit.trains
            self.schedule.values_changed()
