"""Checks that all ranks run the same operations, which find divergence before it can turn into wrong numbers.

Each rank keeps a running hash of its operations: which units of which engine it gathered, and in which phase. The ranks
compare their hashes in an all-reduce (MAX) of a few bytes. A message has the same size for all engines over one set of
process groups, so that the messages of any two engines can pair without an error of the backend. A message holds eight bytes
of hash, the complement of these bytes, and a few bytes for the end of a backward. The hashes are equal on all ranks exactly
when ``max(h) + max(255 - h) == 255`` for every byte. If they differ, the ranks exchange their histories, and all ranks raise
the same error.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..errors import DivergenceError
from .collectives import Collectives
from .multi_engine_order import EngineOrder
from .watchdog import blocking
from .work import caller_line

_HISTORY = 4096  # operations that are kept for error messages
_RECENT = 5  # operations quoted in an error message that has only this rank's history
_MASK = (1 << 61) - 1


class OperationSequence:
    """The sequence of one engine's operations on this rank, which is compared with the sequences of the other ranks."""

    def __init__(self, collectives: Collectives, engine_order: EngineOrder | None) -> None:
        self.collectives, self.engine_order = collectives, engine_order
        self.number = 0  # the number of this engine among the engines over the same process groups
        self.hash = 0
        self.history: list[str] = []
        self.batch = ""  # set by a front end: whether the forwards that begin now run on this rank's last batch
        self.on_difference: Callable[[], None] = lambda: None

    def note(self, code: int, text: str) -> None:
        """Add one operation to this rank's sequence."""
        self.hash = ((self.hash ^ code) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK
        if len(self.history) < _HISTORY:
            self.history.append(text)

    def note_batch(self) -> None:
        """Add what the front end knows of the batch, so that a rank with fewer batches is found before it stops coming."""
        if self.batch:
            self.note(zlib.crc32(self.batch.encode()), f"{_BATCH}{self.batch}")

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
        c = self.collectives
        if c.world == 1:
            return payload
        assert self.engine_order is not None
        own = ((self.hash + self.number * 0x9E3779B97F4A7C15) & _MASK).to_bytes(8, "little")
        message = torch.zeros(16 + self.engine_order.width, dtype=torch.uint8, device="cpu")
        message[:16] = torch.tensor([*own, *(255 - b for b in own)], dtype=torch.uint8, device="cpu")
        size = 0 if payload is None else len(payload)
        if payload is not None:
            message[16 : 16 + size] = payload
        blocking(c.watchdog, "control", what, dist.all_reduce, message, op=dist.ReduceOp.MAX)
        h = message[:16].tolist()
        if any(a + b != 255 for a, b in zip(h[:8], h[8:], strict=True)):
            self._explain(what)
        if payload is not None:  # a vote or the end of a step: a new history starts
            self.hash, self.history = 0, []
        return message[16 : 16 + size]

    def _explain(self, what: str) -> None:
        self.on_difference()
        watchdog = self.collectives.watchdog
        issued = {name: ch.issued for name, ch in watchdog.channels.items() if ch.purpose in ("all-gather", "reduce")}
        mine: tuple[list[str], str, str, int, dict[str, int]] = (self.history, what, caller_line(), self.number, issued)
        before = ", ".join(self.history[-_RECENT:]) or "nothing"
        own = f" Before it this rank had noted, since the last step: {before}."
        try:
            answers: list[Any] = watchdog.exchange(what, mine, own)
        finally:
            self.hash, self.history = 0, []
        try:
            self._raise(answers)
        except DivergenceError as error:
            # Some ranks have begun gathers or reductions that others have not (a backward failed on one rank). The next
            # collectives would pair with those and give wrong numbers.
            if any(counts != issued for *_, counts in answers):
                watchdog.channels["control"].groups.abort(watchdog.rank, error)
            raise

    @staticmethod
    def _raise(answers: list[Any]) -> NoReturn:
        if len({number for *_, number, _ in answers}) > 1:
            places = [f"rank {r} is in {at} of model {n} ({line})" for r, (_, at, line, n, _) in enumerate(answers)]
            raise DivergenceError(
                f"the ranks ran different models, numbered in the order of shard(): {'; '.join(places)}. Every rank must run the "
                "forwards, backwards and saves of several sharded models in the same order (iterate over a list, not a set)."
            )
        steps = min(len(h) for h, *_ in answers)
        first = next((i for i in range(steps) if len({h[i] for h, *_ in answers}) > 1), steps)
        now = [history[first] if first < len(history) else f"nothing more before {at}" for history, at, *_ in answers]
        places = [
            f"rank {rank}: {text} ({line})"
            for rank, (text, (_, _, line, *_)) in enumerate(zip(now, answers, strict=True))
        ]
        differ = f"; the first difference is operation {first} of this step: " + "; ".join(places)
        if any(text.startswith(LOADS) for text in now):
            raise DivergenceError(
                f"the ranks did not load alike{differ}. Each rank loads its own shards only, so the parameters are now partly "
                "old and partly new: load on every rank (model.load_state_dict or engine.load_state_dict, not under `if rank "
                "== ...`), before anything else."
            )
        # A rank that is not at the start of a forward, say in a save, diverges for another reason than its number of batches.
        if any(text.startswith(_BATCH) for text in now) and {at for _, at, *_ in answers} == {_FORWARD}:
            raise DivergenceError(
                f"the ranks have different numbers of batches{differ}. Parameters are gathered from all ranks, also to evaluate: "
                "give each rank equally many batches (a DistributedSampler, or drop_last=True, or a limit on the number), or "
                "evaluate inside engine.gathered(), where ranks go alone."
            )
        raise DivergenceError(
            f"the ranks ran different units{differ}. Every rank must run the same modules in the same order; make the branch "
            "that differs depend on something all ranks share, or leave the module out with ShardConfig(ignore=...)."
        )


# Beginnings of noted operations, and the name of a check, which decide the advice in an error.
_BATCH = "computes with "
_FORWARD = "the start of a forward"
LOADS = "loads a state dict into "
