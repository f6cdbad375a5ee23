"""The names by which a model's parameters are saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import StateDictError
from ..runtime.runtime import Runtime
from ..shard_tensor.tensor import ShardTensor
from ..unit.unit import Unit
from ..utils.patterns import without_wrappers


def named_params(units: Iterable[Unit], model: nn.Module | None) -> dict[str, Any]:
    """Return a model's parameters by the names that state dicts and checkpoints have for them. Not collective.

    A unit knows its parameters by the names from before sharding, with the part of torch's checkpoint wrapper, which state dicts
    leave out.

    Args:
        units: the sharded model's units; none for a plain model. Their names come first.
        model: the model, which has further parameters, such as ignored ones.
    """
    found: dict[str, Any] = {}
    for unit in units:
        found.update(zip(map(without_wrappers, unit.names), unit.params, strict=True))
    for name, p in () if model is None else model.named_parameters():
        found.setdefault(without_wrappers(name), p)
    return found


def names_by_id(units: Iterable[Unit], model: nn.Module | None) -> dict[int, str]:
    """Return the name that :func:`named_params` has for each parameter, by the parameter's id; the first of several."""
    return {id(p): name for name, p in reversed(named_params(units, model).items())}


def names_by_group(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the names, which are given by id, of the parameters in each of an optimizer's groups."""
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def names_of(
    runtime: Runtime, optimizer: torch.optim.Optimizer, model: nn.Module | None, others: bool = False
) -> dict[int, str]:
    """Return the names of the model's and the optimizer's parameters, as :func:`names_of_held` does."""
    return names_of_held(optimizer, names_by_id(runtime.units, model), runtime.collectives.world_rank, others)


def names_of_held(
    optimizer: torch.optim.Optimizer, known: Mapping[int, str], rank: int, others: bool = False
) -> dict[int, str]:
    """Return `known`, the names of models' parameters by id, with those of all other parameters that an optimizer holds.

    A name is the one in the group's ``param_names``, where it has some, or the position in the optimizer. Such a parameter is one
    of a loss, say, which each rank trains by itself. With `others` it may also be one of another sharded model. Not collective.

    Raises:
        StateDictError: without `others`, the optimizer holds none of the models' parameters, or some of another sharded model.
    """
    names = dict(known)
    taken = set(names.values())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not others and held and not any(id(p) in names for p in held):
        raise StateDictError(
            f"rank {rank}: the optimizer holds no parameter of this model. Save that optimizer by itself."
        )
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for i, p in enumerate(group["params"]):
            if id(p) in names:
                continue
            if given is not None and given[i] not in taken:
                names[id(p)] = given[i]
                taken.add(given[i])
            elif others or not isinstance(p, ShardTensor):
                names[id(p)] = f"{number}.{i} (not the model's)"
            else:
                raise StateDictError(
                    f"rank {rank}: parameter {i} of the optimizer's group {number}, of shape {tuple(p.shape)}, is one of another "
                    "sharded model. Save that optimizer with both models: engine.save(..., models={'other': other_engine})."
                )
    return names
