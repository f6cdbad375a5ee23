"""The flat memory of one unit's parameters of one dtype: shard, gathered buffer and leaves."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .collectives import Collectives
from .errors import UnitStateError
from .gradient_buffer import GradientBuffer
from .layout import FlatLayout
from .leaf import Leaf, is_view, move
from .precision import Dtypes
from .rounding import Rounding
from .shard_spec import slot_view
from .shard_tensor import ShardSpec, ShardTensor
from .watch import Pending

if TYPE_CHECKING:
    from .unit import Unit

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a dtype that is compared bitwise

# References that C++ holds to a tensor, autograd's included; undocumented (torch 2.13).
_use_count: Any = torch.Tensor._use_count  # type: ignore[attr-defined]


class FlatBuffer:
    """The flat memory of one unit's parameters of one kind: dtypes, and trainable or frozen when they were sharded."""

    def __init__(
        self, layout: FlatLayout, dtypes: Dtypes, shard: torch.Tensor, collectives: Collectives, unit: Unit
    ) -> None:
        """`shard` has ``dtypes.stored``. Modules compute in that, too, until :meth:`compute_in_its_dtype`."""
        self.layout, self.dtypes, self.shard, self.collectives = layout, dtypes, shard, collectives
        self.dtype = dtypes.stored
        self.rounding: Rounding | None = None  # where steps are rounded stochastically
        self.unit = weakref.ref(unit)
        self.sharded = collectives.size > 1  # each rank holds another part
        self.params: list[ShardTensor] = []
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
        self.gradients = GradientBuffer(layout, dtypes, self.params, collectives)
        self._build(self.dtype)

    def _build(self, compute: torch.dtype) -> None:
        """The gathered buffer and the leaves, of this dtype."""
        self.compute = compute
        self.casts = compute != self.dtype
        self.gathers = self.sharded or self.casts  # whether the leaves have memory other than the shard's
        self.nbytes = self.layout.numel * compute.itemsize
        n = len(self.layout.slots)
        if self.gathers:
            self.full = torch.empty(self.layout.numel, dtype=compute, device=self.shard.device)
        else:
            self.full = self.shard
        self._take_parts()
        self.leaves: list[nn.Parameter] = [self._leaf(i) for i in range(n)]
        if self.gathers:
            self.full.untyped_storage().resize_(0)
        self.edges: list[Any] = [None] * n  # keeps each leaf's AccumulateGrad alive: constant use counts
        self.mirror(force=True)

    def _take_parts(self) -> None:
        """Of the gathered buffer, while it has memory."""
        c = self.collectives
        self.own = self.own_slot(self.full)
        self.slots = c.slots_of(self.full)
        # What is cast is sent from its place.
        self.payload = c.payload(self.own if self.casts else self.shard)

    def compute_in_its_dtype(self) -> None:
        """From here on modules compute in ``dtypes.compute``. Before anybody has seen a leaf."""
        if self.dtypes.casts:
            self._build(self.dtypes.compute)

    # -- tensors ------------------------------------------------------------------------------------------------
    def _parameter(self, index: int) -> ShardTensor:
        start, stop = self.layout.local_range(index, self.collectives.rank)
        spec = ShardSpec(self.layout, index, self.collectives.rank, self.collectives.scalar)
        return ShardTensor(self.shard.narrow(0, start, stop - start), spec, unit=self.unit())

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Parameter `index` in its own shape and strides, as a view of a buffer of the full layout."""
        return slot_view(flat, self.layout.slots[index])

    def _leaf(self, index: int) -> nn.Parameter:
        # `.data` gives the leaf a version counter of its own: refilling `full` must not look like an in-place edit.
        leaf = Leaf(self.view(self.full, index).data, requires_grad=False)
        leaf._place = (weakref.ref(self), index)
        return leaf

    def own_slot(self, flat: torch.Tensor) -> torch.Tensor:
        n = self.layout.shard_numel
        return flat.narrow(0, self.collectives.rank * n, n)

    # -- gathering ----------------------------------------------------------------------------------------------
    def start_gather(self, what: str) -> Pending | None:
        """Fill the gathered buffer, which has memory; None where that is done at once. Collective."""
        self.fresh_version = self.shard._version
        if self.casts:
            self.own.copy_(self.shard)
        if not self.sharded:
            return None
        return self.collectives.all_gather(self.full, self.payload, what, self.slots)

    def is_stale(self) -> bool:
        """Whether a parameter was edited since it was gathered."""
        return self.gathers and self.fresh_version != self.shard._version

    def edited_unseen(self) -> bool:
        """Whether the own slot is no longer what was gathered. Slow: compares all values, bitwise, so that a NaN equals
        itself."""
        gathered = self.shard.to(self.compute) if self.casts else self.shard
        return not torch.equal(self.own.view(torch.uint8), gathered.view(torch.uint8))

    def take_edits(self) -> None:
        """Copy what a forward has changed in its leaves to the shard; the rest keeps its precision."""
        with torch.no_grad():
            if self.casts:
                before = self.shard.to(self.compute)
                integer = _INTEGERS[self.compute.itemsize]
                changed = self.own.view(integer) != before.view(integer)
                torch.where(changed, self.own.to(self.dtype), self.shard, out=self.shard)
            else:
                self.shard.copy_(self.own)
        self.fresh_version = self.shard._version
        self.note_versions()

    # -- leaves -------------------------------------------------------------------------------------------------
    def mirror(self, force: bool = False) -> None:
        """Let the leaves require gradients exactly where the user's parameters do, now."""
        with torch._C.DisableTorchFunctionSubclass():
            wanted = [param.requires_grad for param in self.params]
        if not force and wanted == self.gradients.wanted == [leaf.requires_grad for leaf in self.leaves]:
            return
        for i, wants in enumerate(wanted):
            self.leaves[i].requires_grad_(wants)
            if wants and self.edges[i] is None:
                self._arm(i)
        self.gradients.want(wanted)
        self._measure()

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
        self.versions = [leaf._version for leaf in self.leaves]


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
        total = grad.detach().clone()
        if c.world > 1:
            c.everyone().all_reduce(total, "sum", f"the gradient of {spec.name}, used past its unit")
        return ShardTensor.from_full(total.div_(c.world), spec)


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
            unit.runtime.on_grad(unit, flat, self.index, grads[0])
        return (None,)
