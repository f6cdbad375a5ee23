"""The steps of element-wise optimizers on flat memory.

What each works on is in :mod:`.runs`. Most steps find everything as the last one left it: then only the gradients are
new, and nothing is done for each parameter but to look.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from ...numerics.stochastic_rounding import EXACT, widen
from ...shard_tensor.tensor import ShardTensor
from ...unit.flat_buffer import FlatBuffer
from ...unit.unit import unit_of
from ..checks import check_units, refuse_twice, refuse_unreduced, shard_state
from ..engines_of_optimizer import runtimes_of
from ..optimizer_proxy import Work
from ..registry import is_torchs, kind_of
from .piece import Piece, RoundedPiece
from .runs import Runs
from .step_counters import part_shared

if TYPE_CHECKING:
    from ...runtime.ports import StepInBackward
    from ...runtime.runtime import Runtime
    from ...unit.unit import Unit

__all__ = ["FlatStep"]

_PIECE = 1 << 17  # elements of one piece on the CPU: with gradient and two moments 2 MiB in fp32, a core's L2 cache
_LIST = 1 << 24  # elements of one call of a foreach implementation, whose temporaries are of that size
_ROUNDED_ON_CPU = 1 << 20  # of parameters that are copied to fp32 for the step, at once, with their gradients
# torch's own choice on the CPU is the for-loop, which the fused kernels agree with to rounding in these dtypes and are two to
# five times as fast as. Whoever sets `foreach` or `fused` gets what he asks for.
_FUSED_ON_CPU = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad})
_FUSED_DTYPES = frozenset({torch.float32, torch.float64})


REST = object()
"""In place of a flat buffer: what an optimizer holds besides the engine's parameters."""


def is_step_of_torchs(optimizer: Any) -> bool:
    """Return True if what runs is one of torch's own functions, which have one loop, read no attributes of parameters, and leave
    gradients as they are."""
    # A subclass of no kind of its own is here for a function that it has inherited.
    return is_torchs(type(optimizer)) or kind_of(type(optimizer)) is None


class _State(MutableMapping[Any, Any]):
    """Stands for the optimizer's state; that of parameters which are not the engine's is the optimizer's own."""

    def __init__(self, own: Any, pieces: Iterable[Piece] = ()) -> None:
        self.own = own
        self._pieces = {id(piece.param): piece for piece in pieces}
        self._asked: set[int] = set()  # pieces whose state was empty when it was asked for, which makes an entry

    def __getitem__(self, key: Any) -> Any:
        piece = self._pieces.get(id(key))
        if piece is None:
            return self.own[key]
        self._asked.add(id(key))
        return piece.state

    def __setitem__(self, key: Any, value: Any) -> None:
        piece = self._pieces.get(id(key))
        if piece is None:
            self.own[key] = value
        else:
            self._asked.add(id(key))
            piece.state = value

    def __delitem__(self, key: Any) -> None:
        piece = self._pieces.get(id(key))
        if piece is None:
            del self.own[key]
        else:
            self._asked.discard(id(key))
            piece.state = {}

    def __contains__(self, key: Any) -> bool:
        piece = self._pieces.get(id(key))
        return key in self.own if piece is None else bool(piece.state) or id(key) in self._asked

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __iter__(self) -> Iterator[Any]:
        yield from (piece.param for piece in self._pieces.values() if piece.param in self)
        yield from (key for key in self.own if not isinstance(key, ShardTensor))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Group:
    """One of the user's groups."""

    def __init__(
        self, params: list[Any], twice: set[int], runtimes: list[Runtime], optimizer: Any, only: object
    ) -> None:
        self.params = params
        # Those that are not the engine's, and those that are listed more than once, to be stepped as often.
        self.rest: list[Any] = []
        self.units: dict[int, Unit] = {}
        by_flat: dict[tuple[int, int, int], tuple[FlatBuffer, list[ShardTensor]]] = {}
        positions = {id(runtime): n for n, runtime in enumerate(runtimes)}
        for p in params:
            unit = unit_of(p)
            if unit is None or id(p) in twice:
                if unit is not None:
                    refuse_twice(optimizer, p)
                self.rest.append(p)
                continue
            self.units[id(unit)] = unit
            flat, _ = unit.find(p)
            if only is None or flat is only:  # none is REST
                position = positions.setdefault(id(unit.runtime), len(positions))
                place = position, unit.index, unit.flats.index(flat)
                by_flat.setdefault(place, (flat, []))[1].append(p)
        if only is not None and only is not REST:
            self.rest = []
        self.runs = Runs(params, [by_flat[place] for place in sorted(by_flat)], not is_step_of_torchs(optimizer))
        flats = self.runs.flats
        self.on_cpu = all(flat.memory.device.type == "cpu" for flat in flats)
        self.rounded = [flat for flat in flats if flat.rounding is not None]
        self.at_once = (_ROUNDED_ON_CPU if self.on_cpu else _LIST) if self.rounded else 0
        self.may_fuse = (
            type(optimizer) in _FUSED_ON_CPU
            and self.on_cpu
            and {flat.dtype if flat.rounding is None else EXACT for flat in flats} <= _FUSED_DTYPES
        )

    def way(self, options: dict[str, Any], torchs: bool) -> tuple[bool, int]:
        """Return whether to ask for a fused kernel, and the size of pieces (0: whole runs)."""
        chosen = options.get("foreach", False) is not None or options.get("fused", False) is not None
        if self.may_fuse and not chosen:
            numbers = all(isinstance(n, (int, float)) for n in (options["lr"], *options.get("betas", ())))
            # In another default dtype counters would be of another dtype.
            if numbers and torch.get_default_dtype() is torch.float32:
                return True, self.at_once
        loops = torchs and self.on_cpu and not options.get("foreach") and not options.get("fused")
        return False, _PIECE if loops else self.at_once if torchs else 0


class _Working:
    """One group of a step: all of one of the user's, or a part of it. `last`: no other part follows."""

    def __init__(
        self, own: _Group, group: dict[str, Any], options: dict[str, Any], pieces: list[Piece], last: bool
    ) -> None:
        self.own, self.group, self.pieces, self.last = own, group, pieces, last
        self.rounded = [piece for piece in pieces if isinstance(piece, RoundedPiece)]
        params: list[Any] = [piece.param for piece in pieces]
        self.options = {**options, "params": params + own.rest if last else params}
        self.given = self.options.copy()
        self.note_made()

    def note_made(self) -> None:
        """Note the state as it is now."""
        self.made = [value for piece in self.pieces for value in piece.state.values()]


class FlatStep(Work):
    """The steps of one element-wise optimizer."""

    def __init__(
        self,
        optimizer: Any,
        runtime: Runtime,
        only: object = None,
        groups: Callable[[], list[dict[str, Any]]] | None = None,
    ) -> None:
        """`only`: step nothing but this flat buffer's parameters, `runtime`'s, or what is :data:`REST`; with options from
        `groups` in place of the optimizer's. Else all that the optimizer holds, of whatever engines: nothing in such a step is
        collective."""
        # What is kept must not keep the optimizer itself, by which it is found.
        self._optimizer: Any = weakref.ref(optimizer)
        self.runtimes, self._only, self._given = [runtime], only, groups
        self._torchs = is_step_of_torchs(optimizer)
        self._groups: list[_Group] = []
        self.state = _State({})
        self._working: list[_Working] = []
        self._in_backward: StepInBackward | None = None  # which has begun this step
        # That the parameters change, already; the user's counters have been moved on then, and are his own again.
        self.announced = False
        # Whether :meth:`open` waits for no gradients and leaves :meth:`load` to whoever does the arithmetic, in host memory.
        self.later = False
        self.as_left = False
        """Whether the latest :meth:`open` has found all but the gradients as the step before had left it."""

    # -- before the arithmetic ------------------------------------------------------------------------------------
    def open(self) -> None:
        self._drop()  # of a step that was never ended
        optimizer = self._optimizer()
        if self._only is None:
            runtimes = runtimes_of(optimizer)
            if runtimes and runtimes != self.runtimes:
                self.forget()
                self.runtimes = runtimes
        # Who steps on a part of the parameters has looked at all of them.
        for runtime in self.runtimes if self._only is None else ():
            refuse_unreduced(optimizer, runtime)
        try:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                self._look(optimizer)
        except BaseException:
            self._let_go()
            raise

    def _look(self, optimizer: Any) -> None:
        groups = self._groups_of(optimizer)
        state = optimizer.state
        same = self._same_parameters(groups)
        if not same:
            counts = Counter(id(p) for group in groups for p in group["params"])
            twice = {number for number, count in counts.items() if count > 1}
            self._groups = [
                _Group(list(group["params"]), twice, self.runtimes, optimizer, self._only) for group in groups
            ]
        check_units(optimizer, {id(unit): unit for own in self._groups for unit in own.units.values()}.values())
        hosted = [flat for own in self._groups for flat in own.runs.flats if flat.host is not None]
        for flat in hosted:
            flat.settle_step() if self.later else flat.settle()
        ways = [own.way(group, self._torchs) for own, group in zip(self._groups, groups, strict=True)]
        changed = [
            (own.runs, split)
            for own, (_, split) in zip(self._groups, ways, strict=True)
            if not own.runs.is_as_left(state, split)
        ]
        if changed:
            for flat in hosted:
                flat.settle()
            for runtime in self.runtimes:
                shard_state(optimizer, runtime)
            part_shared(state)
            self._widen(state)
            for runs, split in changed:
                runs.arrange(state, split)
        if changed or self.state.own is not state:
            self.state = _State(state, [piece for own in self._groups for piece in own.runs.pieces])
        self.as_left = same and not changed
        for own, group, (fuse, _) in zip(self._groups, groups, ways, strict=True):
            if own.runs.params or own.rest or self._only is None:
                self._add(own, group, fuse)
        # A step counts for what has gradients, whoever looks at the rest.
        for flat in {id(flat): flat for own in self._groups for flat in own.runs.stepped_flats}.values():
            if flat.rounding is not None:
                flat.rounding.begin()
        if not self.later:
            self.load()
        if not self._torchs:  # others may work on all groups at once, in whatever order
            for work in self._working:
                _enter(work)

    def _groups_of(self, optimizer: Any) -> list[dict[str, Any]]:
        self._in_backward = None
        if self._given is not None:
            return self._given()
        for runtime in self.runtimes if self._only is None else ():
            groups = None if runtime.in_backward is None else runtime.in_backward.groups_for(optimizer)
            if groups is not None:
                self._in_backward = runtime.in_backward
                return groups
        found: list[dict[str, Any]] = optimizer.param_groups
        return found

    def load(self) -> None:
        """Take, behind an :meth:`open` that is :attr:`later`, values and gradients, which must be there, as they are now."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for own in self._groups:
                own.runs.load()

    def _widen(self, state: Any) -> None:
        """Bring to fp32 what steps in bf16 have left behind, or the user has made like the parameters."""
        for runs in (own.runs for own in self._groups if own.rounded):
            for p, number in zip(runs.params, runs.shard_of, strict=True):
                if runs.flats[number].rounding is not None:
                    widen(state.get(p), lambda value, local: ShardTensor._wrap(local, value._spec))

    def forget(self) -> None:
        self._let_go()

    def _let_go(self) -> None:
        """Let go of everything that was kept for the next step."""
        self._drop()
        self._groups, self.state = [], _State({})

    def _same_parameters(self, groups: list[dict[str, Any]]) -> bool:
        return len(groups) == len(self._groups) and all(
            len(own.params) == len(group["params"]) and all(map(operator.is_, own.params, group["params"]))
            for own, group in zip(self._groups, groups, strict=True)
        )

    def _add(self, own: _Group, group: dict[str, Any], fuse: bool) -> None:
        """Make the step's groups of one of the user's."""
        options = given = {key: value for key, value in group.items() if key != "params"}
        pieces = own.runs.pieces
        if fuse and own.runs.fits_fused:
            options = {**given, "fused": True}
        # torch's own do not mind how many groups there are.
        limit = own.at_once or (0 if options.get("fused") else _LIST)
        if not self._torchs:
            limit = 0
        while limit and len(pieces) > 1 and sum(piece.param.numel() for piece in pieces) > limit:
            count = taken = 0
            while not taken or count + pieces[taken].param.numel() <= limit:
                count += pieces[taken].param.numel()
                taken += 1
            self._working.append(_Working(own, group, options, pieces[:taken], last=False))
            pieces = pieces[taken:]
        if own.rest and options is not given:  # whose gradients may be sparse
            if pieces:
                self._working.append(_Working(own, group, options, pieces, last=False))
            options, pieces = given, []
        self._working.append(_Working(own, group, options, pieces, last=True))

    # -- for the optimizer, and after it --------------------------------------------------------------------------
    def groups(self) -> list[dict[str, Any]]:
        return [work.options for work in self._working]

    def before(self, number: int) -> None:
        if self._torchs:
            _enter(self._working[number])

    def after(self, number: int) -> None:
        work = self._working[number]
        if self._torchs and work.rounded:
            # At once, so that copies in fp32 exist of one group only.
            self._store(work)
            for piece in work.rounded:
                piece.drop()

    def leave(self, number: int) -> None:
        # What groups have come to before an exception is there for the user to see.
        for work in self._working[: number + 1]:
            self._publish(work)
        self.after(number)

    def pause(self) -> None:
        for work in self._working:
            self._publish(work)
        if self._in_backward is not None:
            self._in_backward.end_step()
            self._in_backward = None

    def close(self) -> None:
        self.pause()
        self._drop()

    def held(self) -> list[ShardTensor]:
        """Return the parameters that had a gradient in the last step."""
        return [p for own in self._groups for p in own.runs.stepped]

    @property
    def all_runs(self) -> list[Runs]:
        """The runs of all groups."""
        return [own.runs for own in self._groups]

    def count_apart(self) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]] | None:
        """Return :meth:`.runs.Runs.own_counters` of all groups; None where some group has more than counts."""
        found = []
        for runs in self.all_runs:
            counters = runs.own_counters()
            if counters is None:
                self.count_as_before()
                return None
            found.append(counters)
        for work in self._working:
            work.note_made()
        return found

    def count_as_before(self) -> None:
        for runs in self.all_runs:
            runs.give_counters_back()

    def _drop(self) -> None:
        for work in self._working:
            for piece in work.pieces:
                piece.drop()
        self._working = []

    def _store(self, work: _Working) -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for piece in work.pieces:
                piece.store()
            if not self._torchs:
                work.own.runs.store_gradients()
            elif getattr(self._optimizer(), "grad_scale", None) is not None:
                # which fused kernels divide gradients by, for good
                for piece in work.pieces:
                    piece.store_gradient()

    def _publish(self, work: _Working) -> None:
        optimizer, runs = self._optimizer(), work.own.runs
        made = [value for piece in work.pieces for value in piece.state.values()]
        self._store(work)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if len(made) != len(work.made) or not all(map(operator.is_, made, work.made)):
                runs.publish(optimizer.state)
                work.made = [value for piece in work.pieces for value in piece.state.values()]
            if work.last:
                if not self.announced:
                    runs.counters.follow()
                # Autograd's view of them: a graph that has saved one must not be run any more, nor a gathered copy be used.
                changed = [] if self.announced else [*runs.stepped]
                torch.autograd.graph.increment_version([*changed, *(flat.memory for flat in runs.flats)])
        if not self.announced:
            runs.counters.note()
        for key, value in work.options.items():
            if work.given.get(key, self) is not value:  # the optimizer itself has set it
                work.group[key] = work.given[key] = value


def _enter(work: _Working) -> None:
    if work.rounded:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for piece in work.rounded:
                piece.enter()
