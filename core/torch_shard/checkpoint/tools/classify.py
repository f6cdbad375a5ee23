"""Sorting the entries of an opened checkpoint, of any tool, into models, optimizers, and the rest.

Checkpoints differ in where the model is (``model``, ``state_dict``, ``app.model``, at the top) and in how optimizer state is
named: by parameter or by number, with groups in a list or settings by parameter. :mod:`..sharded.entry_tree` does this for a live
model, whose names decide. Here there is no model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...errors import CheckpointError
from ...state.optimizer_state import OTHER
from ..sharded.entries import EXTRA, EXTRA_SHARDS, MODELS, OPTIMIZER
from ..sharded.entry_tree import (
    LIGHTNING,
    OPTIMIZER_KEYS,
    WRAPPERS,
    SavedOptimizer,
    Stored,
    StoredObject,
    is_optimizer,
    map_leaves,
    model_key,
    optimizer_of,
)
from ..sharded.extra_shards import joined
from .open_any import LIGHTNING_META, Opened


@dataclass
class Parts:
    """A checkpoint's contents. Each tensor is a :class:`~..sharded.entry_tree.Stored`.

    Attributes:
        model: the model's state dict, whose values may be nested.
        models: the state dicts of further models, by name.
        optimizers: the optimizers by name; a single one has the name "".
        extra: the object that ``engine.save`` was given as ``extra``, or the rest of a Lightning checkpoint; None without either.
        other: all other entries at the top.
        lightning: True for a checkpoint of Lightning's.
        listed: True if the optimizers were a list. Their names are the positions in it.
        model_key, optimizer_key: the keys of model and optimizers in the checkpoint; None if their entries were at the top.
        refused: the reason for each object that can't be read.
        left_out: the keys of other entries at the top, if only the models were read.
    """

    model: dict[str, Any] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizers: dict[str, SavedOptimizer] = field(default_factory=dict)
    extra: Any = None
    other: dict[Any, Any] = field(default_factory=dict)
    lightning: bool = False
    listed: bool = False
    model_key: str | None = None
    optimizer_key: str | None = None
    refused: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def names(self) -> list[str]:
        """Return the names of the models' entries, as optimizer state has them."""
        return [*map(str, self.model), *(f"{name}.{key}" for name, model in self.models.items() for key in model)]

    def convert(self, dtype: torch.dtype) -> None:
        """Give the floating-point entries of the models another dtype, to which they are converted when they are read."""

        def converted(leaf: Any) -> Any:
            if not isinstance(leaf, Stored) or not leaf.dtype.is_floating_point:
                return leaf
            return replace(leaf, dtype=dtype, place=(leaf.place, dtype), read=lambda: leaf.read().to(dtype))

        self.model, self.models = map_leaves(self.model, converted), map_leaves(self.models, converted)


def parts_of(opened: Opened, model_only: bool = False) -> Parts:
    """Sort a checkpoint's entries and read its objects. With `model_only` only the models are read and returned.

    None takes the place of an object that can't be read, and ``refused`` gets the reason.
    """
    parts = Parts()
    tree: dict[Any, Any] = dict(opened.tree)
    if not model_only and LIGHTNING_META in tree:
        found = _read(parts, tree.pop(LIGHTNING_META))
        tree = {**found, **tree} if isinstance(found, Mapping) else tree
    app = tree.get("app")
    if isinstance(app, dict) and isinstance(app.get("model"), dict):  # as in torch's tutorial for DCP
        tree = {**{key: value for key, value in tree.items() if key != "app"}, **app}
    key = parts.model_key = model_key(tree)
    if key is not None:
        parts.model = _read(parts, tree.pop(key))
    else:
        at_top = [name for name, value in tree.items() if isinstance(value, Stored) or _is_extra_state(name)]
        parts.model = _read(parts, {name: tree.pop(name) for name in at_top})
    if isinstance(tree.get(MODELS), dict) and LIGHTNING not in tree:
        parts.models = _read(parts, tree.pop(MODELS))
    if model_only:
        parts.left_out = list(map(str, tree))
        return parts
    tree = _read(parts, tree)
    parts.optimizers = {name: _optimizer(parts, own) for name, own in _optimizers(parts, tree)}
    if LIGHTNING in tree:
        parts.lightning, parts.extra = True, tree
        return parts
    if EXTRA in tree:
        extra_shards = tree.pop(EXTRA_SHARDS, {})
        by_number = {number: value for number, own in extra_shards.items() for value in own.values()}
        parts.extra = joined(tree.pop(EXTRA), by_number)
        parts.lightning = isinstance(parts.extra, Mapping) and LIGHTNING in parts.extra
    parts.other = tree
    return parts


def _read(parts: Parts, tree: Any) -> Any:
    """Return nested values with their objects read, but not their tensors."""

    def read(leaf: Any) -> Any:
        try:
            return leaf.read() if isinstance(leaf, StoredObject) else leaf
        except CheckpointError as error:  # it is damaged, or can't be unpickled without running code
            parts.refused.append(str(error))
            return None

    return map_leaves(tree, read)


def _is_extra_state(name: Any) -> bool:
    """Return True for the name of a module's extra state, which need not be a tensor."""
    return isinstance(name, str) and name.endswith("_extra_state")


# -- optimizers -------------------------------------------------------------------------------------------------------


def _optimizers(parts: Parts, tree: dict[Any, Any]) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Take the optimizers out of the tree, and yield them with their names."""
    for key in OPTIMIZER_KEYS:
        if key not in tree:
            continue
        value = tree[key]
        found: dict[Any, Any] = {"": value}
        if not is_optimizer(value):
            found = dict(enumerate(value)) if isinstance(value, list) else value if isinstance(value, dict) else {}
            if not found or not all(map(is_optimizer, found.values())):
                continue
            if isinstance(value, list) and len(value) == 1:
                found = {"": value[0]}
            parts.listed = isinstance(value, list) and len(value) > 1
        del tree[key]
        parts.optimizer_key = key
        yield from ((str(name), own) for name, own in found.items())
        return
    numbers = [key for key in tree if isinstance(key, str) and re.fullmatch(r"optimizer_\d+", key)]  # Lightning
    for key in numbers:
        yield "" if len(numbers) == 1 else key.rpartition("_")[2], tree.pop(key)


def _optimizer(parts: Parts, tree: dict[Any, Any]) -> SavedOptimizer:
    """Return an optimizer with groups, and with its state that belongs to no parameter in ``other``."""
    found = optimizer_of(tree, set(parts.names()))
    numbered = found.is_numbered
    strangers = {name: found.state.pop(name) for name in list(found.state) if numbered and not name.isdecimal()}
    if found.other is None:
        found.other = tuple((0, name, value) for name, value in {**found.unknown, **strangers}.items()) or None
    if found.groups:
        found.of_parameter = {}
    else:
        found.groups = _groups_of(found, parts)
    return found


def _groups_of(optimizer: SavedOptimizer, parts: Parts) -> list[dict[str, Any]]:
    """Return groups of parameters with equal settings, in the order of the models, for settings that are by parameter."""
    order = {name: i for i, name in enumerate(parts.names())}
    groups: dict[str, dict[str, Any]] = {}
    for name in sorted(optimizer.of_parameter, key=lambda name: order.get(name, len(order))):
        given = optimizer.of_parameter[name]
        settings = {key: value.read() if isinstance(value, Stored) else value for key, value in given.items()}
        group = groups.setdefault(repr(sorted(settings.items())), {**settings, "params": []})
        group["params"].append(name)
    return list(groups.values())


def merged(parts: Parts) -> SavedOptimizer:
    """Return a list of optimizers as a single one, group after group, as ``engine.save`` writes a list.

    Raises:
        CheckpointError: two of the optimizers have state of one parameter.
    """
    found = SavedOptimizer()
    other: list[tuple[int, Any, Any]] = []
    for position, own in enumerate(parts.optimizers.values()):
        groups = [{**group, "params": list(group.get("params") or ())} for group in own.groups]
        if own.is_numbered:
            # Numbers begin at 0 in each optimizer.
            listed = [int(p) for group in found.groups for p in group["params"] if isinstance(p, int)]
            first = max(listed, default=-1) + 1
            groups = [{**group, "params": [p + first for p in group["params"]]} for group in groups]
            state = {str(int(name) + first): entries for name, entries in own.state.items()}
        else:
            state = own.state
        twice = next((name for name in state if name in found.state), None)
        if twice is not None:
            raise CheckpointError(
                f"{twice} has state in two optimizers of a list, and a sharded checkpoint has them by parameter. Save the "
                "optimizers by name, optimizer={name: optimizer}, or pass --model-only."
            )
        found.groups += groups
        found.state.update(state)
        other += [(position, key, value) for _, key, value in own.other or ()]
    found.other = tuple(other) or None
    return found


# -- names ------------------------------------------------------------------------------------------------------------


def title(path: Iterable[Any]) -> str:
    """Return a path of :func:`named_entries` as text."""
    return ".".join(str(key[1]) if isinstance(key, tuple) else key for key in path)


def named_entries(parts: Parts) -> dict[tuple[Any, ...], Any]:
    """Return all entries by path, as :mod:`..sharded.entries` lists them: the same paths for the same contents in any format.

    Empty dicts and lists are entries, too. Two keys with the same text, ``{1: ...}`` and ``{"1": ...}``, have different paths.
    """
    found: dict[tuple[Any, ...], Any] = {}
    for name, value in parts.model.items():
        found.update(_walk(value, ("model", _at(name))))
    for model, own in parts.models.items():
        for name, value in own.items():
            found.update(_walk(value, (MODELS, model, _at(name))))
    for name, optimizer in parts.optimizers.items():
        base = (OPTIMIZER, name) if name else (OPTIMIZER,)
        for parameter, entries in optimizer.state.items():
            for key, value in entries.items():  # a parameter without entries has no state
                found.update(_walk(value, (*base, "state", parameter, _at(key))))
        for number, group in enumerate(optimizer.groups):
            found.update({(*base, "param_groups", str(number), key): value for key, value in group.items()})
        if optimizer.other is not None:
            found.update({(*base, OTHER): optimizer.other})
    if parts.extra is not None:
        found.update(_walk(parts.extra, (EXTRA,)))
    for name, value in parts.other.items():
        found.update(_walk(value, (_at(name),)))
    return found


def _at(key: Any) -> Any:
    """Return a key as part of a path, with its type unless that is str, since 1, True and "1" are three keys."""
    return key if isinstance(key, str) else (type(key), key)


def _walk(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the leaves of nested values with their paths."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _walk(value, (*path, _at(key)))
    elif isinstance(tree, (list, tuple)) and tree and not isinstance(tree, torch.Size):
        for i, value in enumerate(tree):
            yield from _walk(value, (*path, ("place", i)))
    else:
        yield path, tree


def remove_wrappers(parts: Parts) -> None:
    """Remove the prefix of DDP or torch.compile from all names, if all of the model's names have it."""
    for wrapper in sorted(filter(None, WRAPPERS), key=len, reverse=True):
        if parts.model and all(str(name).startswith(wrapper) for name in parts.model):
            cut = len(wrapper)
            parts.model = {name[cut:]: value for name, value in parts.model.items()}
            for own in parts.optimizers.values():
                own.state = {name.removeprefix(wrapper): value for name, value in own.state.items()}
                for group in own.groups:
                    listed = group.get("params", [])
                    group["params"] = [p.removeprefix(wrapper) if isinstance(p, str) else p for p in listed]
            return
