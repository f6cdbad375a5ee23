"""Do all ranks do the same thing? Small messages that find divergence before it can turn into wrong numbers.

Each rank keeps a running hash of what it has done: which units it gathered, in which phase. Messages are fixed-size
byte vectors, so that any two of them can pair in one all-reduce (MAX): sixteen bytes of hash and its complement, which
agree on all ranks exactly when ``max(h) + max(255 - h) == 255``, then one byte per unit and per parameter for the end
of a backward. On a difference the ranks exchange their histories, and all of them raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .collectives import Collectives
from .errors import DivergenceError
from .watch import Pending, caller_line

_HISTORY = 4096
_MASK = (1 << 61) - 1


class Agreement:
    """The sequence of one engine's operations on this rank, and its comparison with the other ranks'."""

    def __init__(self, collectives: Collectives, width: int) -> None:
        self.collectives = collectives
        self.width = width
        self.hash = 0
        self.history: list[str] = []
        self.on_difference: Callable[[], None] = lambda: None

    def note(self, code: int, text: str) -> None:
        """Add one operation to this rank's sequence."""
        self.hash = ((self.hash ^ code) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK
        if len(self.history) < _HISTORY:
            self.history.append(text)

    def check(self, what: str, payload: torch.Tensor | None = None) -> torch.Tensor | None:
        """Collective. Compare the sequences; returns `payload` (uint8, ``width``), reduced by MAX over the ranks."""
        c = self.collectives
        if c.world == 1:
            return payload
        channel = c.control_channel
        assert channel is not None
        own = self.hash.to_bytes(8, "little")
        head = torch.tensor(list(own) + [255 - b for b in own], dtype=torch.uint8)
        message = torch.zeros(16 + self.width, dtype=torch.uint8)
        message[:16] = head
        if payload is not None:
            message[16:] = payload
        if not c.gloo:
            message = message.to(c.device)
        channel.issued += 1
        work = dist.all_reduce(message, op=dist.ReduceOp.MAX, group=channel.group, async_op=True)
        Pending(c.watch, channel, channel.issued, what, work).wait()
        message = message.cpu()
        h = message[:16].tolist()
        if any(a + b != 255 for a, b in zip(h[:8], h[8:], strict=True)):
            self._explain(what)
        if payload is not None:  # the end of a step: the next one starts a new history
            self.hash, self.history = 0, []
        return message[16:]

    def _explain(self, what: str) -> None:
        self.on_difference()
        c = self.collectives
        assert c.control_channel is not None
        mine: tuple[list[str], str, str] = (self.history, what, caller_line())
        everyone: list[Any] = [None] * c.world
        dist.all_gather_object(everyone, mine, group=c.control_channel.group)
        self.hash, self.history = 0, []
        steps = min(len(h) for h, _, _ in everyone)
        first = next((i for i in range(steps) if len({h[i] for h, _, _ in everyone}) > 1), steps)
        said = []
        for rank, (history, at, line) in enumerate(everyone):
            now = history[first] if first < len(history) else f"nothing more before {at}"
            said.append(f"rank {rank}: {now} ({line})")
        raise DivergenceError(
            f"the ranks ran different units; the first difference is operation {first} of this step: "
            + "; ".join(said)
            + ". Every rank must run the same modules in the same order; make the branch that differs depend on something "
            "all ranks share, or leave the module out with ShardConfig(ignore=...)."
        )
