"""The gradients of one flat buffer, from their arrival through the reduction to the parameters' ``.grad``.

Each gradient of an unsharded parameter is copied into one buffer of the full layout, on devices together with the others of its
unit (:mod:`.held_gradients`). The buffer is reduced, and this rank's shard of the sum is published as ``.grad``. Under
``no_sync()`` the reduction is *deferred*: the buffer accumulates several backwards, and ``.grad`` shows this rank's own,
unreduced shard in the meantime.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..comm.collectives import Collectives
from ..comm.gradient_reduction import Reduction, cast
from ..comm.quantized_collectives import QuantizedGradients
from ..config.param_dtypes import Dtypes
from ..errors import ShardError
from ..layout.flat_layout import FlatLayout, slot_view
from ..numerics.dtypes import widens
from ..shard_tensor.host_memory import flat_of
from ..shard_tensor.state import STATE, ShardState, is_unreduced
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import own_grad, set_own_grad
from .accumulation import Accumulation
from .held_gradients import HeldGradients, least_references

if TYPE_CHECKING:
    from ..comm.comm_hook import CommHook
    from ..offload.host_gradients import HostGradients

# What a rank knows of a gradient at the end of a backward: 0 (not expected), EXPECTED or ARRIVED.
EXPECTED, ARRIVED = 1, 2


class GradientBuffer:
    """The gradients of a flat buffer, whose `layout`, `dtypes` and `params` it shares."""

    def __init__(
        self,
        layout: FlatLayout,
        dtypes: Dtypes,
        params: list[ShardTensor],
        collectives: Collectives,
        host: HostGradients | None,
    ) -> None:
        """Make the buffer, without memory. `host` takes reduced gradients to host memory; None keeps them on the device."""
        self.layout, self.dtypes, self.params, self.collectives, self.host = layout, dtypes, params, collectives, host
        n = len(params)
        # By parameter:
        self.asked = [False] * n  # some forward has used it as trainable
        self.expected = [False] * n  # the running backward may bring its gradient
        self.arrived = [False] * n  # the running backward has brought its gradient
        self.unreduced = [False] * n  # its slot of `flat` has a gradient that is not reduced yet
        self.deferred = [False] * n  # its slot had an unreduced gradient when the running backward began
        self.missing = 0  # how many are expected and have not arrived
        # This rank's gradients in the full layout; None before the first is copied.
        self.flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []  # views of `flat`, one for each parameter
        self.lost = False  # some gradients must not be added to, see `_check_lost`
        self.accumulation = Accumulation(params)
        self.partial = False  # the running backward does not end an accumulation, but reduces all the same
        self.results: list[torch.Tensor] = []  # reduced shards that wait to be published as `.grad`
        self._streams: set[Any] = set()  # the streams on which gradients arrived
        self._on_device = collectives.streams.exist
        self.can_hold = self._on_device and collectives.counts_references  # see `accept`
        if self.can_hold:
            least_references(True), least_references(False)
        self._narrow = False  # `flat` has the dtype in which gradients arrive, in which they may not be summed
        self.hook: CommHook | None = None  # the user's function that reduces in place of the engine
        self.quantized: QuantizedGradients | None = None
        if dtypes.quantized is not None and collectives.size > 1:
            quantizer = dtypes.quantized.gradient_quantizer(dtypes, layout.shard_numel)
            if quantizer is not None:
                self.quantized = QuantizedGradients(quantizer, layout, dtypes, collectives)
        self.divide_by(collectives.data_parallel_size)
        self.opens = self._opens(False)  # the dtype of `flat`, if it is made now
        self._gaps = layout.gaps()
        self.held = HeldGradients(self._gaps)
        self._cut = tuple((slot.shape, slot.stride, slot.offset) for slot in layout.slots)  # without names
        self._pieces, self._piece_of = layout.pieces(collectives.rank)

    def _divide(self, gradients: float, sums: float, averages: bool = False) -> None:
        """Multiply gradients by `gradients` before the reduction, and sums by `sums` after it.

        `averages`: the reduction itself divides by the number of ranks.
        """
        self._factor, self._rest, self._averages = gradients, sums, averages
        # A tensor, because torch takes several microseconds to make one of a Python number, or to convert one. A 0-dim tensor on
        # the CPU counts as a number: it is not rounded to a narrow dtype of gradients, and does not change the result's dtype.
        used = self.dtypes.compute, self.dtypes.reduce, self.dtypes.accumulated, self.dtypes.grad
        exact = torch.float64 in used or torch.complex128 in used
        self._scale = torch.tensor(gradients, dtype=torch.float64 if exact else torch.float32, device="cpu")

    def divide_by(self, divisor: float) -> None:
        """Divide sums over the ranks by `divisor` from now on, in place of the number of ranks."""
        world = self.collectives.data_parallel_size
        if self.dtypes.reduce is torch.float16:
            before = divided_before(world)
            self._divide(1.0 / before, before / divisor)
        elif self.collectives.averages and divisor == world and self.quantized is None:
            self._divide(1.0, 1.0, averages=True)
        else:
            self._divide(1.0 / divisor, 1.0)

    def reduce_like(self, other: GradientBuffer) -> None:
        """Reduce and divide as `other` does."""
        self.hook = other.hook
        self._divide(other._factor, other._rest, other._averages)

    def reduce_by(self, hook: CommHook) -> None:
        """Make `hook` reduce from now on; it divides, too."""
        self.hook = hook
        self._divide(1.0, 1.0)

    @property
    def waits(self) -> bool:
        """True if this rank has gradients that are not reduced yet."""
        return self.flat is not None or bool(self.held)

    @property
    def expects_any(self) -> bool:
        """True if the running backward may bring a gradient."""
        return True in self.expected

    @property
    def buffers(self) -> list[tuple[int, torch.dtype]]:
        """Length and dtype of the buffers that the running backward's reduction takes from ``Collectives.take``."""
        own = (self.layout.numel, self.opens)
        # One buffer to send, one to receive.
        return [own, own] if self.quantized is None else [own, *self.quantized.buffers]

    def _open(self) -> torch.Tensor:
        """Allocate `flat`, and return it."""
        if self.host is not None:
            self.host.host.make_room()
        self._narrow = self.collectives.data_parallel_size == 1 and widens(self.opens, self.dtypes.grad)
        self.flat = flat = self._taken(self.opens)
        if self._on_device:
            self._streams.add(self.collectives.streams.current())  # `flat` was allocated on this stream
        return flat

    def _taken(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer of `dtype`, and keep its views."""
        flat = self.collectives.take(self.layout.numel, dtype)
        # Units of one shape take the same memory in turn, so that the views are kept on the tensor, too. `.data` breaks the
        # reference cycle: a plain view would refer to the buffer, which refers to the view.
        kept: dict[Any, list[torch.Tensor]] = flat.__dict__.setdefault("_views", {})
        if self._cut not in kept:
            kept[self._cut] = [slot_view(flat, slot).data for slot in self.layout.slots]
        self._views = kept[self._cut]
        return flat

    def _widen(self) -> torch.Tensor:
        """Give `flat` the dtype of ``.grad``, in which gradients can be summed, and return it."""
        narrow, streams = self.flat, self._streams
        assert narrow is not None
        c = self.collectives
        here = c.streams.current()
        c.streams.join(here, streams)
        self._narrow, self.flat = False, self._taken(self.dtypes.grad).copy_(narrow)
        for stream in streams:
            # Hazard: the narrow buffer's memory belongs to one of these streams and must not be reused before it was read.
            c.streams.join(stream, [here])
        return self.flat

    def _copied(self, whole: bool = False) -> tuple[torch.Tensor, bool]:
        """Copy the held gradients to the buffer; return it, and True if its padding was set to zero, as `whole` asks."""
        flat = self.flat if self.flat is not None else self._open()
        if not self.held:
            return flat, False
        if self._narrow and not self.held.fit_slots(flat.dtype):
            flat = self._widen()
        c = self.collectives
        here = c.streams.current()
        c.streams.join(here, self._streams)
        filled = self.held.copy_to(flat, self._views, self._factor, whole)
        for stream in self._streams:
            # Hazard: the gradients' memory belongs to one of these streams and must not be reused before it was read.
            c.streams.join(stream, [here])
        self.held.forget()
        return flat, filled

    def _opens(self, deferred: bool) -> torch.dtype:
        """Return the dtype of `flat`: that of the reduction, or a wide one where a deferred reduction lets it accumulate."""
        if deferred:
            return self.dtypes.accumulated
        if self.collectives.data_parallel_size > 1:
            return self.dtypes.reduce
        return self.dtypes.grad if self.host is None or self._factor != 1.0 else self.dtypes.crossing(reduced=False)

    # -- arrival ------------------------------------------------------------------------------------------------
    def begin_backward(self, *, checked: bool, deferred: bool, partial: bool) -> None:
        """Begin a backward.

        Args:
            checked: :meth:`check_accumulation` was called before this backward.
            deferred: the backward will not reduce.
            partial: the backward will reduce, although others follow before the optimizer's step.
        """
        self.opens, self.partial = self._opens(deferred), partial
        if self.lost:
            self._check_lost()
        if not checked:
            self.check_accumulation()
        self.deferred = self.unreduced.copy()
        # As in autograd, a parameter gets a gradient if any recorded forward has used it as trainable and it is so now.
        with torch._C.DisableTorchFunctionSubclass():
            self.expected = [asked and p.requires_grad for asked, p in zip(self.asked, self.params, strict=True)]
        self._await_all()

    def _await_all(self) -> None:
        """Reset which gradients of the running backward have arrived: none."""
        self.arrived = [False] * len(self.params)
        self.missing = sum(self.expected)

    def accept(self, index: int, grad: torch.Tensor, unshared: bool = False) -> bool:
        """Add the gradient of parameter `index`; return True if no other is missing.

        `unshared`: nobody else refers to the gradient, so that it may be copied later.
        """
        if self._on_device:
            self._streams.add(self.collectives.streams.current())
        if unshared and index not in self.held:
            self.held.hold(index, grad, self.unreduced[index])
        else:  # copied at once: autograd, or the function that it comes from, may use the gradient's memory again
            self._copy(index, grad)
        self.unreduced[index] = True
        if self.arrived[index]:
            return False
        self.arrived[index] = True
        self.missing -= 1
        return self.missing == 0

    def _copy(self, index: int, grad: torch.Tensor) -> None:
        flat = self.flat if self.flat is not None else self._open()
        if self._on_device and index in self.held:
            flat, _ = self._copied()
        if self._narrow and (self.unreduced[index] or grad.dtype != flat.dtype):
            self._widen()
        into = self._views[index]
        if self.unreduced[index]:
            into.add_(grad, alpha=self._factor)
        elif self._factor == 1.0:
            into.copy_(grad)
        elif into.dtype == grad.dtype:
            torch.mul(grad, self._scale, out=into)
        else:  # the product must not be rounded to the gradient's dtype
            into.copy_(grad).mul_(self._scale)

    # -- reduction ----------------------------------------------------------------------------------------------
    def start_reduction(self, what: str) -> Reduction | None:
        """Start to reduce the buffer; return None where no other rank has gradients of the same parameters. Collective."""
        grad, is_padded = self._copied(whole=True)
        self.flat, self._views = None, []
        streams, self._streams = tuple(self._streams), set()
        if streams:
            # Hazard: where backward runs on several streams, the current stream, which zeroes the rest of the buffer, may be
            # another one than those that have written to the buffer.
            self.collectives.streams.join(self.collectives.streams.current(), streams)
        for start, stop in () if is_padded else self._gaps:
            grad[start:stop].zero_()
        present, self.unreduced = self.unreduced, [False] * len(self.unreduced)
        if False in present:
            for slot, is_present in zip(self.layout.slots, present, strict=True):
                if not is_present:
                    slot_view(grad, slot).zero_()
        if self.collectives.data_parallel_size == 1:
            self._keep(cast(grad, self.dtypes.grad, self.host is not None), streams=streams)
            return None
        if self.quantized is not None:
            return self.quantized.start(grad, present, self.dtypes.grad, what, streams)
        if grad.dtype != self.dtypes.reduce:  # it was accumulated
            sent = self.collectives.take(grad.numel(), self.dtypes.reduce).copy_(grad)
            self.collectives.give(grad)
            grad = sent
        if self.hook is not None:
            return self.hook.start(self.collectives, grad, self.dtypes.grad, self.host is not None, streams)
        return self.collectives.reduce(grad, what, streams, self._averages)

    def collect(self, reduction: Reduction) -> None:
        """Wait for a reduction and keep its result, this rank's shard, to be published."""
        result, factor = reduction.finish(self.dtypes.grad, self.host is not None), self._rest
        if factor != 1.0 and result.dtype == self.dtypes.grad:
            result.mul_(factor)
            factor = 1.0
        self._keep(result, factor)

    def _keep(self, result: torch.Tensor, factor: float = 1.0, streams: Sequence[Any] = ()) -> None:
        """Add a reduced shard to `.grad` at once, where every `.grad` is a view of one earlier shard; else publish it later.

        Args:
            result: the reduced shard.
            factor: the factor of the result, to be multiplied in the dtype of `.grad`.
            streams: streams to which the memory of `result` may belong.
        """
        host = self.host
        # With one rank no reduction waits for this one, so that the result can as well be added when it is published.
        base = self._published() if host is not None or self.collectives.data_parallel_size > 1 else None
        if host is None:
            if base is not None:
                base.add_(result)
            else:
                self.results.append(result)
        elif base is not None:
            host.add(base, result, self._present_grads(), factor, streams)
        else:
            self.results.append(host.receive(result, self.dtypes.grad, factor, streams))

    def scale(self, base: torch.Tensor, factor: torch.Tensor, gaps: Sequence[tuple[int, int]]) -> None:
        """Multiply `base`, host memory that holds all gradients, by a 0-dim factor, in the background.

        `gaps` are the ranges of padding in `base`.
        """
        assert self.host is not None
        self.host.scale(base, factor, gaps, self._present_grads())

    def _present_grads(self) -> list[Any]:
        """Return the parameters' present gradients, those that are ShardTensors."""
        with torch._C.DisableTorchFunctionSubclass():
            grads = map(own_grad, self.params)
            return [grad for grad in grads if isinstance(grad, ShardTensor)]

    def _published(self) -> torch.Tensor | None:
        """Return the shard of which all parameters' `.grad` are views; None if there is no such shard."""
        base = None
        with torch._C.DisableTorchFunctionSubclass():
            for param in self.params:
                if not param.requires_grad:
                    continue
                grad = own_grad(param)
                # Hot: each reduction asks this of each parameter. Only gradients in host memory need more than an attribute.
                state = getattr(grad, STATE, None)
                flat = None if state is None else state.flat if self.host is None else flat_of(grad)
                if flat is None or (base is not None and flat is not base) or flat.dtype != self.dtypes.grad:
                    return None
                base = flat
        return base

    def arrivals(self) -> list[int]:
        """Return for each parameter 0, EXPECTED or ARRIVED; the ranks compare these, and the largest of any rank counts."""
        # `deferred`: gradients of earlier backwards may have been sent already, with the rest of their unit.
        states = zip(self.expected, self.arrived, self.unreduced, self.deferred, strict=True)
        return [ARRIVED if arrived or held or kept else expected for expected, arrived, held, kept in states]

    def publish(self, arrivals: list[int]) -> list[int]:
        """Make the reduced shards the gradients of the parameters that `arrivals`, as the ranks have agreed, call ARRIVED.

        Returns the indices of these parameters. Call without gradients and without ``__torch_function__``.
        """
        touched = [i for i, state in enumerate(arrivals) if state == ARRIVED]
        results, self.results = self.results, []
        self._publish(results, touched)
        if not self.partial:
            self.accumulation.end()
        return touched

    def publish_also(self, results: list[torch.Tensor], published: list[int], arrivals: list[int]) -> None:
        """Publish more of `results`, the shards of an earlier :meth:`publish`: other ranks have more gradients than this one."""
        both = enumerate(zip(published, arrivals, strict=True))
        more = [i for i, (before, state) in both if state == ARRIVED and before != ARRIVED]
        with torch._C.DisableTorchFunctionSubclass():
            self._publish(results, more)

    def take_back(self, published: list[int]) -> None:
        """Clear the gradients that :meth:`publish` has published, with all that was accumulated before."""
        with torch._C.DisableTorchFunctionSubclass():
            for param, state in zip(self.params, published, strict=True):
                if state == ARRIVED:
                    set_own_grad(param, None)

    def _publish(self, results: list[torch.Tensor], touched: list[int]) -> None:
        """Make the parts of `results` the gradients of the parameters `touched`, or add them to the gradients."""
        for result in results if touched else ():
            pieces = result.split_with_sizes(self._pieces)
            for i in touched:
                param: Any = self.params[i]
                grad = ShardTensor._wrap(pieces[self._piece_of[i]], param._spec, None, result)
                existing: Any = own_grad(param)
                if existing is None or existing._shard_state.unreduced:
                    set_own_grad(param, grad)
                    continue
                if self.host is not None:
                    self.host.pending_writes.wait()
                existing.add_(grad)
            if self.host is not None:
                self.host.pending_writes.block_reads(self._present_grads())
        if self.partial:
            self.accumulation.note(touched)
            self.accumulation.partial.update(touched)

    # -- deferred gradients, between the backwards of no_sync() -----------------------------------------------------
    def show_deferred(self) -> None:
        """Let `.grad` show this rank's own, unreduced gradient, after a backward that did not reduce.

        `zero_grad()` finds there what to clear. The reduction replaces it.
        """
        if not self.waits:
            return
        self._copied()
        own: Sequence[torch.Tensor] = ()
        deferred = [i for i, is_deferred in enumerate(self.unreduced) if is_deferred]
        with torch._C.DisableTorchFunctionSubclass():
            for i in deferred:
                param = self.params[i]
                shown: Any = own_grad(param)
                if shown is None:
                    own = own or self._own_shards()
                    shown = ShardTensor._wrap(own[self._piece_of[i]], param._spec)
                    shown._shard_state.unreduced = True
                    set_own_grad(param, shown)
                if is_unreduced(shown) and self.collectives.data_parallel_size > 1:
                    shown._shard_state.mixed = True  # also if the user has cleared it in the meantime
                    shown._shard_state.read_own = functools.partial(
                        _own_gradient, weakref.ref(self), i, weakref.ref(shown)
                    )
            self.accumulation.note(deferred)
        if self.host is not None and own:
            self.host.pending_writes.block_reads(self._present_grads())

    def _own_shards(self) -> Sequence[torch.Tensor]:
        """Return this rank's shards of the unreduced gradients, one for each parameter, in the dtype of `.grad`."""
        assert self.flat is not None
        start, stop = self.layout.rank_range(self.collectives.rank)
        own = self.flat[start:stop]
        # A copy to host memory runs in the background, when the next backward may add to the buffer: so it gets its own.
        dtype = self.dtypes.grad
        own = own.to(dtype) if self.host is None else self.host.receive(own.to(dtype, copy=True), dtype)
        return own.split_with_sizes(self._pieces)

    def own_gradient(self, index: int, shown: ShardTensor) -> torch.Tensor | None:
        """Return a copy of the gradient that `shown`, the `.grad` of parameter `index`, shows a part of; None if it is stale."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            param = self.params[index]
            current = shown is own_grad(param) and self.unreduced[index] and self.accumulation.is_unchanged(index)
            if not current or param._spec.part is not None:
                return None
            streams = self.collectives.streams
            # Hazard: gradients that arrived on other streams may still be on their way into the buffer.
            streams.join(streams.current(), self._streams)
            return torch.div(self._views[index], self._factor).to(shown._local.device, self.dtypes.grad)

    def check_accumulation(self) -> None:
        """Drop deferred gradients that the user has cleared since the last backward; raise if one was edited."""
        for i in self.accumulation.check():
            self.unreduced[i] = False

    def outdate(self, index: int, name: str) -> None:
        """Note that optimizer `name` may have changed a gradient on another rank, so that nothing can be added to it."""
        with torch._C.DisableTorchFunctionSubclass():
            grad: Any = own_grad(self.params[index])
            state: ShardState | None = getattr(grad, STATE, None)
            if state is not None:
                state.outdated = name, grad._version
                self.lost = True

    # -- after a failure ----------------------------------------------------------------------------------------
    def _check_lost(self) -> None:
        """Raise if a gradient must be cleared before the next backward.

        Deferred gradients are gone after a backward that failed. Nothing can be added to gradients that an optimizer may have
        changed, on the owning rank only.

        Raises:
            ShardError: names the parameter.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for i, p in enumerate(self.params):
                grad: Any = own_grad(p)
                state = getattr(grad, STATE, None)
                if state is None:
                    continue
                name, version = state.outdated or ("", 0)
                if name and grad._version == version:
                    raise ShardError(
                        f"rank {self.collectives.world_rank}: {name}.step() may have changed the gradient of "
                        f"{self.layout.slots[i].name}, on the rank that owns the parameter only, so the next one can't be added "
                        "to it; call zero_grad() after the step."
                    )
                if state.lost and state.local.count_nonzero():
                    raise ShardError(
                        f"rank {self.collectives.world_rank}: what was accumulated for {self.layout.slots[i].name} under "
                        "no_sync() was lost when a later backward failed; call zero_grad() and accumulate anew."
                    )
        self.lost = False

    def forget(self) -> None:
        """Drop everything that a failed backward has left."""
        if self.quantized is not None:
            self.quantized.forget()
        with torch._C.DisableTorchFunctionSubclass():
            for p, was_deferred in zip(self.params, self.deferred, strict=True):
                state: ShardState | None = getattr(own_grad(p), STATE, None)
                if was_deferred and state is not None:
                    state.lost = self.lost = True
        self.held.forget()
        if self.flat is not None:
            self.collectives.give(self.flat)
        self.flat, self._views, self._narrow, self.results = None, [], False, []
        self._streams = set()
        self.unreduced = [False] * len(self.unreduced)
        self._await_all()


def _own_gradient(
    buffer: weakref.ref[GradientBuffer], index: int, shown: weakref.ref[ShardTensor]
) -> torch.Tensor | None:
    gradients, grad = buffer(), shown()
    return None if gradients is None or grad is None else gradients.own_gradient(index, grad)


def divided_before(world: int) -> int:
    """Return the divisor to apply before a sum in fp16: a power of two, about the root of the number of ranks.

    Without it the sum may overflow; with the full division before the sum small gradients may become zero.
    """
    before = 1
    while before * before < world:
        before *= 2
    return before
