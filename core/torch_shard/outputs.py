"""The tensors inside whatever a forward returned."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

_ATOMS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_DEPTH = 8


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts, sets, dataclasses and plain objects, each once."""
    if type(value) is torch.Tensor:
        return [value]
    found: dict[int, torch.Tensor] = {}
    _collect(value, found, set(), _DEPTH)
    return list(found.values())


def _collect(value: Any, found: dict[int, torch.Tensor], seen: set[int], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        found[id(value)] = value
        return
    if isinstance(value, _ATOMS) or depth == 0 or id(value) in seen or isinstance(value, (torch.nn.Module, type)):
        return
    seen.add(id(value))
    children: Any
    if isinstance(value, dict):
        children = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = value
    elif dataclasses.is_dataclass(value):
        children = [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    elif hasattr(value, "__dict__"):
        children = list(vars(value).values())
    else:
        return
    for child in children:
        _collect(child, found, seen, depth - 1)
    if isinstance(value, dict) and hasattr(value, "__dict__"):
        _collect(list(vars(value).values()), found, seen, depth - 1)
