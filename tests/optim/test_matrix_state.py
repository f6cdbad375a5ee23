"""State of whole-matrix optimizers: at the owner, saved by name, resumed on any number of ranks."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_shard
import torch_shard.optim
from tests.compat.harness import Pair, batch, plain_backward
from tests.optim.helpers import Odd
from tests.optim.matrix_optimizers import MAKE, Shampoo, advance, gradients, maker, same_state, takes
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks, run
from torch_shard.errors import ShardPicklingError
from torch_shard.optim import state_tree
from torch_shard.optim.matrix import state as matrix_state

STEPS = 3


def trained(rank: int, world_size: int, name: str, file: str = "", resume: str = "") -> None:
    """Train from the beginning or from a file, compare with plain training from there, save."""
    torch.manual_seed(0)
    pair = Pair(Odd, rank, world_size, optimizer=maker(name), unit_bytes=300)
    first = 0
    if resume:
        saved = torch.load(resume, weights_only=True)
        pair.engine.load_state_dict(saved["model"])
        pair.engine.load_optim_state_dict(pair.optimizer, saved["optimizer"])
        pair.plain.load_state_dict(saved["model"])
        plain = saved["optimizer"]
        names = [n for n, p in pair.plain.named_parameters() if takes(name, p)]
        numbered = {"state": {names.index(n): own for n, own in plain["state"].items()}}
        groups = [{**g, "params": list(range(len(names)))} for g in plain["param_groups"]]
        pair.plain_optimizer.load_state_dict(copy.deepcopy({**numbered, "param_groups": groups}))
        same_state(pair)
        first = STEPS
    advance(pair, range(first, first + STEPS))
    same_state(pair)
    if file:
        model, optimizer = pair.engine.state_dict(), pair.engine.optim_state_dict(pair.optimizer)
        if rank == 0:
            torch.save({"model": model, "optimizer": optimizer}, file)


@pytest.mark.parametrize("name", quick(MAKE, ["Muon"]))
@pytest.mark.parametrize(("first", "second"), [(2, 3), *exhaustive((3, 2), (2, 1), (1, 2), (2, 4))])
def test_training_resumes_on_another_number_of_ranks(name, first, second, tmp_path):
    file = str(tmp_path / "state.pt")
    run(first, trained, name, file)
    run(second, trained, name, "", file)


@pytest.mark.parametrize("name", ["Adafactor", "Soap"])  # whose state is in lists
@ranks(2, exhaustive=(3,))
def test_each_parameter_has_state_on_one_rank(rank, world_size, name):
    pair = Pair(Odd, rank, world_size, optimizer=maker(name))
    advance(pair, range(2))
    mine = [p._spec.name for p in pair.optimizer.state]
    everyone = [None] * world_size
    dist.all_gather_object(everyone, mine)
    stepped = [n for n, p in pair.plain.named_parameters() if p in pair.plain_optimizer.state]
    assert sorted(name for names in everyone for name in names) == sorted(stepped)
    held = [None] * world_size
    dist.all_gather_object(held, pair.engine.memory_summary(pair.optimizer)["optimizer"])
    whole = [t for own in pair.plain_optimizer.state.values() for t in state_tree.tensors_of(own)]
    assert sum(held) == sum(t.numel() * t.element_size() for t in whole)


@pytest.mark.parametrize("name", ["Muon", *exhaustive("Shampoo", "Adafactor", "transformers fixed")])
@ranks(2)
def test_state_from_before_sharding(rank, world_size, name):
    torch.manual_seed(0)
    model = Odd().double()
    optimizer = maker(name)(model)
    plain_backward(model, batch(0, 0))
    optimizer.step()
    plain = copy.deepcopy({"model": model, "optimizer": optimizer})
    pair = Pair.__new__(Pair)
    pair.rank, pair.world_size = rank, world_size
    pair.plain, pair.plain_optimizer = plain["model"], plain["optimizer"]
    pair.model, pair.optimizer = model, optimizer
    pair.engine = torch_shard.shard(model, unit_bytes=300)
    same_state_before = pair.engine.optim_state_dict(optimizer, rank0_only=False)["state"]
    assert len(same_state_before) == len(pair.plain_optimizer.state)
    advance(pair, range(1, 3))
    same_state(pair)
    assert len(optimizer.state) < len(pair.plain_optimizer.state)


@pytest.mark.exhaustive
@ranks(2)
def test_a_plain_state_dict_on_every_rank_and_this_ranks_own(rank, world_size):
    pair = Pair(Odd, rank, world_size, optimizer=maker("Shampoo"))
    advance(pair, range(2))
    mine, plain = copy.deepcopy(pair.optimizer.state_dict()), copy.deepcopy(pair.plain_optimizer.state_dict())
    assert 0 < len(mine["state"]) < len(plain["state"])
    pair.optimizer.load_state_dict(copy.deepcopy(plain))  # whole, on every rank
    advance(pair, range(2, 4))
    same_state(pair)
    assert len(pair.optimizer.state) == len(mine["state"])

    again = Pair(Odd, rank, world_size, optimizer=maker("Shampoo"))
    with torch.no_grad():
        again.engine.load_state_dict(pair.engine.state_dict(rank0_only=False))
        again.plain.load_state_dict(pair.plain.state_dict())
    # A local view belongs to its rank, whoever would have become the owner.
    again.optimizer.load_state_dict(copy.deepcopy(pair.optimizer.state_dict()))
    again.plain_optimizer.load_state_dict(copy.deepcopy(pair.plain_optimizer.state_dict()))
    advance(again, range(4, 6))
    same_state(again)


@ranks(2)
def test_state_that_was_cut_is_made_whole(rank, world_size):
    pair = Pair(Odd, rank, world_size, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
    for step in range(2):
        gradients(pair, step)
        pair.optimizer.step()
        pair.plain_optimizer.step()
    second = [maker("Muon")(model) for model in (pair.model, pair.plain)]
    for old, new in zip((pair.optimizer, pair.plain_optimizer), second, strict=True):
        for p in new.param_groups[0]["params"]:
            if p in old.state:
                new.state[p] = dict(old.state[p])
    pair.optimizer, pair.plain_optimizer = second
    advance(pair, range(2, 4))
    same_state(pair)


@ranks(2)
def test_state_that_the_user_drops_begins_anew(rank, world_size):
    pair = Pair(Odd, rank, world_size, optimizer=maker("Muon"))
    advance(pair, range(2))
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        optimizer.state.clear()
    advance(pair, range(2, 4))
    same_state(pair)


class Plain(Shampoo):
    """Needs no memory of its own."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=0.1)


class Highest(TorchDispatchMode):
    """Looks after each operation at the memory of all tensors that there were not before."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storages = {}
        for found in gc.get_objects():  # without those that were frozen
            if type(found) in (torch.Tensor, nn.Parameter):
                storage = found.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        self.seen = max(self.seen, sum(storages.values()))
        return result


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
        self.layers = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = self.layers
        y: torch.Tensor = fourth(third(second(first(x)[..., : x.shape[-1]])))
        return y


class Tower(nn.Module):
    def __init__(self, blocks: int, width: int, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self) -> torch.Tensor:
        x = self.table(torch.arange(2))
        for block in self.blocks:
            x = block(x)
        return x.sum()


def highest_in_a_step(blocks: int, width: int, rows: int) -> tuple[float, float]:
    """The memory that a step takes, as a part of this rank's gradients, and in units."""
    torch_shard.optim.register(Plain, kind="matrix")
    model = Tower(blocks, width, rows)
    torch_shard.shard(model)
    optimizer = Plain(model.parameters())
    model().backward()
    gradients = sum(p.grad._local.nbytes for p in model.parameters())
    with mock.patch.object(matrix_state, "_SMALL", 0):
        for _ in range(2):  # these keep some values to compare them
            optimizer.step()
        gc.collect()
        gc.freeze()
        try:
            with Highest() as highest:
                optimizer.step()
        finally:
            gc.unfreeze()
    assert highest.seen
    return highest.seen / gradients, highest.seen / (12 * width * width * 4)


@ranks(2, exhaustive=(3, 4))
def test_a_step_holds_a_few_units_beside_the_largest_matrix_and_no_second_copy_of_gradients(rank, world_size):
    _, units = highest_in_a_step(blocks=12, width=16, rows=12 * 16)  # a table of a unit's size
    assert units < 6.5
    part, _ = highest_in_a_step(blocks=24, width=16, rows=2)
    assert part < 0.85


@ranks(2)
def test_a_step_exchanges_a_unit_in_parts_where_there_are_few_units(rank):
    _, units = highest_in_a_step(blocks=3, width=16, rows=2)
    assert units < 4.0


@pytest.mark.parametrize("name", quick(MAKE, ["Muon"]))
@ranks(2)
def test_a_file_of_one_rank_part_of_the_state_is_refused_and_the_part_itself_may_be_loaded_and_copied(rank, name):
    pair = Pair(Odd, rank, 2, optimizer=maker(name), unit_bytes=300)
    advance(pair, range(STEPS))
    part, kind = pair.optimizer.state_dict(), type(pair.optimizer).__name__
    for way in (lambda: torch.save(part, io.BytesIO()), lambda: pickle.dumps({"all": [part]})):
        with pytest.raises(
            ShardPicklingError, match=rf"rank {rank}: .* {kind} .*only the matrices that this rank owns"
        ):
            way()
    pair.optimizer.load_state_dict(copy.deepcopy(part))
    same_state(pair)
