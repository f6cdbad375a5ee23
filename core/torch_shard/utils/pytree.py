"""The tensors inside nested containers and objects, such as the outputs of a forward."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from . import transforms

_ATOMS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_ATOM_TYPES = frozenset(_ATOMS)
_DEPTH = 8


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor in nested tuples, lists, dicts, sets, dataclasses and plain objects, each once."""
    if type(value) is torch.Tensor:
        return [value]
    found: dict[int, torch.Tensor] = {}
    _collect(value, found, set(), _DEPTH)
    return list(found.values())


def may_hold_tensors(value: Any) -> bool:
    """Return False if `value` is empty, or a flat list or tuple of numbers and strings, such as a shape.

    This takes less time than :func:`tensors_in`.
    """
    if isinstance(value, (list, tuple)):
        return not _ATOM_TYPES.issuperset(map(type, value))
    return isinstance(value, torch.Tensor) or bool(value)


def _collect(value: Any, found: dict[int, torch.Tensor], seen: set[int], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        found[id(value)] = value
        return
    if isinstance(value, _ATOMS) or depth == 0 or id(value) in seen or isinstance(value, (torch.nn.Module, type)):
        return
    seen.add(id(value))
    children: list[Any] = []
    if isinstance(value, dict):
        children += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        children += value
    elif dataclasses.is_dataclass(value):  # which may have slots
        children += [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if not isinstance(value, (list, tuple, set, frozenset)):
        children += getattr(value, "__dict__", {}).values()
    for child in children:
        _collect(child, found, seen, depth - 1)


def own_memory(value: Any, tensors: list[torch.Tensor], storages: set[int]) -> tuple[Any, list[torch.Tensor]]:
    """Return `value` with copies of those of its `tensors` that lie in one of `storages`, which will be freed; and the copies.

    The copies carry gradients back. Containers are copied where something in them changes.
    """
    copies = {id(t): transforms.inside(_clone, t) for t in tensors if storage_of(t) in storages}
    return (replace(value, copies) if copies else value), list(copies.values())


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    if not torch.is_inference_mode_enabled():
        return tensor.clone()
    with torch.inference_mode(False), torch.no_grad():  # an inference tensor would not show whether it was edited
        return tensor.clone()


def replace(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Return `value` with other tensors in the place of some, by their ``id``; looks into every object."""
    return _mapped(value, lambda tensor: copies.get(id(tensor), tensor), _DEPTH, objects=True)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with ``change(tensor)`` in the place of each tensor; looks into containers and dataclasses only.

    Containers are copied where something in them changes.
    """
    return _mapped(value, change, _DEPTH, objects=False)


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, or 0 if it has none of its own."""
    local = transforms.innermost(getattr(tensor, "_local_tensor", tensor))  # of a DTensor
    plain = type(local).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and local.layout is torch.strided
    return local.untyped_storage()._cdata if plain else 0


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor], depth: int, objects: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, _ATOMS) or depth == 0 or isinstance(value, (torch.nn.Module, type)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [_mapped(item, change, depth - 1, objects) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        parts = dict(value)
    elif dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        parts = {name: getattr(value, name) for name in names} | getattr(value, "__dict__", {})
    elif objects:
        parts = dict(getattr(value, "__dict__", {}))
    else:
        return value
    changed = {k: new for k, v in parts.items() if (new := _mapped(v, change, depth - 1, objects)) is not v}
    if not changed:
        return value
    twin = copy.copy(value)
    for key, new in changed.items():
        if isinstance(value, dict):
            twin[key] = new
        else:
            object.__setattr__(twin, key, new)
    return twin
