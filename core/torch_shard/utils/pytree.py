"""The tensors inside whatever a forward returned."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

_ATOMS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_ATOM_TYPES = frozenset(_ATOMS)
_DEPTH = 8


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts, sets, dataclasses and plain objects, each once."""
    if type(value) is torch.Tensor:
        return [value]
    found: dict[int, torch.Tensor] = {}
    _collect(value, found, set(), _DEPTH)
    return list(found.values())


def may_hold_tensors(value: Any) -> bool:
    """False for an empty container, or a flat one of numbers and strings, such as a shape: quick to say."""
    if isinstance(value, (list, tuple)):
        return any(type(item) not in _ATOM_TYPES for item in value)
    return isinstance(value, torch.Tensor) or bool(value)


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


def own_memory(value: Any, tensors: list[torch.Tensor], storages: set[int]) -> tuple[Any, list[torch.Tensor]]:
    """`value` and its `tensors`, with copies in place of those that lie in one of `storages` (addresses), which will be
    released. The copies carry gradients back. Containers are copied where something in them changes."""
    copies = {id(t): t.clone() for t in tensors if _storage(t) in storages}
    if not copies:
        return value, tensors
    value = replace(value, copies)
    return value, tensors_in(value)


def replace(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """`value` with other tensors in the place of some, by their ``id``. Containers are copied where something in them changes."""
    return _replace(value, copies, _DEPTH)


def _storage(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return local.untyped_storage()._cdata if type(local).__torch_dispatch__ is _plain and _strided(local) else 0


def _strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


_plain = torch.Tensor.__torch_dispatch__


def _replace(value: Any, copies: dict[int, torch.Tensor], depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return copies.get(id(value), value)
    if isinstance(value, _ATOMS) or depth == 0 or isinstance(value, (torch.nn.Module, type)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [_replace(item, copies, depth - 1) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    pairs = list(value.items()) if isinstance(value, dict) else list(getattr(value, "__dict__", {}).items())
    changed = {k: new for k, v in pairs if (new := _replace(v, copies, depth - 1)) is not v}
    if not changed:
        return value
    twin = copy.copy(value)
    for key, new in changed.items():
        if isinstance(value, dict):
            twin[key] = new
        else:
            object.__setattr__(twin, key, new)
    return twin
