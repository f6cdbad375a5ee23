"""The names by which a model's parameters are saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..unit.unit import Unit
from ..utils.patterns import without_wrappers

__all__ = ["named_params", "names_by_id"]


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
