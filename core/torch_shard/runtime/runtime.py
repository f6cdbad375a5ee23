"""The runtime of one sharded model: its units, and the objects that say when each is unsharded, resharded and reduced.

:mod:`.forward_hooks` has the modules' forwards, :mod:`.session` the ranks' agreement before them, :mod:`.backwards` the
backwards. :mod:`torch_shard.schedule.unshard_schedule` decides on unshards, their order and prefetch, :mod:`.reduce_schedule` on
reductions. :mod:`.on_demand` serves operations outside forwards, :mod:`.lone_reads` reads by one rank alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..comm.collectives import Collectives
from ..comm.divergence import OperationSequence
from ..comm.multi_engine_order import EngineOrder
from ..comm.one_sided.partners import ModelVersion
from ..comm.one_sided.versions import Versions
from ..comm.process_groups import group_timeout
from ..comm.traffic_statistics import GatheredBytes
from ..comm.work import caller_line
from ..config.shard_config import ShardConfig
from ..errors import ShardPicklingError
from ..schedule.phases import BACKWARD, EVALUATION, FORWARD
from ..schedule.unshard_schedule import UnshardSchedule
from ..unit.flat_buffer import FlatBuffer
from ..unit.unit import Unit
from ..utils.autograd_private import graph_task
from . import grad_scaler
from .backwards import Backwards
from .buffer_sync import BufferSync
from .forward_hooks import Forwards
from .lone_reads import LoneReads
from .on_demand import OnDemand
from .optimizer_states import OptimizerStates
from .reduce_schedule import ReduceSchedule
from .replaced_params import Registrations
from .served_shards import ServedShards
from .session import Session

if TYPE_CHECKING:
    from ..comm.one_sided.partners import Reading
    from ..offload.host import Host
    from .ports import StepInBackward


class Runtime:
    """Decides when units are unsharded, resharded and reduced; one for each sharded model."""

    def __init__(self, config: ShardConfig, collectives: Collectives, host: Host | None = None) -> None:
        """Make a runtime without units.

        `host` is the host memory that holds parameters and optimizer state; None where these are on the device.
        """
        self.config, self.collectives, self.host = config, collectives, host
        if host is not None:
            host.users.add(self)
        self.units: list[Unit] = []
        self.gathered_bytes = GatheredBytes()
        self.buffers: BufferSync | None = None
        channel = collectives.gather_channel
        self.engine_order = EngineOrder() if channel is None else channel.groups.engine_order
        self.operations = OperationSequence(collectives, self.engine_order)
        self.require_sync = True
        self.reduces_each = False  # each backward reduces, also while `require_sync` is False: no_sync(hold=False)
        self.forwards, self.session, self.backwards = Forwards(self), Session(self), Backwards(self)
        self.on_grad = self.backwards.on_grad  # one call less for each gradient
        self.leave_interrupted = self.forwards.leave_interrupted
        self.is_ready = False  # set-up has ended
        self.on_demand = OnDemand(self)
        timeout, alone = group_timeout(collectives.device), config.alone != "error" and collectives.world > 1
        self.versions = Versions(collectives.device, collectives.world_rank, timeout, alone)
        if channel is not None:
            comparisons, watchdog = channel.groups.comparisons, collectives.watchdog
            self.versions.settle = lambda: comparisons.settle(watchdog.timeout)
        # Loads that differ between ranks must be followed by one that makes the versions equal again.
        self.operations.on_unlike_loads = self.versions.restart
        self.lone = LoneReads(self)
        self.meet = self.lone.meet
        self.optimizer_states = OptimizerStates(self)
        self.served = ServedShards(self.versions)
        self.replicates = collectives.size == 1 < collectives.data_parallel_size  # no rank waits for others' unshards
        self.schedule = UnshardSchedule[Unit](config, self.replicates, self.operations, self.lone)
        self.solo = 0  # depth of gathered(ranks=...), inside which a forward concerns this rank alone
        self.forward_order: dict[int, Unit] = {}  # units in the order of their first use in forward
        self.forward_sync = True  # `require_sync` at the last forward
        self.forward_reduces = False  # `reduces_each` at the last forward
        self.state_dict_settings: Any = None  # see torch_shard.state_dict_type
        self.reductions = ReduceSchedule(self)
        # Gradients were published before the ranks have compared what the backward has reduced.
        self.awaits_votes = False
        self.copied_from: ModelVersion | None = None
        self.registrations = Registrations()
        # The owners of each optimizer's parameters, by name, equal on all ranks, for optimizers that step on full matrices. An
        # owner never changes once it is set, because the optimizer state is on its rank.
        self.owners: MutableMapping[Any, dict[str, int]] = WeakIdKeyDictionary()
        self.in_backward: StepInBackward | None = None  # the optimizer that steps during backward
        self.steps: Callable[[], Any] = lambda: None  # returns the engine's watcher of optimizers' steps
        quantized = config.quantized
        # Error feedback carries residuals from one step to the next. A scaler changes their scale, and skips steps.
        self.feeds_back = quantized is not None and quantized.gradients is not None and quantized.error_feedback
        if self.feeds_back:
            grad_scaler.follow()

    def add(self, unit: Unit) -> None:
        """Add `unit` to the units of this runtime."""
        self.units.append(unit)
        self.units.sort(key=lambda u: u.index)
        self.schedule.units[unit.index] = unit
        self.served.flats[unit.index] = unit.flats

    @property
    def flats(self) -> list[FlatBuffer]:
        """The flat buffers of all units."""
        return [flat for unit in self.units for flat in unit.flats]

    def ready(self) -> None:
        """Prepare to compare sequences with the other ranks; call when all units are added."""
        self.is_ready = True
        self.engine_order.join(self)
        self.engine_order.widen(2 + sum(4 + len(u.params) for u in self.units))

    def name_as_new(self) -> None:
        """Take a name for this engine. Call on all ranks, for all engines in one order."""
        self.versions.restart()  # ranks that began on meta have changed shards that others were given
        self._take_name(self.engine_order.name())

    def _take_name(self, name: str) -> None:
        """Make `name` the engine's name on all ranks, and hand out this rank's shards to ranks that read alone."""
        self.operations.take_name(name)
        service = self.collectives.service
        if service is not None:
            self.served.offer(service, name)

    def sources(self) -> list[ModelVersion]:
        """Return the versions from which the values of this model can be read, the best one first.

        A deep copy may have been made by this rank alone; until it is changed, its original has its values. Edits may have been
        made by this rank alone; where it knows the edited values in full, it reads only the other parameters.
        """
        versions, edits = self.versions, self.versions.edits
        own = edits.known()
        digest = edits.digest if own is None else edits.base
        count = versions.restarts, versions.finished
        found = ModelVersion(self.operations.model, *count, digest, versions.line, own or {})
        return [found] if self.copied_from is None or versions.changed else [self.copied_from, found]

    @property
    def reading(self) -> Reading | None:
        """The running read of the model by this rank alone."""
        return self.lone.reading

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        other = Runtime(self.config, self.collectives, self.host)
        memo[id(self)] = other
        other.ready()
        source = self.sources()[0]
        # The script may edit the tensors that it has put into the model, but not those of the copy.
        own = {name: value.clone() for name, value in source.own.items()}
        other.copied_from = source._replace(own=own)
        version = f"{source.restarts}.{source.finished}.{self.versions.edits.digest:x}"
        other._take_name(self.engine_order.name_of_copy(f"{source.key} in version {version}", caller_line()))
        if self.buffers is not None:
            other.buffers = copy.deepcopy(self.buffers, memo)
        other.reductions.hook = self.reductions.hook
        other.state_dict_settings = copy.deepcopy(self.state_dict_settings, memo)
        other.registrations.ignored = self.registrations.ignored
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Modules are pickled without it (plain_pickles).
        raise ShardPicklingError(
            f"rank {self.collectives.world_rank}: the engine of a sharded model can't be pickled, nor an object that holds it. "
            f"Pickle the model itself, which is saved as a plain one. {self.collectives.watchdog.saving_advice}"
        )

    # -- what units ask -----------------------------------------------------------------------------------------
    @property
    def in_forward(self) -> bool:
        """True if a forward of the model or of one of its units is running, or is computed again in backward."""
        return self.forwards.running or self.recomputes

    @property
    def recomputes(self) -> bool:
        """True inside a recomputation of torch's checkpoint, whether or not hooks of modules have run in it."""
        # Only there, and in hooks of a backward that creates a graph, is recording switched on inside a backward.
        return torch.is_grad_enabled() and graph_task() != -1

    def await_votes(self) -> None:
        """Learn what the ranks have reduced in the latest backward. Call before gradients are read or changed. Collective."""
        if self.awaits_votes:
            self.operations.finish()

    def check_grad_reader(self) -> None:
        """Raise if `.grad` is read that an optimizer's step in backward has consumed."""
        if self.in_backward is not None:
            self.in_backward.check_reader()

    def check_registrations(self) -> None:
        """Raise if a parameter was added since sharding."""
        for unit in self.units:
            unit.kept_tensors.forget_modules()
        self.registrations.check(self)

    def synchronise_buffers(self, root: nn.Module) -> None:
        """Broadcast rank 0's buffers if no forward has run, or the last one trained outside ``no_sync``. Collective."""
        if self.buffers is None or not self.buffers.due or self.solo:
            return
        if not self.session.is_open and not self.session.open("the model", [self.buffers.signature(root)]):
            return  # this rank evaluates alone, with the buffers that it has
        self.buffers.synchronise(root)

    # -- forward and backward -----------------------------------------------------------------------------------
    def phase(self) -> int:
        """Return the phase in which a unit is unsharded now."""
        if graph_task() != -1:
            return BACKWARD
        return FORWARD if torch.is_grad_enabled() else EVALUATION

    def unshard(self, unit: Unit, phase: int, of: str = "", reads: bool | None = None) -> None:
        """Unshard `unit`, and start to prefetch the next units. Collective.

        `of`, `reads`: see :meth:`.Session.open`.
        """
        if phase != BACKWARD:
            self.session.open_for(phase, of, reads)
            if phase == FORWARD and not self.lone.running:
                self.forward_sync = self.require_sync
                self.forward_reduces = self.reduces_each and not self.require_sync
            # By first use: where a unit is used twice (a tied head), the backward of its first use completes its gradients.
            if (phase == FORWARD or self.forwards.records) and not self.lone.running:
                self.forward_order.setdefault(unit.index, unit)
        if unit.gathers:
            self.schedule.unshard(unit, phase)
        if phase == BACKWARD and self.in_backward is not None:
            self.in_backward.note_computed_with(unit)

    def holds_gradients(self) -> bool:
        """Return True if gradients are deferred, partially accumulated, or were lost while they were deferred."""
        gradients = [flat.gradients for flat in self.flats]
        return any(g.waits or g.lost or g.accumulation.partial for g in gradients)

    def note_issued(self, kind: str, unit: Unit) -> None:
        """Record that a collective of `unit` was issued, in the sequence that the ranks compare."""
        if kind != "reduce" and self.in_backward is not None:
            self.in_backward.note_unsharded(unit)
        if kind == "reduce" or unit.sharded:
            self.engine_order.note(kind, self.operations.number, unit.index)

    # -- between steps ------------------------------------------------------------------------------------------
    def parameters_changed(self) -> None:
        """Forget unsharded parameters and graphs over them, because the shards were edited (a step, a load)."""
        self.versions.note_change()
        if self.forwards.depth:
            self.leave_interrupted()
        if graph_task() == -1 and not self.forwards.depth:
            self.schedule.values_changed()

    def parameters_loaded(self) -> None:
        """Do as :meth:`parameters_changed`, and drop the error feedback of quantized gradients: it belongs to other values."""
        self.parameters_changed()
        for flat in self.flats:
            if flat.gradients.quantized is not None:
                flat.gradients.quantized.forget()
