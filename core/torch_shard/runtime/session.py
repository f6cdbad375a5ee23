"""What the ranks have agreed on before they unshard: that a forward begins, and which."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..schedule.phases import EVALUATION, FORWARD, PHASES

if TYPE_CHECKING:
    from .runtime import Runtime


class Session:
    """The ranks' agreement on the forward that runs now, or has run last.

    Attributes:
        is_open: the ranks have agreed on a forward, and it hasn't ended.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.is_open = False
        self._was_open = False  # `is_open` before the read that runs now
        self._reshards_first = False  # the session that opens next begins with resharding all units that nothing needs
        self._noted: Sequence[tuple[int, str]] = ()  # what was compared for the latest forward that all ranks made

    def begin_model(self) -> None:
        """Prepare for a forward of the root module, which opens a session of its own at its first unshard. Not collective."""
        runtime = self._runtime
        runtime.lone.end_forward()
        self._was_open = self.is_open and not torch.is_grad_enabled()
        self.is_open = False
        if torch.is_grad_enabled():
            runtime.schedule.reshard_unused()
        else:
            self._reshards_first = True  # if all ranks evaluate; a read alone leaves no trace

    def end_model(self, alone: bool) -> None:
        """End a forward of the root module; `alone`: this rank alone has read the model in it. Not collective."""
        self._was_open &= alone
        self.end_read()

    def end_read(self) -> None:
        """End a read of the model, by all ranks or by this one alone. Not collective."""
        self._runtime.lone.end_forward()
        self.is_open, self._was_open = self._was_open, False

    def close(self) -> None:
        """Make the next unshard open a session. Not collective."""
        self.is_open = False

    def open_for(self, phase: int, of: str, reads: bool | None) -> None:
        """Open a session for an unshard outside backward, if it needs one. Collective, as :meth:`open` is."""
        # Each read by itself opens anew, also between the forward of one part of the model and that of the next.
        by_itself = phase == EVALUATION and not (self._runtime.forwards.running or self._runtime.lone.running)
        if by_itself or not self.is_open:
            self._was_open |= by_itself and self.is_open
            self.open(of, reads=reads)

    def open(self, of: str, noted: Sequence[tuple[int, str]] = (), reads: bool | None = None) -> bool:
        """Agree with the other ranks that a forward begins. Collective, unless this rank alone reads the model.

        Args:
            of: the module or operation that computes; ranks that only read must agree on it, because their gathers must be the
                same.
            noted: operations to record before this one, each with its code and text.
            reads: True if the forward changes nothing, so that this rank may read alone; by default, if no gradients are
                recorded.

        Returns:
            False if this rank reads the model alone: it evaluates, and other ranks do something else.
        """
        runtime = self._runtime
        schedule, operations = runtime.schedule, runtime.operations
        runtime.versions.abandon_change()
        fresh = schedule.fresh
        self.is_open = schedule.fresh = True
        if runtime.collectives.world == 1:
            if self._reshards_first:
                self._reshards_first = False
                schedule.reshard_unused()
            schedule.note_changes(schedule.changes())
            return True
        phase = FORWARD if torch.is_grad_enabled() else EVALUATION
        begins = 1 + phase, f"begins a {PHASES[phase]}"
        if phase == EVALUATION:
            begins = zlib.crc32(of.encode()), f"begins an evaluation of {of}"
        elif reads:  # else it could meet with the training forward that the other ranks begin
            begins = zlib.crc32(of.encode()), f"begins a computation with {of}"
        noted = [*noted, *operations.notes_of_batch(), begins]
        what, changes = "the start of a forward", schedule.changes()
        try:
            if phase == EVALUATION if reads is None else reads:
                found = runtime.meet(what, noted, changes, sure=phase == FORWARD)
            else:
                found = self._agree(what, noted, changes)
        except BaseException:
            self.is_open, schedule.fresh = False, fresh
            raise
        if found is None:
            schedule.fresh = fresh
        reshards_first, self._reshards_first = self._reshards_first, False
        if found is not None:
            schedule.note_changes(None if changes is None else found)
            if reshards_first:
                schedule.reshard_unused()
        return found is not None

    def _agree(self, what: str, noted: Sequence[tuple[int, str]], changes: torch.Tensor | None) -> torch.Tensor | None:
        """Compare the ranks before a forward that all make; return what ``OperationSequence.check`` returns. Collective."""
        runtime = self._runtime
        for code, text in (*noted, runtime.versions.note()):
            runtime.operations.note(code, text)
        repeats, self._noted = self._noted == noted, noted
        # With several engines, gathers of two models could mix.
        if repeats and runtime.engine_order.has_one and changes is None and not runtime.versions.edits.before:
            # This forward repeats the last one that all ranks made. A difference is found when it ends, see `Forwards.finish`.
            runtime.operations.begin(what)
            return torch.empty(0, device="cpu")
        found = runtime.operations.check(what, changes)
        runtime.versions.agreed()
        return found
