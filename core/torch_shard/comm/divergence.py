"""Do all ranks do the same thing? Small messages that find divergence before it can turn into wrong numbers.

Each rank keeps a running hash of what it has done: which units of which engine it gathered, in which phase. Messages are
byte vectors of one size for all engines over a set of process groups, so that any two of them can pair in one all-reduce
(MAX): sixteen bytes of hash and its complement, which agree on all ranks exactly when ``max(h) + max(255 - h) == 255``,
then a few bytes for the end of a backward. On a difference the ranks exchange their histories, and
all of them raise the same error.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from ..errors import DivergenceError
from .collectives import Collectives
from .multi_engine_order import Together
from .watchdog import blocking
from .work import caller_line

if TYPE_CHECKING:
    pass


_HISTORY = 4096
_MESSAGES = ("control", "meet", "scalar", "scalar slices", "plane", "whole")  # channels of blocking messages
_SHOWN = 5  # operations in a message that has this rank's history only
_MASK = (1 << 61) - 1


class Agreement:
    """The sequence of one engine's operations on this rank, and its comparison with the other ranks'."""

    def __init__(self, collectives: Collectives, together: Together | None) -> None:
        self.collectives, self.together = collectives, together
        self.number = 0  # of the engine, among those over the same process groups
        self.hash = 0
        self.history: list[str] = []
        self.batch = ""  # what a front end knows of the batch of the forwards that begin now: is it this rank's last?
        self.on_difference: Callable[[], None] = lambda: None

    def note(self, code: int, text: str) -> None:
        """Add one operation to this rank's sequence."""
        self.hash = ((self.hash ^ code) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK
        if len(self.history) < _HISTORY:
            self.history.append(text)

    def note_batch(self) -> None:
        """Add what is known of the batch: ranks with fewer batches than others are found before they stop coming."""
        if self.batch:
            self.note(zlib.crc32(self.batch.encode()), f"{_BATCH}{self.batch}")

    @contextlib.contextmanager
    def unnoted(self) -> Iterator[None]:
        """Inside, what is noted does not count: for work that one rank may break off, after which the ranks compare."""
        kept = self.hash, list(self.history)
        try:
            yield
        finally:
            self.hash, self.history = kept

    def check(self, what: str, payload: torch.Tensor | None = None) -> torch.Tensor | None:
        """Collective. Compare the sequences; returns `payload` (uint8), reduced by MAX over the ranks."""
        c = self.collectives
        if c.world == 1:
            return payload
        assert self.together is not None
        own = ((self.hash + self.number * 0x9E3779B97F4A7C15) & _MASK).to_bytes(8, "little")
        head = torch.tensor(list(own) + [255 - b for b in own], dtype=torch.uint8, device="cpu")
        message = torch.zeros(16 + self.together.width, dtype=torch.uint8, device="cpu")
        message[:16] = head
        size = 0 if payload is None else len(payload)
        if payload is not None:
            message[16 : 16 + size] = payload
        blocking(c.watch, "control", what, dist.all_reduce, message, op=dist.ReduceOp.MAX)
        h = message[:16].tolist()
        if any(a + b != 255 for a, b in zip(h[:8], h[8:], strict=True)):
            self._explain(what)
        if payload is not None:  # the end of a step: the next one starts a new history
            self.hash, self.history = 0, []
        return message[16 : 16 + size]

    def _explain(self, what: str) -> None:
        self.on_difference()
        watch = self.collectives.watch
        issued = {name: channel.issued for name, channel in watch.channels.items() if channel.purpose not in _MESSAGES}
        mine: tuple[list[str], str, str, int, dict[str, int]] = (self.history, what, caller_line(), self.number, issued)
        before = ", ".join(self.history[-_SHOWN:]) or "nothing"
        own = f" Before it this rank had noted, since the last step: {before}."
        try:
            everyone: list[Any] = watch.exchange(what, mine, own)
        finally:
            self.hash, self.history = 0, []
        try:
            self._raise(everyone)
        except DivergenceError as error:
            # Gathers or reductions that some ranks have begun and others not (a backward failed on one rank): the next ones
            # would pair with them.
            if any(counts != issued for *_, counts in everyone):
                watch.channels["control"].groups.give_up(watch.rank, error)
            raise

    @staticmethod
    def _raise(everyone: list[Any]) -> NoReturn:
        if len({number for *_, number, _ in everyone}) > 1:
            said = [f"rank {r} is in {at} of model {n} ({line})" for r, (_, at, line, n, _) in enumerate(everyone)]
            raise DivergenceError(
                f"the ranks ran different models, numbered in the order of shard(): {'; '.join(said)}. Every rank must run the "
                "forwards, backwards and saves of several sharded models in the same order (iterate over a list, not a set)."
            )
        steps = min(len(h) for h, *_ in everyone)
        first = next((i for i in range(steps) if len({h[i] for h, *_ in everyone}) > 1), steps)
        said = []
        loads = uneven = False
        for rank, (history, at, line, *_) in enumerate(everyone):
            now = history[first] if first < len(history) else f"nothing more before {at}"
            loads |= now.startswith(_LOADS)
            uneven |= now.startswith(_BATCH)
            said.append(f"rank {rank}: {now} ({line})")
        # Else one of them does another thing than a forward, say a save.
        uneven &= {at for _, at, *_ in everyone} == {_FORWARD}
        differ = f"; the first difference is operation {first} of this step: " + "; ".join(said)
        if loads:
            raise DivergenceError(
                f"the ranks did not load alike{differ}. Each rank loads its own slices only, so the parameters are now partly "
                "old and partly new: load on every rank (model.load_state_dict or engine.load_state_dict, not under `if rank "
                "== ...`), before anything else."
            )
        if uneven:
            raise DivergenceError(
                f"the ranks have different numbers of batches{differ}. Parameters are gathered from all ranks, also to evaluate: "
                "give each rank equally many batches (a DistributedSampler, or drop_last=True, or a limit on the number), or "
                "evaluate inside engine.gathered(), where ranks go alone."
            )
        raise DivergenceError(
            f"the ranks ran different units{differ}. Every rank must run the same modules in the same order; make the branch "
            "that differs depend on something all ranks share, or leave the module out with ShardConfig(ignore=...)."
        )


# -- loading through torch's own load_state_dict ------------------------------------------------------------------------

_BATCH = "computes with "
_FORWARD = "the start of a forward"
_LOADS = "loads a state dict into "
