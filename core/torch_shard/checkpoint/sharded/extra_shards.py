"""ShardTensors within the object that a front end saves as ``extra``, such as averages of the weights.

An object is written by rank 0 alone. So each ShardTensor in it becomes an entry of its own, of which every rank writes its
shard, ``sliced.<number>.<name of the parameter that it is cut as>``, and in its place is left::

    {"torch_shard.sliced": number}
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from ...shard_tensor.tensor import ShardTensor
from ...utils.patterns import without_wrappers

_KEY = "torch_shard.sliced"


def split(tree: Any) -> tuple[Any, dict[str, dict[str, ShardTensor]]]:
    """Return the tree with a placeholder for each ShardTensor, and the ShardTensors by number and parameter. Not collective."""
    found: dict[str, dict[str, ShardTensor]] = {}

    def take(shards: ShardTensor) -> dict[str, int]:
        found[str(len(found))] = {without_wrappers(shards._spec.name): shards}
        return {_KEY: len(found) - 1}

    return map_shards(tree, take), found


def joined(tree: Any, found: Mapping[str, Any]) -> Any:
    """Return the tree that :func:`split` was given, from the tree with placeholders and the values by number. Not collective."""
    if isinstance(tree, Mapping) and list(tree) == [_KEY]:
        return found[str(tree[_KEY])]
    return _rebuilt(tree, lambda value: joined(value, found)) if found else tree


def map_shards(tree: Any, function: Callable[[ShardTensor], Any]) -> Any:
    """Replace each ShardTensor, the same object by the same value; containers without any are kept as they are."""
    done: dict[int, Any] = {}
    within: set[int] = set()

    def visit(value: Any) -> Any:
        if isinstance(value, ShardTensor):
            if id(value) not in done:
                done[id(value)] = function(value)
            return done[id(value)]
        if id(value) in within:  # a container that holds itself
            return value
        within.add(id(value))
        try:
            return _rebuilt(value, visit)
        finally:
            within.discard(id(value))

    return visit(tree)


def _rebuilt(tree: Any, visit: Callable[[Any], Any]) -> Any:
    """Return a dict, list or tuple with other values, or itself if all values stay the same."""
    if isinstance(tree, dict):
        new = {key: visit(value) for key, value in tree.items()}
        if all(new[key] is value for key, value in tree.items()):
            return tree
        changed = copy.copy(tree)  # of its class, with its attributes: a state dict has _metadata
        changed.update(new)
        return changed
    if isinstance(tree, (list, tuple)):
        values = [visit(value) for value in tree]
        if all(a is b for a, b in zip(values, tree, strict=True)):
            return tree
        if isinstance(tree, list):
            return values
        return type(tree)._make(values) if hasattr(tree, "_make") else type(tree)(values)
    return tree
