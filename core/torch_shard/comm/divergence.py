"""Checks that all ranks run the same operations, which find divergence before it can turn into wrong numbers.

Each rank keeps a running hash of its operations: which units of which engine it gathered, and in which phase. The ranks
compare their hashes in an all-reduce (MAX) of a few bytes. A message has the same size for all engines over one set of
process groups, so that the messages of any two engines can pair without an error of the backend. A message holds eight bytes
of hash, the complement of these bytes, the same for the hash before the present operation and for the engine's name, flags,
and a few bytes for the end of a backward. The hashes are equal on all ranks exactly when ``max(h) + max(255 - h) == 255`` for
every byte. If they differ, the ranks exchange their histories, and all ranks raise the same error. An exception is a rank that
only reads the model: it reads alone (:mod:`.comparisons`), and the other ranks compare again. If all ranks came to read the same
model, their earlier operations must be equal.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn

import torch

from ..errors import DivergenceError
from .collectives import Collectives
from .comparisons import FLAGS, Comparisons, Purpose
from .multi_engine_order import EngineOrder
from .one_sided.versions import CHANGED
from .work import caller_line

_HISTORY = 4096  # operations that are kept for error messages
_RECENT = 5  # operations quoted in an error message that has only this rank's history
_MASK = (1 << 61) - 1
_HASHES = 40  # bytes of a message before the flags of `comparisons`
_HEAD = _HASHES + FLAGS
# The hashes in a message, with their complements: of the operations up to the present one, of those before it, and of the name.
_PRESENT, _EARLIER, _ENGINE = slice(0, 16), slice(16, 32), slice(32, _HASHES)

# Beginnings of noted operations, and the name of a check, which decide the advice in an error.
_BATCH = "computes with "
_OF_THE_MODEL = ("gathers ", "begins ", "broadcasts ", CHANGED, "nothing more ", "has mixed ", _BATCH)
_FORWARD = "the start of a forward"
LOADS = "loads a state dict into "


class OperationSequence:
    """The sequence of one engine's operations on this rank, which is compared with the sequences of the other ranks."""

    def __init__(self, collectives: Collectives, engine_order: EngineOrder) -> None:
        self.collectives, self.engine_order = collectives, engine_order
        self.model = ""  # the name of this engine among the engines over the same process groups
        self.number = 0  # a checksum of the name
        self.hash = 0
        self.history: list[str] = []
        self.batch = ""  # set by a front end: whether the forwards that begin now run on this rank's last batch
        self.on_difference: Callable[[], None] = lambda: None
        self.on_unlike_loads: Callable[[], None] = lambda: None

    def take_name(self, model: str) -> None:
        """Set the name of the engine, which is equal on all ranks and differs from those of the other engines."""
        self.model, self.number = model, zlib.crc32(model.encode())

    def note(self, code: int, text: str) -> None:
        """Add one operation to this rank's sequence."""
        self.hash = ((self.hash ^ code) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK
        if len(self.history) < _HISTORY:
            self.history.append(text)

    def notes_of_batch(self) -> list[tuple[int, str]]:
        """Return what the front end knows of the batch, to be noted, so that a rank with fewer batches is found in time."""
        return [(zlib.crc32(self.batch.encode()), f"{_BATCH}{self.batch}")] if self.batch else []

    @contextlib.contextmanager
    def unnoted(self) -> Iterator[None]:
        """Drop the operations that are noted inside this context, for work that one rank alone may break off."""
        kept = self.hash, list(self.history)
        try:
            yield
        finally:
            self.hash, self.history = kept

    def check(self, what: str, payload: torch.Tensor | None = None) -> torch.Tensor | None:
        """Compare the ranks' sequences and return `payload` (uint8), reduced by MAX over the ranks. Collective.

        Raises:
            DivergenceError: the sequences differ.
        """
        if self.collectives.world == 1:
            return payload
        message = self._compare(_Comparison(self, what, payload, self.hash))
        assert message is not None
        return self._answer(message, payload)

    def meet(
        self,
        what: str,
        notes: Sequence[tuple[int, str]],
        purpose: Purpose,
        alone_after: float,
        payload: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Note operations that only read the model, and compare the ranks' sequences. Collective, unless it returns None.

        Args:
            what: the name of the comparison, for messages.
            notes: the operations, as for :meth:`note`.
            purpose: what this rank comes for; :attr:`.Purpose.WORKS` if it may not read alone.
            alone_after: see :meth:`.Comparisons.all_reduce`.
            payload: the argument of :meth:`check`.

        Returns:
            What :meth:`check` returns; None if another rank does something else, so that this rank reads alone. Nothing is noted
            then.

        Raises:
            DivergenceError: the sequences differ, and this rank may not read alone.
        """
        kept = self.hash, len(self.history)
        for code, text in notes:
            self.note(code, text)
        message = self._compare(_Comparison(self, what, payload, kept[0], purpose, alone_after))
        if message is None:
            self.hash = kept[0]
            del self.history[kept[1] :]
            return None
        return self._answer(message, payload)

    def begin(
        self,
        what: str,
        payload: torch.Tensor | None = None,
        then: Callable[[torch.Tensor | None], None] = lambda answer: None,
    ) -> None:
        """Compare the ranks' sequences as :meth:`check` does, but go on before the others have come. Collective.

        The comparison ends in :meth:`finish`, before the next one of any engine (unless this rank comes there to read, and
        reads alone), before a change of the parameters, and in a wait in which it has become known that the sequences differ.
        There `then` is called with what ``check`` would return, or with None before an error is raised.
        """
        comparisons = self._comparisons
        comparisons.finish()
        comparison = _Comparison(self, what, payload, self.hash)
        comparison.line = caller_line()
        if payload is not None:
            self.hash, self.history = 0, []
        self._send(comparison, then)

    def _send(self, comparison: _Comparison, then: Callable[[torch.Tensor | None], None]) -> None:
        message, flags = comparison.message()
        ended = functools.partial(self._finish, comparison, message, then)
        self._comparisons.begin(self.collectives.watchdog, message, flags, comparison.what, ended)

    def _finish(
        self,
        comparison: _Comparison,
        message: torch.Tensor,
        then: Callable[[torch.Tensor | None], None],
        have_come: bool,
        repeats: bool,
    ) -> None:
        found, goes_on = None, False
        try:
            if have_come and self._have_all_come(comparison, message):
                found = message
            elif have_come and repeats:
                found = self._compare(comparison)
            elif have_come:
                self._send(comparison, then)
                goes_on = True
        finally:
            if not goes_on:
                then(None if found is None else found[_HEAD : _HEAD + comparison.length])

    def finish(self) -> None:
        """End the comparison that has begun, if there is one.

        Raises:
            DivergenceError: the sequences differ.
        """
        if self.collectives.world > 1:
            self._comparisons.finish()

    def _answer(self, message: torch.Tensor, payload: torch.Tensor | None) -> torch.Tensor:
        if payload is None:
            return message[:0]
        self.hash, self.history = 0, []  # a vote or the end of a step: a new history starts
        return message[_HEAD : _HEAD + len(payload)]

    @property
    def _comparisons(self) -> Comparisons:
        found: Comparisons = self.collectives.watchdog.channels["control"].groups.comparisons
        return found

    def _compare(self, comparison: _Comparison) -> torch.Tensor | None:
        """Return the message of all ranks; None if this rank, which came to read, reads alone."""
        comparisons, watchdog = self._comparisons, self.collectives.watchdog
        if not comparisons.finish_for(comparison.purpose, comparison.alone_after, watchdog.timeout):
            return None
        while True:
            message, flags = comparison.message()
            if not comparisons.all_reduce(
                watchdog, message, flags, comparison.what, comparison.purpose, comparison.alone_after
            ):
                return None
            if self._have_all_come(comparison, message):
                return message
            if comparison.purpose is Purpose.READS or (
                comparison.purpose is Purpose.RECORDS and _may_record_alone(message.tolist())
            ):
                return None
            # A rank that came to read has gone on alone: all others, and that one when it is back, compare once more.

    def _have_all_come(self, comparison: _Comparison, message: torch.Tensor) -> bool:
        """Return True if all ranks have come to one operation, and False if some have read alone instead.

        Raises:
            DivergenceError: they have come to different operations, of which none may be alone.
        """
        h = message[:_HEAD].tolist()
        left, reads, records, works = h[_HASHES:]
        if not left and _equal(h[_PRESENT]):
            self._comparisons.met()
            return True
        only_reads = not (left or records or works)
        apart = only_reads and _equal(h[_ENGINE]) and not _equal(h[_EARLIER])
        if apart or not (left or reads or _may_record_alone(h)):
            self._explain(comparison)
        return False

    def _explain(self, comparison: _Comparison) -> None:
        self.on_difference()
        watchdog, what = self.collectives.watchdog, comparison.what
        history, line = comparison.history[: comparison.noted], comparison.line or caller_line()
        issued = {name: ch.issued for name, ch in watchdog.channels.items() if ch.purpose in ("all-gather", "reduce")}
        mine = _Account(history, what, line, self.model, issued)
        before = ", ".join(history[-_RECENT:]) or "nothing"
        own = f" Before that, this rank had recorded these operations since its last step: {before}."
        try:
            accounts: list[_Account] = watchdog.exchange(what, mine, own)
        finally:
            self.hash, self.history = 0, []
        try:
            self._raise(accounts)
        except DivergenceError as error:
            # Some ranks have begun gathers or reductions that others have not (a backward failed on one rank). The next
            # collectives would pair with those and give wrong numbers.
            if any(account.issued != issued for account in accounts):
                watchdog.channels["control"].groups.abort(watchdog.rank, error)
            raise

    def _raise(self, accounts: list[_Account]) -> NoReturn:
        if len({account.model for account in accounts}) > 1:
            places = [f"rank {r} is in {a.what} of {a.model} ({a.line})" for r, a in enumerate(accounts)]
            raise DivergenceError(
                f"the ranks ran different models, numbered in the order of shard(): {'; '.join(places)}. Every rank must run the "
                "forwards, backwards and saves of several sharded models in the same order (iterate over a list, not a set)."
            )
        steps = min(len(account.history) for account in accounts)
        first = next((i for i in range(steps) if len({account.history[i] for account in accounts}) > 1), steps)
        now = [a.history[first] if first < len(a.history) else f"nothing more before {a.what}" for a in accounts]
        places = [f"rank {r}: {text} ({a.line})" for r, (text, a) in enumerate(zip(now, accounts, strict=True))]
        differ = f"; the first difference is operation {first} of this step: " + "; ".join(places)
        if any(text.startswith(LOADS) for text in now):
            self.on_unlike_loads()
            raise DivergenceError(
                f"the ranks did not load alike{differ}. Each rank loads its own shards only, so the parameters are now partly "
                "old and partly new: load on every rank (model.load_state_dict or engine.load_state_dict, not under `if rank "
                "== ...`), before anything else."
            )
        if any(text.startswith(CHANGED) for text in now):
            raise DivergenceError(
                f"the ranks have not made the same changes of the parameters (steps, edits, loads){differ}. Each rank changes "
                "its own shards only, so the parameters are now partly old and partly new: change them on every rank, not under "
                "`if rank == ...`, and load a checkpoint on every rank before training goes on."
            )
        # A rank that is not at the start of a forward, say in a save, diverges for another reason than its number of batches.
        if any(text.startswith(_BATCH) for text in now) and {account.what for account in accounts} == {_FORWARD}:
            raise DivergenceError(
                f"the ranks have different numbers of batches{differ}. Parameters are gathered from all ranks, also to evaluate: "
                "give each rank equally many batches (a DistributedSampler, or drop_last=True, or a limit on the number), or "
                f"evaluate inside {self.collectives.watchdog.handle}.gathered(), where ranks go alone."
            )
        calls = [text for text in now if not text.startswith(_OF_THE_MODEL)]
        if calls:
            raise DivergenceError(
                f"the ranks ran different operations{differ}. {calls[0]} concerns all ranks: call it on every rank, not "
                "under `if rank == ...`."
            )
        raise DivergenceError(
            f"the ranks ran different units{differ}. Every rank must run the same modules in the same order; make the branch "
            "that differs depend on something all ranks share, or leave the module out with ShardConfig(ignore=...)."
        )


class _Account(NamedTuple):
    """The account that one rank gives the others when their operations differ.

    Attributes:
        history: the operations of this rank since the last step.
        what: the name of the comparison.
        line: the line of the user's code.
        model: the name of the engine.
        issued: the number of gathers and reductions that were issued, by channel.
    """

    history: list[str]
    what: str
    line: str
    model: str
    issued: dict[str, int]


class _Comparison:
    """One rank's side of a comparison."""

    def __init__(
        self,
        sequence: OperationSequence,
        what: str,
        payload: torch.Tensor | None,
        before: int,
        purpose: Purpose = Purpose.WORKS,
        alone_after: float = 0.0,
    ) -> None:
        """Take the present state of `sequence`; `before` is its hash before the operation. The others are those of ``meet``."""
        self.what, self.purpose, self.alone_after = what, purpose, alone_after
        self.history, self.noted = sequence.history, len(sequence.history)
        self.line = ""  # the line of the user's code at which the comparison began, if that code goes on meanwhile
        self._payload = payload
        self._width = sequence.engine_order.width
        number = sequence.number * 0x9E3779B97F4A7C15
        present, earlier = (((h + n) & _MASK).to_bytes(8, "little") for h, n in ((sequence.hash, number), (before, 0)))
        engine = sequence.number.to_bytes(4, "little")
        self._hashes = [b for part in (present, earlier, engine) for b in (*part, *(255 - b for b in part))]

    @property
    def length(self) -> int:
        """The number of bytes that the ranks reduce beside the hashes."""
        return 0 if self._payload is None else len(self._payload)

    def message(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a new message, and the part of it that holds the flags."""
        message = torch.zeros(_HEAD + self._width, dtype=torch.uint8, device="cpu")
        message[:_HASHES] = torch.tensor(self._hashes, dtype=torch.uint8, device="cpu")
        if self._payload is not None:
            message[_HEAD : _HEAD + len(self._payload)] = self._payload
        return message, message[_HASHES:_HEAD]


def _equal(reduced: list[int]) -> bool:
    """Return True if all ranks have sent one hash: the maxima of its bytes, and those of their complements."""
    half = len(reduced) // 2
    return all(a + b == 255 for a, b in zip(reduced[:half], reduced[half:], strict=True))


def _may_record_alone(message: list[int]) -> bool:
    """Return True if ranks that read for a graph may read alone: another rank certainly works, or reads another model.

    If some ranks only read, they go first, and all ranks compare again.
    """
    left, reads, records, works = message[_HASHES:_HEAD]
    return bool(records and not (left or reads) and (works or not _equal(message[_ENGINE])))
