"""The contents of a checkpoint, under the names that torch's own tools use.

::

    model.<parameter or buffer>                    as model.state_dict() has it
    optimizer.state.<parameter>.<key>              as torch's get_optimizer_state_dict names it
    optimizer.param_groups.<number>.<setting>      "params" are names
    optimizer.other_state                          state that belongs to no parameter, as one object
    optimizer.<name>.state..., models.<name>....   where there are several
    extra                                          one object
    sliced.<number>.<parameter>                    a ShardTensor in front ends' objects, cut as the parameter is

torch.distributed.checkpoint.load into the state dicts of an unsharded or an FSDP2 model finds the first three.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError, StateDictError
from ...optim.engines_of_optimizer import params_of
from ...runtime.registry import engine_for
from ...runtime.runtime import Runtime
from ...state.optimizer_state import OTHER, groups_by_name, is_number
from ...state.param_names import named_params, names_of_held
from ..ports import EnginePort

MODEL, MODELS, OPTIMIZER, EXTRA, EXTRA_SHARDS = "model", "models", "optimizer", "extra", "sliced"


@dataclass(frozen=True)
class Source:
    """One sharded model of a checkpoint.

    Attributes:
        path: the place of the model's entries, ``("model",)`` or ``("models", name)``.
        prefix: the text before the model's parameter names in optimizer state, "" for the first model.
        model, runtime: the sharded module and its runtime.
    """

    path: tuple[str, ...]
    prefix: str
    model: nn.Module
    runtime: Runtime

    def params(self) -> dict[str, Any]:
        """Return the model's parameters by their names in optimizer state, those of its units first."""
        return {self.prefix + name: p for name, p in named_params(self.runtime.units, self.model).items()}


def sources_of(engine: EnginePort, models: Mapping[str, Any] | None) -> list[Source]:
    """Return the engine's model first, then the further ones by name."""
    found = [Source((MODEL,), "", engine.model, engine._runtime)]
    for name, given in (models or {}).items():
        other = engine_for(given)
        if not isinstance(name, str) or not name or "." in name:
            raise ConfigError(f"models: a name is a string without dots, not {name!r}.")
        if other is None:
            raise ConfigError(
                f"models: {name!r} must be an Engine or a model that was given to shard(), not {type(given).__name__}."
            )
        found.append(Source((MODELS, name), f"{name}.", other.model, other._runtime))
    return found


Optimizers = tuple[tuple[tuple[str, ...], tuple[torch.optim.Optimizer, ...]], ...]
"""The optimizers of a checkpoint, each with its path. Several optimizers of one path are stored as one, as torch does it."""


def optimizers_of(given: Any) -> Optimizers:
    """Return the optimizers that were given: None, one, a sequence of them, or a mapping from names to them."""
    if given is None:
        return ()
    if isinstance(given, Mapping):
        for name in given:
            if not isinstance(name, str) or not name or "." in name or name in ("state", "param_groups"):
                raise ConfigError(
                    f"optimizer: {name!r} can't be an optimizer's name: it must be a string without dots."
                )
        return tuple(((OPTIMIZER, name), (_checked(value),)) for name, value in given.items())
    several = tuple(map(_checked, given)) if isinstance(given, Iterable) else (_checked(given),)
    return (((OPTIMIZER,), several),) if several else ()


def _checked(optimizer: Any) -> Any:
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state", "state_dict", "load_state_dict")):
        raise ConfigError(
            f"optimizer must be one, several in a list, or a dict of them by name, not {type(optimizer).__name__}."
        )
    return optimizer


def param_names(sources: Sequence[Source], optimizer: Any) -> dict[int, str]:
    """Return the name of each parameter that the optimizer holds, by id, as :func:`.names_of_held` does. Not collective."""
    known: dict[int, str] = {}
    for source in sources:
        for name, p in source.params().items():
            known.setdefault(id(p), name)
    names = names_of_held(optimizer, known, sources[0].runtime.collectives.world_rank)
    return {id(p): names[id(p)] for p in params_of(optimizer)}


def optimizer_state(sources: Sequence[Source], optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return this rank's state, sharded as it is, and the groups, by parameter name. Not collective."""
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    other: list[tuple[int, Any, Any]] = []
    for position, optimizer in enumerate(optimizers):
        names = param_names(sources, optimizer)
        taken = optimizer.state_dict()
        numbers = params_of(optimizer)
        for number, entries in taken["state"].items():
            if not is_number(number, numbers):
                other.append((position, number, entries))
                continue
            name = names[id(numbers[number])]
            if name in state:
                raise StateDictError(
                    f"{name} has state in two optimizers; pass them by name: optimizer={{name: optimizer}}."
                )
            state[name] = entries
        groups += groups_by_name(optimizer, names, taken["param_groups"])
    # A tuple, which torch's planner takes for one object.
    return {"state": state, "param_groups": groups, **({OTHER: tuple(other)} if other else {})}
