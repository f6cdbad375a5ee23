"""One unit: the parameters that are unsharded, resharded and reduced together, as flat buffers.

A unit has one :class:`~.flat_buffer.FlatBuffer` for each dtype and trainability of its parameters. The memory of one::

    shard   [ this rank's slot ]                      always allocated; ShardTensors view it, optimizers step on it
    full    [ slot 0 | slot 1 | ... | slot W-1 ]      storage resized to 0 bytes while the unit is sharded
            one view of full for each parameter       the unsharded parameters, with which the modules compute
    grad    [ slot 0 | slot 1 | ... | slot W-1 ]      from the arrival of the first gradient to the reduction

The states of a unit::

    SHARDED --unshard()--> GATHERING --wait()--> FULL --reshard()--> SHARDED
    GATHERING --wait() fails--> SHARDED       with new buffers, since the old ones may still be written
    FULL --unshard()--> GATHERING             the same values once more, because other ranks have resharded (`refill`)
    SHARDED or FULL --summon()--> SUMMONED --dismiss()--> the state before

Where a shard group has one rank, `full` is the shard itself, the unit is always FULL, and nothing moves. There are two
exceptions. Where modules compute in another dtype than the shards have (:mod:`torch_shard.config.precision`), the unshard
casts, before the collective or without one. Where the shards are in host memory (:mod:`torch_shard.offload`), the unshard
copies.

The unit knows how to unshard and reshard. :class:`~torch_shard.schedule.unshard_schedule.UnshardSchedule` and
:class:`~torch_shard.runtime.reduce_schedule.ReduceSchedule` decide when.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..comm.collectives import both, outside_inference
from ..comm.quantized_collectives import QuantizedGather
from ..comm.work import Pending
from ..errors import ShardError, UnitStateError
from ..offload.host_shard import Crossing
from ..schedule.phases import PHASES
from ..schedule.unit_state import State
from ..shard_tensor.tensor import ShardTensor
from .flat_buffer import FlatBuffer, PlainGather
from .module_params import adopt
from .places import Places
from .references import KeptTensors

if TYPE_CHECKING:
    from .ports import RuntimePort


class Unit:
    """Parameters that are unsharded, resharded and reduced together, and the module attributes that hold them."""

    # Asked for each read of a `.grad`. A property that calls Python would cost three times as much.
    is_summoned: bool = property(operator.attrgetter("state.is_summoned"))  # type: ignore[assignment]
    """True inside ``engine.gathered`` on ranks that have the values."""

    def __init__(self, name: str, index: int, runtime: RuntimePort) -> None:
        """Make a unit of `runtime` without parameters; set-up adds them.

        Args:
            name: the unit's name, for messages.
            index: the unit's position in the plan, equal on all ranks.
            runtime: the runtime whose units this one joins.
        """
        self.name, self.index, self.runtime = name, index, runtime
        self.collectives, self.host = runtime.collectives, runtime.host
        self.sharded = self.collectives.size > 1  # the shard group has several ranks
        self.casts = False  # modules compute in another dtype than that of some shard
        self.rounding = False  # optimizer steps on some shard are rounded stochastically
        self.exact = True  # modules compute with the stored values, neither cast nor quantized
        # Unsharded parameters have memory of their own: their values come from other ranks, are cast, or come from host memory.
        self.gathers = self.sharded or self.host is not None
        self.flats: list[FlatBuffer] = []
        self.places = Places()
        self.triggers: list[nn.Module] = []
        self.kept_tensors = KeptTensors(self.triggers)
        self.tensor_hooks: dict[str, dict[int, Any]] = {}
        self.post_hooks: dict[str, dict[int, Any]] = {}
        self._on_side = self.gathers and self.collectives.gather_stream is not None  # unshards run on the gather stream
        self.state = State.SHARDED if self.gathers else State.FULL
        self.pending: list[Pending | QuantizedGather | Crossing] = []
        self.running = 0  # forwards that compute with this unit at this moment
        self.recomputes = False  # checkpoint computes a part of the unit's forward again
        self.installed = 0  # forwards and gathered() calls that have put the unsharded parameters into the modules
        self._state_before_summon = self.state
        self.awaits_trigger = False  # recomputed in backward before its own trigger: see Forwards.enter
        self.uses: list[Any] = []  # uses whose backward has begun
        # Uses that backward may reach without a trigger, so that this rank keeps the unit unsharded. Other ranks may have
        # resharded the unit; when they unshard it anew, this rank takes part (`refill`).
        self.kept: list[Any] = []
        self.refill = False
        # While the ranks keep secondary shards for the unshard in backward: the parameters' versions of forward, else None. A
        # recomputation in backward computes with the present values, so parameters that have changed since then are
        # unsharded from the shards.
        self._secondary_versions: list[int] | None = None
        # Under `shard_optim`. outdated: parameters may have changed since the last unshard, as all ranks agree.
        # exposed: the user was given the memory of a shard, where changes leave no trace.
        self.outdated = self.exposed = False
        self.untraced = 0  # the number of forwards since `.data` was read in one, where changes leave no trace
        self.full_bytes = 0  # the bytes of the unsharded parameters, where these have memory of their own
        self._counted_bytes = 0  # the bytes that the statistics count now for this unit
        self._streams = self.collectives.streams
        self._filled: Any = None  # the event behind the latest unshard
        self.used_by: set[Any] = set()  # streams that compute with the unsharded parameters
        self.checks = 2  # iterations that still look for untracked edits of the unsharded parameters
        # The running engine.gathered() calls that hold this unit, the innermost last: see unshard/write_back.py.
        self.gathered_calls: list[Any] = []
        self.gather_text = f"the all-gather of unit {name!r}"
        self.reduce_text = f"the gradient reduction of unit {name!r}"
        self.event_texts = [f"gathers unit {name!r} in {phase}" for phase in PHASES]
        runtime.add(self)

    def compute_in_its_dtypes(self) -> None:
        """Let modules compute in the dtypes that were asked for; the last step of set-up."""
        for flat in self.flats:
            flat.compute_in_its_dtype()
            if flat.host is not None:
                flat.host.prepare()
            if flat.gradients.host is not None and any(param.requires_grad for param in flat.params):
                flat.gradients.host.prepare(flat.dtypes.grad)
        self.gathers = any(flat.gathers for flat in self.flats)
        self.casts = any(flat.casts for flat in self.flats)
        self.rounding = any(flat.rounding is not None for flat in self.flats)
        self.exact = all(flat.exact for flat in self.flats)
        self.full_bytes = sum(flat.nbytes for flat in self.flats if flat.gathers)
        if self.gathers:
            self.state = State.SHARDED

    # -- its parameters -----------------------------------------------------------------------------------------
    @property
    def params(self) -> list[ShardTensor]:
        return [p for flat in self.flats for p in flat.params]

    @property
    def names(self) -> list[str]:
        return [s.name for flat in self.flats for s in flat.layout.slots]

    @property
    def distributed(self) -> str | None:
        """The name of the first parameter that is a DTensor; None where none is."""
        found = ((slot.name, placed) for f in self.flats for slot, placed in zip(f.layout.slots, f.placed, strict=True))
        return next((name for name, placed in found if placed is not None), None)

    def find(self, param: ShardTensor) -> tuple[FlatBuffer, int]:
        """Return the flat buffer that holds `param`, and the parameter's index in that buffer."""
        for flat in self.flats:
            if flat.layout is param._spec.layout:
                return flat, param._spec.index
        raise ShardError(f"{param._spec.name} is not a parameter of unit {self.name}")

    def unsharded_param_of(self, param: ShardTensor) -> nn.Parameter:
        """Return the unsharded parameter that modules compute with in place of `param`."""
        flat, index = self.find(param)
        return flat.unsharded_params[index]

    def differentiable(self, param: ShardTensor) -> nn.Parameter:
        """Return the unsharded parameter for `param`, to differentiate with respect to it.

        The unsharded parameter requires a gradient exactly where `param` does now, also if the last forward has found
        `param` frozen.
        """
        flat, index = self.find(param)
        if param.requires_grad and not flat.unsharded_params[index].requires_grad and not self.is_summoned:
            flat.mirror()
        return flat.unsharded_params[index]

    def holds_gradients(self) -> bool:
        """Return True if gradients of this unit wait for their reduction."""
        return any([flat.gradients.waits for flat in self.flats])  # noqa: C419 (hot)

    # -- unshard and reshard ------------------------------------------------------------------------------------
    def unshard(self, from_secondary: bool = False) -> None:
        """Start the unshard of a SHARDED unit, or of a FULL one that takes part for other ranks (`refill`). Collective.

        Args:
            from_secondary: True in backward, to gather the secondary shards that the ranks have kept since forward, if any.
        """
        if self.state is not State.SHARDED and not self.refill:
            return
        if self.state is State.GATHERING:
            self.wait()
        self.refill = self.outdated = False
        c = self.collectives
        kept = self._secondary_versions if from_secondary else None
        from_secondary = kept is not None and kept == self._versions()
        if from_secondary:
            self._secondary_versions = None
        self.runtime.note_issued("secondary gather" if from_secondary else "gather", self)
        if c.gather_stream is not None and c.streams.is_capturing():
            raise UnitStateError(
                f"rank {c.world_rank}: unit {self.name!r} is gathered during the capture of a CUDA graph, which would read freed "
                "memory when replayed; capture the plain model, or leave CUDA graphs out."
            )
        # Frozen and trainable parameters, as with LoRA, are in flat buffers of their own, which one collective fills.
        batch: list[PlainGather] | None = [] if c.coalesces and len(self.flats) > 1 else None
        with self._gathering():
            for flat in self.flats:
                if not flat.gathers:
                    continue
                storage = flat.full.untyped_storage()
                # The memory is allocated already in a refill, and after an abandoned unshard, which may still write to it.
                # Hazard: compute may read while a refill writes. The refill writes the values that are there already,
                # because an edited unit is resharded first.
                if storage.nbytes() != flat.nbytes:
                    storage.resize_(flat.nbytes)
                pending: Pending | QuantizedGather | Crossing | None
                if from_secondary and flat.sharded:
                    pending = flat.gather_secondary(self.gather_text)
                else:
                    pending = flat.start_gather(self.gather_text, batch)
                if pending is not None:
                    self.pending.append(pending)
            if batch:
                casts = [(each.sent, each.stored) for each in batch if each.stored is not None]
                if casts:
                    torch._foreach_copy_([sent for sent, _ in casts], [stored for _, stored in casts])
                together = [each.full for each in batch], [each.sent for each in batch]
                self.pending.append(c.all_gather_coalesced(*together, self.gather_text))
        # The gathers of all flat buffers are on one stream, where the last event is behind them all.
        self._filled = self.pending[-1].event if self.pending else self._streams.record()
        self.state = State.GATHERING
        self._count_bytes(self.full_bytes)

    def unshard_alone(self) -> None:
        """Unshard a SHARDED unit for a read by this rank alone: the other ranks hand out their shards."""
        reading = self.runtime.reading
        assert reading is not None and self.state is State.SHARDED
        with self._gathering():
            for flat in self.flats:
                if flat.gathers:
                    flat.full.untyped_storage().resize_(flat.nbytes)
                    flat.read(reading)
        c = self.collectives
        self._filled = self._streams.record(c.gather_stream if self._on_side else None)
        self.state = State.FULL
        self._count_bytes(self.full_bytes)

    def _count_bytes(self, held: int = 0) -> None:
        """Count `held` bytes of unsharded parameters in the statistics; with secondary shards, count what is allocated."""
        if self.collectives.secondary_channel is not None:
            held = sum(flat.gathered_bytes for flat in self.flats if flat.gathers)
        self.runtime.gathered_bytes.add(held - self._counted_bytes)
        self._counted_bytes = held

    def _gathering(self) -> contextlib.AbstractContextManager[Any]:
        # Without other ranks and without host memory the unshard is a cast, on the stream that computes with the values.
        outside = outside_inference()
        return both(outside, self.collectives.gathering()) if self._on_side else outside

    def is_stale(self) -> bool:
        """Return True if this rank's shard was written to since the last unshard."""
        return any([flat.is_stale() for flat in self.flats])  # noqa: C419 (hot)

    def wait(self) -> None:
        """Wait for a running unshard: GATHERING becomes FULL. The current stream may compute with a FULL unit from here on."""
        if self.state is State.GATHERING:
            try:
                for pending in self.pending:
                    pending.wait()
                if not self.pending:
                    # Hazard: without a collective the values were cast by the stream that was current when the unshard began.
                    self._streams.wait(self._filled)
            except BaseException:
                # The backend may still write into the buffers when the other rank comes, so that the unit gets new ones.
                # `ProcessGroups.buffers` keeps the old ones alive until then.
                for flat in self.flats:
                    if flat.gathers:
                        flat.renew()
                self._count_bytes()
                self.state = State.SHARDED
                raise
            finally:
                self.pending = []
            self.state = State.FULL
            if self._streams.exist:
                self.used_by.add(self._streams.current())
        elif self._streams.exist and self.gathers and self.state is not State.SHARDED:
            here = self._streams.current()
            if here not in self.used_by:
                # Hazard: another stream has waited for the unshard, and this one computes with the unit, too.
                self._streams.wait(self._filled)
                self.used_by.add(here)

    def allocate(self) -> None:
        """Make a SHARDED unit FULL without values; the caller fills the full buffers."""
        if self.gathers:
            for flat in self.flats:
                flat.full.untyped_storage().resize_(flat.nbytes)
            self.state = State.FULL

    def summon(self) -> None:
        """Make a SHARDED or FULL unit SUMMONED: it is not unsharded, resharded or written back until :meth:`dismiss`."""
        self._state_before_summon, self.state = self.state, State.SUMMONED

    def dismiss(self) -> None:
        """Give a SUMMONED unit the state back that it had before :meth:`summon`."""
        self.state = self._state_before_summon

    def _versions(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [param._version for param in self.params]

    def note_resharded(self) -> None:
        """Note that backward is to unshard from the secondary shards, where the engine keeps any."""
        if self.collectives.secondary_channel is not None:
            self._secondary_versions = self._versions()

    def drop_secondary_shards(self) -> None:
        """Drop the secondary shards, so that the next unshard uses the shards."""
        if self._secondary_versions is not None:
            self._secondary_versions = None
            with self._gathering():
                for flat in self.flats:
                    flat.drop_secondary_shard()
            self._count_bytes()

    def reshard(self, for_backward: bool = False) -> None:
        """Reshard: FULL becomes SHARDED, and the memory of the unsharded parameters is freed.

        Args:
            for_backward: the unit is needed again in backward; keep a secondary shard, where the engine keeps any.
        """
        self.end_recomputation()
        if not self.gathers or self.state is State.SHARDED:
            return
        if self.state is State.GATHERING:
            self.wait()
        self.refill = False
        keeps = for_backward and self.collectives.secondary_channel is not None
        if keeps:
            self.note_resharded()
        if self._streams.exist:
            # Hazard: the next allocation may reuse this memory while a stream still computes with it.
            here, users = self._streams.current(), self.used_by
            if self._on_side:
                self.collectives.released.update(users, (here,))
            else:
                self._streams.join(here, users)
            users.clear()
        for flat in self.flats:
            if not flat.gathers:
                continue
            if keeps and flat.sharded:
                with self._gathering():
                    flat.keep_secondary_shard()
                self._count_bytes()  # the full buffer and the secondary shard are both allocated for a moment
            flat.free()
        self.state = State.SHARDED
        self._count_bytes()

    # -- unsharded parameters in the modules --------------------------------------------------------------------
    def install(self) -> None:
        """Put the unsharded parameters into the modules, in place of the sharded ones.

        Raises:
            ReplacedParameterError: a module holds another parameter; no module was changed.
        """
        if self.installed:
            self.installed += 1
            return
        self.refuse_replaced()
        for flat in self.flats:
            flat.mirror()
        self.installed = 1
        self.places.put_unsharded()
        for flat in self.flats:
            flat.note_versions()

    def refuse_replaced(self) -> None:
        """Raise a ReplacedParameterError if a module holds a parameter that is not the one that was sharded.

        The unsharded parameters must not be in the modules.
        """
        self.places.refuse_replaced(self.collectives.world_rank)

    def exchange(self, params: list[list[nn.Parameter]]) -> None:
        """Make `params`, by flat buffer, the unsharded parameters, also in the modules if these hold them now."""
        chosen = dict(zip(self.flats, params, strict=True))
        self.places.exchange(chosen)
        for flat, unsharded in chosen.items():
            flat.unsharded_params = unsharded

    def uninstall(self) -> None:
        """Put the sharded parameters back into the modules, and write edits of the unsharded ones to the shard."""
        self.installed -= 1
        if self.installed:
            return
        self.places.put_back()
        if self.is_summoned:
            return
        if self.gathers:
            self.write_back_edits()
        elif self._data_was_taken():
            # Sharded and unsharded parameters share memory here, so that edits need no copy. But `.data = ` may have given
            # an unsharded parameter other memory.
            self._settle()

    def begin_recomputation(self) -> None:
        """Install the unsharded parameters until the unit's next gradient: checkpoint computes a part of its forward again.

        The hooks that install them in forward don't run where a module checkpoints its own forward.
        """
        self.recomputes = True
        self.install()

    def end_recomputation(self) -> None:
        """Uninstall the unsharded parameters after :meth:`begin_recomputation`, if it was called."""
        if self.recomputes:
            self.recomputes = False
            self.uninstall()

    def write_back_edits(self) -> None:
        """Write to the shard what a forward has edited (`with no_grad(): self.weight.clamp_()`).

        An edit shows in the version counter of the unsharded parameter, except one through `.data` or a NumPy array.
        So where `.data` was read, and in the first iterations anyhow, the values themselves are compared.
        """
        if self.state is not State.FULL:
            return
        edited = [flat for flat in self.flats if flat.gathers and flat.versions != flat.unsharded_versions()]
        for flat in edited:
            for i in range(len(flat.unsharded_params)):
                flat.refuse_recorded_edit(i)
        if edited and self.runtime.reading is not None:
            raise UnitStateError(
                f"rank {self.collectives.world_rank}: a forward has edited parameters of unit {self.name!r}, which this rank "
                "runs alone, while the others are elsewhere; they would not be edited there. Run it on every rank."
            )
        counts = bool(edited)  # all ranks see these edits; an edit without a trace shows only where its elements are
        taken = self._data_was_taken()
        if self.checks or taken:
            flats = [flat for flat in self.flats if flat.gathers]
            if taken:
                self._settle()
            unseen = [flat for flat in flats if flat not in edited and flat.edited_unseen()]
            # A unit in which one untracked edit was found is compared in all further iterations.
            self.checks -= 0 if unseen or self.runtime.config.debug else min(1, self.checks)
            edited += unseen
        if edited:
            with self.runtime.versions.change() if counts else contextlib.nullcontext():
                for flat in edited:
                    flat.take_edits()

    def _settle(self) -> None:
        for flat in self.flats:
            flat.settle()
        self.untraced += 1  # afterwards, because aliases keep values of before

    def _data_was_taken(self) -> bool:
        return any([getattr(p, "data_taken", False) for flat in self.flats for p in flat.unsharded_params])  # noqa: C419 (hot)

    # -- user hooks ---------------------------------------------------------------------------------------------
    def register_grad_hook(self, param: ShardTensor, fn: Any) -> Any:
        """Carry out `param.register_hook(fn)`: `fn` sees this rank's full gradient, as under DDP."""
        flat, index = self.find(param)
        unsharded = flat.unsharded_params[index]
        if not unsharded.requires_grad:
            flat.mirror()
        return unsharded.register_hook(fn)

    def register_post_accumulate_hook(self, param: ShardTensor, fn: Any) -> Any:
        """Carry out `param.register_post_accumulate_grad_hook(fn)`: `fn` runs once `.grad` holds the reduced shard."""
        hooks = self.post_hooks.setdefault(param._spec.name, OrderedDict())
        # The id of this handle also differs from those of hooks that were registered before sharding.
        handle = RemovableHandle(hooks)
        hooks[handle.id] = fn
        return handle

    # -- deepcopy -----------------------------------------------------------------------------------------------
    def deepcopy_param(self, param: ShardTensor, memo: dict[int, Any]) -> Any:
        """Copy the unit and return the copy of `param`."""
        other = copy.deepcopy(self, memo)
        flat, index = self.find(param)
        return other.flats[self.flats.index(flat)].params[index]

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        self.runtime.leave_interrupted()
        if self.running:
            raise UnitStateError(
                f"rank {self.collectives.world_rank}: deepcopy of the model while unit {self.name!r} is inside a forward; "
                "copy it before or after the forward."
            )
        other = Unit(self.name, self.index, copy.deepcopy(self.runtime, memo))
        memo[id(self)] = other
        other.flats += [flat.copy_for(other) for flat in self.flats]
        for mine, its in zip(self.params, other.params, strict=True):
            memo[id(mine)] = its
            adopt(its, mine)  # without `.grad`, as nn.Parameter is copied
        for twin in other.flats:
            twin.mirror(force=True)
        other.compute_in_its_dtypes()
        for flat, twin in zip(self.flats, other.flats, strict=True):
            twin.gradients.reduce_like(flat.gradients)
        for module, attribute, flat, index in self.places:
            other.places.append((copy.deepcopy(module, memo), attribute, other.flats[self.flats.index(flat)], index))
        other.triggers += [copy.deepcopy(m, memo) for m in self.triggers]
        return other


def unit_of(param: object) -> Unit | None:
    """Return the unit of a sharded parameter; None for gradients, optimizer state and plain tensors."""
    return cast("Unit | None", param._unit) if isinstance(param, ShardTensor) else None
