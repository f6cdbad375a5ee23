"""The order of gradient reductions in a backward, and how many run at a time.

Units are reduced in the reverse order of their first use in forward, which all ranks share. A unit whose gradients are
complete waits for the units before it. Units with a parameter that had no gradient on any rank in the backward before come
last, where they hold up no other unit. At the end of a backward the ranks compare what they have reduced, and reduce the
rest, including units of which a rank has no gradient. If all ranks had the same gradients in the backward before, and this rank
has them again, it publishes them without waiting for the comparison, whose result it takes before anybody reads them.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

import torch

from ..comm.gradient_reduction import Reduction
from ..errors import ShardError
from ..schedule.reduction_order import has_too_many, reduction_order
from ..unit.gradient_buffer import ARRIVED, EXPECTED

if TYPE_CHECKING:
    from ..comm.comm_hook import CommHook
    from ..unit.flat_buffer import FlatBuffer
    from ..unit.unit import Unit
    from .runtime import Runtime

# Seconds to wait for the oldest reduction where too many are in flight.
PAUSE = 0.2
# Seconds that a rank whose backward has failed waits for reductions within its replica, so that replicas stay in step. If the
# other ranks have failed as well, these reductions end at once.
_WAIT_WITHIN_REPLICA = 5.0
# After a pause that has timed out, this many backwards don't pause.
_NO_PAUSE_FOR = 100


class ReduceSchedule:
    """The gradient reductions of one engine."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.collectives = runtime, runtime.collectives
        self.hook: CommHook | None = None  # the user's function that reduces in place of the engine
        self.rounds: dict[int, int] = {}  # by the index of a unit, its reductions that were issued in this backward
        self.used: list[Unit] = []  # the units of the running backward, in the order of forward
        self._order: list[Unit] = []
        self._in_flight: list[tuple[Unit, FlatBuffer, Reduction]] = []
        self._no_pause = 0
        # Indices of units with a parameter of which no rank had a gradient in the last backward.
        self._incomplete: set[int] = set()
        # Where an optimizer steps in backward: reduced gradients that wait for its end, since backward may need their unit once
        # more. The others are published, and stepped with, as soon as they are reduced.
        self._postponed: dict[int, tuple[Unit, FlatBuffer]] = {}
        # By the id of a flat buffer, which gradients arrived on any rank; None until the ranks have agreed on that.
        self._agreed: dict[int, list[int]] | None = None
        self._answer: list[int] | None = None  # the votes of all ranks, where they have come in `flush`
        self._votes: list[int] | None = None  # this rank's votes in the last backward, if all ranks had the same
        # The gradients that this rank has published before it knows the other ranks' votes, by flat buffer, with the parameters'
        # states. Empty if it is about to publish some, and None once it knows the votes. See `Runtime.await_votes`.
        self._early: list[tuple[FlatBuffer, list[torch.Tensor], list[int]]] | None = None

    def begin(self, forward_order: Iterable[Unit]) -> None:
        """Begin a backward; `forward_order` has the units that forward has used, the latest last."""
        self.collectives.forget_ended()  # a failed backward may have left some
        self.rounds = dict.fromkeys((unit.index for unit in self.runtime.units), 0)
        self.used = [u for u in forward_order if any([f.gradients.expects_any for f in u.flats])]  # noqa: C419 (hot)
        self._order = reduction_order(self.used, self._incomplete)
        self._no_pause = max(0, self._no_pause - 1)
        expected = [f for u in self._order for f in u.flats if f.gradients.expects_any]
        self.collectives.expect([buffer for f in expected for buffer in f.gradients.buffers])

    def advance(self) -> None:
        """Reduce the next units in order, as far as their gradients are complete. Collective."""
        if self.collectives.in_one_order:
            return
        while self._order and not any([f.gradients.missing for f in self._order[0].flats]):  # noqa: C419 (hot)
            self._issue(self._order.pop(0))

    def _issue(self, unit: Unit, early: bool = False) -> None:
        """Start the reduction of `unit`, and collect finished ones.

        `early`: some of this rank's gradients may be missing, and the ranks have not agreed yet on who has one.
        """
        self.rounds[unit.index] += 1
        self.runtime.note_issued("reduce", unit)
        stepping, agreed = self.runtime.in_backward, self._agreed
        # After the last node no unit is needed any more. This is decided here, because the sum may be there at any time.
        postponed = stepping is not None and agreed is None and (stepping.postpones(unit) or early)
        for flat in unit.flats:
            # Once the ranks have agreed, a gradient counts that any rank has seen, also of a graph older than the last forward.
            if not flat.gradients.expects_any and (agreed is None or ARRIVED not in agreed[id(flat)]):
                continue
            if postponed:
                self._postponed[id(flat)] = unit, flat
            reduction = flat.gradients.start_reduction(unit.reduce_text)
            if reduction is not None:
                self._in_flight.append((unit, flat, reduction))
            elif stepping is not None:
                self._step(unit, flat)
        on_streams = self.collectives.reduce_stream is not None
        while self._in_flight:
            oldest = self._in_flight[0][2]
            few = not has_too_many(len(self._in_flight), on_streams)
            if few and on_streams:
                break  # the peak of GPU memory must not depend on timing
            if not oldest.done():
                if few or self._no_pause:
                    break
                oldest.wait_for_own_part()
                if not oldest.wait_at_most(PAUSE):
                    self._no_pause = _NO_PAUSE_FOR
                    break
            self._collect_oldest()

    def _collect_oldest(self) -> None:
        unit, flat, reduction = self._in_flight.pop(0)
        flat.gradients.collect(reduction)
        if self.runtime.in_backward is not None:
            self._step(unit, flat)

    def _step(self, unit: Unit, flat: FlatBuffer) -> None:
        """Publish reduced gradients and step with them, unless they are postponed."""
        if id(flat) in self._postponed:
            return
        # Before the end of backward only complete units are reduced, so that all ranks have what this one has.
        seen = flat.gradients.arrivals() if self._agreed is None else self._agreed[id(flat)]
        self._publish([(unit, flat)], {id(flat): seen})
        assert self.runtime.in_backward is not None
        self.runtime.in_backward.step(flat)

    def compare(self) -> None:
        """Agree with the other ranks on what is left at the end of backward, and start to reduce it. Collective.

        Every wait for a reduction in here has a limit.
        """
        runtime, hook, stepping = self.runtime, self.hook, self.runtime.in_backward
        if hook is not None:
            # A hook returns when its reduction has ended, which needs all ranks. So each rank calls it for all units before
            # they compare.
            while self._order:
                self._issue(self._order.pop(0), early=True)
        late = any(not self.rounds[u.index] and u.index not in self._incomplete for u in self._order)
        unneeded = runtime.schedule.passed - runtime.schedule.needed
        votes: list[int] = [late, hook is not None and hook.error is not None]
        for unit in runtime.units:
            unreduced = any([True in f.gradients.unreduced for f in unit.flats])  # noqa: C419 (hot)
            votes += [self.rounds[unit.index] + unreduced, unit.index not in unneeded]
            for flat in unit.flats:
                votes += flat.gradients.arrivals()
        if stepping is not None:
            votes += stepping.votes()
        payload, what = torch.tensor(votes, dtype=torch.uint8, device="cpu"), "the end of backward"
        if votes == self._votes and hook is None and stepping is None and self._may_publish_early():
            self._early = []
            runtime.awaits_votes = True
            runtime.operations.begin(what, payload, functools.partial(_compare_late, weakref.ref(self), votes))
            self._follow(votes)
            return
        message = runtime.operations.check(what, payload)
        assert message is not None
        answer = message.tolist()
        self._votes = votes if answer == votes else None
        self._follow(answer)

    def _may_publish_early(self) -> bool:
        # Nothing may read the gradients before the votes are known: no hook of the user's, and no other engine.
        if self.collectives.world == 1 or not self.runtime.engine_order.has_one:
            return False
        return not self._order and not any(unit.post_hooks for unit in self.runtime.units)

    def _follow(self, votes: list[int]) -> None:
        """Do what the ranks have agreed on; `votes` are the largest of any rank."""
        runtime, hook, stepping = self.runtime, self.hook, self.runtime.in_backward
        answer = iter(votes)
        if not next(answer):
            self._no_pause = 0  # another rank was only slow
        hook_failed = bool(next(answer))
        rounds: dict[int, int] = {}
        agreed: dict[int, list[int]] = {}
        for unit in runtime.units:
            rounds[unit.index] = next(answer)
            if not next(answer):  # no rank needs the unit in backward any more: learn the order anew
                runtime.schedule.order.forget()
            for flat in unit.flats:
                agreed[id(flat)] = list(islice(answer, len(flat.params)))
        if hook is not None:
            hook.raise_together(runtime, hook_failed)
        if stepping is not None:
            stepping.check_votes(list(answer))
        for unit in self.used:
            if any([EXPECTED in agreed[id(flat)] for flat in unit.flats]):  # noqa: C419 (hot)
                self._incomplete.add(unit.index)
            else:
                self._incomplete.discard(unit.index)
        self._agreed = agreed
        for unit in self._order:  # first the reductions that other ranks have issued before they came here
            if self.rounds[unit.index] < min(1, rounds[unit.index]):
                self._issue(unit)
        while left := [u for u in reversed(runtime.units) if self.rounds[u.index] < rounds[u.index]]:
            for unit in left:
                self._issue(unit)

    def compare_late(self, votes: list[int], answer: torch.Tensor | None) -> None:
        """Take the ranks' answer after this rank has followed its own `votes`, and reduce and publish further gradients.

        The answer is None if the ranks differ, or one is gone. Then the published gradients are taken back.
        """
        self.runtime.awaits_votes = False
        early, self._early = self._early, None
        if early is None:  # the backward has failed
            return
        if answer is None:
            self._votes = None
            for flat, _, published in early:
                flat.gradients.take_back(published)
        elif answer.tolist() != votes:
            self._votes = None
            if not early:  # the answer has come inside `flush`, which goes on with it
                self._answer = answer.tolist()
                return
            with torch.no_grad():
                self._follow(answer.tolist())
                assert self._agreed is not None
                for flat, results, published in early:
                    flat.gradients.publish_also(results, published, self._agreed[id(flat)])
                self.flush()

    def flush(self) -> None:
        """Wait for all reductions after :meth:`compare`, publish every `.grad`, and run users' hooks on them."""
        assert self._agreed is not None
        while self._in_flight or self._answer is not None:
            while self._in_flight:
                self._collect_oldest()
            if self._answer is not None:
                answer, self._answer = self._answer, None
                self._follow(answer)
        postponed, self._postponed = self._postponed, {}
        for unit, flat in postponed.values():
            self._step(unit, flat)
        if self.runtime.in_backward is None:
            flats = [(unit, flat) for unit in self.runtime.units for flat in unit.flats]
            if self._early is not None:
                self._early = [(flat, flat.gradients.results, self._agreed[id(flat)]) for _, flat in flats]
            self._publish(flats, self._agreed)
        self._agreed = None

    @staticmethod
    def _publish(flats: list[tuple[Unit, FlatBuffer]], agreed: dict[int, list[int]]) -> None:
        """Make reduced gradients the parameters' `.grad`, and run the users' hooks that wait for that."""
        called = []
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for unit, flat in flats:
                touched = flat.gradients.publish(agreed[id(flat)])
                if unit.post_hooks:
                    called += [(unit, flat, i) for i in touched]
        for unit, flat, i in called:
            for hook in list(unit.post_hooks.get(flat.layout.slots[i].name, {}).values()):
                hook(flat.params[i])

    def abandon(self) -> None:
        """Drop all reductions after a backward that has failed.

        Another rank may never come to them, so this does not wait for long; the failure that is being handled says why.
        """
        c = self.collectives
        # Ranks that are out of step already send nothing more.
        replicas = c.replica_channel is not None and not c.replica_channel.groups.broken
        deadline = time.monotonic() + min(
            _WAIT_WITHIN_REPLICA if replicas else PAUSE * len(self._in_flight), c.watchdog.timeout
        )
        for *_, reduction in self._in_flight:
            left = max(0.0, deadline - time.monotonic())
            with contextlib.suppress(ShardError):
                reduction.abandon(left if replicas else min(PAUSE, left))
        self._in_flight.clear()
        self._agreed = self._votes = self._early = self._answer = None
        self._postponed.clear()
        self._order, self.used = [], []
        self.collectives.forget_ended()


def _compare_late(schedule: weakref.ref[ReduceSchedule], votes: list[int], answer: torch.Tensor | None) -> None:
    """Call :meth:`ReduceSchedule.compare_late` of a schedule that this must not keep alive."""
    found = schedule()
    if found is not None:
        found.compare_late(votes, answer)
