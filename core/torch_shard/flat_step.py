"""The steps of element-wise optimizers on flat memory.

What each works on is in :mod:`.flat_blocks`. Most steps find everything as the last one left it: then only the gradients are
new, and nothing is done for each parameter but to look.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .flat_blocks import Block, Piece, grad_of
from .flat_buffer import FlatBuffer
from .optim import is_torchs
from .shard_tensor import ShardTensor
from .step_checks import check_units, refuse_unreduced, several_engines, shard_state

if TYPE_CHECKING:
    from .runtime import Runtime
    from .unit import Unit

__all__ = ["FlatStep"]

_flat, _spec, _version = map(operator.attrgetter, ("_flat", "_spec", "_version"))

_PIECE = 1 << 17  # elements of one piece on the CPU: with gradient and two moments 2 MiB in fp32, a core's L2 cache
_LIST = 1 << 24  # elements of one call of a foreach implementation, whose temporaries are of that size
# torch's own choice on the CPU is the for-loop, which the fused kernels agree with to rounding in these dtypes and are two to
# five times as fast as. Whoever sets `foreach` or `fused` gets what he asks for.
_FUSED_ON_CPU = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad})
_FUSED_DTYPES = frozenset({torch.float32, torch.float64})


class _State(dict[Any, Any]):
    """The state of what the step works on; that of parameters which are not the engine's is the optimizer's own."""

    def __init__(self, own: Any, pieces: Sequence[Piece] = ()) -> None:
        # One without state is not in here: some optimizers ask.
        super().__init__((piece.param, piece.state) for piece in pieces if piece.state)
        self._own = own
        self._bare = {id(piece.param) for piece in pieces if not piece.state}

    def __missing__(self, key: Any) -> Any:
        if id(key) not in self._bare:
            return self._own[key]
        self[key] = made = {}  # type: ignore[var-annotated]
        return made


class _Group:
    """One of the user's groups."""

    def __init__(
        self, params: list[Any], twice: set[int], runtime: Runtime, optimizer: Any, only: FlatBuffer | None
    ) -> None:
        self.params = params
        # Those that are not the engine's, and those that are listed more than once, to be stepped as often.
        self.rest: list[Any] = []
        self.units: dict[int, Unit] = {}
        by_flat: dict[int, tuple[FlatBuffer, list[ShardTensor]]] = {}
        for p in params:
            unit = p._unit_ref() if type(p) is ShardTensor and p._unit_ref is not None else None
            if unit is not None and unit.runtime is not runtime:
                raise several_engines(optimizer, p, runtime)
            if unit is None or id(p) in twice:
                self.rest.append(p)
                continue
            self.units[unit.index] = unit
            flat, _ = unit.find(p)
            if only is not None and flat is not only:
                continue
            by_flat.setdefault(id(flat), (flat, []))[1].append(p)
        if only is not None:
            self.rest = []
        self.blocks = [Block(flat, own) for flat, own in by_flat.values()]
        self.on_cpu = all(b.flat.shard.device.type == "cpu" for b in self.blocks)
        dtypes = {b.flat.dtype for b in self.blocks} | {p.dtype for p in self.rest}
        self.may_fuse = (
            type(optimizer) in _FUSED_ON_CPU
            and self.on_cpu
            and dtypes <= _FUSED_DTYPES
            and all(p.device.type == "cpu" and type(p) is not ShardTensor for p in self.rest)
        )

    def way(self, options: dict[str, Any], torchs: bool) -> tuple[bool, int]:
        """Whether to ask for a fused kernel, and the size of pieces (0: whole runs)."""
        chosen = options.get("foreach", False) is not None or options.get("fused", False) is not None
        if self.may_fuse and not chosen:
            tensors = isinstance(options["lr"], torch.Tensor) or any(
                isinstance(beta, torch.Tensor) for beta in options.get("betas", ())
            )
            # In another default dtype counters would be of another dtype.
            if not tensors and torch.get_default_dtype() is torch.float32:
                return True, 0
        loops = torchs and self.on_cpu and not options.get("foreach") and not options.get("fused")
        return False, _PIECE if loops else 0


class _Working:
    """One group of a step: all of one of the user's, or a part of it. `last`: no other part follows."""

    def __init__(
        self, own: _Group, group: dict[str, Any], options: dict[str, Any], pieces: list[Piece], last: bool
    ) -> None:
        self.own, self.group, self.pieces, self.last = own, group, pieces, last
        params: list[Any] = [piece.param for piece in pieces]
        self.options = {**options, "params": params + own.rest if last else params}
        self.given = self.options.copy()
        self.made = [value for piece in pieces for value in piece.state.values()]
        self.bare = [piece for piece in pieces if not piece.state]


class FlatStep:
    """The steps of one optimizer; see :class:`~torch_shard.stand_in.Work`."""

    def __init__(self, optimizer: Any, runtime: Runtime, only: FlatBuffer | None = None) -> None:
        """`only`: step nothing but this flat buffer's parameters."""
        # What is kept must not keep the optimizer itself, by which it is found.
        self._optimizer: Any = weakref.ref(optimizer)
        self.runtime, self._only = runtime, only
        self._torchs = is_torchs(type(optimizer))
        self._groups: list[_Group] = []
        self._ways: list[tuple[bool, int]] = []
        self.state = _State({})
        self._working: list[_Working] = []
        # Over all blocks, as long as they are as they were: what the fast way compares.
        self._regular = False
        self._params: list[ShardTensor] = []
        self._specs: list[Any] = []
        self._block_of: list[int] = []  # of each parameter: the position of its block's first one
        self._keys: list[Any] = []  # of the optimizer's state, and what is under them
        self._entries: list[Any] = []
        self._values: list[Any] = []
        self._counters: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._absent: list[ShardTensor] = []  # parameters without a gradient; those above have one
        self._pieces: list[Piece] = []
        # By block: its first parameter's position, and how its reduced slice is cut into the pieces' gradients.
        self._cuts: list[tuple[int, list[int], list[torch.Tensor | None]]] = []

    # -- before the arithmetic ------------------------------------------------------------------------------------
    def open(self) -> None:
        self.close()
        optimizer = self._optimizer()
        groups, state = optimizer.param_groups, optimizer.state
        refuse_unreduced(optimizer, self.runtime)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            same = self._same_parameters(groups)
            if not same:
                counts = Counter(id(p) for group in groups for p in group["params"])
                twice = {number for number, count in counts.items() if count > 1}
                self._groups = [
                    _Group(list(group["params"]), twice, self.runtime, optimizer, self._only) for group in groups
                ]
            check_units(optimizer, {unit.index: unit for own in self._groups for unit in own.units.values()}.values())
            ways = [own.way(group, self._torchs) for own, group in zip(self._groups, groups, strict=True)]
            if not (same and ways == self._ways and self._is_as_left(state)):
                self._ways = ways
                self._arrange(optimizer)
            self._working = []
            for own, group, (fuse, _) in zip(self._groups, groups, ways, strict=True):
                if own.blocks or self._only is None:
                    self._add(own, group, fuse)

    def _same_parameters(self, groups: list[dict[str, Any]]) -> bool:
        return len(groups) == len(self._groups) and all(
            len(own.params) == len(group["params"]) and all(map(operator.is_, own.params, group["params"]))
            for own, group in zip(self._groups, groups, strict=True)
        )

    def _is_as_left(self, state: Any) -> bool:
        """Whether the blocks are right as they are; their gradients are set then."""
        if not self._regular:
            return False
        # In C as far as possible: this is done for each parameter in each step.
        try:
            grads = list(map(grad_of, self._params))
            results = list(map(_flat, grads))
            specs = map(_spec, grads)
        except AttributeError:  # None, or not the reduction's
            return False
        firsts = map(results.__getitem__, self._block_of)
        if not (all(map(operator.is_, results, firsts)) and all(map(operator.is_, specs, self._specs))):
            return False
        if self._only is None:
            entries: Iterable[Any] = state.values()
            if len(state) != len(self._keys) or not all(map(operator.is_, state, self._keys)):
                return False
        else:
            entries = map(state.get, self._keys)
        if not all(map(operator.is_, entries, self._entries)):
            return False
        values = list(itertools.chain.from_iterable(map(dict.values, self._entries)))
        if len(values) != len(self._values) or not all(map(operator.is_, values, self._values)):
            return False
        if list(map(_version, self._counters)) != self._versions:
            return False
        if not all(map(operator.is_, map(grad_of, self._absent), itertools.repeat(None))):
            return False
        for first, sizes, params in self._cuts:
            for param, grad in zip(params, results[first].split_with_sizes(sizes), strict=False):
                if param is not None:
                    param.grad = grad
        return True

    def _arrange(self, optimizer: Any) -> None:
        """Look at each block, and arrange anew what has changed."""
        state = optimizer.state
        if list(map(_version, self._counters)) == self._versions:
            for own in self._groups:
                for block in own.blocks:
                    block.note_versions()
        blocks = [(block, way) for own, way in zip(self._groups, self._ways, strict=True) for block in own.blocks]
        changed = [block for block, (_, split) in blocks if not block.look(state, split)]
        if changed:
            shard_state(optimizer, self.runtime)
            for block in changed:
                block.arrange(state)
        self._params, self._specs, self._block_of, self._absent = [], [], [], []
        self._pieces, self._cuts = [], []
        for block, _ in blocks:
            first = len(self._params)
            present = block.present
            self._params += present
            self._specs += [p._spec for p in present]
            self._block_of += [first] * len(present)
            self._absent += block.absent
            pieces = block.pieces
            self._pieces += pieces
            if present:
                self._cuts.append((first, *_cut(pieces, block.flat.layout.shard_numel)))
            for piece in pieces:
                piece.param.grad = piece.grad if piece.grad is not None else block.part(piece)
        self._regular = all(block.is_regular for block, _ in blocks) and all(type(o) is dict for o in state.values())
        self.state = _State(state, self._pieces)
        self._note(state)

    def _note(self, state: Any) -> None:
        blocks = [block for own in self._groups for block in own.blocks]
        self._keys = [p for p in (state if self._only is None else self._params + self._absent) if p in state]
        self._entries = [state[p] for p in self._keys]
        self._values = [value for entries in self._entries for value in entries.values()]
        self._counters = [counter for block in blocks for counter in block.counters]
        self._versions = [version for block in blocks for version in block.versions]

    def _add(self, own: _Group, group: dict[str, Any], fuse: bool) -> None:
        """Make the step's groups of one of the user's."""
        options = {key: value for key, value in group.items() if key != "params"}
        pieces = [piece for block in own.blocks for piece in block.pieces]
        # Fused SGD takes no mixture of momentum that is there and momentum that is not.
        if fuse and len({not piece.state for piece in pieces}) < 2:
            options["fused"] = True
        # torch's own do not mind how many groups there are.
        limit = _LIST if self._torchs and not options.get("fused") else 0
        while limit and len(pieces) > 1 and sum(piece.length for piece in pieces) > limit:
            count = taken = 0
            while not taken or count + pieces[taken].length <= limit:
                count += pieces[taken].length
                taken += 1
            self._working.append(_Working(own, group, options, pieces[:taken], last=False))
            pieces = pieces[taken:]
        self._working.append(_Working(own, group, options, pieces, last=True))

    def held(self) -> list[ShardTensor]:
        """The parameters that have a gradient."""
        return [p for own in self._groups for block in own.blocks for p in block.stepped]

    # -- for the optimizer, and after it --------------------------------------------------------------------------
    def groups(self) -> list[dict[str, Any]]:
        return [work.options for work in self._working]

    def before(self, number: int) -> None:
        pass

    def after(self, number: int) -> None:
        self._finish(self._working[number])

    def close(self) -> None:
        """Put state and options where the user finds them, as far as that is not done. Local."""
        working, self._working = self._working, []
        for work in working:
            for piece in work.pieces:
                piece.param.grad = None
            self._finish(work)

    def _finish(self, work: _Working) -> None:
        """One group has been stepped; or it has not, in which case there is nothing new to be found."""
        optimizer, blocks = self._optimizer(), work.own.blocks
        for piece in work.bare:
            piece.state = self.state.get(piece.param, piece.state)
        made = [value for piece in work.pieces for value in piece.state.values()]
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if len(made) != len(work.made) or not all(map(operator.is_, made, work.made)):
                for block in blocks:
                    block.publish(optimizer.state)
                self._note(optimizer.state)
                work.made = [value for piece in work.pieces for value in piece.state.values()]
            if work.last:
                followers = [t for block in blocks for t in block.followers]
                if followers:
                    torch._foreach_copy_(followers, [t for block in blocks for t in block.leaders])
                # Autograd's view of them: a graph that has saved one must not be run any more.
                torch.autograd.graph.increment_version([p for block in blocks for p in block.stepped])
        self._versions = list(map(_version, self._counters))
        for key, value in work.options.items():
            if work.given.get(key, self) is not value:  # the optimizer itself has set it
                work.group[key] = work.given[key] = value


def _cut(pieces: list[Piece], length: int) -> tuple[list[int], list[torch.Tensor | None]]:
    """Sizes into which a slice of `length` elements is split so that each piece's gradient is one part; and whose it is."""
    sizes: list[int] = []
    params: list[torch.Tensor | None] = []
    end = 0
    for piece in sorted(pieces, key=lambda piece: (piece.start, piece.length)):
        if piece.start > end:
            sizes.append(piece.start - end)
            params.append(None)
        sizes.append(piece.length)
        params.append(piece.param)
        end = piece.start + piece.length
    if end < length:
        sizes.append(length - end)
    return sizes, params
