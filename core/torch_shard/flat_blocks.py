"""Which flat tensors an element-wise optimizer steps on.

The parameters that one group has in one flat buffer are a *block*. Neighbours in it whose gradients come from one
reduction and whose state agrees in keys and counters are a *run*, one plain 1-D tensor for the optimizer::

    shard      [ w0 w0 w0 w1 w1 . w2 | b0 b1 b2 ]      this rank's slot of a unit, two groups
    runs       [ ------- run ------- ][-- run --]
    state      [ exp_avg of the run  ]                 ``optimizer.state[w1]["exp_avg"]`` is a ShardTensor over its part

Where kernels take several passes over their operands, a run is worked on in *pieces*.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .errors import NeedsGatherError, ShardError
from .flat_buffer import FlatBuffer
from .shard_spec import same_cut
from .shard_tensor import ShardTensor

__all__ = ["Block", "Piece", "grad_of"]

_NONE, _HERE, _OTHER = 0, 1, 2  # a parameter's gradient: none; in the block's reduced slice; the user's own
grad_of: Any = torch.Tensor.grad.__get__  # type: ignore[union-attr]
"""``.grad`` as autograd keeps it; to be called with ``__torch_function__`` disabled."""


class Piece:
    """What the optimizer sees as a parameter: elements ``[start, start + length)`` of a shard."""

    __slots__ = ("grad", "length", "param", "start", "state")

    def __init__(self, shard: torch.Tensor, start: int, stop: int, grad: torch.Tensor | None) -> None:
        self.start, self.length = start, stop - start
        self.param = shard[start:stop]
        self.grad = grad  # None: where the block's reduced slice has it
        self.state: dict[str, Any] = {}


class Run:
    """Neighbouring parameters that take the same step: elements ``[start, stop)`` of a shard. `members` are positions in
    the block; some may have no elements on this rank."""

    def __init__(self, start: int, stop: int, grad: torch.Tensor | None) -> None:
        self.start, self.stop, self.grad = start, stop, grad
        self.members: list[int] = []
        self.pieces: list[Piece] = []


class Block:
    """The parameters of one group in one flat buffer."""

    def __init__(self, flat: FlatBuffer, params: Sequence[ShardTensor]) -> None:
        self.flat = flat
        self.params = sorted(params, key=lambda p: p._spec.index)
        self.specs = [p._spec for p in self.params]
        rank = flat.collectives.rank
        self.ranges = [flat.layout.local_range(spec.index, rank) for spec in self.specs]
        self.runs: list[Run] = []
        self.result: torch.Tensor | None = None  # the reduced slice that most gradients are in
        self.stepped: list[ShardTensor] = []
        # As the last step has left it: each parameter's state and what is in it; counters, with their versions, and which
        # of them follow another one.
        self.entries: list[dict[str, Any] | None] = []
        self.values: list[Any] = []
        self.counters: list[torch.Tensor] = []
        self.versions: list[int] = []
        self.followers: list[torch.Tensor] = []
        self.leaders: list[torch.Tensor] = []
        self._pattern: list[int] = []
        self._split = -1

    # -- as it is now -------------------------------------------------------------------------------------------
    def look(self, state: Any, split: int) -> bool:
        """Take gradients as they are; `split`: elements of a piece, 0 for whole runs. Returns whether the runs are still
        right; else :meth:`arrange` comes next."""
        before = self._pattern, self._split
        self._pattern, self.result = self._gradients()
        self._split = split
        entries = [state.get(p) for p in self.params]
        return (
            before == (self._pattern, split)
            and _OTHER not in self._pattern
            and _are(entries, self.entries)
            and _are([v for own in entries if own for v in own.values()], self.values)
            and [t._version for t in self.counters] == self.versions
        )

    @property
    def is_regular(self) -> bool:
        """Whether all gradients were parts of one reduced slice."""
        return _OTHER not in self._pattern

    @property
    def present(self) -> list[ShardTensor]:
        """The parameters with such a gradient."""
        return [p for p, kind in zip(self.params, self._pattern, strict=True) if kind == _HERE]

    @property
    def absent(self) -> list[ShardTensor]:
        """Those without any."""
        return [p for p, kind in zip(self.params, self._pattern, strict=True) if kind == _NONE]

    @property
    def pieces(self) -> list[Piece]:
        return [piece for run in self.runs for piece in run.pieces]

    def part(self, piece: Piece) -> torch.Tensor:
        """A piece's gradient in the reduced slice."""
        assert self.result is not None
        return self.result.narrow(0, piece.start, piece.length)

    def _gradients(self) -> tuple[list[int], torch.Tensor | None]:
        pattern, result = [], None
        for p, spec in zip(self.params, self.specs, strict=True):
            grad = grad_of(p)
            if grad is None:
                pattern.append(_NONE)
                continue
            own = grad.__dict__
            found = own.get("_flat")
            if found is not None and own["_spec"] is spec and (result is None or found is result):
                result = found
                pattern.append(_HERE)
            else:
                pattern.append(_OTHER)
        return pattern, result

    def note(self, state: Any) -> None:
        """Everything is as a step leaves it."""
        self.entries = [state.get(p) for p in self.params]
        self.values = [v for own in self.entries if own for v in own.values()]
        self.note_versions()

    def note_versions(self) -> None:
        self.versions = [t._version for t in self.counters]

    # -- runs ---------------------------------------------------------------------------------------------------
    def arrange(self, state: Any) -> None:
        """Divide the block into runs, anew."""
        kinds = {i: _signature(p, state.get(p)) for i, p in enumerate(self.params) if self._pattern[i]}
        self.runs = []
        empty: list[int] = []
        last = -1  # the slot that the open run ends with
        for i, kind in kinds.items():
            start, stop = self.ranges[i]
            if start == stop:
                empty.append(i)
                continue
            run = self.runs[-1] if self.runs else None
            other = self._pattern[i] == _OTHER
            slot = self.specs[i].index
            # Between neighbours in the layout lies nothing but padding.
            if run is None or other or run.grad is not None or slot != last + 1 or kinds[run.members[0]] != kind:
                grad: Any = self.params[i].grad if other else None
                run = Run(start, stop, grad._local if other else None)
                self.runs.append(run)
            run.members.append(i)
            run.stop = stop
            last = slot
        self._attach(empty, kinds)
        for run in self.runs:
            self._cut(run, state)
        self.stepped = [self.params[i] for run in self.runs for i in run.members]
        self._pair(state)
        self.note(state)

    def _attach(self, empty: Iterable[int], kinds: dict[int, Any]) -> None:
        """Parameters of which this rank has nothing: their counters go with those of others, so that all ranks agree."""
        for i in empty:
            own = None if self._pattern[i] == _HERE else self.flat.shard[0:0]
            for run in self.runs:
                if kinds[run.members[0]] == kinds[i] and (run.grad is None or own is not None):
                    run.members.append(i)
                    break
            else:
                self.runs.append(Run(0, 0, own))
                self.runs[-1].members.append(i)

    def _cut(self, run: Run, state: Any) -> None:
        """Into pieces, with their state."""
        entries = state.get(self.params[run.members[0]]) or {}
        bases = self._bases(run, state) if entries else {}
        size = self._split or max(1, run.stop - run.start)
        for start in range(run.start, max(run.stop, run.start + 1), size):
            stop, begin = min(start + size, run.stop), start - run.start
            grad = None if run.grad is None else run.grad[begin : stop - run.start]
            piece = Piece(self.flat.shard, start, stop, grad)
            for key, value in entries.items():
                if key in bases:
                    piece.state[key] = bases[key][begin : stop - run.start]
                else:  # a kernel counts once for each tensor that it is given
                    piece.state[key] = value.clone() if begin and isinstance(value, torch.Tensor) else value
            run.pieces.append(piece)

    def _bases(self, run: Run, state: Any) -> dict[str, torch.Tensor]:
        """The run's state as one tensor for each key; copied together where it is not."""
        bases: dict[str, torch.Tensor] = {}
        for key, value in state[self.params[run.members[0]]].items():
            if type(value) is not ShardTensor:
                continue
            values = [state[self.params[i]][key] for i in run.members]
            base = self._common(run, values)
            if base is None:
                base = torch.zeros(run.stop - run.start, dtype=value.dtype, device=value.device)
                for i, v in zip(run.members, values, strict=True):
                    part = self._part(run, base, i)
                    part.copy_(v._local)
                    v._local, v._flat = part, base
            bases[key] = base
        return bases

    def _common(self, run: Run, values: list[Any]) -> torch.Tensor | None:
        """The memory of which the values are the parts that belong to the run, or None."""
        base = values[0].__dict__.get("_flat")
        if base is None:
            return None
        begin = values[0]._local.storage_offset() - base.storage_offset()
        if begin < 0 or begin + run.stop - run.start > base.numel():
            return None
        for i, v in zip(run.members, values, strict=True):
            if v.__dict__.get("_flat") is not base:
                return None
            start, stop = self.ranges[i]
            if start < stop and v._local.storage_offset() - base.storage_offset() - begin != start - run.start:
                return None
        whole: torch.Tensor = base[begin : begin + run.stop - run.start]
        return whole

    def _part(self, run: Run, base: torch.Tensor, i: int) -> torch.Tensor:
        start, stop = self.ranges[i]
        return base[start - run.start : stop - run.start] if start < stop else base[0:0]

    def _pair(self, state: Any) -> None:
        """Find the counters. The optimizer steps those of a run's first member, the others follow."""
        self.counters, self.followers, self.leaders = [], [], []
        for run in self.runs:
            first: dict[str, torch.Tensor] = {}
            for n, i in enumerate(run.members):
                for key, value in (state.get(self.params[i]) or {}).items():
                    if type(value) is ShardTensor or not isinstance(value, torch.Tensor):
                        continue
                    self.counters.append(value)
                    if n:
                        self.followers.append(value)
                        self.leaders.append(first[key])
                    else:
                        first[key] = value

    # -- after a step -------------------------------------------------------------------------------------------
    def publish(self, state: Any) -> None:
        """Put state that the optimizer has made, replaced or removed where the user finds it."""
        for run in self.runs:
            self._publish(run, state)
        self._pair(state)
        self.note(state)

    def _publish(self, run: Run, state: Any) -> None:
        first = run.pieces[0].state
        if not first and not any(state.get(self.params[i]) for i in run.members):
            return
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
        for n, own in enumerate(entries):
            held = own.get(key)
            if n == 0:
                own[key] = value
            elif isinstance(held, torch.Tensor) and held.dtype == value.dtype and not held.dim():
                held.copy_(value)
            else:
                own[key] = value.clone()

    def _publish_elements(self, run: Run, key: str, entries: list[dict[str, Any]]) -> None:
        parts = [piece.state[key] for piece in run.pieces]
        if any(part.shape != piece.param.shape for part, piece in zip(parts, run.pieces, strict=True)):
            name = self.specs[run.members[0]].name
            raise ShardError(
                f"rank {self.specs[0].rank}: state {key!r} of {name} is not shaped like the parameter, which the state of an "
                "optimizer that steps element by element must be; register it with kind='matrix', if it needs whole parameters."
            )
        base = parts[0].detach() if len(parts) == 1 else torch.cat(parts)
        for piece in run.pieces if len(parts) > 1 else ():
            begin = piece.start - run.start
            piece.state[key] = base[begin : begin + piece.length]
        for i, own in zip(run.members, entries, strict=True):
            held, part = own.get(key), self._part(run, base, i)
            if type(held) is ShardTensor and held.dtype == part.dtype:
                held._local = part  # whoever holds it still sees the state
            else:
                own[key] = held = ShardTensor._wrap(part, self.specs[i])
            held._flat = base  # type: ignore[attr-defined]


def _are(some: list[Any], others: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _signature(param: ShardTensor, entries: Any) -> Any:
    """What parameters of one run must agree in; raises where a flat step can't take the state."""
    if not entries:
        return None
    found: list[tuple[Any, ...]] = []
    for key, value in entries.items():
        if type(value) is ShardTensor:
            if not same_cut(value._spec, param._spec):
                raise _unusable(param, key, "is a sharded tensor that is cut differently")
            found.append((key, "elements", value.dtype))
        elif isinstance(value, torch.Tensor):
            if value.dim():
                raise _unusable(
                    param, key, f"has shape {tuple(value.shape)} where the parameter has {tuple(param.shape)}"
                )
            found.append((key, value.dtype, value.item()))
        elif value is None or isinstance(value, (bool, int, float, complex, str)):
            found.append((key, type(value), value))
        else:
            raise _unusable(param, key, f"is a {type(value).__name__}")
    return tuple(found)


def _unusable(param: ShardTensor, key: str, what: str) -> NeedsGatherError:
    return NeedsGatherError(
        f"rank {param._spec.rank}: optimizer state {key!r} of {param._spec.name} {what}, which a step on slices can't use; "
        "nothing was changed. Drop it (`optimizer.state.pop(parameter)`), load state that fits, or change the parameter inside "
        "`with engine.gathered(parameter, write=True)`."
    )
