"""The steps of element-wise optimizers on flat memory.

The tensors that a step works on are chosen in :mod:`.runs`. Most steps find everything as the last one has left it: then only
the gradients are new, and nothing is done for each parameter but to look.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ...comm.streams import streams_of
from ...numerics.stochastic_rounding import EXACT
from ...shard_tensor.tensor import ShardTensor
from ...unit.flat_buffer import FlatBuffer
from ...unit.unit import unit_of
from ..checks import check_units, refuse_repeated, refuse_unreduced, shard_state, widen_state
from ..engines_of_optimizer import runtimes_of, same_params
from ..optimizer_proxy import StateView, StepBackend
from ..registry import is_torchs, kind_of
from .piece import Piece
from .runs import Runs

if TYPE_CHECKING:
    from ...runtime.runtime import Runtime
    from ...unit.unit import Unit

_PIECE = 1 << 17  # elements of one piece on the CPU: with gradient and two moments 2 MiB in fp32, a core's L2 cache
_LIST = 1 << 24  # elements of one call of a foreach implementation, whose temporaries are of that size
_ROUNDED_ON_CPU = 1 << 20  # elements that are copied to fp32 for the step at a time, with their gradients
# torch's own choice on the CPU is the for-loop, which the fused kernels agree with to rounding in these dtypes, and which takes
# two to five times as long. A user who sets `foreach` or `fused` gets what he asks for.
_FUSED_ON_CPU = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad})
_FUSED_DTYPES = frozenset({torch.float32, torch.float64})


REST = object()
"""A stand-in for a flat buffer: the parameters that an optimizer holds besides the engine's."""


def is_step_of_torchs(optimizer: Any) -> bool:
    """Return True if the step is one of torch's own functions.

    These have one loop over the groups, read no attributes of parameters, and leave gradients as they are.
    """
    # An undeclared subclass gets here only with a step function that it inherits from one of torch's classes.
    return is_torchs(type(optimizer)) or kind_of(type(optimizer)) is None


class _PieceState(StateView):
    """The optimizer's state, with the state of pieces in place of that of the engine's parameters."""

    def __init__(self, own: Any, pieces: Iterable[Piece] = ()) -> None:
        self.own = own
        self._pieces = {id(piece.param): piece for piece in pieces}

    def __getitem__(self, key: Any) -> Any:
        piece = self._pieces.get(id(key))
        return self.own[key] if piece is None else piece.state

    def __setitem__(self, key: Any, value: Any) -> None:
        piece = self._pieces.get(id(key))
        if piece is None:
            self.own[key] = value
        else:
            piece.state = value

    def __delitem__(self, key: Any) -> None:
        piece = self._pieces.get(id(key))
        if piece is None:
            del self.own[key]
        else:
            piece.state = {}

    def __contains__(self, key: Any) -> bool:
        piece = self._pieces.get(id(key))
        return key in self.own if piece is None else bool(piece.state)

    def __iter__(self) -> Iterator[Any]:
        yield from (piece.param for piece in self._pieces.values() if piece.state)
        yield from (key for key in self.own if not isinstance(key, ShardTensor))


class _UserGroup:
    """One of the user's groups.

    Attributes:
        params: the group's parameters.
        rest: the parameters that no engine shards.
        units: the units of the sharded parameters, each once.
        runs: the runs in which the sharded parameters are stepped.
    """

    def __init__(self, params: list[Any], runtimes: list[Runtime], optimizer: Any, only: object) -> None:
        self.params = params
        self.rest: list[Any] = []
        self.units: dict[Unit, None] = {}
        by_flat: dict[tuple[int, int, int], tuple[FlatBuffer, list[ShardTensor]]] = {}
        positions = {id(runtime): n for n, runtime in enumerate(runtimes)}
        for p in params:
            unit = unit_of(p)
            if unit is None:
                self.rest.append(p)
                continue
            self.units[unit] = None
            flat, _ = unit.find(p)
            if only is None or flat is only:  # no buffer is REST
                position = positions.setdefault(id(unit.runtime), len(positions))
                place = position, unit.index, unit.flats.index(flat)
                by_flat.setdefault(place, (flat, []))[1].append(p)
        if only is not None and only is not REST:
            self.rest = []
        self.runs = Runs(params, [by_flat[place] for place in sorted(by_flat)], not is_step_of_torchs(optimizer))
        flats = self.runs.flats
        self._on_cpu = not any(streams_of(flat.memory.device).exist for flat in flats)
        self._rounded = any(flat.rounding is not None for flat in flats)
        self.at_once = (_ROUNDED_ON_CPU if self._on_cpu else _LIST) if self._rounded else 0
        self._may_fuse = (
            type(optimizer) in _FUSED_ON_CPU
            and self._on_cpu
            and {flat.dtype if flat.rounding is None else EXACT for flat in flats} <= _FUSED_DTYPES
        )

    def implementation(self, options: dict[str, Any], torchs: bool) -> tuple[bool, int]:
        """Return whether to ask for a fused kernel, and the size of pieces (0: as large as runs)."""
        chosen = options.get("foreach", False) is not None or options.get("fused", False) is not None
        if self._may_fuse and not chosen:
            numbers = all(isinstance(n, (int, float)) for n in (options["lr"], *options.get("betas", ())))
            # With another default dtype counters would be of that dtype.
            if numbers and torch.get_default_dtype() is torch.float32:
                return True, self.at_once
        loops = torchs and self._on_cpu and not options.get("foreach") and not options.get("fused")
        return False, _PIECE if loops else self.at_once if torchs else 0

    def widen(self, state: Any) -> None:
        """Convert the state of parameters whose steps are rounded stochastically to fp32."""
        for p, number in zip(self.runs.params, self.runs.flat_numbers, strict=True) if self._rounded else ():
            if self.runs.flats[number].rounding is not None:
                widen_state(state.get(p))


class _StepGroup:
    """One group of a step: one of the user's groups, or a part of it. If `last` is True, no other part follows."""

    def __init__(
        self, own: _UserGroup, group: dict[str, Any], options: dict[str, Any], pieces: list[Piece], last: bool
    ) -> None:
        self.own, self.group, self.pieces, self.last = own, group, pieces, last
        params: list[Any] = [piece.param for piece in pieces]
        self.options = {**options, "params": params + own.rest if last else params}
        self.given = self.options.copy()
        self.state = self.state_values()

    def state_values(self) -> list[Any]:
        """Return all values of the pieces' state."""
        return [value for piece in self.pieces for value in piece.state.values()]


class FlatStep(StepBackend):
    """The steps of one element-wise optimizer.

    Attributes:
        given_groups: the parameter groups to read options from; None for the optimizer's own.
        announced: True if the user's counters and versions have been moved on already, ahead of the arithmetic.
        later: True if :meth:`open` must not wait for gradients and values in host memory.
        as_left: True if the latest :meth:`open` has found all but the gradients as the step before had left it.
    """

    def __init__(self, optimizer: Any, runtime: Runtime, only: object = None) -> None:
        """Make the steps of one optimizer.

        `only` is a flat buffer of `runtime`, or :data:`REST`, that alone is stepped. By default all that the optimizer holds is
        stepped, of any engines: nothing in such a step is collective.
        """
        # What is kept must not keep the optimizer itself, the key under which it is found.
        self._optimizer: Any = weakref.ref(optimizer)
        self.runtimes, self._only = [runtime], only
        self._torchs = is_step_of_torchs(optimizer)
        self._user_groups: list[_UserGroup] = []
        self.state = _PieceState({})
        self._groups: list[_StepGroup] = []
        self.given_groups: list[dict[str, Any]] | None = None
        self.announced = self.later = self.as_left = False

    # -- before the arithmetic ------------------------------------------------------------------------------------
    def open(self) -> None:
        self._drop()  # the pieces of a step that has failed
        optimizer = self._optimizer()
        if self._only is None:  # else the caller has looked at all parameters
            runtimes = runtimes_of(optimizer)
            if runtimes and runtimes != self.runtimes:
                self.forget()
                self.runtimes = runtimes
            for runtime in self.runtimes:
                refuse_unreduced(optimizer, runtime)
                if runtime.in_backward is not None:
                    runtime.in_backward.take_back(optimizer)
        try:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                self._look(optimizer)
        except BaseException:
            FlatStep.forget(self)  # what a subclass has besides stays
            raise

    def _look(self, optimizer: Any) -> None:
        groups = optimizer.param_groups if self.given_groups is None else self.given_groups
        state = optimizer.state
        same = same_params(groups, [own.params for own in self._user_groups])
        if not same:
            refuse_repeated(optimizer)
            self._user_groups = [
                _UserGroup(list(group["params"]), self.runtimes, optimizer, self._only) for group in groups
            ]
        check_units(optimizer, (unit for own in self._user_groups for unit in own.units))
        hosted = [flat for runs in self.all_runs for flat in runs.flats if flat.host is not None]
        for flat in hosted:
            flat.wait_for_step() if self.later else flat.wait_for_host()
        chosen = [own.implementation(group, self._torchs) for own, group in zip(self._user_groups, groups, strict=True)]
        changed = [
            (runs, limit)
            for runs, (_, limit) in zip(self.all_runs, chosen, strict=True)
            if not runs.is_as_left(state, limit)
        ]
        if changed:
            for flat in hosted:
                flat.wait_for_host()
            for runtime in self.runtimes:
                shard_state(optimizer, runtime)
            for own in self._user_groups:
                own.widen(state)
            for runs, limit in changed:
                runs.arrange(state, limit)
        if changed or self.state.own is not state:
            self.state = _PieceState(state, [piece for runs in self.all_runs for piece in runs.pieces])
        self.as_left = same and not changed
        for own, group, (fuse, _) in zip(self._user_groups, groups, chosen, strict=True):
            if own.runs.params or own.rest or self._only is None:
                self._add(own, group, fuse)
        # Rounding advances once a step for each buffer, in the step that has the buffer's gradients.
        for flat in {flat for runs in self.all_runs for flat in runs.stepped_flats}:
            if flat.rounding is not None:
                flat.rounding.begin()
        if not self._torchs:  # others may work on all groups at once, in any order
            for number in range(len(self._groups)):
                self._load(number)

    def _load(self, number: int) -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for piece in self._groups[number].pieces:
                if not piece.loaded:
                    piece.load()

    def forget(self) -> None:
        self._drop()
        self._user_groups, self.state = [], _PieceState({})

    def _add(self, own: _UserGroup, group: dict[str, Any], fuse: bool) -> None:
        """Make the step's groups of one of the user's."""
        options = given = {key: value for key, value in group.items() if key != "params"}
        pieces = own.runs.pieces
        if fuse and own.runs.fits_fused:
            options = {**given, "fused": True}
        # The number of groups does not matter to torch's own steps.
        limit = (own.at_once or (0 if options.get("fused") else _LIST)) if self._torchs else 0
        while limit and len(pieces) > 1 and sum(piece.param.numel() for piece in pieces) > limit:
            count = taken = 0
            while not taken or count + pieces[taken].param.numel() <= limit:
                count += pieces[taken].param.numel()
                taken += 1
            self._groups.append(_StepGroup(own, group, options, pieces[:taken], last=False))
            pieces = pieces[taken:]
        if own.rest and options is not given:  # the rest's gradients may be sparse
            if pieces:
                self._groups.append(_StepGroup(own, group, options, pieces, last=False))
            options, pieces = given, []
        self._groups.append(_StepGroup(own, group, options, pieces, last=True))

    # -- for the optimizer, and after it --------------------------------------------------------------------------
    def groups(self) -> list[dict[str, Any]]:
        return [group.options for group in self._groups]

    def begin_group(self, number: int) -> None:
        if self._torchs:
            self._load(number)

    def end_group(self, number: int) -> None:
        if self._torchs:  # at once, so that copies of values and gradients exist of one group only
            self._store(self._groups[number])

    def leave_loop(self, number: int) -> None:
        self.end_group(number)
        for group in self._groups[: number + 1]:  # the user shall see what groups have come to before an exception
            self._publish(group, group.last or group is self._groups[number])

    def publish(self) -> None:
        for group in self._groups:
            self._publish(group, group.last)

    def close(self) -> None:
        self.publish()
        self._drop()
        for runtime in self.runtimes if self._only is None else ():
            if runtime.in_backward is not None:
                runtime.in_backward.put_back(self._optimizer())

    def stepped(self) -> list[ShardTensor]:
        """Return the parameters that had a gradient in the last step."""
        return [p for runs in self.all_runs for p in runs.stepped]

    @property
    def all_runs(self) -> list[Runs]:
        """The runs of all groups."""
        return [own.runs for own in self._user_groups]

    def _drop(self) -> None:
        for group in self._groups:
            for piece in group.pieces:
                if piece.loaded:
                    piece.drop()
        self._groups = []

    def _store(self, group: _StepGroup) -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            scaled = self._torchs and getattr(self._optimizer(), "grad_scale", None) is not None
            for piece in group.pieces:
                piece.store()
                if scaled:  # fused kernels divide gradients in place
                    piece.store_gradient()
                if self._torchs:
                    piece.drop()
            if not self._torchs:
                group.own.runs.store_gradients()

    def _publish(self, group: _StepGroup, last: bool) -> None:
        """Show the user what a group of the step has done. If `last` is True, no other part of the user's group follows."""
        optimizer, runs = self._optimizer(), group.own.runs
        if not self._torchs:
            self._store(group)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            values = group.state_values()
            if len(values) != len(group.state) or not all(map(operator.is_, values, group.state)):
                runs.publish(optimizer.state)
                group.state = group.state_values()
            if last:
                if not self.announced:
                    runs.counters.follow()
                # Autograd must notice: a graph that has saved a parameter must not run any more, nor a gathered copy be used.
                changed = [] if self.announced else runs.stepped
                torch.autograd.graph.increment_version([*changed, *(flat.memory for flat in runs.flats)])
        if not self.announced:
            runs.counters.note()
        for key, value in group.options.items():
            if group.given.get(key, self) is not value:  # set by the step
                group.group[key] = group.given[key] = value
