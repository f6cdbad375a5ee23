"""Reads of a model by this rank alone, while the other ranks do something else.

An operation that only reads the model is a forward without gradients, a state dict, or the reading of one value. Either all
ranks call it, and use collectives, or this rank alone does, and reads the shards of the others one-sidedly.
:meth:`LoneReads.meet` decides that, where the ranks compare their operations anyway. A lone read leaves no trace in what the
ranks compare and remember: the order of unshards, the sequence of operations, the states of units.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ..comm.comparisons import Purpose
from ..comm.work import caller_line
from ..errors import DivergenceError, UnitStateError
from ..log import ANY_RANK, logger
from ..schedule.unit_state import State
from ..unit.unit import Unit

if TYPE_CHECKING:
    from ..comm.one_sided.partners import Reading
    from .runtime import Runtime


class LoneReads:
    """The lone reads of one model.

    Attributes:
        running: a lone read is running.
        reading: that read; None while none is running.
        count, bytes_read: the number of lone reads so far, and of the bytes that they have read from other ranks.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._open: contextlib.ExitStack | None = None
        self.reading: Reading | None = None
        self._units: list[Unit] = []  # those that are unsharded for the running read
        self._held = False  # forwards don't end the running read
        self._reported: set[str] = set()  # lines that are in the log, or will be at the end of the running read
        self._to_report: tuple[str, str] | None = None  # line and operation that the end of the running read logs
        self.count = self.bytes_read = 0

    @property
    def running(self) -> bool:
        return self._open is not None

    # -- alone or together --------------------------------------------------------------------------------------
    def meet(
        self,
        what: str,
        notes: Sequence[tuple[int, str]],
        payload: torch.Tensor | None = None,
        sure: bool = False,
        alone: bool = True,
    ) -> torch.Tensor | None:
        """Compare the ranks' operations before one that only reads; return what the comparison returns. Collective.

        Returns None if this rank reads alone. The read is running then, until :meth:`end`.

        Args:
            what: the comparison, for messages.
            notes: the operations to note, each with its code and text.
            payload: see :meth:`~torch_shard.comm.divergence.OperationSequence.check`.
            sure: read alone only if the others certainly do something else, and not if they may only be late. (The result may be
                part of a graph, whose backward would be an error.)
            alone: False if this read needs all ranks, so that it is an error inside a lone read, and if others do something else.
        """
        runtime = self._runtime
        if not alone:
            self.refuse(what)
        if self._open is not None:
            return None
        if runtime.collectives.world == 1:
            for code, text in notes:
                runtime.operations.note(code, text)
            return payload if payload is not None else torch.empty(0, device="cpu")
        purpose = Purpose.WORKS
        if alone and self._may_begin:
            purpose = Purpose.RECORDS if sure else Purpose.READS
        # Ranks may come to the same read from different sides of a step; the versions tell.
        notes = [*notes, runtime.versions.note()]
        found = runtime.operations.meet(what, notes, purpose, runtime.config.alone_after, payload)
        if found is None:
            self._begin(what)
        return found

    @property
    def _may_begin(self) -> bool:
        """True if this rank may read alone now."""
        runtime = self._runtime
        if runtime.config.alone == "error" or runtime.collectives.service is None or runtime.solo:
            return False
        # Modules with DTensors compute together themselves, and within a step no version can be read.
        return not (any(unit.distributed for unit in runtime.units) or runtime.versions.changing)

    # -- a lone read --------------------------------------------------------------------------------------------
    def _begin(self, what: str) -> None:
        runtime = self._runtime
        c = runtime.collectives
        comparisons = c.watchdog.channels["control"].groups.comparisons
        partners, service = comparisons.partners, comparisons.service
        assert partners is not None and service is not None
        members = c.topology.shard_group_of(c.world_rank)
        with contextlib.ExitStack() as stack:
            errors: list[str] = []
            for source in runtime.sources():  # the other ranks may have made the copy, too
                try:
                    self.reading = stack.enter_context(partners.reading(members, source, service.issued))
                    break
                except DivergenceError as error:
                    errors.insert(0, str(error))
            else:
                raise DivergenceError(" And of the original of this copy: ".join(errors))
            self._open = stack.pop_all()
        self.count += 1
        line = caller_line()  # at the end of the read the caller may be at another line
        if line not in self._reported:
            self._reported.add(line)
            self._to_report = line, what

    def _report(self, nbytes: int) -> None:
        """Log the line of the read that ends now, unless it has been logged."""
        found, self._to_report = self._to_report, None
        if found is not None:
            logger.info(
                "rank %d reads the model alone at %s (%s): %s bytes from other ranks, which are elsewhere. All ranks together "
                "would be faster; this is said once for each line.",
                self._runtime.collectives.world_rank,
                *found,
                f"{nbytes:,}",
                extra=ANY_RANK,
            )

    def unshard(self, unit: Unit) -> None:
        """Unshard a unit for the running lone read."""
        self.reshard_outdated(unit)
        self._reshard_unneeded(besides=unit)
        if unit.state is State.SHARDED:
            unit.unshard_alone()
            self._units.append(unit)
        unit.wait()

    def reshard_outdated(self, unit: Unit) -> None:
        """Reshard a unit whose unsharded parameters lack the present values, before it is unsharded for the running read."""
        unit.wait()
        idle = not (unit.running or unit.uses or unit.kept)
        if idle and unit.state is State.FULL and unit.gathers and (unit.is_stale() or unit.outdated):
            self._reshard(unit)
            unit.outdated = True  # the other ranks have to gather it, too, when all compute with it the next time

    def _reshard(self, unit: Unit) -> None:
        # Under `shard_optim`, too, where a current unit stays unsharded: the other ranks' units are not, so that all gather it.
        unit.reshard()
        self._runtime.schedule.gathered.pop(unit.index, None)

    def end_forward(self) -> None:
        """End what a forward has read, and the read itself, unless something around the forward goes on with it."""
        if self._held and not torch.is_grad_enabled():
            self._reshard_unneeded()
        else:
            self.end()

    def _reshard_unneeded(self, besides: Unit | None = None) -> None:
        """Reshard the units of the running read that nothing needs, except `besides`."""
        for unit in self._units:
            needed = unit is besides or unit.running or unit.uses
            if not needed and unit.state is not State.SHARDED:
                self._reshard(unit)
        self._units = [unit for unit in self._units if unit.state is not State.SHARDED]

    def end(self) -> None:
        """End the running lone read, if there is one."""
        if self._open is None:
            return
        stack, self._open = self._open, None
        try:
            self._reshard_unneeded()
        finally:
            self._units = []
            nbytes = self.reading.bytes_read if self.reading is not None else 0
            self.bytes_read += nbytes
            self.reading = None
            try:
                stack.close()
            finally:
                self._report(nbytes)

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[Reading | None]:
        """Return a context in which this rank reads alone, whatever the others do; it yields None where this rank may not."""
        if not self._may_begin:
            yield None
            return
        with self.until_end():
            if self._open is None:
                self._begin(what)
            with self.held():
                yield self.reading

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Return a context in which the ends of forwards don't end the lone read that is running now, if there is one."""
        outer, self._held = self._held, self._open is not None
        try:
            yield
        finally:
            self._held = outer

    @contextlib.contextmanager
    def until_end(self) -> Iterator[None]:
        """Return a context at whose end a lone read that began inside ends, for operations outside any forward."""
        outer = self._open
        try:
            yield
        finally:
            if outer is None:
                self.end()

    def refuse(self, what: str) -> None:
        """Raise if a lone read is running, since `what` concerns all ranks."""
        if self._open is not None:
            raise UnitStateError(
                f"rank {self._runtime.collectives.world_rank}: {what} at {caller_line()} inside a read of the model by this rank "
                "alone; it concerns all ranks. Call it outside, on every rank."
            )
