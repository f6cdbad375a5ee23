"""What an Accelerator has prepared, as the engine's checkpoints know it: models, optimizers and their parameters' names."""

from __future__ import annotations

from typing import Any

from torch import nn

from torch_shard import Engine
from torch_shard.frontend import engines_over
from torch_shard.frontend.checkpoint import MODEL, MODELS, Source, plain_source, source_of

from .._private import plain_optimizer
from ..models.unwrap import engine_of, inner

__all__ = ["Prepared", "path_of"]


def path_of(position: int) -> tuple[str, ...]:
    """Where the model at this place of the list that hooks leave is in a sharded checkpoint."""
    return (MODEL,) if position == 0 else (MODELS, str(position))


class Prepared:
    """Models and optimizers of an Accelerator, at one moment.

    Attributes:
        models: as ``prepare`` has returned them, without what ``torch.compile`` put around them.
        engines: of these; None for one that is not sharded.
        optimizers: the users' own, without Accelerate's wrappers.
    """

    def __init__(self, accelerator: Any) -> None:
        self.models: list[nn.Module] = [inner(model) for model in accelerator._models]
        self.engines: list[Engine | None] = [engine_of(model) for model in self.models]
        self.optimizers: list[Any] = [plain_optimizer(optimizer) for optimizer in accelerator._optimizers]

    @property
    def sharded(self) -> list[Engine]:
        """The engines, in order."""
        return [engine for engine in self.engines if engine is not None]

    def source(self, number: int, path: tuple[str, ...] = ()) -> Source:
        """A sharded model as the engine's checkpoints describe it, with its entries at `path`."""
        engine = self.engines[number]
        assert engine is not None
        return source_of(engine, path, f"{number}." if number else "")

    def named(self) -> list[Source]:
        """After which optimizers' parameters are named: the models, and what optimizers hold besides."""
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
        """That of the model whose parameters an optimizer holds, the first of several; None where it holds no sharded ones."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        return next(iter(engines_over(self.sharded, held)), None)
