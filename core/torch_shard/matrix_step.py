"""The steps of optimizers that need whole matrices: each parameter is updated by the rank that owns it.

Gradients are averaged and cut already, as for any other optimizer. In a step each rank sends the slices of parameters and
gradients to their owners, steps on what it owns, and sends new values back (:mod:`.matrix_parts`). That goes part by part:
while one is worked on, the next one's slices come in and the last one's values go out, so that only two or three parts are
whole at a time. State is the optimizer's own: whole tensors, at the owner only.

The optimizer goes through one group for each part. Each begins with the options of the user's group, so that a ``step`` that
counts in them (``group["k"] += 1``) counts once, however many parts there are.

An exception in the arithmetic of one rank (a matrix without a decomposition, say) must not leave the others waiting. That
rank takes part in the exchanges that remain, without stepping, and says so in them: at the end of the step the others raise
too. Asking all ranks before each part goes back would cost a message and a wait for each.

Sources: Muon with matrices at their owners, arXiv 2502.16982; DION's reference code, arXiv 2504.05295; Distributed Shampoo,
arXiv 2309.06497.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import weakref
import zlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from .errors import ShardError
from .matrix_parts import Entry, Part, Spares
from .owned_state import give_owners, settle, stages_of
from .shard_tensor import ShardTensor
from .step_checks import check_units, refuse_unreduced, several_engines
from .unit import Unit
from .whole import agree

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["MatrixStep"]


class _State(MutableMapping[Any, Any]):
    """The optimizer's own state, under what the step works on in place of the user's parameters."""

    def __init__(self, own: Any) -> None:
        self.own = own
        self._shown: dict[int, tuple[Any, Any]] = {}  # by id of a whole tensor: it, and the user's parameter

    def show(self, whole: Any, param: Any) -> None:
        self._shown[id(whole)] = whole, param

    def hide(self) -> None:
        self._shown = {}

    def _key(self, key: Any) -> Any:
        return self._shown[id(key)][1] if id(key) in self._shown else key

    def __getitem__(self, key: Any) -> Any:
        return self.own[self._key(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.own[self._key(key)] = value

    def __delitem__(self, key: Any) -> None:
        del self.own[self._key(key)]

    def __contains__(self, key: object) -> bool:
        return self._key(key) in self.own

    def get(self, key: Any, default: Any = None) -> Any:  # which makes no entry in a defaultdict
        return self.own.get(self._key(key), default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return self.own.setdefault(self._key(key), default)

    def __iter__(self) -> Iterator[Any]:
        wholes = {id(param): whole for whole, param in self._shown.values()}
        return (wholes.get(id(key), key) for key in list(self.own))

    def __len__(self) -> int:
        return len(self.own)


class _Outside(list[Any]):
    """A group's parameters outside the loop's body, where there are none."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        super().__init__()
        self._error = error

    def _refuse(self, *_: Any) -> Any:
        raise self._error()

    __iter__ = __len__ = __getitem__ = __contains__ = _refuse


class _Working:
    """One group of a step: what one of the user's groups has in one part."""

    def __init__(
        self, group: dict[str, Any], part: Part, params: list[Any], rest: list[Any], outside: _Outside
    ) -> None:
        self.group, self.part, self.rest, self.outside = group, part, rest, outside
        self.listed = params  # the user's, in the user's order; more than once where they are so there
        # Copies, so that what a step changes in place (`group["k"] += 1` of a tensor) starts from the same for each part.
        self.given = {key: _own(value) for key, value in group.items() if key != "params"}
        self.options = {**self.given, "params": outside}
        self._before = {key: _own(value) for key, value in self.given.items() if _is_mutable(value)}

    def write_back(self) -> None:
        """Options that the optimizer has set or changed."""
        for key, value in self.options.items():
            if key == "params":
                continue
            if self.given.get(key, self) is not value:
                self.group[key] = self.given[key] = value
            elif key in self._before and not _equal(value, self._before[key]):
                if isinstance(value, torch.Tensor):
                    self.group[key].copy_(value)
                else:
                    self.group[key] = value


def _is_mutable(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, list, dict, set))


def _own(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.copy(value) if _is_mutable(value) else value


def _equal(some: Any, others: Any) -> bool:
    return torch.equal(some, others) if isinstance(some, torch.Tensor) else bool(some == others)


class MatrixStep:
    """The steps of one optimizer; see :class:`~torch_shard.stand_in.Work`."""

    def __init__(self, optimizer: Any, runtime: Runtime) -> None:
        self._optimizer: Any = weakref.ref(optimizer)  # by which this is found
        self.runtime = runtime
        self._name = type(optimizer).__name__
        self._groups: list[list[Any]] = []
        self._order = 0  # a hash of the names in all groups
        self._params: list[ShardTensor] = []  # those that are the engine's, each once
        self._units: list[Unit] = []
        self._made: tuple[Any, ...] = ()  # what the parts were made for
        self._parts: list[list[tuple[Part, list[Any]]]] = []
        self._entries: dict[int, Any] = {}  # state as the last step has left it, by position in `_params`
        self.state = _State({})
        self._working: list[_Working] = []
        self._spares = Spares(runtime.collectives.device)
        self._at = -1  # the group that is worked on; -1: the parameters are as the last pass has left them
        self._left = False
        self._left_at = -1
        self._said: list[tuple[int, torch.Tensor]] = []  # by rank, whether it left its step
        self._error: Exception | None = None
        # A part's values as they were sent back, until it has been seen that this optimizer changes them before that.
        self._unchanged: list[tuple[torch.Tensor, torch.Tensor]] | None = []
        self._changes = False

    # -- before the arithmetic ------------------------------------------------------------------------------------
    def open(self) -> None:
        self._abandon()
        optimizer, what = self._optimizer(), f"{self._name}.step()"
        error: Exception | None = None
        present: list[bool] = []
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            try:
                self._hear()
                refuse_unreduced(optimizer, self.runtime)
                self._look(optimizer)
                check_units(optimizer, self._units)
                present = [_has_gradient(p) for p in self._params]
            except Exception as problem:  # the other ranks must hear of it
                error = problem
            agree(self.runtime, what, None, error)
            if self._compare(what, present, not self._is_as_left(optimizer.state)):
                settle(self.runtime, optimizer, self._params, what)
            owners = give_owners(
                self.runtime, optimizer, [p for p, has in zip(self._params, present, strict=True) if has]
            )
            made = (tuple(present), tuple(map(owners.get, (p._spec.name for p in self._params))))
            if made != self._made:
                self._arrange(optimizer, present, owners)
                self._made = made
            self.state = _State(optimizer.state)
            self._working = []
            for group, parts in zip(optimizer.param_groups, self._parts, strict=True):
                rest = [p for p in group["params"] if not self._is_ours(p)]
                for n, (part, params) in enumerate(parts):
                    last = n + 1 == len(parts)
                    outside = _Outside(lambda: self._other_way("asked for parameters outside its loop over the groups"))
                    self._working.append(_Working(group, part, params, rest if last else [], outside))
        self._left, self._left_at = False, -1
        self._unchanged = None if self._changes else []

    def _is_ours(self, p: Any) -> bool:
        unit = p._unit_ref() if type(p) is ShardTensor and p._unit_ref is not None else None
        return unit is not None and unit.runtime is self.runtime

    def _look(self, optimizer: Any) -> None:
        """Take the groups as they are."""
        groups = optimizer.param_groups
        if len(groups) == len(self._groups) and all(
            len(held) == len(group["params"]) and all(map(operator.is_, held, group["params"]))
            for held, group in zip(self._groups, groups, strict=True)
        ):
            return
        params: dict[int, ShardTensor] = {}
        units: dict[int, Unit] = {}
        for group in groups:
            for p in group["params"]:
                unit = p._unit_ref() if type(p) is ShardTensor and p._unit_ref is not None else None
                if unit is None:
                    continue
                if unit.runtime is not self.runtime:
                    raise several_engines(optimizer, p, self.runtime)
                params[id(p)], units[unit.index] = p, unit
        self._groups = [list(group["params"]) for group in groups]
        names = [[p._spec.name if type(p) is ShardTensor else "" for p in held] for held in self._groups]
        self._order = zlib.crc32(repr(names).encode())
        self._params, self._units = list(params.values()), list(units.values())
        self._made, self._entries = (), {-1: None}  # unlike any state

    def _is_as_left(self, state: Any) -> bool:
        found = {i: state[p] for i, p in enumerate(self._params) if p in state}
        return (
            found.keys() == self._entries.keys()
            and all(map(operator.is_, found.values(), self._entries.values()))
            and not any(type(v) is ShardTensor for own in found.values() if type(own) is dict for v in own.values())
        )

    def _compare(self, what: str, present: list[bool], changed: bool) -> bool:
        """Whether all ranks are about to do the same, and whether state has changed on any. Collective.

        Raises:
            DivergenceError: on all ranks, before anything has changed.
        """
        c, agreement = self.runtime.collectives, self.runtime.agreement
        if c.world == 1 or agreement is None:
            return changed
        absent = [p._spec.name for p, has in zip(self._params, present, strict=True) if not has]
        text = f"steps {self._name} over {len(present)} parameters"
        if absent:
            few = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
            text += f", {len(absent)} of them without a gradient: {few}"
        owners = self.runtime.owners.of(self._optimizer())
        owned = [owners.get(p._spec.name, -1) for p in self._params]
        key = zlib.crc32(repr((text, owned)).encode() + bytes(present), self._order)
        agreement.note(key, f"{text} (their order and owners: {key:08x})")
        answer = agreement.check(what, torch.tensor([changed], dtype=torch.uint8, device="cpu"))
        assert answer is not None
        return bool(answer[0])

    def _arrange(self, optimizer: Any, present: list[bool], owners: dict[str, int]) -> None:
        """Divide the step into parts."""
        steps = {id(p) for p, has in zip(self._params, present, strict=True) if has}
        c = self.runtime.collectives
        self._parts = []
        for group in optimizer.param_groups:
            params = [p for p in group["params"] if id(p) in steps]
            stages = stages_of(params, c.size) if c.size > 1 else {}
            runs: dict[int, list[Any]] = {}
            for p in params:
                runs.setdefault(stages.get(id(p), 0), []).append(p)
            found = [params for _, params in sorted(runs.items())] or [[]]
            self._parts.append([(self._part(params, owners), params) for params in found])

    def _part(self, params: list[Any], owners: dict[str, int]) -> Part:
        entries = []
        for p in {id(p): p for p in params}.values():
            flat, _ = p._unit_ref().find(p)
            entries.append(Entry(p, flat, owners[p._spec.name]))
        names = list(dict.fromkeys(repr(p._unit_ref().name) for p in params))
        some = f"unit {names[0]}" if len(names) == 1 else f"units {names[0]} to {names[-1]}" if names else "no unit"
        return Part(entries, self.runtime.collectives, self._spares, f"{self._name}.step() on {some}")

    # -- for the optimizer ----------------------------------------------------------------------------------------
    def groups(self) -> list[dict[str, Any]]:
        return [work.options for work in self._working]

    def before(self, number: int) -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if number == 0:
                self._left, self._left_at = False, -1
                self._working[0].part.send()
            if number + 1 < len(self._working):
                self._working[number + 1].part.send()
            self._at = number
            work = self._working[number]
            values = work.part.build()
            wholes = {id(entry.param): value for entry, value in zip(work.part.owned, values, strict=True)}
            work.options["params"] = [wholes[id(p)] for p in work.listed if id(p) in wholes] + work.rest
            for entry, value in zip(work.part.owned, values, strict=True):
                self.state.show(value, entry.param)

    def after(self, number: int) -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            work = self._working[number]
            work.options["params"] = work.outside
            self.state.hide()
            for made in work.part.wholes:
                made.settle()
            self._note_changes(work.part)
            work.part.reply(self._left)
            if number:
                self._collect(number - 1)
            work.write_back()

    def leave(self, number: int) -> None:
        """The optimizer has left its loop early, with an exception perhaps. Never raises: that would hide it."""
        self._left, self._left_at = True, number
        try:
            for following in range(number, len(self._working)):
                if following > number:
                    self.before(following)
                self.after(following)
            self._finish()
        except Exception as error:
            self._error = error
        self._said = []  # what the others say is no news to a rank that has left

    def through(self) -> None:
        self.close()

    def forget(self) -> None:
        """State has been loaded: nothing of what there was is kept."""
        self._made, self._entries = (), {-1: None}
        self.state = _State({})

    def close(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._at == len(self._working) - 1 >= 0:
            self._finish()
            self._hear_at_once()
        for work in self._working:
            work.write_back()
        self._refuse_other_ways()

    # -- after it -------------------------------------------------------------------------------------------------
    def _collect(self, number: int) -> None:
        part = self._working[number].part
        self._said += part.collect().items()
        stepped = [entry.param for entry in part.entries]
        if stepped:
            # Autograd's view of them: a graph that has saved one must not be run any more.
            torch.autograd.graph.increment_version(stepped)

    def _finish(self) -> None:
        """Bring in the last part's values."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._collect(len(self._working) - 1)
            self._spares.drop()
            self._at = -1
            state = self._optimizer().state
            self._entries = {i: state[p] for i, p in enumerate(self._params) if p in state}

    def _hear_at_once(self) -> None:
        # On a GPU the host would wait for the whole step.
        if self.runtime.collectives.device.type == "cpu":
            self._hear()

    def _hear(self) -> None:
        """Has a rank left its step?"""
        said, self._said = self._said, []
        ranks = sorted({rank for rank, left in said if left.item()})
        if ranks and not self._left:
            raise ShardError(
                f"rank {self.runtime.collectives.world_rank}: {self._name}.step() ended early on rank(s) "
                f"{', '.join(map(str, ranks))}, see the error there. Parameters that they own may be as before the step, "
                "the others are stepped; go on from a checkpoint."
            )

    def _abandon(self) -> None:
        """A step that has failed within an exchange: nothing may still be on its way when the next one begins."""
        if self._at < 0:
            return
        self._at = -1
        for work in self._working:
            for exchange in work.part.under_way():
                with contextlib.suppress(ShardError):
                    exchange.finish()
        self._working = []
        self._entries = {-1: None}
        self._spares.drop()

    # -- ways of stepping that would change nothing ---------------------------------------------------------------
    def _note_changes(self, part: Part) -> None:
        """Keep one part's values, until some were seen to change between `before` and `after`."""
        if self._changes or self._unchanged is None:
            return
        rank = self.runtime.collectives.rank
        moving = [whole for whole in part.wholes if whole.entry.moves]
        for whole in moving:
            start, stop = whole.entry.mine
            here = whole.memory[start:stop].view(torch.uint8)
            if whole.entry.length(rank) and not torch.equal(here, whole.entry.param._local.view(torch.uint8)):
                self._changes, self._unchanged = True, None
                return
        if not self._unchanged:
            self._unchanged = [(whole.memory, whole.memory.clone()) for whole in moving]

    def _refuse_other_ways(self) -> None:
        """Raise where a step has worked on parameters outside its loop over the groups, when they were on their way."""
        kept, self._unchanged = self._unchanged, None
        if self._left and any(work.part.entries for work in self._working[self._left_at + 1 :]):
            self._left = False
            raise self._other_way("left its loop over the groups before the last")
        for value, sent in kept or ():
            if not torch.equal(value.view(torch.uint8), sent.view(torch.uint8)):
                raise self._other_way("changed parameters after it had gone on to the next group")
        if self._at < 0:
            self._unchanged = kept  # the step itself may not have ended yet

    def _other_way(self, what: str) -> ShardError:
        return ShardError(
            f"rank {self.runtime.collectives.world_rank}: {self._name}.step() {what}. An optimizer of kind 'matrix' has whole "
            "parameters in the body of `for group in self.param_groups:` only, and must update a group's parameters there. "
            "What it does elsewhere is lost, so go on from a checkpoint."
        )


def _has_gradient(param: ShardTensor) -> bool:
    grad = param.grad
    if grad is None:
        return False
    if grad._local.dtype != param._local.dtype:
        spec = param._spec
        raise ShardError(
            f"rank {spec.rank}: the gradient of {spec.name} is {grad._local.dtype}, the parameter {param._local.dtype}; a step "
            "on whole matrices needs the same. Nothing was changed."
        )
    return True
