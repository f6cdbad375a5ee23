"""Plans of models whose modules are registered in many places: the same as from every single path, at the cost of a few."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import torch_shard
from torch_shard.config.precision import Precision, precision_of
from torch_shard.config.shard_config import ShardConfig
from torch_shard.errors import ConfigError
from torch_shard.plan.module_tree import ModuleTree, Node
from torch_shard.plan.planner import make_plan
from torch_shard.utils.patterns import MOST_NAMES, every_name


class Holder(nn.Module):
    """A module with a forward and a parameter of its own."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(2))
        for number, child in enumerate(children):
            self.add_module(f"m{number}", child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def chain(length: int) -> nn.Module:
    """Each module is registered twice in the next one, so that the first has 2**length names."""
    module: nn.Module = nn.Linear(3, 3)
    for number in range(length):
        module = Holder(module, module) if number % 3 else nn.ModuleList([module, module])
    return module


def test_a_chain_of_modules_that_are_each_registered_twice_is_planned_and_sharded_within_a_second() -> None:
    model = chain(30)
    precision = Precision(param_dtype=torch.bfloat16, keep=["*m1.m0"])
    begin = time.process_time()
    plan = make_plan(model, ShardConfig(units=[nn.Linear]), 2)
    assert make_plan(model, ShardConfig(precision=precision), 2).params
    engine = torch_shard.shard(model)
    assert time.process_time() - begin < 1
    assert len(engine.plan.params) == sum(1 for _ in model.parameters())
    first = plan.unit_of(".".join(reversed([f"{'m' if n % 3 else ''}0" for n in range(30)])) + ".weight")
    assert [p.shape for p in first.params] == [(3, 3), (3,)]
    assert all(len(p.aliases) < MOST_NAMES for p in plan.params)


# -- against the definition ---------------------------------------------------------------------------------------------


def every_path(tree: ModuleTree) -> Iterator[tuple[tuple[Node, ...], str]]:
    """Every path of registrations from the root, shared modules once per path."""

    def walk(path: tuple[Node, ...], prefix: str) -> Iterator[tuple[tuple[Node, ...], str]]:
        yield path, prefix
        for attr, child in path[-1].module._modules.items():
            node = None if child is None else tree.node_of(child)
            if node is not None and node not in path:
                yield from walk((*path, node), f"{prefix}.{attr}" if prefix else attr)

    yield from walk((tree.root,), "")


def random_model(seed: int) -> nn.Module:
    """A small graph of modules without cycles: some have no forward, some are atoms, some are in several places."""
    pick = random.Random(seed)
    made: list[nn.Module] = []
    for _ in range(pick.randint(2, 8)):
        children = [pick.choice(made) for _ in range(pick.randint(0, 3))] if made else []
        kind = pick.choice(("holder", "list", "atom", "parametrized"))
        module: nn.Module = nn.ModuleList(children) if kind == "list" else Holder(*children)
        if kind == "atom":
            module = nn.MultiheadAttention(2, 1)
            for number, child in enumerate(children):
                module.add_module(f"m{number}", child)
        elif kind == "parametrized":
            nn.utils.parametrizations.weight_norm(module, "own")
        if made and pick.random() < 0.3 and kind == "holder":
            tied = next((p for other in made for p in other.parameters()), None)
            module.register_parameter("tied", tied)
        made.append(module)
    return Holder(*made[-3:], *pick.sample(made, 1))


def first_path(node: Node) -> tuple[Node, ...]:
    """Return the nodes from the root to this one, by first registrations."""
    return (node,) if node.parent is None else (*first_path(node.parent), node)


def caller(path: tuple[Node, ...]) -> Node:
    """Return the outermost atom on a path, else the innermost module that has a forward, else the root."""
    atoms, callable_ones = [n for n in path if n.is_atom], [n for n in path if n.has_forward]
    return [*atoms, *reversed(callable_ones), path[0]][0]


@pytest.mark.parametrize("seed", range(60))
def test_names_owners_and_triggers_are_those_of_every_path(seed: int) -> None:
    model = random_model(seed)
    tree = ModuleTree(model)
    paths = list(every_path(tree))
    assert [(prefix, path[-1].module) for path, prefix in paths] == list(every_name(model))
    to = {number: [] for number in range(len(tree.params))}
    names = {number: [] for number in to}
    owners = {number: {} for number in to}
    for path, prefix in paths:
        for attr, param in path[-1].module._parameters.items():
            if param is not None:
                number = tree.number_of(param)
                to[number].append(path)
                names[number].append(f"{prefix}.{attr}" if prefix else attr)
                owners[number][path[-1].name, attr] = None
    for number, info in enumerate(tree.infos):
        assert [info.name, *info.aliases] == names[number]
        assert info.owners == tuple(owners[number])
    nodes = list(tree.root.walk())
    for number, covering in itertools.product(to, [None, *nodes]):
        found = {} if covering is None else {caller(first_path(covering)).name: covering}
        around = set(found.values())
        expected = dict.fromkeys(found)
        for path in to[number]:
            if not around.intersection(path):
                expected[caller(path).name] = None
        roots = [] if covering is None else [covering]
        triggers = tree.triggers([number], roots)
        assert set(triggers) == set(expected) and len(triggers) == len(expected)


@pytest.mark.parametrize("seed", range(60))
def test_what_precision_keeps_is_kept_on_every_path(seed: int) -> None:
    model = random_model(seed)
    plain = ModuleTree(model)
    pick = random.Random(seed)
    chosen = pick.choice([path[-1] for path, _ in every_path(plain)])
    precision = precision_of(Precision(param_dtype=torch.bfloat16, cast_inputs=True, keep=[chosen.name or "*"]))
    kept = precision.kept_modules(model)
    mixed, inside = [], []
    for number, info in enumerate(plain.infos):
        paths = [
            p for p, _ in every_path(plain) for q in p[-1].module._parameters.values() if q is plain.params[number]
        ]
        flags = [any(node.module in kept for node in path) for path in paths]
        inside.append(any(flags))
        if any(flags) and not all(flags):
            owners = {
                flag: {path[-1].name for path, own in zip(paths, flags, strict=True) if own is flag} for flag in flags
            }
            mixed.append((info.name, owners))
    if mixed:
        name, owners = mixed[0]
        with pytest.raises(ConfigError) as caught:
            ModuleTree(model, precision)
        said = re.search(r"(\S+) is tied between '(.*)', which is kept, and '(.*)', which is not", str(caught.value))
        assert said[1] == name and said[2] in owners[True] and said[3] in owners[False]
    else:
        tree = ModuleTree(model, precision)
        assert [info.dtypes.compute is torch.float32 for info in tree.infos] == inside
