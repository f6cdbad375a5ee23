"""The prepared models and optimizers of an Accelerator, and operations that its ranks do together."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from torch_shard import Engine
from torch_shard.errors import CheckpointError
from torch_shard.frontend import each_rank, engines_over, group_timeout
from torch_shard.frontend.checkpoint import MODEL, MODELS, Source, broadcast, each, plain_source, source_of

from .._private import compiled_inner, plain_optimizer
from ..models.unwrap import engine_of

T = TypeVar("T")


def path_of(position: int) -> tuple[str, ...]:
    """Return the path, in a sharded checkpoint, of the model at this position in the list that hooks leave."""
    return (MODEL,) if position == 0 else (MODELS, str(position))


class Prepared:
    """The models and optimizers that an Accelerator has at one moment.

    Attributes:
        models: the models that ``prepare`` has returned, without the wrappers of ``torch.compile``.
        engines: the models' engines; None for a model that is not sharded.
        optimizers: the user's own optimizers, without Accelerate's wrappers.
    """

    def __init__(self, accelerator: Any) -> None:
        self.models: list[nn.Module] = [compiled_inner(model) for model in accelerator._models]
        self.engines: list[Engine | None] = [engine_of(model) for model in self.models]
        self.optimizers: list[Any] = [plain_optimizer(optimizer) for optimizer in accelerator._optimizers]

    @property
    def sharded(self) -> list[Engine]:
        """The engines of the sharded models, in order."""
        return [engine for engine in self.engines if engine is not None]

    def source(self, number: int, path: tuple[str, ...] = ()) -> Source:
        """Return a sharded model as the engine's checkpoints describe it, with its entries at `path`."""
        engine = self.engines[number]
        assert engine is not None
        return source_of(engine, path, f"{number}." if number else "")

    def named(self) -> list[Source]:
        """Return the sources of names for optimizers' parameters: the models, and parameters that only optimizers hold."""
        found = [self.source(number) for number, engine in enumerate(self.engines) if engine is not None]
        known = {id(p) for model in self.models for p in model.parameters()}
        known.update(id(p) for engine in self.sharded for unit in engine.units for p in unit.params)
        for number, engine in enumerate(self.engines):
            if engine is None:
                found.append(plain_source(f"{number}.", dict(self.models[number].named_parameters())))
        others = {
            f"{number}.{place}": p
            for number, optimizer in enumerate(self.optimizers)
            for place, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
            if id(p) not in known
        }
        return [*found, plain_source("not_prepared.", others)] if others else found

    def engine_for(self, optimizer: Any) -> Engine | None:
        """Return the engine of the first model of which an optimizer holds parameters; None if it holds no sharded ones."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        return next(iter(engines_over(self.sharded, held)), None)


class Ranks:
    """The ranks of a run, for one operation.

    Args:
        engines: the engines of the prepared models. The first one's messages, which have a timeout, are used. Without any the
            ranks talk through the process group's store.
        what: the operation, for messages.

    Attributes:
        alone: True where one rank acts and the others take no part.
    """

    alone = False

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
        return each_rank(function, self.what, group_timeout(torch.device("cpu")), key)

    def on_first(self, function: Callable[[], Any]) -> None:
        """Run `function` on rank 0 while the others wait. Collective; raises as :meth:`each`."""
        self.each(function if self.is_first else lambda: None)

    def broadcast(self, value: T) -> T:
        """Return rank 0's object on every rank. Collective."""
        if self._engine is not None:
            return broadcast(self._engine, value, self.what)
        objects = [value]
        if self.world > 1:
            dist.broadcast_object_list(objects, 0)
        return objects[0]


class OneRank(Ranks):
    """This rank alone in the place of all ranks, for an operation in which the others take no part. Nothing is collective."""

    alone = True

    def __init__(self, what: str) -> None:
        super().__init__((), what)
        self.world, self.rank = 1, 0

    def each(self, function: Callable[[], T], key: object = None) -> T:
        """Run `function`; an OSError becomes a CheckpointError."""
        try:
            return function()
        except OSError as problem:
            raise CheckpointError(f"{self.what}: {problem}.") from problem

    def broadcast(self, value: T) -> T:
        """Return `value`."""
        return value
