"""The flat tensors that an element-wise optimizer steps on, for one parameter group.

A *segment* is a part of one unit's shard: neighbours whose gradients come from one reduction, and whose state agrees in keys
and counters::

    shard      [ w0 w0 w0 w1 w1 . w2 | b0 b1 b2 ]      this rank's slot of a unit, parameters of two groups
    segments   [ ----- segment ----- ][- segment]
    state      [  exp_avg of the run ]                 ``optimizer.state[w1]["exp_avg"]`` is a ShardTensor over its part

A *run* is one large segment, or all small ones together: those are copied into one tensor for the step, and back, which
costs less than calling the kernels for each. The optimizer gets the run's *pieces*, plain 1-D tensors: one, except where
kernels take several passes over their operands.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import ShardError
from ...shard_tensor.host_memory import flat_of, shard_of
from ...shard_tensor.state import STATE, has_user_attributes
from ...shard_tensor.tensor import ShardTensor
from ...shard_tensor.unsharded_param import own_grad, set_own_grad
from ...unit.flat_buffer import FlatBuffer
from ...unit.module_params import copy_attributes
from .piece import Piece, RoundedPiece
from .segments import Run, Segment, fit_fused, runs_of, signature
from .step_counters import Counters

# The kinds of a parameter's gradient: there is none, it is a part of its unit's reduced gradient, or the user has made it.
_NONE, _REDUCED, _OTHER = 0, 1, 2
_flat, _spec, _local = map(operator.attrgetter, (f"{STATE}.flat", f"{STATE}.spec", f"{STATE}.local"))


class Runs:
    """The sharded parameters of one group.

    The *arrangement* is their division into runs, with the pieces and their state. It is made from the following, and is valid
    as long as none of this has changed, which :meth:`is_as_left` checks:

    - the parameters and their order (others make a new Runs, see `FlatStep._look`);
    - which gradients there are, and that they are parts of their units' reduced gradients. With a gradient of the user's own
      nothing is kept for the next step;
    - the dict of each parameter in the optimizer's state, and the values in it, by identity;
    - the memory of these values;
    - the values of counters, since those of a run must agree;
    - Python attributes of the parameters, where the optimizer may look at them;
    - the largest size of a piece.

    Options of the group are read anew in each step.

    Attributes:
        flats: the flat buffers.
        params: the parameters, in the order of the buffers.
        flat_numbers: the number of each parameter's flat buffer.
        specs, ranges: each parameter's spec, and the range of its elements in the shard.
        pieces: the optimizer's parameters.
        stepped, stepped_flats: the parameters with a gradient, and their buffers.
        counters: the counters in the parameters' state.
        elements: the sharded tensors in their state.
        fits_fused: True if a fused kernel on the CPU takes all pieces with the state that they have.
    """

    def __init__(
        self, listed: Sequence[Any], found: Sequence[tuple[FlatBuffer, Sequence[ShardTensor]]], attributes: bool
    ) -> None:
        """Make the runs of one group.

        Args:
            listed: the group's parameters in the user's order.
            found: the sharded parameters by flat buffer.
            attributes: True if the optimizer may look at Python attributes that the user has given to parameters. Parameters
                that have some are stepped by themselves.
        """
        self._attributes = attributes
        self.flats = [flat for flat, _ in found]
        self.params: list[ShardTensor] = []
        self.flat_numbers: list[int] = []
        for number, (_, params) in enumerate(found):
            self.params += sorted(params, key=lambda p: p._spec.index)
            self.flat_numbers += [number] * len(params)
        numbers = {id(p): i for i, p in enumerate(self.params)}
        self._listed = [numbers[id(p)] for p in listed if id(p) in numbers]
        self.specs = [p._spec for p in self.params]
        self.ranges = [
            self.flats[n].layout.local_range(spec.index, self.flats[n].collectives.rank)
            for n, spec in zip(self.flat_numbers, self.specs, strict=True)
        ]
        # Looking at gradients in host memory must not wait for them.
        offloaded = any(flat.host is not None for flat in self.flats)
        self._flat_of: Any = flat_of if offloaded else _flat
        self._shard_of: Any = shard_of if offloaded else _local
        self.pieces: list[Piece] = []
        self.stepped: list[ShardTensor] = []
        self.stepped_flats: list[FlatBuffer] = []
        self.counters = Counters()
        self.fits_fused = False
        self._runs: list[Run] = []
        # What the last step has left. `_regular`: all gradients came from reductions. `_limit`: the largest size of a piece.
        self._regular, self._limit = False, -1
        self._present: list[ShardTensor] = []
        self._present_specs: list[Any] = []
        self._firsts: list[int] = []  # for each present parameter: the position of the first present one of its shard
        self._absent: list[ShardTensor] = []
        # The parts of pieces' gradients. Either they are those of present parameters, by position. Or they are cut from reduced
        # gradients: the number of the part, the position of a present parameter of that shard, the start and the length.
        self._gathered: list[tuple[Piece, list[int]]] = []
        self._narrowed: list[tuple[Piece, int, int, int, int]] = []
        self._entries: list[dict[str, Any] | None] = []
        self._values: list[Any] = []
        self.elements: list[Any] = []
        self._memory: list[torch.Tensor] = []  # of these elements
        self._seen: list[Any] = []  # attributes of parameters

    # -- before a step --------------------------------------------------------------------------------------------
    def is_as_left(self, state: Any, limit: int) -> bool:
        """Return True if nothing but the gradients is new, and give these to the pieces.

        `limit` is the largest size of a piece, 0 for any size.
        """
        if not self._regular or limit != self._limit:
            return False
        # This runs in C as far as possible, because it is done for each parameter in each step.
        try:
            grads = list(map(own_grad, self._present))
            results = list(map(self._flat_of, grads))
            specs = map(_spec, grads)
        except AttributeError:  # None, or plain
            return False
        firsts = map(results.__getitem__, self._firsts)
        if not (all(map(operator.is_, results, firsts)) and all(map(operator.is_, specs, self._present_specs))):
            return False
        if any(map(operator.is_, results, itertools.repeat(None))):  # the user's own
            return False
        if not all(map(operator.is_, map(own_grad, self._absent), itertools.repeat(None))):
            return False
        if not all(map(operator.is_, map(state.get, self.params), self._entries)):
            return False
        values = [value for own in self._entries if own for value in own.values()]
        if len(values) != len(self._values) or not all(map(operator.is_, values, self._values)):
            return False
        if not self.counters.are_as_left():
            return False
        if self._attributes:
            seen = self._all_attributes()
            if len(seen) != len(self._seen) or not all(map(operator.is_, seen, self._seen)):
                return False
        # Two optimizers may share state, by load_state_dict(), and the other one may have laid it out anew.
        if not all(map(operator.is_, map(_local, self.elements), self._memory)):
            return False
        self._point(grads)
        return True

    def _point(self, grads: Sequence[Any]) -> None:
        parts = list(map(self._shard_of, grads))
        for piece, numbers in self._gathered:
            piece.grads = [parts[n] for n in numbers]
        for piece, slot, first, start, length in self._narrowed:
            piece.grads[slot] = self._flat_of(grads[first]).narrow(0, start, length)

    def arrange(self, state: Any, limit: int) -> None:
        """Take everything as it is now, and divide it into runs anew; `limit` is the argument of :meth:`is_as_left`."""
        # First the old references are dropped, because they keep state that was replaced since.
        self._runs, self.pieces, self.stepped, self.stepped_flats = [], [], [], []
        self._entries, self._values, self.elements, self._memory, self._seen = [], [], [], [], []
        self._gathered, self._narrowed, self._regular = [], [], False
        grad_kinds = self._gradient_kinds()
        kinds = {
            i: (self._kind(i), signature(p, state.get(p)), i if self._stands_out(p) else None)
            for i, p in enumerate(self.params)
            if grad_kinds[i]
        }
        segments, empty = self._segments(grad_kinds, kinds)
        self._runs = runs_of(segments, kinds)
        for i in empty:  # a run steps their counters, too, so that all ranks agree
            run = next((run for run in self._runs if run.kind == kinds[i]), None)
            if run is None:
                nothing = None if grad_kinds[i] == _REDUCED else self.flats[self.flat_numbers[i]].memory[0:0]
                segment = Segment(self.flat_numbers[i], 0, 0, nothing)
                run = Run([segment], kinds[i])
                self._runs.append(run)
            run.members.append(i)
        for run in self._runs:
            self._cut(run, state, limit)
        self.pieces = [piece for run in self._runs for piece in run.pieces]
        members = [i for run in self._runs for i in run.members]
        self.stepped = [self.params[i] for i in members]
        self.stepped_flats = [self.flats[n] for n in dict.fromkeys(self.flat_numbers[i] for i in members)]
        self._regular, self._limit = _OTHER not in grad_kinds, limit
        present = [i for i, kind in enumerate(grad_kinds) if kind == _REDUCED]
        self._present = [self.params[i] for i in present]
        self._present_specs = [self.specs[i] for i in present]
        self._absent = [self.params[i] for i, kind in enumerate(grad_kinds) if kind == _NONE]
        first_of: dict[int, int] = {}  # by shard, the position of its first present parameter
        self._firsts = [first_of.setdefault(self.flat_numbers[i], n) for n, i in enumerate(present)]
        self._find_gradients({i: n for n, i in enumerate(present)}, first_of)
        self._keep(state)
        self._point(list(map(own_grad, self._present)))

    def _kind(self, i: int) -> tuple[torch.dtype, bool, torch.device]:
        flat = self.flats[self.flat_numbers[i]]
        return flat.dtype, flat.rounding is not None, flat.memory.device  # one of two models may be in host memory

    def _stands_out(self, p: ShardTensor) -> bool:
        return self._attributes and has_user_attributes(p)

    def _all_attributes(self) -> list[Any]:
        """Return names and values of the users' attributes. A value that the user edits in place stays the same object."""
        found: list[Any] = []
        for p in self.params:
            if has_user_attributes(p):
                found += (p, *p.__dict__, *p.__dict__.values())
        return found

    def _gradient_kinds(self) -> list[int]:
        """Return the kind of each parameter's gradient."""
        grad_kinds: list[int] = []
        results: dict[int, torch.Tensor] = {}
        for p, spec, number in zip(self.params, self.specs, self.flat_numbers, strict=True):
            grad = own_grad(p)
            if grad is None:
                grad_kinds.append(_NONE)
                continue
            found = flat_of(grad) if isinstance(grad, ShardTensor) else None
            if found is not None and _spec(grad) is spec and results.setdefault(number, found) is found:
                grad_kinds.append(_REDUCED)
            else:
                grad_kinds.append(_OTHER)
        return grad_kinds

    # -- runs -----------------------------------------------------------------------------------------------------
    def has_counters_only(self) -> bool:
        """Return True if the state has nothing but tensors of elements, counters of steps, and None."""
        return all(
            value is None or (isinstance(value, torch.Tensor) and (value.dim() > 0 or key == "step"))
            for run in self._runs
            for key, value in run.pieces[0].state.items()
        )

    def _segments(self, grad_kinds: list[int], kinds: dict[int, Any]) -> tuple[list[Segment], list[int]]:
        """Return the segments, and the numbers of the parameters without elements on this rank."""
        segments: list[Segment] = []
        empty: list[int] = []
        last = -1  # the slot that the open segment ends with
        for i, kind in kinds.items():
            start, stop = self.ranges[i]
            if start == stop:
                empty.append(i)
                continue
            segment, slot, other = segments[-1] if segments else None, self.specs[i].index, grad_kinds[i] == _OTHER
            # Between neighbours in the layout there is only padding.
            if (
                segment is None
                or other
                or segment.grad is not None
                or segment.flat_number != self.flat_numbers[i]
                or slot != last + 1
                or kinds[segment.members[0]] != kind
            ):
                grad: Any = self.params[i].grad if other else None
                segment = Segment(self.flat_numbers[i], start, stop, grad._local if other else None)
                segments.append(segment)
            segment.members.append(i)
            segment.stop = stop
            last = slot
        return segments, empty

    def _cut(self, run: Run, state: Any, limit: int) -> None:
        """Cut a run into pieces, with their state."""
        entries = state.get(self.params[run.members[0]]) or {}
        bases = self._bases(run, state) if entries else {}
        shards = [self.flats[segment.flat_number].memory[segment.start : segment.stop] for segment in run.segments]
        if len(shards) > 1 or not limit or run.length <= limit:
            parts = [(0, run.length, shards)]
        else:
            ends = [min(start + limit, run.length) for start in range(0, run.length, limit)]
            parts = [(a, b, [shards[0][a:b]]) for a, b in zip([0, *ends], ends, strict=False)]
        for start, stop, values in parts:
            piece = self._piece(run, values, start)
            if self._attributes:
                piece.param._is_param = True  # type: ignore[attr-defined]  # what isinstance(p, nn.Parameter) asks
                if self._stands_out(self.params[run.members[0]]):
                    copy_attributes(self.params[run.members[0]], piece.param)
            if run.segments[0].grad is not None:
                piece.grads = [run.segments[0].grad[start:stop]]
            for key, value in entries.items():
                if key in bases:
                    piece.state[key] = bases[key][start:stop]
                else:  # a kernel counts once for each tensor that it is given, so each piece has a counter of its own
                    piece.state[key] = value.clone() if isinstance(value, torch.Tensor) else value
            run.pieces.append(piece)

    def _piece(self, run: Run, values: list[torch.Tensor], start: int) -> Piece:
        """Return a piece over `values`: of all segments, or of the only segment from `start`."""
        sources = []
        for segment in run.segments:
            flat = self.flats[segment.flat_number]
            if flat.rounding is None:  # all segments of a run are of one kind
                return Piece(values)
            first, _ = flat.layout.rank_range(flat.collectives.rank)
            sources.append((flat.rounding, first + segment.start + start))
        return RoundedPiece(values, sources)

    def _find_gradients(self, numbers: dict[int, int], first_of: dict[int, int]) -> None:
        """Note where the pieces' gradients come from.

        Args:
            numbers: the positions of the parameters among the present ones.
            first_of: the position of the first present parameter of each flat buffer.
        """
        for run in self._runs:
            if run.segments[0].grad is not None:
                continue
            lengths = [sum(self.specs[i].length for i in segment.members) for segment in run.segments]
            # Where no padding lies between the parameters, the parts of the gradients need not be cut.
            if lengths == [s.stop - s.start for s in run.segments] and (
                len(run.segments) > 1 or (len(run.pieces) == 1 and len(run.segments[0].members) == 1)
            ):
                parts = [numbers[i] for segment in run.segments for i in segment.members]
                self._gathered.append((run.pieces[0], parts))
                continue
            for n, segment in enumerate(run.segments):
                first, start = first_of[segment.flat_number], segment.start
                for piece in run.pieces:
                    self._narrowed.append((piece, n, first, start, piece.sizes[n]))
                    start += piece.sizes[n]

    # -- state ----------------------------------------------------------------------------------------------------
    def _bases(self, run: Run, state: Any) -> dict[str, torch.Tensor]:
        """Return the run's state as one tensor for each key, which is made where there is none."""
        bases: dict[str, torch.Tensor] = {}
        for key, value in state[self.params[run.members[0]]].items():
            if not isinstance(value, ShardTensor):
                continue
            values = [state[self.params[i]][key] for i in run.members]
            base = self._common(run, values)
            if base is None:
                base = torch.zeros(run.length, dtype=value.dtype, device=value.device)
                for i, v in zip(run.members, values, strict=True):
                    part = self._part(run, base, i)
                    part.copy_(v._local)
                    v._shard_state.local, v._shard_state.flat = part, base
            bases[key] = base
        return bases

    def _common(self, run: Run, values: list[Any]) -> torch.Tensor | None:
        """Return the memory of the run of which the values are the parts, or None."""
        base = values[0]._shard_state.flat
        if base is None:
            return None
        begin = None  # the position of the run in the base
        for i, v in zip(run.members, values, strict=True):
            if v._shard_state.flat is not base:
                return None
            start, stop = self.ranges[i]
            if start < stop:
                at = v._local.storage_offset() - base.storage_offset() - start - run.places[i]
                if begin not in (None, at):
                    return None
                begin = at
        begin = begin or 0
        if begin < 0 or begin + run.length > base.numel():
            return None
        memory: torch.Tensor = base[begin : begin + run.length]
        return memory

    def _part(self, run: Run, base: torch.Tensor, i: int) -> torch.Tensor:
        start, stop = self.ranges[i]
        if start == stop:
            return base[0:0]
        place = run.places[i]
        return base[start + place : stop + place]

    def _keep(self, state: Any) -> None:
        self._entries = [state.get(p) for p in self.params]
        self.counters.pair((run.pieces[0].state, [self._entries[i] for i in run.members]) for run in self._runs)
        self._values = [value for own in self._entries if own for value in own.values()]
        self.elements = [value for value in self._values if isinstance(value, ShardTensor)]
        self._memory = list(map(_local, self.elements))
        self._seen = self._all_attributes() if self._attributes else []
        self.fits_fused = fit_fused(self.pieces)

    # -- after a step ---------------------------------------------------------------------------------------------
    def publish(self, state: Any) -> None:
        """Bring the user's state up to date with what the optimizer has made, replaced or removed."""
        # State is made in torch's order, the same on all ranks, because users go through it with collective operations.
        made = {i for run in self._runs if run.pieces[0].state for i in run.members}
        for i in self._listed:
            if i in made:
                state.setdefault(self.params[i], {})
        for run in self._runs:
            self._publish(run, state)
        self._keep(state)

    def store_gradients(self) -> None:
        """Bring the user's gradients up to date with what the step has done to them, where each run is one piece."""
        for run in self._runs:
            (piece,) = run.pieces
            if not piece.take_gradient():
                piece.store_gradient()
                continue
            grad = piece.given
            if grad is not None and isinstance(piece, RoundedPiece):
                grad = grad.to(self.flats[run.segments[0].flat_number].dtypes.grad)
            for i in run.members:
                # A new tensor, because the old one must stay as it was for code that holds it.
                part = None if grad is None else self._part(run, grad.detach(), i)
                set_own_grad(self.params[i], None if part is None else ShardTensor._wrap(part, self.specs[i]))

    def _publish(self, run: Run, state: Any) -> None:
        first = run.pieces[0].state
        if not first and not any(state.get(self.params[i]) for i in run.members):
            return
        if any(piece.state.keys() != first.keys() for piece in run.pieces):
            return  # after an exception while the state was made
        entries = [state.setdefault(self.params[i], {}) for i in run.members]
        for own in entries:
            for key in [k for k in own if k not in first]:
                del own[key]
        for key, value in first.items():
            if not isinstance(value, torch.Tensor):
                for own in entries:
                    own[key] = value
            elif value.dim() == 0:
                self._publish_counter(key, value, entries)
            else:
                self._publish_elements(run, key, entries)

    @staticmethod
    def _publish_counter(key: str, value: torch.Tensor, entries: list[dict[str, Any]]) -> None:
        for own in entries:
            held = own.get(key)
            if isinstance(held, torch.Tensor) and held.dtype == value.dtype and not held.dim():
                held.copy_(value)
            else:
                own[key] = value.clone()

    def _publish_elements(self, run: Run, key: str, entries: list[dict[str, Any]]) -> None:
        parts = [piece.state[key] for piece in run.pieces]
        if any(part.shape != piece.param.shape for part, piece in zip(parts, run.pieces, strict=True)):
            spec = self.specs[run.members[0]]
            raise ShardError(
                f"rank {spec.world_rank}: state {key!r} of {spec.name} is not shaped like the parameter, which the state of an "
                "optimizer that steps element by element must be; register it with kind='matrix', if it needs full parameters."
            )
        base = parts[0].detach() if len(parts) == 1 else torch.cat(parts)
        if len(parts) > 1:
            for piece, part in zip(run.pieces, base.split([part.numel() for part in parts]), strict=True):
                piece.state[key] = part
        for i, own in zip(run.members, entries, strict=True):
            held, part = own.get(key), self._part(run, base, i)
            if isinstance(held, ShardTensor) and held.dtype == part.dtype:
                held._shard_state.local = part  # code that holds it still sees the state
            else:
                own[key] = held = ShardTensor._wrap(part, self.specs[i])
            held._shard_state.flat = base
