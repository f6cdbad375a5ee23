"""What a step on whole matrices does with one engine's parameters: brings them to their owners and back, part by part."""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
import zlib
from typing import TYPE_CHECKING, Any

import torch

from ...comm.consensus import agree
from ...errors import ShardError
from ...numerics.stochastic_rounding import widen
from ...shard_tensor.tensor import ShardTensor
from ...shard_tensor.unsharded_param import set_own_grad
from ...unit.unit import Unit, unit_of
from ..checks import check_units, refuse_unreduced
from ..engines_of_optimizer import runtime_of
from ..registry import is_torchs, kind_of
from .exchange import Entry, Part, Spares
from .groups import OwnState, Working
from .state import give_owners, settle, stages_of

if TYPE_CHECKING:
    from ...runtime.runtime import Runtime
    from ...unit.flat_buffer import FlatBuffer

__all__ = ["EngineStep"]


class EngineStep:
    """The steps of one optimizer on one engine's parameters."""

    def __init__(self, optimizer: Any, runtime: Runtime, last: bool) -> None:
        """`last`: no other engine's part of the step follows, so parameters that no engine has are stepped here."""
        self._optimizer: Any = weakref.ref(optimizer)
        self.runtime, self._last = runtime, last
        self._name = type(optimizer).__name__
        self.other_way = functools.partial(_other_way, self._name, runtime.collectives.world_rank)
        self._groups: list[list[Any]] = []
        self._order = 0  # a hash of the names in all groups
        self._params: list[ShardTensor] = []  # those that are the engine's, each once
        self._present: list[bool] = []  # which of them have a gradient
        self._changed = False  # state is not as the last step has left it, on some rank
        self._units: list[Unit] = []
        self._made: tuple[Any, ...] = ()  # what the parts were made for
        self._parts: list[list[tuple[Part, list[Any]]]] = []
        # State as the last step has left it, by position in `_params`; None: unknown, because it was loaded since, say.
        self._entries: dict[int, Any] | None = {}
        self._state = OwnState({})
        self.working: list[Working] = []
        self._spares = Spares(runtime.collectives.device)
        self._at = -1  # the group that is worked on
        self.left_at: int | None = None  # the group in which the loop was left
        self._said: list[tuple[int, torch.Tensor]] = []  # by rank, whether it left its step
        self._error: Exception | None = None
        # Values that have gone back, with their versions: an empty tensor has the same version counter, and outlives the memory.
        self._given: list[tuple[torch.Tensor, int]] = []
        # What the step has done to gradients, by id of the user's parameters.
        self._cleared: set[int] = set()
        self._edited: set[int] = set()
        # The ranks tell each other what a step has done besides updating; torch's own do nothing else.
        self._tells = not is_torchs(type(optimizer))
        # A class that is of no kind itself calls a step of torch's: see `_refuse_state_of_its_own`.
        self._within = kind_of(type(optimizer)) is None

    # -- before the arithmetic ------------------------------------------------------------------------------------
    def check(self) -> None:
        """Make sure that all ranks can take this step, and take the same one. Collective; nothing is changed."""
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
                self._refuse_state_of_its_own(optimizer.state)
            except Exception as problem:  # the other ranks must hear of it
                error = problem
            agree(self.runtime, what, None, error)
            self._changed = self._compare(what, present, not self._is_as_left(optimizer.state))
            self._present = present

    def begin(self, state: OwnState) -> None:
        """Bring state to the owners, and divide the step into parts, which find it in `state`. Collective."""
        optimizer, what, present = self._optimizer(), f"{self._name}.step()", self._present
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if self._changed:
                settle(self.runtime, optimizer, self._params, what)
                self._widen(optimizer.state)
            owners = give_owners(
                self.runtime, optimizer, [p for p, has in zip(self._params, present, strict=True) if has]
            )
            made = (tuple(present), tuple(map(owners.get, (p._spec.name for p in self._params))))
            if made != self._made:
                self._arrange(optimizer, present, owners)
                self._made = made
            self._state, self.working = state, []
            for group, parts in zip(optimizer.param_groups, self._parts, strict=True):
                rest = [p for p in group["params"] if runtime_of(p) is None] if self._last else []
                for n, (part, params) in enumerate(parts):
                    last = n + 1 == len(parts)
                    self.working.append(Working(group, part, params, rest if last else [], self.other_way))
            for flat in {id(flat): flat for flat, _ in map(_place, self._params)}.values():
                if flat.rounding is not None:
                    flat.rounding.begin()
        self.left_at = None
        self._forget_notes()

    def _widen(self, state: Any) -> None:
        """Bring to fp32 what steps in bf16 have left behind, where steps are rounded stochastically."""
        for p in self._params:
            if _place(p)[0].rounding is not None:
                widen(state.get(p), lambda value, local: ShardTensor._wrap(local, value._spec))

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
                if runtime_of(p) is not self.runtime:
                    continue
                unit: Any = unit_of(p)
                if p._spec.part is not None:
                    raise ShardError(
                        f"rank {self.runtime.collectives.world_rank}: {self._name}.step() works on whole matrices, and "
                        f"{p._spec.name} is cut by tensor parallelism, so that no rank gathers it. Give it to an optimizer that "
                        "steps element by element (AdamW), or leave it out of the parallelize plan. Nothing was changed."
                    )
                params[id(p)], units[unit.index] = p, unit
        self._groups = [list(group["params"]) for group in groups]
        names = [[p._spec.name if isinstance(p, ShardTensor) else "" for p in held] for held in self._groups]
        self._order = zlib.crc32(repr(names).encode())
        self._params, self._units = list(params.values()), list(units.values())
        self._made, self._entries = (), None

    def _is_as_left(self, state: Any) -> bool:
        found = {i: state[p] for i, p in enumerate(self._params) if p in state}
        return (
            self._entries is not None
            and found.keys() == self._entries.keys()
            and all(map(operator.is_, found.values(), self._entries.values()))
            and not any(isinstance(v, ShardTensor) for own in found.values() if type(own) is dict for v in own.values())
        )

    def _refuse_state_of_its_own(self, state: Any) -> None:
        """Refuse a subclass of torch's class that keeps entries of its own, on all ranks, beside those of the base class, which
        only the owners keep."""
        if not self._within or self._entries is None or self.runtime.collectives.size == 1:
            return
        owners, rank = self.runtime.owners.of(self._optimizer()), self.runtime.collectives.rank
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
        """Return True if state has changed on any rank; all must be about to do the same. Collective.

        Raises:
            DivergenceError: on all ranks, before anything has changed.
        """
        c, operations = self.runtime.collectives, self.runtime.operations
        if c.world == 1 or operations is None:
            return changed
        absent = [p._spec.name for p, has in zip(self._params, present, strict=True) if not has]
        text = f"steps {self._name} over {len(present)} parameters"
        if absent:
            few = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
            text += f", {len(absent)} of them without a gradient: {few}"
        owners = self.runtime.owners.of(self._optimizer())
        owned = [owners.get(p._spec.name, -1) for p in self._params]
        key = zlib.crc32(repr((text, owned)).encode() + bytes(present), self._order)
        operations.note(key, f"{text} (their order and owners: {key:08x})")
        answer = operations.check(what, torch.tensor([changed], dtype=torch.uint8, device="cpu"))
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
            flat, _ = _place(p)
            entries.append(Entry(p, flat, owners[p._spec.name]))
        names = list(dict.fromkeys(repr(p._unit_ref().name) for p in params))
        some = f"unit {names[0]}" if len(names) == 1 else f"units {names[0]} to {names[-1]}" if names else "no unit"
        return Part(entries, self.runtime.collectives, self._spares, f"{self._name}.step() on {some}")

    # -- for the optimizer ----------------------------------------------------------------------------------------
    def come_to(self, number: int) -> None:
        """Bring in a group's matrices, and start with those of the next."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if number == 0:
                self.working[0].part.send()
            self._at = number
            work = self.working[number]
            values = work.part.build()
            if number + 1 < len(self.working):
                # Not before this part is built: its messages' memory is what the next ones take.
                self.working[number + 1].part.send()
            work.enter({id(entry.param): value for entry, value in zip(work.part.owned, values, strict=True)})
            for entry, value in zip(work.part.owned, values, strict=True):
                self._state.show(value, entry.param)

    def go_on_from(self, number: int) -> None:
        """Send the new values of a group back."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            work = self.working[number]
            work.go_out()
            self._state.hide()
            for made in work.part.wholes:
                made.settle()
            self._note_gradients(work.part)
            for made in work.part.wholes:
                if made.entry.moves:  # what is written to it later is lost
                    counter = made.value.detach()
                    counter.data = torch.empty(0, dtype=counter.dtype, device=counter.device)
                    self._given.append((counter, counter._version))
            if number:
                self._collect(number - 1)  # whose messages' memory the reply takes
            work.part.reply(self.left_at is not None)
            work.write_back()

    def leave(self, number: int) -> None:
        """Take part in the exchanges that remain, without stepping: the optimizer has left its loop in this group, -1 for before
        the first, with an exception perhaps. Never raises: that would hide it."""
        self.left_at = number
        try:
            for following in range(max(number, 0), len(self.working)):
                if following > number:
                    self.come_to(following)
                self.go_on_from(following)
            self.finish()
        except Exception as error:
            self._error = error
        self.ignore()

    def ignore(self) -> None:
        """Ignore what the others say: it is no news to a rank that has left."""
        self._said = []

    def raise_what_leaving_met(self) -> None:
        """Raise what the exchanges of a step that was left have met."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def forget(self) -> None:
        """Let go of all that was kept: state has been loaded, or an engine is closed."""
        self._made, self._entries = (), None
        self._groups, self._params, self._units, self._parts = [], [], [], []
        self._state = OwnState({})
        self._forget_notes()

    def _forget_notes(self) -> None:
        """Let go of what a step that has failed has left."""
        self._cleared, self._edited, self._given = set(), set(), []

    def pause(self, passed: bool) -> None:
        """Give the user what the step has done so far; `passed`: it has gone through all groups."""
        for work in self.working:
            work.write_back()
        wrong = self._other_ways()
        if self._tells and passed:
            wrong = self._tell(wrong)
        if wrong:
            raise self.other_way(wrong)
        self._give_gradients()

    # -- after it -------------------------------------------------------------------------------------------------
    def _collect(self, number: int) -> None:
        part = self.working[number].part
        self._said += part.collect().items()
        stepped = [entry.param for entry in part.entries]
        if stepped:
            # Autograd's view of them: a graph that has saved one must not be run any more.
            torch.autograd.graph.increment_version(stepped)

    def finish(self) -> None:
        """Bring in the last part's values."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._collect(len(self.working) - 1)
            self._spares.drop()
            self._at = -1
            state = self._optimizer().state
            self._entries = {i: state[p] for i, p in enumerate(self._params) if p in state}

    def hear_at_once(self) -> None:
        """Raise if a rank has left its step, where the answer is here."""
        # On a GPU the host would wait for the whole step.
        if self.runtime.collectives.device.type == "cpu" or self._tells:
            self._hear()

    def _hear(self) -> None:
        """Raise if a rank has left its step."""
        said, self._said = self._said, []
        ranks = sorted({rank for rank, left in said if left.item()})
        if ranks and self.left_at is None:
            raise ShardError(
                f"rank {self.runtime.collectives.world_rank}: {self._name}.step() ended early on rank(s) "
                f"{', '.join(map(str, ranks))}, see the error there. Parameters that they own may be as before the step, "
                "the others are stepped; go on from a checkpoint."
            )

    def _abandon(self) -> None:
        """End a step that has failed within an exchange: nothing may still be on its way when the next one begins."""
        under_way = [exchange for work in self.working for exchange in work.part.under_way()]
        if self._at < 0 and not under_way:
            return
        self._at = -1
        for exchange in under_way:
            with contextlib.suppress(ShardError):
                exchange.finish()
        self.working, self._entries = [], None
        self._spares.drop()

    # -- what the step has done to gradients ------------------------------------------------------------------------
    def _note_gradients(self, part: Part) -> None:
        for whole in part.wholes:
            if whole.value.grad is None:
                self._cleared.add(id(whole.entry.param))
            elif whole.settle_gradient():
                self._edited.add(id(whole.entry.param))

    def _tell(self, wrong: str) -> str:
        """Bring together what each rank has found in the parameters that it owns. Returns what was wrong, "" for nothing."""
        if self.runtime.collectives.size == 1:
            return wrong
        told = [2 if id(p) in self._cleared else int(id(p) in self._edited) for p in self._params]
        what, operations = f"the end of {self._name}.step()", self.runtime.operations
        assert operations is not None
        operations.note(zlib.crc32(what.encode()), what)
        answer = operations.check(what, torch.tensor([*told, _WRONG.index(wrong)], dtype=torch.uint8, device="cpu"))
        assert answer is not None
        *most, worst = answer.tolist()
        self._cleared = {id(p) for p, said in zip(self._params, most, strict=True) if said == 2}
        self._edited = {id(p) for p, said in zip(self._params, most, strict=True) if said == 1}
        return _WRONG[worst]

    def _give_gradients(self) -> None:
        """Do to the user's gradients what the owners' steps have done to theirs."""
        cleared, self._cleared = self._cleared, set()
        edited, self._edited = self._edited, set()
        with torch._C.DisableTorchFunctionSubclass():
            for p in self._params if cleared or edited else ():
                if id(p) in cleared:
                    set_own_grad(p, None)
                elif id(p) in edited:
                    # Sent back they would cost a third more bytes, for what is cleared next nearly always.
                    flat, index = _place(p)
                    flat.gradients.outdate(index, self._name)

    # -- ways of stepping that would change nothing ---------------------------------------------------------------
    def _other_ways(self) -> str:
        """Return how the step has worked on parameters outside its loop over the groups, when they were on their way, or ""."""
        changed = any(counter._version != version for counter, version in self._given)
        self._given = []
        if self.left_at is not None and any(work.part.entries for work in self.working[self.left_at + 1 :]):
            self.left_at = None
            return _WRONG[1]
        return _WRONG[2] if changed else ""


_WRONG = (
    "",
    "left its loop over the groups before the last",
    "changed parameters after it had gone on to the next group",
)


def _other_way(name: str, rank: int, what: str) -> ShardError:
    return ShardError(
        f"rank {rank}: {name}.step() {what}. An optimizer of kind 'matrix' has whole parameters in the body of `for group in "
        "self.param_groups:` only, and must update a group's parameters there. What it does elsewhere is lost, so go on from a "
        "checkpoint."
    )


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
            "step on whole matrices needs the same. Nothing was changed."
        )
    return True
