"""One unit: the parameters that travel together, as flat buffers.

Life of a buffer (one per dtype and trainability)::

    shard   [ this rank's slot ]                      always there; what ShardTensors view and optimizers step on
    full    [ slot 0 | slot 1 | ... | slot W-1 ]      storage resized to 0 bytes between uses
    leaves  views of full, one nn.Parameter each      what the modules compute with while the unit is gathered
    grad    [ slot 0 | slot 1 | ... | slot W-1 ]      from the first gradient's arrival to the reduction

    SHARDED --gather()--> GATHERING --wait()--> FULL --release()--> SHARDED
    SHARDED or FULL --summon()--> SUMMONED --dismiss()--> the state before

With one rank to a shard group `full` *is* the shard: always FULL, nothing moves. Unless modules compute in another dtype than
the shards have (:mod:`.config.precision`): then gathering is a cast, before the collective or without one. Or the shards are in
host memory (:mod:`.offload`): then it is a copy.
The unit knows how; Schedule and Reductions decide when.
"""

from __future__ import annotations

import contextlib
import copy
import enum
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..comm.collectives import Collectives, join, outside_inference
from ..comm.quantized_collectives import QuantizedGather
from ..comm.work import Pending
from ..errors import ReplacedParameterError, ShardError, UnitStateError
from ..offload.host_shard import Crossing
from ..shard_tensor.state import OWN_COUNT, STATE
from ..shard_tensor.tensor import ShardTensor
from ..utils.autograd_private import inside_functional_call
from ..utils.pytree import may_hold_tensors, tensors_in
from .flat_buffer import FlatBuffer, GatherAgain
from .phases import PHASES

if TYPE_CHECKING:
    from ..offload.host import Host
    from .ports import RuntimePort


class State(enum.Enum):
    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"
    SUMMONED = "summoned"  # the modules hold full parameters outside forwards: inside engine.gathered


class Unit:
    """Parameters that are gathered, released and reduced together, and the module slots that hold them."""

    def __init__(self, name: str, index: int, collectives: Collectives, host: Host | None = None) -> None:
        """`host`: where the shards are, if they are not on the device."""
        self.name, self.index, self.collectives, self.host = name, index, collectives, host
        self.sharded = collectives.size > 1  # each rank holds another part
        self.casts = False  # modules compute in another dtype than that of some shard
        self.rounding = False  # steps of some shard are rounded stochastically
        self.exact = True  # modules compute with the values that are stored: neither cast nor quantized on the way
        # Modules compute with other memory than the shards': of all ranks, or of another dtype, or on the device.
        self.gathers = self.sharded or host is not None
        self.runtime: RuntimePort = None  # type: ignore[assignment]  # set by Runtime.add
        self.flats: list[FlatBuffer] = []
        # (module, attribute, flat, index): every place of the model that holds a parameter of this unit
        self.places: list[tuple[nn.Module, str, FlatBuffer, int]] = []
        self.triggers: list[nn.Module] = []
        self.tensor_hooks: dict[str, dict[int, Any]] = {}
        self.post_hooks: dict[str, dict[int, Any]] = {}
        self.state = State.SHARDED if self.gathers else State.FULL
        self.pending: list[Pending | QuantizedGather | GatherAgain | Crossing] = []
        self.running = 0  # forwards inside this unit right now
        self.installed = 0
        self._before_summons = self.state
        self.held = False  # recomputed in backward before its own trigger: see Runtime
        self.uses: list[Any] = []  # uses whose backward has begun
        # Uses that backward may come back to past any trigger. That is this rank's own affair: other ranks may have released
        # the unit, so that they gather it anew, and then this one takes part (`refill`).
        self.kept: list[Any] = []
        self.refill = False
        self.resharded = False  # since this forward few ranks share it, from whose parts backward gathers it again
        # The parameters' then: a recomputation in backward computes with what they are now.
        self._reshard_versions: list[int] = []
        # Under `shard_optim`: whether parameters may have changed since they were gathered, as all ranks agree; and whether the
        # user was given this rank's memory of one, where changes leave no trace.
        self.outdated = self.exposed = False
        self._held = self._whole_bytes = 0  # bytes of gathered memory: as counted now, and of the whole unit
        self.rounds = 0  # reductions issued in this backward
        self.streams: set[Any] = set()  # CUDA: those that compute with the gathered values
        self.checks = 2  # iterations in which an untracked edit of the gathered values is looked for
        self.summons: list[Any] = []  # see summons.py
        self._flattened: list[nn.RNNBase] | None = None  # see _rnns
        self._modules: list[tuple[nn.Module, int]] | None = None  # see kept_tensors
        self.gather_text = f"the all-gather of unit {name!r}"
        self.reduce_text = f"the gradient reduction of unit {name!r}"
        self.event_texts = [f"gathers unit {name!r} in {phase}" for phase in PHASES]

    def compute_in_its_dtypes(self) -> None:
        """The end of set-up: from here on modules compute in the dtypes that were asked for."""
        for flat in self.flats:
            flat.compute_in_its_dtype()
            if flat.host is not None:
                flat.host.prepare()
            if flat.gradients.home is not None and any(param.requires_grad for param in flat.params):
                flat.gradients.home.prepare(flat.dtypes.grad)
        self.gathers = any(flat.gathers for flat in self.flats)
        self.casts = any(flat.casts for flat in self.flats)
        self.rounding = any(flat.rounding is not None for flat in self.flats)
        self.exact = all(flat.exact for flat in self.flats)
        self._whole_bytes = self.full_bytes
        if self.gathers:
            self.state = State.SHARDED

    # -- what it holds ------------------------------------------------------------------------------------------
    @property
    def params(self) -> list[ShardTensor]:
        return [p for flat in self.flats for p in flat.params]

    @property
    def names(self) -> list[str]:
        return [s.name for flat in self.flats for s in flat.layout.slots]

    @property
    def distributed(self) -> str | None:
        """The first parameter that is a DTensor."""
        found = ((slot.name, placed) for f in self.flats for slot, placed in zip(f.layout.slots, f.placed, strict=True))
        return next((name for name, placed in found if placed is not None), None)

    def find(self, param: ShardTensor) -> tuple[FlatBuffer, int]:
        for flat in self.flats:
            if flat.layout is param._spec.layout:
                return flat, param._spec.index
        raise ShardError(f"{param._spec.layout.slots[param._spec.index].name} is not a parameter of unit {self.name}")

    def leaf_of(self, param: ShardTensor) -> nn.Parameter:
        flat, index = self.find(param)
        return flat.leaves[index]

    def differentiable(self, param: ShardTensor) -> nn.Parameter:
        """The same to differentiate with respect to: it requires gradients where the parameter does now, whatever a forward since
        then has found."""
        flat, index = self.find(param)
        if param.requires_grad and not flat.leaves[index].requires_grad and not self.is_summoned:
            flat.mirror()
        return flat.leaves[index]

    def references(self) -> tuple[bool, list[tuple[int, int, int]], bool]:
        """Who holds gathered values beside the engine: anyone; which parameters autograd has saved (flat, index, version);
        whether a Python object (`self.kept = self.weight`) holds a leaf."""
        # All ranks must come to one answer: where use counts don't tell, it is always yes. The rest is this rank's own affair,
        # and no count is ever too low: what it takes for held is gathered, or kept, in vain.
        anyone, by_python = not self.collectives.knows_references, False
        # DTensor's own collectives may keep references for a while.
        anyone |= any(flat.distributed for flat in self.flats)
        saved = []
        with torch._C.DisableTorchFunctionSubclass():
            for number, flat in enumerate(self.flats):
                held, versions, python = flat.references()
                anyone |= held
                by_python |= python
                saved += [(number, i, version) for i, version in versions]
        return anyone, saved, by_python

    def kept_tensors(self) -> list[torch.Tensor]:
        """Tensors with a gradient that the triggers' modules keep in attributes: an auxiliary loss, for example."""
        if self._modules is None:
            modules = dict.fromkeys(m for trigger in self.triggers for m in trigger.modules())
            self._modules = [(m, _first_attribute(m)) for m in modules]
        found = []
        for module, first in self._modules:
            for value in islice(module.__dict__.values(), first, None):
                if type(value) in _HOLDERS and may_hold_tensors(value):
                    found += [t for t in tensors_in(value) if t.requires_grad and not t.is_leaf]
        return found

    def holds_gradients(self) -> bool:
        """Whether some wait for their reduction."""
        return any([flat.gradients.flat is not None for flat in self.flats])  # noqa: C419 (hot)

    def forget_modules(self) -> None:
        """A module may have been added to the triggers since :meth:`kept_tensors` looked for them."""
        self._modules = None

    @property
    def full_bytes(self) -> int:
        return sum(f.nbytes for f in self.flats if f.gathers)

    # -- gather and release -------------------------------------------------------------------------------------
    def gather(self, again: bool = False) -> None:
        """Start the gather; SHARDED, or FULL where the same values may come once more (`refill`). `again`: for backward, from
        what few ranks have kept since forward, if they have. Collective."""
        if self.state is not State.SHARDED and not self.refill:
            return
        self.wait()
        self.refill = self.outdated = False
        c = self.collectives
        again = again and self.resharded and self._reshard_versions == self._versions()
        if again:
            self.resharded = False
        self.runtime.note_issued("gather again" if again else "gather", self)
        if c.gather_stream is not None and c.is_capturing():
            raise UnitStateError(
                f"rank {c.world_rank}: unit {self.name!r} is gathered during the capture of a CUDA graph, which would read freed "
                "memory when replayed; capture the plain model, or leave CUDA graphs out."
            )
        with outside_inference(), self._gathering():
            for flat in self.flats:
                if not flat.gathers:
                    continue
                storage = flat.full.untyped_storage()
                # The memory is there where an abandoned gather may still write to it, and in a refill. Hazard: compute may
                # read while a refill writes; it writes what is there already, since an edited unit is released first.
                if storage.nbytes() != flat.nbytes:
                    storage.resize_(flat.nbytes)
                among_few = again and flat.sharded
                pending: Pending | QuantizedGather | GatherAgain | Crossing | None
                pending = flat.gather_again(self.gather_text) if among_few else flat.start_gather(self.gather_text)
                if pending is not None:
                    self.pending.append(pending)
        self.state = State.GATHERING
        self._count_bytes(self._whole_bytes)

    def _count_bytes(self, held: int = 0) -> None:
        """Gathered memory was taken, or given back, so that `held` bytes remain; where parts of it are kept, what there is."""
        if self.collectives.again_channel is not None:
            held = sum(flat.gathered_bytes for flat in self.flats if flat.gathers)
        self.runtime.gathered_bytes.add(held - self._held)
        self._held = held

    def _gathering(self) -> contextlib.AbstractContextManager[Any]:
        # What no other rank sends is cast on the stream that computes with it, unless it comes from host memory.
        return self.collectives.gathering() if self._on_side else contextlib.nullcontext()

    @property
    def _on_side(self) -> bool:
        return self.sharded or self.host is not None

    def is_stale(self) -> bool:
        """Whether this rank's shard was written to since its unit was gathered."""
        return any(flat.is_stale() for flat in self.flats)

    def wait(self) -> None:
        """GATHERING to FULL."""
        if self.state is not State.GATHERING:
            return
        try:
            for pending in self.pending:
                pending.wait()
        except BaseException:
            # The backend may still write into the buffers once the partner comes (`Groups.written` keeps them until
            # then): the unit gets new ones.
            for flat in self.flats:
                if flat.gathers:
                    flat.renew()
            self._count_bytes()
            self.state = State.SHARDED
            raise
        finally:
            self.pending = []
        self.state = State.FULL

    @property
    def is_summoned(self) -> bool:
        """Whether the modules hold full parameters that no forward has installed: inside ``engine.gathered``."""
        return self.state is State.SUMMONED

    def summon(self) -> None:
        """SHARDED or FULL to SUMMONED: nothing is gathered, released or written back until :meth:`dismiss`."""
        self._before_summons, self.state = self.state, State.SUMMONED

    def dismiss(self) -> None:
        """SUMMONED to the state before."""
        self.state = self._before_summons

    def note_stream(self) -> None:
        """The current stream computes with the gathered values from here on."""
        if self.collectives.gather_stream is not None:
            self.streams.add(torch.cuda.current_stream(self.collectives.device))

    def _versions(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [param._version for param in self.params]

    def note_resharded(self) -> None:
        """Forward is done with it: backward is to gather it from what few ranks keep, if that was asked for."""
        if self.collectives.again_channel is not None:
            self.resharded = True
            self._reshard_versions = self._versions()

    def drop_parts(self) -> None:
        """What is gathered next is the shards' values."""
        if self.resharded:
            self.resharded = False
            with self._gathering():
                for flat in self.flats:
                    flat.drop_part()
            self._count_bytes()

    def release(self, for_backward: bool = False) -> None:
        """FULL to SHARDED: give the gathered memory back. `for_backward`: few ranks keep it, if that was asked for."""
        if not self.gathers or self.state is State.SHARDED:
            return
        self.wait()
        self.refill = False
        keeps = for_backward and self.collectives.again_channel is not None
        if keeps:
            self.note_resharded()
        with self._gathering():
            # Hazard: the next allocation may reuse this memory on the gather stream while compute still reads it;
            # `gathering()` has made that stream wait for what the current one was given, which may be another one.
            if self.streams:
                c = self.collectives
                join(c.gather_stream if self._on_side else torch.cuda.current_stream(c.device), self.streams)
                self.streams.clear()
            for flat in self.flats:
                if not flat.gathers:
                    continue
                if keeps and flat.sharded:
                    flat.keep_part()
                    self._count_bytes()  # both are held for a moment
                flat.release()
        self.state = State.SHARDED
        self._count_bytes()

    # -- leaves in the modules ----------------------------------------------------------------------------------
    def install(self) -> None:
        """Put the leaves where the modules look for their parameters."""
        self.installed += 1
        if self.installed > 1:
            return
        for flat in self.flats:
            flat.mirror()
        for module, attribute, flat, index in self.places:
            slots, param = module._parameters, flat.params[index]
            held: Any = slots.get(attribute)
            if held is param:
                slots[attribute] = flat.leaves[index]
            elif not self._stands_in(module, attribute, held):
                self.installed -= 1
                self._restore()
                name = flat.layout.slots[index].name
                raise ReplacedParameterError(
                    f"rank {self.collectives.world_rank}: {type(module).__name__}.{attribute} (sharded as {name!r}) holds "
                    "another parameter than when the model was sharded. Replace layers before shard(), use "
                    "load_state_dict without assign=True, or close() the engine and shard again."
                )
            if len(param.__dict__) > OWN_COUNT:
                copy_attributes(param, flat.leaves[index])
        for rnn in self._rnns():
            rebuild_flat_weights(rnn)
        for flat in self.flats:
            flat.note_versions()

    def uninstall(self) -> None:
        """Put the sharded parameters back; write edits that forward made on the leaves to the shard."""
        self.installed -= 1
        if self.installed:
            return
        self._restore()
        if self.is_summoned:
            return
        if self.gathers:
            self.write_back_edits()
        elif self._data_was_taken():
            # What was assigned to the memory that parameters and leaves share is there already; other memory is not theirs.
            for flat in self.flats:
                flat.check_places()

    def _restore(self) -> None:
        for module, attribute, flat, index in self.places:
            slots: dict[str, Any] = module._parameters
            if slots.get(attribute) is flat.leaves[index]:
                slots[attribute] = flat.params[index]
                if len(flat.leaves[index].__dict__) > 1:  # attributes that forward has set, beside `_place`
                    copy_attributes(flat.leaves[index], flat.params[index])
        for rnn in self._rnns():
            rebuild_flat_weights(rnn)

    def _rnns(self) -> list[nn.RNNBase]:
        if self._flattened is None:
            self._flattened = list(dict.fromkeys(m for m, *_ in self.places if isinstance(m, nn.RNNBase)))
        return self._flattened

    def _stands_in(self, module: nn.Module, attribute: str, found: Any) -> bool:
        """torch.func.functional_call puts the caller's own tensors into the modules for one call: leave them there."""
        if found is not None and not isinstance(found, nn.Parameter) and isinstance(found, torch.Tensor):
            return True
        return inside_functional_call()

    def write_back_edits(self) -> None:
        """An edit made inside forward (`with no_grad(): self.weight.clamp_()`) shows in the leaf's version counter. An
        edit through `.data` leaves no trace there, so once that was taken the values themselves are compared, and in
        the first iterations anyhow (NumPy arrays leave no trace at all)."""
        if self.state is not State.FULL:
            return
        flats = [flat for flat in self.flats if flat.gathers]
        edited = [flat for flat in flats if flat.versions != flat.leaf_versions()]
        for flat in edited:
            for i in range(len(flat.leaves)):
                flat.refuse_recorded_edit(i)
        taken = self._data_was_taken()
        if taken:
            for flat in flats:
                flat.check_places()
        if self.checks or taken:
            unseen = [flat for flat in flats if flat not in edited and flat.edited_unseen()]
            # A unit that was edited so once is compared for good.
            self.checks -= 0 if unseen or self.runtime.config.debug else min(1, self.checks)
            edited += unseen
        for flat in edited:
            flat.take_edits()

    def _data_was_taken(self) -> bool:
        return any([getattr(leaf, "data_taken", False) for flat in self.flats for leaf in flat.leaves])  # noqa: C419 (hot)

    # -- user hooks ---------------------------------------------------------------------------------------------
    def register_grad_hook(self, param: ShardTensor, fn: Any) -> Any:
        """`param.register_hook(fn)`: fn sees this rank's whole gradient, as under DDP."""
        flat, index = self.find(param)
        leaf = flat.leaves[index]
        if not leaf.requires_grad:
            flat.mirror()
        return leaf.register_hook(fn)

    def register_post_accumulate_hook(self, param: ShardTensor, fn: Any) -> Any:
        """`param.register_post_accumulate_grad_hook(fn)`: fn(param) runs once `.grad` holds the reduced slice."""
        name = param._spec.layout.slots[param._spec.index].name
        hooks = self.post_hooks.setdefault(name, OrderedDict())
        handle = RemovableHandle(hooks)  # its ids are unique among those of hooks registered before sharding, too
        hooks[handle.id] = fn
        return handle

    # -- on demand ----------------------------------------------------------------------------------------------
    def on_demand(
        self, param: ShardTensor, func: Any, local_ok: bool, dtypes: frozenset[torch.dtype] = frozenset()
    ) -> torch.Tensor | None:
        return self.runtime.unshard_on_demand(self, param, func, local_ok, dtypes)

    def on_demand_done(self, result: Any, copies: list[torch.Tensor], name: str) -> None:
        self.runtime.on_demand_done(self, result, copies, name)

    def watch_copies(self, copies: list[torch.Tensor], name: str) -> None:
        self.runtime.watch_copies(copies, name)

    # -- what parameters ask ------------------------------------------------------------------------------------
    @property
    def in_forward(self) -> bool:
        """Whether a forward of the model is running."""
        return self.runtime is not None and self.runtime.in_forward

    def check_grad_reader(self) -> None:
        """Raise where `.grad` is read that an optimizer has consumed in backward already."""
        if self.runtime is not None:
            self.runtime.check_grad_reader()

    def leave_interrupted(self) -> None:
        """Do what the hooks of forwards that an interrupt has ended would have done."""
        self.runtime.leave_interrupted()

    # -- deepcopy -----------------------------------------------------------------------------------------------
    def deepcopy_param(self, param: ShardTensor, memo: dict[int, Any]) -> Any:
        other = copy.deepcopy(self, memo)
        flat, index = self.find(param)
        return other.flats[self.flats.index(flat)].params[index]

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        self.leave_interrupted()
        if self.running:
            raise UnitStateError(
                f"rank {self.collectives.world_rank}: deepcopy of the model while unit {self.name!r} is inside a forward; "
                "copy it before or after the forward."
            )
        other = Unit(self.name, self.index, self.collectives, self.host)
        memo[id(self)] = other
        for flat in self.flats:
            shard = (
                flat.shard.detach().clone() if self.host is None else self.host.copied(flat.shard.detach(), self.name)
            )
            twin = FlatBuffer(flat.layout, flat.dtypes, shard, self.collectives, other, flat.placed, self.host)
            twin.rounding = None if flat.rounding is None else flat.rounding.copy()
            other.flats.append(twin)
            for mine, its in zip(flat.params, twin.params, strict=True):
                memo[id(mine)] = its
        runtime = copy.deepcopy(self.runtime, memo)
        for mine, its in zip(self.params, other.params, strict=True):
            adopt(its, mine)  # without `.grad`, as nn.Parameter is copied
        for flat, twin in zip(self.flats, other.flats, strict=True):
            for i in range(len(twin.params)):
                twin.params[i] = memo[id(flat.params[i])]
            twin.mirror(force=True)
        other.compute_in_its_dtypes()
        hook = self.runtime.comm_hook
        if hook is not None:
            runtime.comm_hook = hook
            for twin in other.flats:
                twin.gradients.reduce_by(hook)
        for flat, twin in zip(self.flats, other.flats, strict=True):
            twin.gradients.divide_like(flat.gradients)
        runtime.add(other)
        for module, attribute, flat, index in self.places:
            other.places.append((copy.deepcopy(module, memo), attribute, other.flats[self.flats.index(flat)], index))
        other.triggers = [copy.deepcopy(m, memo) for m in self.triggers]
        return other


def unit_of(param: object) -> Unit | None:
    """Return the unit of a sharded parameter; None for gradients, optimizer state and plain tensors."""
    ref = param._unit_ref if isinstance(param, ShardTensor) else None
    return None if ref is None else cast("Unit | None", ref())


_HOLDERS = frozenset({torch.Tensor, list, tuple, dict})
_MODULES_OWN = frozenset(nn.Module().__dict__)


def _first_attribute(module: nn.Module) -> int:
    """Where in the module's ``__dict__`` the attributes begin that are not nn.Module's own."""
    return next((i for i, key in enumerate(module.__dict__) if key not in _MODULES_OWN), len(module.__dict__))


OWN_ATTRIBUTES = frozenset({STATE, "_is_param", "_place", "data_taken"})
"""Attributes of parameters and leaves that are not the user's."""


def adopt(param: Any, original: Any) -> None:
    """Make `param` an nn.Parameter with the Python attributes and requires_grad of `original`."""
    with torch._C.DisableTorchFunctionSubclass():
        param._is_param = True
        param.requires_grad_(original.requires_grad)
        if isinstance(original, ShardTensor) and original.grad_dtype != original.dtype:
            param.grad_dtype = original.grad_dtype
    for key, value in original.__dict__.items():
        if key not in OWN_ATTRIBUTES:
            param.__dict__[key] = value


def copy_attributes(param: torch.Tensor, leaf: torch.Tensor) -> None:
    """Give `leaf` the Python attributes that the user has given to `param`."""
    for key, value in param.__dict__.items():
        if key not in OWN_ATTRIBUTES:
            leaf.__dict__[key] = value


def rebuild_flat_weights(module: nn.RNNBase) -> None:
    # RNNBase.forward reads this list, not `_parameters`; weak references to it would also block a later swap.
    module._flat_weights = [getattr(module, n, None) for n in module._flat_weights_names]
    module._flat_weight_refs = [None] * len(module._flat_weights_names)
