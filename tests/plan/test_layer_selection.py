"""Layers that are selected by the names of their classes."""

from __future__ import annotations

from torch import nn

from torch_shard.plan.layer_selection import classes_named


def block() -> type[nn.Module]:
    class Block(nn.Module):
        pass

    return Block


def test_all_classes_of_one_name_are_found():
    first, second = block(), block()
    assert classes_named("layers", ["Block"], nn.Sequential(first(), nn.ReLU(), second(), first())) == (first, second)
