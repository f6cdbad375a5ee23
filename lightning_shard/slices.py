"""ShardTensors in a checkpoint beyond model and optimizer states: those of averages of the weights, or of a user's own callback.

In the full form they become whole on rank 0. In the sharded form each is written as an entry of its own, of which every rank
writes its slice, and in its place is left::

    {"torch_shard.slices": number}
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_shard import Engine, ShardTensor
from torch_shard.whole import agree

from .full_checkpoint import on_meta

__all__ = ["gathered", "joined", "names", "split", "whole"]

_KEY = "torch_shard.slices"


def whole(engine: Engine, tree: Any) -> Any:
    """The tree with whole tensors on the CPU of rank 0, and on the others entries without memory. Collective.

    Raises:
        DivergenceError: on all ranks: they have not put the same things into the checkpoint.
    """
    agree(engine._runtime, "saving a checkpoint", names(tree))
    first = engine.rank == 0

    def gather(slices: ShardTensor) -> torch.Tensor:
        found = gathered(slices, engine.device)
        return found.cpu() if first else on_meta(slices)

    return _mapped(tree, gather)


def gathered(slices: ShardTensor, device: torch.device) -> torch.Tensor:
    """The whole, on a device from which the ranks can send: slices of an average may be elsewhere. Collective."""
    there: Any = slices.detach().to(device)
    return there.full_tensor()  # type: ignore[no-any-return]


def names(tree: Any) -> list[str]:
    """What is sharded in a tree, in order, each by the name of the parameter that it is cut as. Not collective."""
    found: list[str] = []

    def note(slices: ShardTensor) -> ShardTensor:
        found.append(slices._spec.name)
        return slices

    _mapped(tree, note)
    return found


def split(tree: Any) -> tuple[Any, dict[str, dict[str, ShardTensor]]]:
    """The tree with a mark for each ShardTensor, and these by number and name of the parameter. Not collective."""
    found: dict[str, dict[str, ShardTensor]] = {}

    def take(slices: ShardTensor) -> dict[str, int]:
        found[str(len(found))] = {slices._spec.name: slices}
        return {_KEY: len(found) - 1}

    return _mapped(tree, take), found


def joined(tree: Any, found: Mapping[str, Any]) -> Any:
    """What :func:`split` was given, from what it gave. Not collective."""
    if isinstance(tree, Mapping) and list(tree) == [_KEY]:
        return found[str(tree[_KEY])]
    return _rebuilt(tree, lambda value: joined(value, found)) if found else tree


def _mapped(tree: Any, function: Callable[[ShardTensor], Any]) -> Any:
    """Replace each ShardTensor, those of one object by one; containers without any are kept as they are."""
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
    """A dict, list or tuple with other values; itself where they are the same."""
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
