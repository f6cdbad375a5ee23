"""What the ranks of an Accelerator do together: all return, or all raise, and a rank that is missing is named."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from torch_shard import Engine
from torch_shard.errors import CheckpointError, DivergenceError, ShardError
from torch_shard.frontend.checkpoint import broadcast, each

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """The ranks of a run, for one operation.

    Args:
        engines: of the prepared models; the first one's messages are used, which have a timeout. Without any the process
            group's own objects are sent.
        what: the operation, for messages.
    """

    def __init__(self, engines: Sequence[Engine], what: str) -> None:
        self.what = what
        self._engine = engines[0] if engines else None
        together = dist.is_available() and dist.is_initialized()
        self.world = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else 0
        self._nonce = ""
        self._count = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def begin(self) -> str:
        """Agree on sixteen hexadecimal digits, never used before; what follows may take any time. Collective."""
        self._nonce = self.broadcast(secrets.token_hex(8))
        return self._nonce

    def each(self, function: Callable[[], T], key: object = None) -> T:
        """Run `function` on every rank, without collectives; all of them return, or all raise. Collective.

        Args:
            function: this rank's work.
            key: must be equal on all ranks; a function is called with the result.

        Raises:
            ShardError: this rank's own, or one that quotes another rank's. An OSError becomes a CheckpointError.
        """
        self._count += 1
        if self._engine is not None:
            nonce = f"{self._nonce}/accelerate/{self._count}" if self._nonce else ""
            return each(self._engine, self.what, function, nonce, key)
        return self._plain(function, key)

    def on_first(self, function: Callable[[], Any]) -> None:
        """Run `function` on rank 0 while the others wait. Collective; raises as :meth:`each`."""
        self.each(function if self.is_first else _nothing)

    def broadcast(self, value: T) -> T:
        """Rank 0's object on every rank. Collective."""
        if self._engine is not None:
            return broadcast(self._engine, value, self.what)
        objects = [value]
        if self.world > 1:
            dist.broadcast_object_list(objects, 0)
        return objects[0]

    def _plain(self, function: Callable[[], T], key: object) -> T:
        error: Exception | None = None
        result: Any = None
        own: Any = None
        try:
            result = function()
            own = key(result) if callable(key) else key
        except OSError as problem:
            error = CheckpointError(f"rank {self.rank}: {self.what}: {problem}.")
            error.__cause__ = problem
        except Exception as problem:
            error = problem
        told = [(None if error is None else (type(error), str(error)), repr(own))]
        if self.world > 1:
            told = [("", "")] * self.world  # type: ignore[list-item]
            dist.all_gather_object(told, (None if error is None else (type(error), str(error)), repr(own)))
        if error is not None:
            raise error
        for rank, (failure, _) in enumerate(told):
            if failure is not None:
                kind, text = failure
                raise (kind if issubclass(kind, ShardError) else ShardError)(f"rank {rank} failed: {text}")
        if len({text for _, text in told}) > 1:
            raise DivergenceError(f"{self.what}: the ranks passed different arguments: {[text for _, text in told]}.")
        return result  # type: ignore[no-any-return]


def _nothing() -> None:
    """What the others do while rank 0 works."""
