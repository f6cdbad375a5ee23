"""The gradients of one flat buffer: from each leaf's, through the reduction, to the parameters' ``.grad``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..comm.collectives import Collectives, join
from ..comm.gradient_reduction import Reduction, cast
from ..comm.quantized_collectives import QuantizedGradients
from ..config.param_dtypes import Dtypes
from ..errors import ShardError
from ..layout.flat_layout import FlatLayout, slot_view
from ..numerics.dtypes import widens
from ..offload.pending_writes import whole_of
from ..shard_tensor.state import STATE, ShardState, is_unreduced
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import own_grad, set_own_grad
from .flat_views import FlatViews, cut_of
from .partial_gradients import Unfinished

if TYPE_CHECKING:
    from ..comm.comm_hook import CommHook, HookedReduction
    from ..offload.host_gradients import HostGradients

# Marks of a parameter in a backward; 0: nobody asked for its gradient.
WANTED, SEEN = 1, 2


class GradientBuffer:
    """A flat buffer's gradients. `layout`, `dtypes` and `params` are the flat buffer's own."""

    def __init__(
        self,
        layout: FlatLayout,
        dtypes: Dtypes,
        params: list[ShardTensor],
        collectives: Collectives,
        home: HostGradients | None = None,
    ) -> None:
        """`home`: where reduced gradients go, if they don't stay on the device."""
        self.layout, self.dtypes, self.params, self.collectives, self.home = layout, dtypes, params, collectives, home
        n = len(params)
        self.asked = [False] * n  # leaves that required gradients in the last forward
        self._ever_asked: list[bool] | None = None  # ... in any since the last backward that reduced; None: as `asked`
        self.wanted = [False] * n  # gradients that the running backward may bring
        self.flat: torch.Tensor | None = None  # what this rank has, in the full layout, from the first arrival on
        self._views: FlatViews | None = None  # of `flat`
        self.holds = [False] * n  # slots of `flat` that hold a gradient not yet reduced
        self.arrived = [False] * n  # gradients seen in the running backward
        self.missing = 0  # wanted ones not yet seen
        self.frozen = [False] * n  # parameters that want no gradient of the running backward
        self.held_before = [False] * n  # `holds` at the beginning of the running backward
        self.lost = False  # some gradients must not be added to, see `_check_lost`
        # Under no_sync(): what `.grad` showed for each held gradient, and its version.
        self.shown: list[tuple[weakref.ref[torch.Tensor], int] | None] = [None] * n
        self.unfinished = Unfinished(params)
        self.partial = False  # the running backward does not end an accumulation, and reduces all the same
        self.results: list[torch.Tensor] = []  # reduced slices waiting to be published as .grad
        # CUDA: those on which gradients arrived, where another stream reads them.
        self._streams: set[Any] = set()
        self._notes_streams = collectives.reduce_stream is not None or (home is not None and home.host.on_cuda)
        self._narrow = False  # `flat` is to hold gradients as they arrive, and can't hold sums of them
        before = _divided_before(collectives.averaged) if dtypes.reduce is torch.float16 else collectives.averaged
        self._divide(1.0 / before, before / collectives.averaged)
        self.opens = self._opens(False)  # the dtype of `flat`, where it is made now
        self.hook: CommHook | None = None  # reduces in place of the engine
        self.quantized: QuantizedGradients | None = None
        if dtypes.quantized is not None and collectives.size > 1:
            code = dtypes.quantized.gradient_code(dtypes, layout.shard_numel)
            if code is not None:
                self.quantized = QuantizedGradients(code, layout, dtypes, collectives)
        self._gaps, self._cut = layout.gaps(), cut_of(layout.slots)
        self._pieces, self._piece_of = layout.pieces(collectives.rank)

    def _divide(self, gradients: float, sums: float) -> None:
        self._factor, self._rest = gradients, sums
        # As a tensor: torch takes several microseconds to make one of a Python number. On the CPU and without dimensions it
        # counts as a number: its dtype neither rounds it to that of the gradients nor decides on that of the result.
        self._scale = torch.tensor(gradients, dtype=torch.float64, device="cpu")

    def divide_by(self, divisor: float) -> None:
        """From now on the sum over the ranks is divided by this, in place of their number."""
        world = self.collectives.averaged
        before = _divided_before(world) if self.dtypes.reduce is torch.float16 and world > 1 else divisor
        self._divide(1.0 / before, before / divisor)

    def divide_like(self, other: GradientBuffer) -> None:
        """As this one is a copy of."""
        self._divide(other._factor, other._rest)

    def reduce_by(self, hook: CommHook) -> None:
        """From now on. It divides, too."""
        self.hook = hook
        self._divide(1.0, 1.0)

    @property
    def wants_any(self) -> bool:
        return True in self.wanted

    @property
    def buffers(self) -> list[tuple[int, torch.dtype]]:
        """What the running backward's reduction takes of ``Collectives.take``."""
        own = (self.layout.numel, self.opens)
        # The second is for what is received.
        return [own, own] if self.quantized is None else [own, *self.quantized.buffers]

    def _open(self) -> torch.Tensor:
        if self.flat is None:
            if self.home is not None:
                self.home.host.make_room()
            self._narrow = self.collectives.averaged == 1 and widens(self.opens, self.dtypes.grad)
            self.flat = self._taken(self.opens)
        return self.flat

    def _taken(self, dtype: torch.dtype) -> torch.Tensor:
        flat = self.collectives.take(self.layout.numel, dtype)
        self._views = FlatViews.of(flat, self.layout.slots, self._cut)
        return flat

    def _widen(self) -> torch.Tensor:
        """More is to be added to a gradient that was only to be sent on, or it comes in another dtype than the leaf's: from here
        on in the dtype of ``.grad``, as without offload."""
        narrow, streams = self.flat, self._streams
        assert narrow is not None
        here = torch.cuda.current_stream(narrow.device) if streams else None
        if here is not None:
            join(here, streams)
        self._narrow, self.flat = False, self._taken(self.dtypes.grad).copy_(narrow)
        for stream in streams:
            # Hazard: the narrow one's memory is that of one of them, and is read here until then.
            join(stream, [here])
        return self.flat

    def _opens(self, deferred: bool) -> torch.dtype:
        """What is reduced at once has the dtype of the reduction, what more is added to a wide one."""
        if deferred:
            return self.dtypes.accumulated
        if self.collectives.averaged > 1:
            return self.dtypes.reduce
        return self.dtypes.grad if self.home is None or self._factor != 1.0 else self.dtypes.crossing(reduced=False)

    # -- from the leaves ----------------------------------------------------------------------------------------
    def begin_backward(self, checked: bool = False, deferred: bool = False, partial: bool = False) -> None:
        """A new backward begins; `checked` where :meth:`check_held` was called before it, `deferred` where it will not reduce,
        `partial` where it will, and others follow before a step."""
        self.opens, self.partial = self._opens(deferred), partial
        if self.lost:
            self._check_lost()
        if not checked:
            self.check_held()
        n = len(self.params)
        self.held_before = self.holds.copy()
        self.shown = [None] * n
        with torch._C.DisableTorchFunctionSubclass():
            self.frozen = [not p.requires_grad for p in self.params]
        # As in autograd: what a forward recorded gets a gradient, whatever forwards came after it, if it takes one now.
        asked = self.asked if self._ever_asked is None else self._ever_asked
        self.wanted = [ask and not frozen for ask, frozen in zip(asked, self.frozen, strict=True)]
        self.arrived = [False] * n
        self._count_missing()

    def ask(self, asked: list[bool]) -> None:
        """Which leaves require gradients from now on, in a forward, as a rule."""
        if self._ever_asked is None:
            self._ever_asked = asked
        elif asked != self.asked:
            self._ever_asked = [a or b for a, b in zip(self._ever_asked, asked, strict=True)]
        self.asked = asked

    def forget_forwards(self) -> None:
        """Their backward has ended."""
        self._ever_asked = None

    def _count_missing(self) -> None:
        self.missing = sum(want and not seen for want, seen in zip(self.wanted, self.arrived, strict=True))

    def accept(self, index: int, grad: torch.Tensor) -> bool:
        """Add a leaf's gradient, divided by the number of ranks; True if it was the last one missing. Copied at once: its
        memory may be used again, by autograd or by the function that it comes from."""
        flat = self.flat if self.flat is not None else self._open()
        if self._notes_streams:
            self._streams.add(torch.cuda.current_stream(flat.device))
        if self._narrow and (self.holds[index] or grad.dtype != flat.dtype):
            flat = self._widen()
        assert self._views is not None
        into = self._views.view(flat, index)
        if self.holds[index]:
            into.add_(grad, alpha=self._factor)
        elif self._factor == 1.0:
            into.copy_(grad)
        elif into.dtype == grad.dtype:
            torch.mul(grad, self._scale, out=into)
        else:  # else the product would be rounded to the gradient's dtype
            into.copy_(grad).mul_(self._scale)
        self.holds[index] = True
        if self.arrived[index]:
            return False
        self.arrived[index] = True
        self.missing -= self.wanted[index]
        return self.missing == 0

    # -- through the reduction ----------------------------------------------------------------------------------
    def start_reduction(self, what: str) -> Reduction | HookedReduction | None:
        """Send the buffer off. Where no other rank has gradients of the same parameters its slice is published as is."""
        grad = self._open()
        self.flat = self._views = None
        streams, self._streams = tuple(self._streams), set()
        if streams:
            # Hazard: the stream of the buffer's memory, and those that wrote to it, may be others than the one that zeroes the
            # rest, if backward runs on several.
            join(torch.cuda.current_stream(grad.device), streams)
        for start, stop in self._gaps:
            grad[start:stop].zero_()
        held, self.holds = self.holds, [False] * len(self.holds)
        if False in held:
            for slot, has in zip(self.layout.slots, held, strict=True):
                if not has:
                    slot_view(grad, slot).zero_()
        if self.collectives.averaged == 1:
            self._keep(cast(grad, self.dtypes.grad, self.home is not None), streams=streams)
            return None
        if self.quantized is not None:
            return self.quantized.start(grad, held, self.dtypes.grad, what, streams)
        if grad.dtype != self.dtypes.reduce:
            grad = self._converted(grad)
        if self.hook is not None:
            return self.hook.start(self.collectives, grad, self.dtypes.grad, self.home is not None)
        return self.collectives.reduce(grad, what, streams)

    def _converted(self, grad: torch.Tensor) -> torch.Tensor:
        """What was accumulated in a wide dtype, in that of the reduction."""
        c = self.collectives
        sent = c.take(grad.numel(), self.dtypes.reduce)
        sent.copy_(grad)
        c.give(grad)
        return sent

    def collect(self, reduction: Reduction | HookedReduction) -> None:
        """Take the slice of a reduction; added at once where every `.grad` is a view of one earlier slice, else published
        later."""
        result, factor = reduction.finish(self.dtypes.grad, self.home is not None), self._rest
        if factor != 1.0 and result.dtype == self.dtypes.grad:
            result.mul_(factor)
            factor = 1.0
        self._keep(result, factor)

    def _keep(self, result: torch.Tensor, factor: float = 1.0, streams: Sequence[Any] = ()) -> None:
        """`factor`: what it has to be multiplied with once it is wide. `streams`: CUDA: those that its memory may belong to."""
        home = self.home
        # With one rank nothing is in flight behind it, so that it can as well be added when it is published.
        base = self._published() if home is not None or self.collectives.averaged > 1 else None
        if home is None:
            if base is not None:
                base.add_(result)
            else:
                self.results.append(result)
        elif base is not None:
            home.add(base, result, self._shown(), factor, streams)
        else:
            self.results.append(home.receive(result, self.dtypes.grad, factor, streams))

    def scale(self, base: torch.Tensor, factor: torch.Tensor, gaps: Sequence[tuple[int, int]]) -> None:
        """Multiply `base`, in host memory, which has all gradients, by a 0-d factor, in the background. `gaps`: its padding."""
        assert self.home is not None
        self.home.scale(base, factor, gaps, self._shown())

    def _shown(self) -> list[Any]:
        """The gradients that there are, of sharded parameters."""
        with torch._C.DisableTorchFunctionSubclass():
            grads = map(own_grad, self.params)
            return [grad for grad in grads if isinstance(grad, ShardTensor)]

    def _published(self) -> torch.Tensor | None:
        base = None
        with torch._C.DisableTorchFunctionSubclass():
            for param in self.params:
                if not param.requires_grad:
                    continue
                grad = own_grad(param)
                # Asked of each parameter in each reduction: only what moves to host memory needs more than an attribute.
                state = getattr(grad, STATE, None)
                flat = None if state is None else state.flat if self.home is None else whole_of(grad)
                if flat is None or (base is not None and flat is not base) or flat.dtype != self.dtypes.grad:
                    return None
                base = flat
        return base

    def marks(self) -> list[int]:
        """What the ranks compare at the end of a backward, for each parameter; the largest mark of any rank counts."""
        # What earlier backwards have left may be on its way already, with the rest of its unit.
        states = zip(self.wanted, self.arrived, self.holds, self.held_before, strict=True)
        return [SEEN if True in has else want for want, *has in states]

    def publish(self, marks: list[int]) -> list[int]:
        """Make the reduced slices the parameters' gradients, where the ranks' `marks` say that there is one; returns the
        indices of those. Call without gradients and without ``__torch_function__``."""
        touched = [i for i, mark in enumerate(marks) if mark == SEEN]
        results, self.results = self.results, []
        for result in results if touched else ():
            pieces = result.split_with_sizes(self._pieces)
            for i in touched:
                self._publish_one(self.params[i], pieces[self._piece_of[i]], result, self.home)
            if self.home is not None:
                self.home.moving.hold(self._shown())
        self._note_unfinished(touched)
        return touched

    def _note_unfinished(self, touched: list[int]) -> None:
        if self.partial:
            self.unfinished.note(touched)
        else:
            self.unfinished.end()

    @staticmethod
    def _publish_one(param: Any, local: torch.Tensor, result: torch.Tensor, home: HostGradients | None = None) -> None:
        grad = ShardTensor._wrap(local, param._spec)
        existing: Any = own_grad(param)
        if existing is None or is_unreduced(existing):
            grad._shard_state.flat = result
            set_own_grad(param, grad)
        else:
            if home is not None:
                home.moving.settle()
            existing.add_(grad)

    # -- between the backwards of no_sync() -------------------------------------------------------------------------
    def show_held(self) -> None:
        """After a backward that did not reduce: `.grad` must be something, so that `zero_grad()` finds what to clear.

        It shows this rank's own, unreduced gradient (its slice), which the reduction replaces."""
        if self.flat is None:
            return
        own: Sequence[torch.Tensor] = ()
        with torch._C.DisableTorchFunctionSubclass():
            for i, held in enumerate(self.holds):
                if not held:
                    continue
                param = self.params[i]
                shown: Any = own_grad(param)
                if shown is None:
                    own = own or self._own_part()
                    shown = ShardTensor._wrap(own[self._piece_of[i]], param._spec)
                    shown._shard_state.unreduced = True
                    set_own_grad(param, shown)
                self.shown[i] = (weakref.ref(shown), shown._version)
        if self.home is not None and own:
            self.home.moving.hold(self._shown())

    def _own_part(self) -> Sequence[torch.Tensor]:
        """This rank's slices of what waits for its reduction, as gradients have them."""
        assert self.flat is not None
        start, stop = self.layout.rank_range(self.collectives.rank)
        own = self.flat[start:stop]
        # What goes to host memory is read behind this, when more may have been added.
        dtype = self.dtypes.grad
        own = own.to(dtype) if self.home is None else self.home.receive(own.to(dtype, copy=True), dtype)
        return own.split_with_sizes(self._pieces)

    def keep_held(self) -> None:
        """After any backward: it may have added to `.grad` (a loss term on the sharded parameter itself)."""
        self.unfinished.keep()
        if self.flat is None:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for i, shown in enumerate(self.shown):
                grad = own_grad(self.params[i])
                if shown is not None and grad is not None:
                    self.shown[i] = (weakref.ref(grad), grad._version)

    def check_held(self) -> None:
        """Drop held gradients that the user has cleared since the last backward."""
        self.unfinished.check()
        if self.flat is None:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for i, held in enumerate(self.holds):
                shown = self.shown[i]
                if not held or shown is None:
                    continue
                grad = own_grad(self.params[i])
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

    def outdate(self, index: int, name: str) -> None:
        """Optimizer `name` has changed this gradient elsewhere: nothing can be added to it."""
        with torch._C.DisableTorchFunctionSubclass():
            grad: Any = own_grad(self.params[index])
            state: ShardState | None = getattr(grad, STATE, None)
            if state is not None:
                state.outdated = name, grad._version
                self.lost = True

    # -- after a failure ----------------------------------------------------------------------------------------
    def _check_lost(self) -> None:
        """What no_sync() held before a backward that failed is gone, and what the owners' optimizers have done to gradients
        is theirs: these must be cleared before the next backward."""
        with torch._C.DisableTorchFunctionSubclass():
            for i, p in enumerate(self.params):
                grad: Any = own_grad(p)
                state = getattr(grad, STATE, None)
                if state is None:
                    continue
                name, version = state.outdated or ("", 0)
                if name and grad._version == version:
                    raise ShardError(
                        f"rank {self.collectives.world_rank}: {name}.step() has changed the gradient of "
                        f"{self.layout.slots[i].name} in place, on the rank that owns the parameter only, so the next one can't "
                        "be added to it; call zero_grad() after the step."
                    )
                if state.lost and state.local.count_nonzero():
                    raise ShardError(
                        f"rank {self.collectives.world_rank}: what was accumulated for {self.layout.slots[i].name} under "
                        "no_sync() was lost when a later backward failed; call zero_grad() and accumulate anew."
                    )
        self.lost = False

    def forget(self) -> None:
        """Drop everything a failed backward left."""
        if self.quantized is not None:
            self.quantized.forget()
        with torch._C.DisableTorchFunctionSubclass():
            for p, held in zip(self.params, self.held_before, strict=True):
                state: ShardState | None = getattr(own_grad(p), STATE, None)
                if held and state is not None:
                    state.lost = self.lost = True
        if self.flat is not None:
            self.collectives.give(self.flat)
        self.flat, self._views, self._narrow, self.results = None, None, False, []
        self._streams = set()
        self.holds = [False] * len(self.holds)
        self.arrived = [False] * len(self.arrived)
        self._count_missing()


def _divided_before(world: int) -> int:
    """The part of a division by the number of ranks that comes before a sum in fp16, a power of two of about its root: without
    any the sum may be too large for it, and with all of it small gradients may become zero."""
    before = 1
    while before * before < world:
        before *= 2
    return before
