"""One unit: the parameters that travel together, as flat buffers.

Life of a buffer (one per dtype and trainability)::

    shard   [ this rank's slot ]                      always there; what ShardTensors view and optimizers step on
    full    [ slot 0 | slot 1 | ... | slot W-1 ]      storage resized to 0 bytes between uses
    leaves  views of full, one nn.Parameter each      what the modules compute with while the unit is gathered
    grad    [ slot 0 | slot 1 | ... | slot W-1 ]      from the first gradient's arrival to the reduction

    SHARDED --gather()--> GATHERING --wait()--> FULL --release()--> SHARDED

With one rank to a shard group `full` *is* the shard: always FULL, nothing moves.
The unit knows how; the runtime decides when.
"""

from __future__ import annotations

import copy
import enum
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .collectives import Collectives, Pending, Reduction
from .errors import ReplacedParameterError, ShardError
from .layout import FlatLayout
from .shard_tensor import ShardSpec, ShardTensor

if TYPE_CHECKING:
    from .runtime import Runtime


# References that C++ holds to a tensor, autograd's included; undocumented (torch 2.11 to 2.13).
_use_count: Any = torch.Tensor._use_count  # type: ignore[attr-defined]


class State(enum.Enum):
    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"


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
        self.fresh_versions: tuple[int, ...] = ()
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
        return nn.Parameter(self.view(self.full, index).data, requires_grad=False)

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
                leaf.data = self.view(self.full, i)
            self.full.untyped_storage().resize_(0)
        self._measure()

    def _arm(self, i: int) -> None:
        leaf, unit = self.leaves[i], self.unit()
        assert unit is not None
        self.edges[i] = torch.autograd.graph.get_gradient_edge(leaf).node
        leaf.register_post_accumulate_grad_hook(_GradHook(unit, self, i))
        for hook in unit.tensor_hooks.get(self.layout.slots[i].name, {}).values():
            leaf.register_hook(hook)

    def _measure(self) -> None:
        storage = self.full.untyped_storage()
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

    def param_versions(self) -> tuple[int, ...]:
        with torch._C.DisableTorchFunctionSubclass():
            return tuple([p._version for p in self.params])

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
        for result in self.results:
            for i in touched:
                self._publish_one(i, result)
        self.results = []
        return touched

    def _publish_one(self, i: int, result: torch.Tensor) -> None:
        start, stop = self.layout.local_range(i, self.collectives.rank)
        param = self.params[i]
        grad = ShardTensor(result.narrow(0, start, stop - start), param._spec)
        with torch._C.DisableTorchFunctionSubclass():
            existing = param.grad
            if existing is None or getattr(existing, "_unreduced", False):
                grad._flat = result  # type: ignore[attr-defined]
                param.grad = grad
            else:
                with torch.no_grad():
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
        if not checked:
            self.check_held()
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

    def forget(self) -> None:
        """Drop everything a failed backward left."""
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


class _GradHook:
    """Called by autograd when a leaf's gradient of this backward is complete."""

    def __init__(self, unit: Unit, flat: FlatBuffer, index: int) -> None:
        self.unit, self.flat, self.index = weakref.ref(unit), weakref.ref(flat), index

    def __call__(self, leaf: torch.Tensor) -> None:
        unit, flat = self.unit(), self.flat()
        if unit is not None and flat is not None:
            unit.runtime.on_grad(unit, flat, self.index, leaf)


class Unit:
    """Parameters that are gathered, released and reduced together, and the module slots that hold them."""

    def __init__(self, name: str, index: int, collectives: Collectives) -> None:
        self.name, self.index, self.collectives = name, index, collectives
        self.runtime: Runtime = None  # type: ignore[assignment]  # set by Runtime.add
        self.flats: list[FlatBuffer] = []
        # (module, attribute, flat, index): every place of the model that holds a parameter of this unit
        self.places: list[tuple[nn.Module, str, FlatBuffer, int]] = []
        self.triggers: list[nn.Module] = []
        self.tensor_hooks: dict[str, dict[int, Any]] = {}
        self.post_hooks: dict[str, dict[int, Any]] = {}
        self.state = State.FULL if collectives.size == 1 else State.SHARDED
        self.pending: list[Pending] = []
        self.running = 0  # forwards inside this unit right now
        self.installed = 0
        self.is_summoned = False  # inside engine.gathered
        self.held = False  # recomputed in backward before its own trigger: see Runtime
        self.uses: list[Any] = []  # uses whose backward has begun
        self.rounds = 0  # reductions issued in this backward
        self.checks = 2  # iterations in which an untracked edit of the gathered values is looked for
        self.hook_count = 0
        self.summons: list[Any] = []  # see summons.py

    # -- what it holds ------------------------------------------------------------------------------------------
    @property
    def params(self) -> list[ShardTensor]:
        return [p for flat in self.flats for p in flat.params]

    @property
    def names(self) -> list[str]:
        return [s.name for flat in self.flats for s in flat.layout.slots]

    @property
    def sharded(self) -> bool:
        return self.collectives.size > 1

    def find(self, param: ShardTensor) -> tuple[FlatBuffer, int]:
        for flat in self.flats:
            if flat.layout is param._spec.layout:
                return flat, param._spec.index
        raise ShardError(f"{param._spec.layout.slots[param._spec.index].name} is not a parameter of unit {self.name}")

    def leaf_of(self, param: ShardTensor) -> nn.Parameter:
        flat, index = self.find(param)
        return flat.leaves[index]

    def is_referenced(self) -> bool:
        """Whether anything outside the unit still holds its gathered values. All ranks must come to one answer, so on
        CUDA, where NCCL keeps references of its own for a while, it is always yes."""
        if self.collectives.device.type != "cpu":
            return True
        return any(flat.is_referenced() for flat in self.flats)

    @property
    def full_bytes(self) -> int:
        return sum(f.nbytes for f in self.flats)

    # -- gather and release -------------------------------------------------------------------------------------
    def gather(self) -> None:
        """Start the gather; SHARDED only. Collective."""
        if self.state is not State.SHARDED:
            return
        c = self.collectives
        # A buffer allocated inside inference_mode would be an inference tensor, which a later training step cannot use.
        with torch.inference_mode(False), torch.no_grad(), c.gathering():
            for flat in self.flats:
                storage = flat.full.untyped_storage()
                if storage.nbytes() != flat.nbytes:  # kept where an abandoned gather may still write
                    storage.resize_(flat.nbytes)
                flat.own_slot(flat.full).copy_(flat.shard)
                self.pending.append(c.all_gather(flat.full, f"the all-gather of unit {self.name!r}"))
            for flat in self.flats:
                flat.fresh_versions = flat.param_versions()
        self.state = State.GATHERING

    def is_stale(self) -> bool:
        """Whether a parameter was edited since its unit was gathered."""
        return any(flat.fresh_versions != flat.param_versions() for flat in self.flats)

    def wait(self) -> None:
        """GATHERING to FULL."""
        if self.state is not State.GATHERING:
            return
        try:
            for pending in self.pending:
                pending.wait()
        except BaseException:
            # The backend may still write into the buffers once the partner comes: it keeps them, the unit gets new ones.
            for flat in self.flats:
                self.collectives.parked.append(flat.full)
                flat.renew()
            self.state = State.SHARDED
            raise
        finally:
            self.pending = []
        self.state = State.FULL

    def release(self) -> None:
        """FULL to SHARDED: give the gathered memory back."""
        if not self.sharded or self.state is State.SHARDED:
            return
        self.wait()
        with self.collectives.gathering():
            # Hazard: the next allocation may reuse this memory on the gather stream while compute still reads it;
            # `gathering()` has made that stream wait for the compute issued so far.
            for flat in self.flats:
                storage = flat.full.untyped_storage()
                if storage.resizable():
                    storage.resize_(0)
                else:  # the user took a NumPy array of it, which keeps the memory
                    flat.renew()
        self.state = State.SHARDED

    # -- leaves in the modules ----------------------------------------------------------------------------------
    def install(self) -> None:
        """Put the leaves where the modules look for their parameters."""
        self.installed += 1
        if self.installed > 1:
            return
        for flat in self.flats:
            flat.mirror()
        rnns = []
        for module, attribute, flat, index in self.places:
            slots = module._parameters
            held: Any = slots.get(attribute)
            if held is flat.params[index]:
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
            if isinstance(module, nn.RNNBase):
                rnns.append(module)
            _copy_attributes(flat.params[index], flat.leaves[index])
        for module in dict.fromkeys(rnns):
            rebuild_flat_weights(module)
        for flat in self.flats:
            flat.versions = [leaf._version for leaf in flat.leaves]

    def uninstall(self) -> None:
        """Put the sharded parameters back; write edits that forward made on the leaves to the shard."""
        self.installed -= 1
        if self.installed:
            return
        self._restore()
        if self.sharded and not self.is_summoned:
            self.write_back_edits()

    def _restore(self) -> None:
        rnns = []
        for module, attribute, flat, index in self.places:
            if module._parameters.get(attribute) is flat.leaves[index]:
                module._parameters[attribute] = flat.params[index]  # type: ignore[assignment]
            if isinstance(module, nn.RNNBase):
                rnns.append(module)
        for module in dict.fromkeys(rnns):
            rebuild_flat_weights(module)

    def _stands_in(self, module: nn.Module, attribute: str, found: Any) -> bool:
        """torch.func.functional_call puts the caller's own tensors into the modules for one call: leave them there."""
        if found is not None and not isinstance(found, nn.Parameter) and isinstance(found, torch.Tensor):
            return True
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_globals.get("__name__") == "torch.nn.utils.stateless":
                return True
            frame = frame.f_back
        return False

    def write_back_edits(self) -> None:
        """An edit made inside forward (`with no_grad(): self.weight.clamp_()`) shows in the leaf's version counter. An
        edit through `.data` leaves no trace there, so in the first iterations the values themselves are compared."""
        if self.state is not State.FULL:
            return
        edited = [
            f for f in self.flats if any(leaf._version != v for leaf, v in zip(f.leaves, f.versions, strict=True))
        ]
        if self.checks:
            unseen = [f for f in self.flats if f not in edited and not _same_bits(f.own_slot(f.full), f.shard)]
            # A unit that was edited so once is compared for good.
            self.checks -= 0 if unseen or self.runtime.config.debug else 1
            edited += unseen
        for flat in edited:
            with torch.no_grad():
                flat.shard.copy_(flat.own_slot(flat.full))
            flat.versions = [leaf._version for leaf in flat.leaves]

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
        hooks = self.post_hooks.setdefault(name, {})
        self.hook_count += 1
        hooks[self.hook_count] = fn
        return _Handle(hooks, self.hook_count)

    # -- on demand ----------------------------------------------------------------------------------------------
    def on_demand(self, param: ShardTensor, func: Any, local_ok: bool) -> torch.Tensor | None:
        return self.runtime.on_demand(self, param, func, local_ok)

    def on_demand_done(self, result: Any) -> None:
        self.runtime.on_demand_done(self, result)

    # -- deepcopy -----------------------------------------------------------------------------------------------
    def deepcopy_param(self, param: ShardTensor, memo: dict[int, Any]) -> Any:
        other = copy.deepcopy(self, memo)
        flat, index = self.find(param)
        return other.flats[self.flats.index(flat)].params[index]

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        if self.running:
            raise ShardError(
                f"rank {self.collectives.world_rank}: deepcopy of the model while unit {self.name!r} is inside a forward; "
                "copy it before or after the forward."
            )
        other = Unit(self.name, self.index, self.collectives)
        memo[id(self)] = other
        for flat in self.flats:
            twin = FlatBuffer(flat.layout, flat.dtype, flat.shard.detach().clone(), self.collectives, other)
            other.flats.append(twin)
            for mine, its in zip(flat.params, twin.params, strict=True):
                memo[id(mine)] = its
        runtime = copy.deepcopy(self.runtime, memo)
        for mine, its in zip(self.params, other.params, strict=True):
            adopt(its, mine)
            with torch._C.DisableTorchFunctionSubclass():
                if mine.grad is not None:
                    its.grad = ShardTensor(mine.grad._local.clone(), its._spec)  # type: ignore[attr-defined]
        for flat, twin in zip(self.flats, other.flats, strict=True):
            for i in range(len(twin.params)):
                twin.params[i] = memo[id(flat.params[i])]
            twin.mirror(force=True)
        other.post_hooks = {k: dict(v) for k, v in self.post_hooks.items()}
        runtime.add(other)
        for module, attribute, flat, index in self.places:
            other.places.append((copy.deepcopy(module, memo), attribute, other.flats[self.flats.index(flat)], index))
        other.triggers = [copy.deepcopy(m, memo) for m in self.triggers]
        return other


class _Handle:
    def __init__(self, hooks: dict[int, Any], key: int) -> None:
        self.hooks, self.key = hooks, key

    def remove(self) -> None:
        self.hooks.pop(self.key, None)

    def __enter__(self) -> _Handle:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


_OWN_ATTRIBUTES = {"_local", "_spec", "_unit_ref", "_flat", "_unreduced", "_is_param"}


def adopt(param: Any, original: Any) -> None:
    """Make `param` an nn.Parameter with the Python attributes and requires_grad of `original`."""
    with torch._C.DisableTorchFunctionSubclass():
        param._is_param = True
        param.requires_grad_(original.requires_grad)
    for key, value in original.__dict__.items():
        if key not in _OWN_ATTRIBUTES:
            param.__dict__[key] = value


def _copy_attributes(param: ShardTensor, leaf: nn.Parameter) -> None:
    for key, value in param.__dict__.items():
        if key not in _OWN_ATTRIBUTES:
            leaf.__dict__[key] = value


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise, so that a NaN equals itself."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def rebuild_flat_weights(module: nn.RNNBase) -> None:
    # RNNBase.forward reads this list, not `_parameters`; weak references to it would also block a later swap.
    module._flat_weights = [getattr(module, n, None) for n in module._flat_weights_names]
    module._flat_weight_refs = [None] * len(module._flat_weights_names)
