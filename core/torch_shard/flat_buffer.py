"""The flat memory of one unit's parameters of one dtype: shard, gathered buffer, leaves and gradients."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .collectives import Collectives, Reduction, ScalarComm
from .errors import ShardError, UnitStateError
from .layout import FlatLayout
from .leaf import Leaf, is_view, move
from .shard_tensor import ShardSpec, ShardTensor

if TYPE_CHECKING:
    from .unit import Unit

# References that C++ holds to a tensor, autograd's included; undocumented (torch 2.11 to 2.13).
_use_count: Any = torch.Tensor._use_count  # type: ignore[attr-defined]


class FlatBuffer:
    """The flat memory of one unit's parameters of one dtype, all trainable or all frozen when they were sharded."""

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, shard: torch.Tensor, collectives: Collectives, unit: Unit
    ) -> None:
        self.layout, self.dtype, self.shard, self.collectives = layout, dtype, shard, collectives
        self.unit = weakref.ref(unit)
        self.sharded = collectives.size > 1
        if self.sharded:
            self.full = torch.empty(layout.numel, dtype=dtype, device=shard.device)
            self.full.untyped_storage().resize_(0)
        else:
            self.full = shard
        self.nbytes = layout.numel * shard.element_size()
        self.params: list[ShardTensor] = []
        for index in range(len(layout.slots)):
            self.params.append(self._parameter(index))
        if self.sharded:  # views need memory to be views of; it is not touched
            self.full.untyped_storage().resize_(self.nbytes)
        self.leaves: list[nn.Parameter] = [self._leaf(i) for i in range(len(layout.slots))]
        self.own = self.own_slot(self.full)
        if self.sharded:
            self.full.untyped_storage().resize_(0)
        n = len(layout.slots)
        self.edges: list[Any] = [None] * n  # keeps each leaf's AccumulateGrad alive: constant use counts
        self.baseline: list[tuple[int, int]] = [(0, 0)] * n
        self.storage_baseline = 0
        self.versions = [0] * n
        self.grad: torch.Tensor | None = None
        self.holds = [False] * n  # slots of `grad` that hold a gradient not yet reduced
        self.arrived = [False] * n  # gradients seen in the running backward
        # Under no_sync(): what `.grad` showed for each held gradient, and its version.
        self.shown: list[tuple[weakref.ref[torch.Tensor], int] | None] = [None] * n
        self.gaps = gaps(layout)
        self.fresh_version = -1  # the shard's when it was gathered
        self.frozen = [False] * n  # parameters that want no gradient of the running backward
        self.held_before = [False] * n  # `holds` at the beginning of the running backward
        self.lost = False  # a failed backward took held gradients with it
        self.results: list[torch.Tensor] = []  # reduced slices waiting to be published as .grad
        self.mirror(force=True)

    # -- tensors ------------------------------------------------------------------------------------------------
    def _parameter(self, index: int) -> ShardTensor:
        start, stop = self.layout.local_range(index, self.collectives.rank)
        spec = ShardSpec(self.layout, index, self.collectives.rank, self.collectives.scalar)
        return ShardTensor(self.shard.narrow(0, start, stop - start), spec, unit=self.unit())

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Parameter `index` in its own shape and strides, as a view of a buffer of the full layout."""
        slot = self.layout.slots[index]
        return torch.as_strided(flat, slot.shape, slot.stride, flat.storage_offset() + slot.offset)

    def _leaf(self, index: int) -> nn.Parameter:
        # `.data` gives the leaf a version counter of its own: refilling `full` must not look like an in-place edit.
        leaf = Leaf(self.view(self.full, index).data, requires_grad=False)
        leaf._place = (weakref.ref(self), index)
        return leaf

    def own_slot(self, flat: torch.Tensor) -> torch.Tensor:
        n = self.layout.shard_numel
        return flat.narrow(0, self.collectives.rank * n, n)

    def mirror(self, force: bool = False) -> None:
        """Let the leaves require gradients exactly where the user's parameters do, now."""
        changed = force
        with torch._C.DisableTorchFunctionSubclass():
            for i in range(len(self.params)):
                wants = self.params[i].requires_grad
                if wants != self.leaves[i].requires_grad:
                    self.leaves[i].requires_grad_(wants)
                    changed = True
                if wants and self.edges[i] is None:
                    self._arm(i)
        if changed:
            self._measure()

    def renew(self) -> None:
        """Leave the gathered buffer to whoever holds it, and point the leaves at a new, empty one."""
        with torch.inference_mode(False), torch.no_grad():
            self.full = torch.empty(self.layout.numel, dtype=self.dtype, device=self.full.device)
            for i, leaf in enumerate(self.leaves):
                move(leaf, self.view(self.full, i))
            self.own = self.own_slot(self.full)
            self.full.untyped_storage().resize_(0)
        self._measure()

    def _arm(self, i: int) -> None:
        leaf, unit = self.leaves[i], self.unit()
        assert unit is not None
        self.edges[i] = torch.autograd.graph.get_gradient_edge(leaf).node
        with torch._C.DisableTorchFunctionSubclass():
            self.params[i].register_hook(_Average(self, i))
        leaf.register_post_accumulate_grad_hook(_GradHook(unit, self, i))
        hooks = unit.tensor_hooks.get(self.layout.slots[i].name)
        if hooks:  # the dict itself, so that the handles that users hold still remove their hooks
            leaf._backward_hooks = hooks  # type: ignore[assignment]

    def _measure(self) -> None:
        storage = self.full.untyped_storage()
        self.storage = storage._cdata  # which one it is
        self.storage_baseline = torch._C._storage_Use_Count(storage._cdata)
        for i in range(len(self.leaves)):
            self.baseline[i] = (_use_count(self.leaves[i]), sys.getrefcount(self.leaves[i]))

    def is_referenced(self) -> bool:
        """Whether anything outside (autograd's saved tensors, a user's variable) holds the gathered values."""
        if torch._C._storage_Use_Count(self.full.untyped_storage()._cdata) > self.storage_baseline:
            return True
        leaves = self.leaves
        for i, (uses, references) in enumerate(self.baseline):
            if _use_count(leaves[i]) > uses or sys.getrefcount(leaves[i]) > references:
                return True
        return False

    def saved_versions(self) -> list[tuple[int, int]]:
        """Index and version of the parameters that autograd has saved gathered values of (the leaf, or a view of it)."""
        saved = [i for i, (uses, _) in enumerate(self.baseline) if _use_count(self.leaves[i]) > uses]
        with torch._C.DisableTorchFunctionSubclass():
            return [(i, self.params[i]._version) for i in saved]

    def check_places(self) -> None:
        """Raise where a forward gave a leaf other memory (``.data = ``, of another shape)."""
        for i, leaf in enumerate(self.leaves):
            view = self.view(self.full, i)
            if not is_view(leaf, view):
                given = f"shape {tuple(leaf.shape)}, {leaf.dtype}, {leaf.device}"
                move(leaf, view.data)
                raise UnitStateError(
                    f"rank {self.collectives.world_rank}: .data of {self.layout.slots[i].name} was assigned another tensor "
                    f"inside a forward ({given}, not shape {tuple(leaf.shape)}, {leaf.dtype}, {leaf.device}). Assign one that "
                    "is alike, or convert the model before shard()."
                )

    def note_versions(self) -> None:
        """The leaves hold what the shard holds: an in-place edit of one will show against this."""
        self.versions = [leaf._version for leaf in self.leaves]

    def is_held_by_python(self) -> bool:
        """Whether a Python object beside the engine's own refers to a leaf."""
        # The loop variable and the argument are references, too; `_measure` counts the same way.
        leaves = self.leaves
        return any(sys.getrefcount(leaves[i]) > references for i, (_, references) in enumerate(self.baseline))

    # -- gradients ----------------------------------------------------------------------------------------------
    def accept(self, index: int, grad: torch.Tensor, scale: float) -> None:
        """Add a leaf's gradient, times `scale`, to the gradient buffer."""
        if self.grad is None:
            self.grad = self.collectives.take(self.layout.numel, self.dtype)
        into = self.view(self.grad, index)
        grad = grad.detach()
        if self.holds[index]:
            into.add_(grad, alpha=scale)
        elif scale == 1.0:
            into.copy_(grad)
        else:
            torch.mul(grad, scale, out=into)
        self.holds[index] = True
        self.arrived[index] = True

    def start_reduction(self, what: str) -> Reduction | None:
        """Send the gradient buffer off. With one rank in all there is nothing to send: its slice is published as is."""
        if self.grad is None:
            self.grad = self.collectives.take(self.layout.numel, self.dtype)
        grad, self.grad = self.grad, None
        for start, stop in self.gaps:
            grad[start:stop].zero_()
        for i, held in enumerate(self.holds):
            if not held:
                self.view(grad, i).zero_()
        self.holds = [False] * len(self.holds)
        if self.collectives.world == 1:
            self.results.append(grad)
            return None
        return self.collectives.reduce(grad, what)

    def collect(self, result: torch.Tensor) -> None:
        """Take a reduced slice; added at once where every `.grad` is a view of one earlier slice, else published later."""
        base = self._published()
        if base is not None:
            base.add_(result)
        else:
            self.results.append(result)

    def _published(self) -> torch.Tensor | None:
        base = None
        with torch._C.DisableTorchFunctionSubclass():
            for param in self.params:
                if not param.requires_grad:
                    continue
                grad = param.grad
                flat = getattr(grad, "_flat", None)
                if flat is None or (base is not None and flat is not base):
                    return None
                base = flat
        return base

    def publish(self, used: list[bool]) -> list[int]:
        """Make the reduced slices the parameters' gradients; returns the indices of those that received one."""
        touched = [i for i, u in enumerate(used) if u]
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for result in self.results:
                for i in touched:
                    self._publish_one(i, result)
        self.results = []
        return touched

    def _publish_one(self, i: int, result: torch.Tensor) -> None:
        start, stop = self.layout.local_range(i, self.collectives.rank)
        param = self.params[i]
        grad = ShardTensor(result.narrow(0, start, stop - start), param._spec)
        existing = param.grad
        if existing is None or getattr(existing, "_unreduced", False):
            grad._flat = result  # type: ignore[attr-defined]
            param.grad = grad
        else:
            existing.add_(grad)

    # -- between the backwards of no_sync() -------------------------------------------------------------------------
    def show_held(self) -> None:
        """After a backward that did not reduce: `.grad` must be something, so that `zero_grad()` finds what to clear.

        It shows this rank's own, unreduced gradient (its slice), which the reduction replaces."""
        if self.grad is None:
            return
        own, rank = self.own_slot(self.grad), self.collectives.rank
        with torch._C.DisableTorchFunctionSubclass():
            for i, held in enumerate(self.holds):
                if held and self.params[i].grad is None:
                    start, stop = self.layout.local_range(i, rank)
                    shown = ShardTensor(own.narrow(0, start, stop - start), self.params[i]._spec)
                    shown._unreduced = True  # type: ignore[attr-defined]
                    self.params[i].grad = shown
                if held:
                    grad = self.params[i].grad
                    self.shown[i] = (weakref.ref(grad), grad._version)  # type: ignore[arg-type,union-attr]

    def begin_backward(self, checked: bool = False) -> None:
        """A new backward begins; `checked` where :meth:`check_held` was called before it."""
        self.arrived = [False] * len(self.arrived)
        if self.lost:
            self._check_lost()
        if not checked:
            self.check_held()
        self.held_before = list(self.holds)
        with torch._C.DisableTorchFunctionSubclass():
            self.frozen = [not p.requires_grad for p in self.params]
        self.shown = [None] * len(self.shown)

    def keep_held(self) -> None:
        """After any backward: it may have added to `.grad` (a loss term on the sharded parameter itself)."""
        with torch._C.DisableTorchFunctionSubclass():
            for i, shown in enumerate(self.shown):
                grad = self.params[i].grad
                if shown is not None and grad is not None:
                    self.shown[i] = (weakref.ref(grad), grad._version)

    def check_held(self) -> None:
        """Drop held gradients that the user has cleared since the last backward."""
        if self.grad is None:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for i, held in enumerate(self.holds):
                shown = self.shown[i]
                if not held or shown is None:
                    continue
                grad = self.params[i].grad
                if grad is None:
                    self.holds[i] = False
                elif shown[0]() is not grad or shown[1] != grad._version:
                    if getattr(grad, "_local", grad).count_nonzero():
                        raise ShardError(
                            f"rank {self.collectives.world_rank}: the gradient of {self.layout.slots[i].name} was edited "
                            "between backwards under no_sync(); its parts are reduced later, so edit it after the "
                            "backward that reduces, or leave no_sync() out."
                        )
                    self.holds[i] = False

    def _check_lost(self) -> None:
        """What no_sync() held before a backward that failed is gone; its `.grad` must be cleared before the next one."""
        with torch._C.DisableTorchFunctionSubclass():
            for i, p in enumerate(self.params):
                if getattr(p.grad, "_lost", False) and p.grad._local.count_nonzero():  # type: ignore[union-attr]
                    raise ShardError(
                        f"rank {self.collectives.world_rank}: what was accumulated for {self.layout.slots[i].name} under "
                        "no_sync() was lost when a later backward failed; call zero_grad() and accumulate anew."
                    )
        self.lost = False

    def forget(self) -> None:
        """Drop everything a failed backward left."""
        with torch._C.DisableTorchFunctionSubclass():
            for p, held in zip(self.params, self.held_before, strict=True):
                if held and p.grad is not None:
                    p.grad._lost = self.lost = True  # type: ignore[attr-defined]
        if self.grad is not None:
            self.collectives.give(self.grad)
        self.grad, self.results = None, []
        self.holds = [False] * len(self.holds)
        self.arrived = [False] * len(self.arrived)


def gaps(layout: FlatLayout) -> list[tuple[int, int]]:
    """The padding: ranges of the flat buffer that belong to no parameter."""
    found, end = [], 0
    for slot in layout.slots:
        if slot.offset > end:
            found.append((end, slot.offset))
        end = slot.offset + slot.numel
    if end < layout.numel:
        found.append((end, layout.numel))
    return found


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
            everyone = ScalarComm(c.watch.channels["scalar"], c.watch, c.world, c.world_rank)
            everyone.all_reduce(total, "sum", f"the gradient of {spec.name}, used past its unit")
        return ShardTensor.from_full(total.div_(c.world), spec)


class _GradHook:
    """Called by autograd when a leaf's gradient of this backward is complete."""

    def __init__(self, unit: Unit, flat: FlatBuffer, index: int) -> None:
        self.unit, self.flat, self.index = weakref.ref(unit), weakref.ref(flat), index

    def __call__(self, leaf: torch.Tensor) -> None:
        unit, flat = self.unit(), self.flat()
        if unit is not None and flat is not None:
            unit.runtime.on_grad(unit, flat, self.index, leaf)
