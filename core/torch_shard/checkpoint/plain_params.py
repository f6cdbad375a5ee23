"""Names for all parameters that an optimizer may hold, of several sharded models and of none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from .sharded.entries import Source


class _Named(nn.Module):
    """A proxy for a model of which only the parameters' names are needed; it does not own the parameters."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.__dict__["named"] = dict(named)  # not registered

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield from self.__dict__["named"].items()


def plain_source(prefix: str, named: Mapping[str, torch.Tensor]) -> Source:
    """Return a source for parameters that belong to no sharded model, by name."""
    without_units: Any = SimpleNamespace(units=())
    return Source((), prefix, _Named(named), without_units)


def all_parameters(sources: Sequence[Source]) -> nn.Module:
    """Return the parameters of all sources under names that differ, for :mod:`torch_shard.state.optimizer_state`."""
    found: dict[str, torch.Tensor] = {}
    for number, source in enumerate(sources):
        for name, p in source.model.named_parameters():
            found.setdefault(f"source {number}: {name}", p)
    return _Named(found)
