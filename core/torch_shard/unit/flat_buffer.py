"""The flat memory of one unit's parameters of one dtype: shard, gathered buffer and leaves."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..comm.collectives import Collectives
from ..comm.quantized_collectives import QuantizedGather
from ..comm.work import Pending
from ..config.param_dtypes import Dtypes
from ..errors import UnitStateError
from ..layout.dtensor_placement import Placed, is_dtensor
from ..layout.flat_layout import FlatLayout, slot_view
from ..numerics.block_quantizer import BlockCode
from ..numerics.stochastic_rounding import Rounding
from ..offload.host_gradients import HostGradients
from ..offload.host_shard import Crossing, HostShard
from ..shard_tensor.dtensor_classes import gathered_parameter, shard_class, unsharded_parameter
from ..shard_tensor.spec import ShardSpec, slice_part
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import Leaf, is_view, mark_of_unit, memory_of, move, refuse_recorded_edit
from .gradient_buffer import GradientBuffer

if TYPE_CHECKING:
    from ..offload.host import Host
    from .unit import Unit

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a dtype that is compared bitwise

# References that C++ holds to a tensor, autograd's included; undocumented (torch 2.13).
_use_count: Any = torch.Tensor._use_count  # type: ignore[attr-defined]


class FlatBuffer:
    """The flat memory of one unit's parameters of one kind: dtypes, trainable or frozen when they were sharded, and whether
    tensor parallelism cuts them."""

    def __init__(
        self,
        layout: FlatLayout,
        dtypes: Dtypes,
        shard: torch.Tensor,
        collectives: Collectives,
        unit: Unit,
        placed: Sequence[Placed | None] = (),
        host: Host | None = None,
    ) -> None:
        """`shard` has ``dtypes.stored``. Modules compute in that, too, until :meth:`compute_in_its_dtype`. `placed`: how DTensor
        has distributed each parameter; the layout is that of this rank's parts. `host`: whose memory the shard is in, if it is
        not the device's."""
        self.layout, self.dtypes, self.collectives = layout, dtypes, collectives
        self.memory = shard  # with what may still be written to it; see `shard`
        self.dtype = dtypes.stored
        self.rounding: Rounding | None = None  # where steps are rounded stochastically
        self.unit = weakref.ref(unit)
        self.sharded = collectives.size > 1  # each rank holds another part
        self.placed = tuple(placed) or (None,) * len(layout.slots)
        self.distributed = any(self.placed)  # some leaves are DTensors
        self.split = any(p is not None and p.part is not None for p in self.placed)  # then all are
        self.params: list[ShardTensor] = []
        self.host = HostShard(host, shard, self.params) if host is not None else None
        for index in range(len(layout.slots)):
            self.params.append(self._parameter(index))
        n = len(layout.slots)
        self._averages = [False] * n
        self.baseline: list[tuple[int, int]] = [(0, 0)] * n
        self.storage_baseline = 0
        self.versions = [0] * n
        self.fresh_version = -1  # the shard's when it was gathered
        first, last = layout.rank_range(collectives.rank)
        self.gaps = [  # the shard's padding
            (max(start, first) - first, min(stop, last) - first)
            for start, stop in layout.gaps()
            if start < last and stop > first
        ]
        home = None if self.host is None else HostGradients(self.host.host, layout.shard_numel, unit.index)
        self.gradients = GradientBuffer(layout, dtypes, self.params, collectives, home)
        self._build(self.dtype, None)

    @property
    def shard(self) -> torch.Tensor:
        """This rank's slot, 1-D, of the dtype that is stored. Where the host steps on it, this waits until it has."""
        if self.host is not None:
            self.host.moving.settle()
        return self.memory

    def settle(self) -> None:
        """Wait for all that is done to the shard, its state and its gradients in the background."""
        if self.host is not None and self.gradients.home is not None:
            self.host.moving.settle()
            self.gradients.home.moving.settle()

    def settle_step(self) -> None:
        """Wait for the host's step on the shard and its state."""
        if self.host is not None:
            self.host.moving.settle_writes()

    @property
    def version(self) -> int:
        """Of the shard's values, behind what is written to it. What only reads it is not waited for."""
        self.settle_step()
        return self.memory._version

    def _build(self, compute: torch.dtype, code: BlockCode | None) -> None:
        """The gathered buffer and the leaves, of this dtype. `code`: how shards are sent, where that is not as they are."""
        self.compute, self.code = compute, code
        self.casts = compute != self.dtype
        self.exact = not self.casts and code is None  # modules compute with the values that are stored
        # Where they do not, this rank's slot as it was gathered: its codes, or what a forward's edits have left there.
        self._sent: torch.Tensor | None = None
        self._edited: torch.Tensor | None = None
        # Whether the leaves have memory other than the shard's.
        self.gathers = self.sharded or self.casts or self.host is not None
        self.nbytes = self.layout.numel * compute.itemsize
        n = len(self.layout.slots)
        if self.gathers:
            self.full = torch.empty(self.layout.numel, dtype=compute, device=self.collectives.device)
        else:
            self.full = self.shard
        if self.host is not None:
            self.host.compute_in(compute, code)
        # What this rank keeps between forward and backward, where few ranks gather it again then.
        self.part: torch.Tensor | None = None
        if self.sharded and self.collectives.again_channel is not None:
            self.part = torch.empty_like(self.collectives.own_part(self.full))
            self.part.untyped_storage().resize_(0)
        self._take_parts()
        self.leaves: list[nn.Parameter] = [self._leaf(i) for i in range(n)]
        if self.gathers:
            self.full.untyped_storage().resize_(0)
        self.edges: list[Any] = [None] * n  # keeps each leaf's AccumulateGrad alive: constant use counts
        self.mirror(force=True)

    def _take_parts(self) -> None:
        """Of the gathered buffer, while it has memory."""
        c = self.collectives
        mark_of_unit(self.full)
        self.own = self.own_slot(self.full)
        self.slots = c.slots_of(self.full)
        # What is cast, or comes from elsewhere, is sent from its place.
        self.payload = c.payload(self.own if self.casts or self.host is not None else self.shard)

    def compute_in_its_dtype(self) -> None:
        """From here on modules compute in ``dtypes.compute``, and shards are sent as ``dtypes.quantized`` says. Before anybody
        has seen a leaf."""
        quantized, code = self.dtypes.quantized, None
        if quantized is not None and self.sharded:
            code = quantized.parameter_code(self.dtypes, self.layout.shard_numel)
        if self.dtypes.casts or code is not None:
            self._build(self.dtypes.compute, code)

    # -- tensors ------------------------------------------------------------------------------------------------
    def _parameter(self, index: int) -> ShardTensor:
        start, stop = self.layout.local_range(index, self.collectives.rank)
        placed, c = self.placed[index], self.collectives
        part = None if placed is None else placed.part
        spec = ShardSpec(self.layout, index, c.rank, c.scalar if part is None else c.whole, part)
        cls = ShardTensor if placed is None else shard_class()
        return cls(self.memory.narrow(0, start, stop - start), spec, unit=self.unit())

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Parameter `index`, or this rank's part of it, in its own shape and strides: a view of a buffer of the full layout."""
        return slot_view(flat, self.layout.slots[index])

    def parameter_over(self, flat: torch.Tensor, index: int) -> nn.Parameter:
        """The same as modules take it: an ``nn.Parameter``, a DTensor where the user's was one."""
        placed, view = self.placed[index], self.view(flat, index).data
        return nn.Parameter(view, requires_grad=False) if placed is None else gathered_parameter(placed, view)

    def as_given(self, values: torch.Tensor, index: int) -> torch.Tensor:
        """Values of parameter `index` as :meth:`view` gives them, or a gradient: a DTensor where the parameter was one."""
        placed = self.placed[index]
        return values if placed is None else placed.over(values)

    def part_of(self, values: torch.Tensor, index: int) -> torch.Tensor:
        """The other way round. May communicate within a tensor-parallel group."""
        placed = self.placed[index]
        return values if placed is None else placed.local_grad(values, self.layout.slots[index].name)

    def _leaf(self, index: int) -> nn.Parameter:
        # `.data` gives the leaf a version counter of its own: refilling `full` must not look like an in-place edit.
        placed, view = self.placed[index], self.view(self.full, index).data
        leaf: Any = Leaf(view, requires_grad=False) if placed is None else unsharded_parameter(placed, view)
        leaf._place = (weakref.ref(self), index)
        return leaf  # type: ignore[no-any-return]

    def own_slot(self, flat: torch.Tensor) -> torch.Tensor:
        n = self.layout.shard_numel
        return flat.narrow(0, self.collectives.rank * n, n)

    # -- gathering ----------------------------------------------------------------------------------------------
    def start_gather(self, what: str) -> Pending | QuantizedGather | Crossing | None:
        """Fill the gathered buffer, which has memory; None where that is done at once. Collective."""
        self.fresh_version = self.version
        if self.code is not None:
            sent = torch.empty(self.code.nbytes, dtype=torch.uint8, device=self.full.device)
            if self.host is None:
                with torch.no_grad():
                    self.code.encode(self.shard.unsqueeze(0), sent.unsqueeze(0))
            else:
                self.host.copy_to(sent)
            self._sent, self._edited = sent, None
            return QuantizedGather(self.collectives, self.code, sent, self.full, what)
        if self.host is not None:
            crossing = self.host.copy_to(self.own)
            if not self.sharded:
                return crossing
        elif self.casts:
            self.own.copy_(self.shard)
        if not self.sharded:
            return None
        return self.collectives.all_gather(self.full, self.payload, what, self.slots)

    def keep_part(self) -> None:
        """Before the gathered buffer is released between forward and backward. Under `gathering()`."""
        assert self.part is not None
        # Hazard: compute must be through with the buffer, whose memory goes next; `Unit.release` has joined its streams. The
        # part is made, filled, read and dropped on the gather stream alone, so that nothing else waits for it.
        self.part.untyped_storage().resize_(self.part.numel() * self.part.element_size())
        self.part.copy_(self.collectives.own_part(self.full))

    def drop_part(self) -> None:
        """Under `gathering()`, behind what has read it there."""
        if self.part is not None:
            self.part.untyped_storage().resize_(0)

    def gather_again(self, what: str) -> Pending | GatherAgain:
        """Fill the gathered buffer, which has memory, from the parts that few ranks have kept. Collective."""
        assert self.part is not None
        if self.part.untyped_storage().nbytes():  # else this rank has kept the whole
            self.collectives.own_part(self.full).copy_(self.part)
            self.drop_part()
        pending = self.collectives.all_gather_again(self.full, what)
        return pending if self.code is None else GatherAgain(self, pending)

    def keep_as_gathered(self) -> None:
        """What the own slot holds now is what an edit will show against."""
        self._edited = self.own.clone()

    @property
    def gathered_bytes(self) -> int:
        """What it holds of gathered memory, with the part that this rank keeps for backward."""
        held = self.full.untyped_storage().nbytes()
        return held if self.part is None else held + self.part.untyped_storage().nbytes()

    def is_stale(self) -> bool:
        """Whether a parameter was edited since it was gathered."""
        return self.gathers and self.fresh_version != self.version

    def edited_unseen(self) -> bool:
        """Whether the own slot is no longer what was gathered. Slow: compares all values, bitwise, so that a NaN equals
        itself."""
        return not torch.equal(self.own.view(torch.uint8), self._as_gathered().view(torch.uint8))

    def _as_gathered(self) -> torch.Tensor:
        """What the own slot holds unless somebody has written to it."""
        if self._edited is not None:
            return self._edited
        if self.code is None:
            return self.shard.to(self.own.device, self.compute)
        # Not from the shard: one edited element gives its whole block other codes.
        assert self._sent is not None
        values = torch.empty_like(self.own)
        self.code.decode(self._sent.unsqueeze(0), values.unsqueeze(0))
        return values

    def take_edits(self) -> None:
        """Copy what a forward has changed in its leaves to the shard; the rest keeps its precision."""
        with torch.no_grad():
            if self.exact:
                self.shard.copy_(self.own)
            else:
                integer = _INTEGERS[self.compute.itemsize]
                before, shard = self._as_gathered(), self.shard
                changed = self.own.view(integer) != before.view(integer)
                changed &= ~(self.own.isnan() & before.isnan())  # of a NaN only a cast may have changed the bits
                torch.where(changed.to(shard.device), self.own.to(shard.device, self.dtype), shard, out=shard)
                if self.code is not None:
                    self._edited = self.own.clone()
        self.fresh_version = self.shard._version
        self.note_versions()

    def release(self) -> None:
        """Give the gathered memory back."""
        self._sent = self._edited = None
        storage = self.full.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
        else:  # the user took a NumPy array of it, which keeps the memory
            self.renew()

    # -- leaves -------------------------------------------------------------------------------------------------
    def mirror(self, force: bool = False) -> None:
        """Let the leaves require gradients exactly where the user's parameters do, now."""
        with torch._C.DisableTorchFunctionSubclass():
            wanted = [param.requires_grad for param in self.params]
        if not force and wanted == self.gradients.asked == [leaf.requires_grad for leaf in self.leaves]:
            self.gradients.ask(wanted)
            return
        if force:
            self._measure()
        for i, wants in enumerate(wanted):
            self.refuse_recorded_edit(i)
            self.leaves[i].requires_grad_(wants)
            if wants and self.edges[i] is None:
                self._arm_counted(i)
        self.gradients.ask(wanted)

    def refuse_recorded_edit(self, i: int) -> None:
        """Raise if a leaf has become part of a graph."""
        refuse_recorded_edit(self.leaves[i], self.layout.slots[i].name, self.collectives.world_rank)

    def renew(self) -> None:
        """Leave the gathered buffer to whoever holds it, and point the leaves at a new, empty one."""
        with torch.inference_mode(False), torch.no_grad():
            self.full = torch.empty(self.layout.numel, dtype=self.compute, device=self.full.device)
            for i, leaf in enumerate(self.leaves):
                move(leaf, self.view(self.full, i))
            self._take_parts()
            self.full.untyped_storage().resize_(0)
        self._measure()

    def _arm(self, i: int) -> None:
        leaf, unit = self.leaves[i], self.unit()
        assert unit is not None
        self.edges[i] = torch.autograd.graph.get_gradient_edge(leaf).node
        self.edges[i].register_prehook(_GradHook(unit, self, i))
        if not self._averages[i]:
            self._averages[i] = True
            with torch._C.DisableTorchFunctionSubclass():
                self.params[i].register_hook(_Average(self, i))
        hooks = unit.tensor_hooks.get(self.layout.slots[i].name)
        if hooks:  # the dict itself, so that the handles that users hold still remove their hooks
            leaf._backward_hooks = hooks  # type: ignore[assignment]

    def _arm_counted(self, i: int) -> None:
        """The same, and what it adds to the leaf's references. All others may be those of a graph that is alive, which end with
        it, so that they must not be taken for the engine's own."""
        leaf, (uses, references) = self.leaves[i], self.baseline[i]
        before = _use_count(leaf), sys.getrefcount(leaf)
        self._arm(i)
        after = _use_count(leaf), sys.getrefcount(leaf)
        owns = before[0] > uses  # the tensor its Python object already, see `references`
        self.baseline[i] = uses + after[0] - before[0], references + after[1] - before[1] + owns

    def put_back(self, i: int) -> None:
        """Point a leaf at its place again, to which the user gave other memory (``.data = ``). Where that had another dtype,
        autograd has dropped the leaf's gradient node, and the hook with it."""
        move(self.leaves[i], self.view(self.full, i).data)
        if self.edges[i] is not None:
            self.edges[i] = None
            if self.leaves[i].requires_grad:
                self._arm(i)
            self._measure()

    def _measure(self) -> None:
        storage = self.full.untyped_storage()
        self.storage = storage._cdata  # which one it is
        self.storage_baseline = torch._C._storage_Use_Count(storage._cdata)
        for i in range(len(self.leaves)):
            self.baseline[i] = (_use_count(self.leaves[i]), sys.getrefcount(self.leaves[i]))

    def references(self) -> tuple[bool, list[tuple[int, int]], bool]:
        """What holds gathered values beside the engine: whether anything does (autograd's saved tensors, a user's variable);
        index and version of the parameters that autograd has saved (the leaf, or a view of it); and whether a Python
        object refers to a leaf."""
        storage = torch._C._storage_Use_Count(self.full.untyped_storage()._cdata)
        leaves, saved, by_python = self.leaves, [], False
        # A loop variable would be a reference, too; `_measure` counts the same way.
        for i, (uses, references) in enumerate(self.baseline):
            more = _use_count(leaves[i]) > uses
            if more:
                saved.append((i, self.params[i]._version))
            # Autograd's first reference makes the tensor own its Python object, which adds one. A leaf that wants a
            # gradient has that from the beginning.
            if sys.getrefcount(leaves[i]) > references + (more and self.edges[i] is None):
                by_python = True
        return storage > self.storage_baseline or bool(saved) or by_python, saved, by_python

    def check_places(self) -> None:
        """Raise where a forward gave a leaf other memory (``.data = ``, of another shape)."""
        for i, leaf in enumerate(self.leaves):
            view = self.view(self.full, i)
            if not is_view(leaf, view):
                given = f"shape {tuple(leaf.shape)}, {leaf.dtype}, {leaf.device}"
                self.put_back(i)
                raise UnitStateError(
                    f"rank {self.collectives.world_rank}: .data of {self.layout.slots[i].name} was assigned another tensor "
                    f"inside a forward ({given}, not shape {tuple(leaf.shape)}, {leaf.dtype}, {leaf.device}). Assign one that "
                    "is alike, or convert the model before shard()."
                )

    def note_versions(self) -> None:
        """The leaves hold what the shard holds: an in-place edit of one will show against this."""
        self.versions = self.leaf_versions()

    def leaf_versions(self) -> list[int]:
        """They grow with edits."""
        if not self.distributed:
            return [leaf._version for leaf in self.leaves]
        # An edit of a DTensor counts on itself, one of what its to_local() gave counts there.
        return [leaf._version + memory_of(leaf)._version for leaf in self.leaves]


class GatherAgain:
    """A :class:`~torch_shard.comm.work.Pending` of values that forward received as codes, which are gone by now."""

    def __init__(self, flat: FlatBuffer, pending: Pending) -> None:
        self._flat, self._pending = flat, pending

    def settle(self, seconds: float) -> bool:
        """Wait at most this long; False if it is still going on."""
        return self._pending.settle(seconds)

    def wait(self) -> None:
        """Return when the gathered values may be read by the current stream."""
        self._pending.wait()
        self._flat.keep_as_gathered()


class _Average:
    """On the sharded parameter itself: a plain gradient is this rank's own, of something that went past the engine (a
    `torch.autograd.Function` that was given another module's weight). It is averaged as any other. Collective."""

    def __init__(self, flat: FlatBuffer, index: int) -> None:
        self.flat, self.index = weakref.ref(flat), index

    def __call__(self, grad: torch.Tensor) -> torch.Tensor | None:
        flat = self.flat()
        if flat is None or isinstance(grad, ShardTensor):
            return None
        c, spec = flat.collectives, flat.params[self.index]._spec
        # A whole gradient of a distributed parameter is one of a computation that is not, which each rank does for itself.
        among = c.everyone if flat.split and not is_dtensor(grad) else c.plane
        total = grad.detach().clone() if not is_dtensor(grad) else flat.part_of(grad.detach(), self.index).clone()
        if among.size > 1:
            among.all_reduce(total, "sum", f"the gradient of {spec.name}, used past its unit")
        total.div_(among.size)
        if flat.split and is_dtensor(grad):
            return ShardTensor(slice_part(total, spec).clone(), spec)
        return ShardTensor.from_full(total, spec)


class _GradHook:
    """Called by autograd, behind the user's hooks, when a leaf's gradient of this backward is complete; takes it, so that
    nothing is accumulated in the leaf itself."""

    def __init__(self, unit: Unit, flat: FlatBuffer, index: int) -> None:
        self.unit, self.flat, self.index = weakref.ref(unit), weakref.ref(flat), index

    def __call__(self, grads: tuple[torch.Tensor | None, ...]) -> tuple[None, ...] | None:
        unit, flat = self.unit(), self.flat()
        if unit is None or flat is None:
            return None
        if grads[0] is not None:
            grad = grads[0] if not flat.distributed else flat.part_of(grads[0], self.index)
            unit.runtime.on_grad(unit, flat, self.index, grad)
        return (None,)
