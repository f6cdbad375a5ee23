"""The names by which a model's parameters are saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import StateDictError
from ..runtime.runtime import Runtime
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
    """Return the name of each of the optimizer's parameters, by the parameter's id. Not collective.

    With `others`, parameters that are not the model's get their position for a name.

    Raises:
        StateDictError: without `others`, the optimizer holds parameters that are not the model's and have no name of their own.
    """
    names = names_by_id(runtime.units, model)
    taken = set(names.values())
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for i, p in enumerate(group["params"]):
            if id(p) not in names and given is not None and given[i] not in taken:
                names[id(p)] = given[i]
                taken.add(given[i])
            if id(p) not in names and others:
                names[id(p)] = f"{number}.{i} (not the model's)"
            if id(p) not in names:
                raise StateDictError(
                    f"rank {runtime.collectives.world_rank}: parameter {i} of the optimizer's group {number}, of shape "
                    f"{tuple(p.shape)}, is not a parameter of this model. Save that optimizer by itself, or, if it holds "
                    "parameters of another sharded model, too, with both: engine.save(..., models={'other': other_engine})."
                )
    return names
