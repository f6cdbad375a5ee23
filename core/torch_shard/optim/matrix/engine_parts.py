"""The parts of a step on full matrices that have one engine's parameters."""

from __future__ import annotations

import operator
import weakref
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...comm.consensus import agree
from ...errors import ShardError
from ...shard_tensor.tensor import ShardTensor
from ...unit.unit import Unit, unit_of
from ..checks import check_units, refuse_unreduced, widen_state
from ..engines_of_optimizer import open_runtime_of, same_params
from ..registry import is_declared, kind_of
from .exchange import OwnedParam, Part, Spares
from .groups import PartGroup
from .state import give_owners, move_to_owners, stages_of

if TYPE_CHECKING:
    from ...runtime.runtime import Runtime
    from ...unit.flat_buffer import FlatBuffer


class EngineParts:
    """The division of one optimizer's steps on one engine's parameters."""

    def __init__(self, optimizer: Any, runtime: Runtime, last: bool) -> None:
        """Divide the steps. If no other engine follows (`last`), these parts also step the parameters that no engine has."""
        self._optimizer: Any = weakref.ref(optimizer)
        self.runtime, self._last = runtime, last
        self._name = type(optimizer).__name__
        self._listed: list[list[Any]] = []  # the parameters of each of the user's groups
        self._order = 0  # a hash of the names in all groups
        self._params: list[ShardTensor] = []  # the engine's among them, each once
        self._present: list[bool] = []  # which of these have a gradient
        self._changed = False  # True if, on some rank, state is not as the last step has left it
        self._units: list[Unit] = []
        self._made: tuple[Any, ...] = ()  # what the parts were made for
        self._parts: list[list[tuple[Part, list[Any]]]] = []
        # State as the last step has left it, by position in `_params`; None where it has been loaded since, say.
        self._entries: dict[int, Any] | None = {}
        self._counts: set[str] = set()  # the options in which steps have counted on this rank
        self._spares = Spares(runtime.collectives.device)
        # True for an undeclared subclass, which calls a torch class's step by super(): see `_refuse_own_state`.
        self._within = kind_of(type(optimizer)) is None

    # -- before the arithmetic ------------------------------------------------------------------------------------
    def check(self, error: Exception | None) -> None:
        """Make sure that all ranks can take this step, and take the same one. Collective; nothing is changed.

        Args:
            error: the error with which the step has failed on this rank already.

        Raises:
            Exception: on all ranks.
        """
        optimizer, what = self._optimizer(), f"{self._name}.step()"
        present: list[bool] = []
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            try:
                refuse_unreduced(optimizer, self.runtime)
                self._take_groups(optimizer)
                check_units(optimizer, self._units)
                present = [_has_gradient(p) for p in self._params]
                self._refuse_own_state(optimizer.state)
            except Exception as problem:  # the other ranks must hear of it
                error = error or problem
            agree(self.runtime, what, None, error)
            self._changed = self._compare(what, present, not self._is_as_left(optimizer.state))
            self._present = present

    def begin(self, misuse: Callable[[str], Exception]) -> list[PartGroup]:
        """Move state to the owners, and return the groups of the step, which get `misuse`. Collective."""
        optimizer, what, present = self._optimizer(), f"{self._name}.step()", self._present
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if self._changed:
                move_to_owners(self.runtime, optimizer, self._params, what)
                for p in self._params:
                    if _place(p)[0].rounding is not None:
                        widen_state(optimizer.state.get(p))
            owners = give_owners(
                self.runtime, optimizer, [p for p, has in zip(self._params, present, strict=True) if has]
            )
            made = (tuple(present), tuple(map(owners.get, (p._spec.name for p in self._params))))
            if made != self._made:
                self._arrange(optimizer, present, owners)
                self._made = made
            groups: list[PartGroup] = []
            for group, parts in zip(optimizer.param_groups, self._parts, strict=True):
                rest = [p for p in group["params"] if open_runtime_of(p) is None] if self._last else []
                for n, (part, params) in enumerate(parts):
                    last = n + 1 == len(parts)
                    groups.append(PartGroup(group, part, params, rest if last else [], misuse, self._counts))
            for flat in {flat for flat, _ in map(_place, self._params)}:
                if flat.rounding is not None:
                    flat.rounding.begin()
        return groups

    def _take_groups(self, optimizer: Any) -> None:
        """Read the optimizer's groups, unless they are those of the last step."""
        groups = optimizer.param_groups
        if same_params(groups, self._listed):
            return
        params: dict[int, ShardTensor] = {}
        units: dict[int, Unit] = {}
        for group in groups:
            for p in group["params"]:
                if open_runtime_of(p) is not self.runtime:
                    continue
                unit: Any = unit_of(p)
                if p._spec.part is not None:
                    raise ShardError(
                        f"rank {self.runtime.collectives.world_rank}: {self._name}.step() works on full matrices, and "
                        f"{p._spec.name} is cut by tensor parallelism, so that no rank gathers it. Give it to an optimizer that "
                        "steps element by element (AdamW), or leave it out of the parallelize plan. Nothing was changed."
                    )
                params[id(p)], units[unit.index] = p, unit
        self._listed = [list(group["params"]) for group in groups]
        names = [[p._spec.name if isinstance(p, ShardTensor) else "" for p in held] for held in self._listed]
        self._order = zlib.crc32(repr(names).encode())
        self._params, self._units = list(params.values()), list(units.values())
        self._made, self._entries = (), None

    def _is_as_left(self, state: Any) -> bool:
        """Return True if the last step has left this state."""
        found = {i: state[p] for i, p in enumerate(self._params) if p in state}
        return (
            self._entries is not None
            and found.keys() == self._entries.keys()
            and all(map(operator.is_, found.values(), self._entries.values()))
            and not any(isinstance(v, ShardTensor) for own in found.values() if type(own) is dict for v in own.values())
        )

    def _refuse_own_state(self, state: Any) -> None:
        """Raise if a subclass of torch's class keeps entries of its own on all ranks.

        The entries of the base class are kept by the owners only.
        """
        if not self._within or self._entries is None:
            return
        owners, rank = self.runtime.owners.setdefault(self._optimizer(), {}), self.runtime.collectives.rank
        for i, p in enumerate(self._params):
            own = state.get(p)
            if own and i not in self._entries and owners.get(p._spec.name, rank) != rank:
                raise ShardError(
                    f"rank {self.runtime.collectives.world_rank}: {self._name} has put {', '.join(map(repr, own))} into the "
                    f"state of {p._spec.name}, which the step that it calls by super() keeps at the parameter's owner only. "
                    "Declare the class, so that all of its step runs there: "
                    f"torch_shard.optim.register({self._name}, kind='matrix'). What it has done to parameters since is wrong; "
                    "go on from a checkpoint."
                )

    def _compare(self, what: str, present: list[bool], changed: bool) -> bool:
        """Return True if state has changed on any rank. Collective.

        Raises:
            DivergenceError: on all ranks, before anything has changed: the ranks are about to take different steps.
        """
        c, operations = self.runtime.collectives, self.runtime.operations
        if c.world == 1:
            return changed
        absent = [p._spec.name for p, has in zip(self._params, present, strict=True) if not has]
        text = f"steps {self._name} over {len(present)} parameters"
        if absent:
            few = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
            text += f", {len(absent)} of them without a gradient: {few}"
        counts = [{key: group.get(key) for key in sorted(self._counts)} for group in self._optimizer().param_groups]
        if self._counts:
            text += f", whose groups have counted {counts} (it must count on ranks that own no parameter, too)"
        owners = self.runtime.owners.setdefault(self._optimizer(), {})
        owned = [owners.get(p._spec.name, -1) for p in self._params]
        key = zlib.crc32(repr((text, owned)).encode() + bytes(present), self._order)
        operations.note(key, f"{text} (their order and owners: {key:08x})")
        answer = operations.check(what, torch.tensor([changed], dtype=torch.uint8, device="cpu"))
        assert answer is not None
        return bool(answer[0])

    def _arrange(self, optimizer: Any, present: list[bool], owners: dict[str, int]) -> None:
        """Divide the step into parts."""
        stepped = {id(p) for p, has in zip(self._params, present, strict=True) if has}
        self._parts = []
        for group in optimizer.param_groups:
            params = [p for p in group["params"] if id(p) in stepped]
            stages = stages_of(params, self.runtime.collectives.size)
            by_stage: dict[int, list[Any]] = {}
            for p in params:
                by_stage.setdefault(stages[id(p)], []).append(p)
            found = [params for _, params in sorted(by_stage.items())] or [[]]
            self._parts.append([(self._part(params, owners), params) for params in found])

    def _part(self, params: list[Any], owners: dict[str, int]) -> Part:
        entries = [OwnedParam(p, _place(p)[0], owners[p._spec.name]) for p in {id(p): p for p in params}.values()]
        names = list(dict.fromkeys(repr(p._unit_ref().name) for p in params))
        some = f"unit {names[0]}" if len(names) == 1 else f"units {names[0]} to {names[-1]}" if names else "no unit"
        return Part(entries, self.runtime.collectives, self._spares, f"{self._name}.step() on {some}")

    # -- after the loop -------------------------------------------------------------------------------------------
    def end(self) -> None:
        """End a step, whose values have come back."""
        self._spares.drop()
        optimizer = self._optimizer()
        self._entries = {i: optimizer.state[p] for i, p in enumerate(self._params) if p in optimizer.state}
        if is_declared(type(optimizer)):
            # What such a class does to gradients (`p.grad.lerp_(...)`) only the owners know. To send that would cost a third
            # more bytes, for what is cleared next nearly always.
            for p, has in zip(self._params, self._present, strict=True):
                if has:
                    flat, index = _place(p)
                    flat.gradients.outdate(index, self._name)

    def abandon(self) -> None:
        """Drop what a step that has failed has left."""
        self._entries = None
        self._spares.drop()

    def forget(self) -> None:
        """Drop all that was kept: state has been loaded, or an engine is closed."""
        self._made, self._entries = (), None
        self._listed, self._params, self._units, self._parts = [], [], [], []
        self._present = []


def _place(param: Any) -> tuple[FlatBuffer, int]:
    found: tuple[FlatBuffer, int] = param._unit_ref().find(param)
    return found


def _has_gradient(param: ShardTensor) -> bool:
    grad = param.grad
    if grad is None:
        return False
    if grad._local.dtype != param._local.dtype:
        spec = param._spec
        raise ShardError(
            f"rank {spec.world_rank}: the gradient of {spec.name} is {grad._local.dtype}, the parameter {param._local.dtype}; a "
            "step on full matrices needs the same. Nothing was changed."
        )
    return True
