"""``torch.save(model)`` of a sharded model writes what DDP's module is in a file, on one rank alone and on all."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_shard
from tests.support import models
from tests.support.ranks import ranks
from tests.support.run_python import run_python
from torch_shard import Precision, ShardTensor
from torch_shard.activation_checkpointing import checkpointed_layers
from torch_shard.errors import ShardPicklingError
from torch_shard.state_dict_type import StateDictType, state_dict_type


def tokens(batch: int) -> torch.Tensor:
    return torch.arange(12).view(4, 3).add(batch) % 11


def train(model: nn.Module, batch: int) -> None:
    models.loss_of(model(tokens(batch))).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


def trained(batch: int, **settings: Any) -> tuple[nn.Module, DistributedDataParallel]:
    """Return a sharded model and a DDP model, both trained for a step."""
    torch.manual_seed(0)
    plain = models.Remembered()
    torch.manual_seed(0)
    sharded = models.Remembered()
    torch_shard.shard(sharded, **({"units": ["rnn", "head"]} | settings))
    ddp = DistributedDataParallel(plain)
    for model in (ddp, sharded):
        train(model, batch)
    return sharded, ddp


def reloaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def same(found: Any, expected: Any, path: str = "model") -> None:
    """Compare two modules, attribute by attribute, hooks and their flags included."""
    assert type(found) is type(expected), path
    if isinstance(found, nn.Module):
        same(vars(found), vars(expected), path)
    elif isinstance(found, weakref.ref):
        same(found(), expected(), path)
    elif isinstance(found, dict):
        named = [
            [key for key in each if not isinstance(key, int)] for each in (found, expected)
        ]  # the others number hooks
        assert named[0] == named[1], path
        for (key, one), other in zip(found.items(), expected.values(), strict=True):
            same(one, other, f"{path}.{key}")
    elif isinstance(found, torch.Tensor):
        assert found.requires_grad == expected.requires_grad and vars(found) == vars(expected), path
        torch.testing.assert_close(found.detach(), expected.detach(), msg=path)
    elif isinstance(found, list):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            same(one, other, f"{path}[{number}]")
    else:
        assert found == expected, path


@ranks(2, exhaustive=(3,))
def test_all_ranks_and_one_alone_save_what_ddp_saves(rank: int) -> None:
    sharded, ddp = trained(rank)
    wanted = reloaded(ddp.module)
    for found in (reloaded(sharded), pickle.loads(pickle.dumps(sharded))):
        same(found, wanted)
        assert found.head.weight is found.embedding.weight
    if rank == 1:
        same(reloaded(sharded), wanted)
        same(reloaded(sharded.rnn), reloaded(ddp.module.rnn))  # a part
    for model in (sharded, ddp):
        train(model, rank)
    assert isinstance(sharded.scale, ShardTensor)
    same(reloaded(sharded), reloaded(ddp.module))


@ranks(2)
def test_a_process_without_the_engine_loads_and_trains_the_file(rank: int, tmp_path: Path) -> None:
    sharded, ddp = trained(rank)
    if rank == 0:
        for name, model in (("sharded", sharded), ("plain", ddp.module)):
            torch.save(model, tmp_path / name)
        code = f"""
import sys
sys.modules["torch_shard"] = None  # importing it fails
import torch
from tests.support import models
both = [torch.load({str(tmp_path)!r} + "/" + name, weights_only=False) for name in ("sharded", "plain")]
for model in both:
    models.loss_of(model(torch.arange(12).view(4, 3) % 11)).backward()
for one, other in zip(*(model.parameters() for model in both), strict=True):
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(one.grad, other.grad)
"""
        run_python("-c", code)
    dist.barrier()


@ranks(2)
def test_what_else_the_engine_puts_into_modules_stays_out(rank: int) -> None:
    torch.manual_seed(0)
    plain = models.MLP(blocks=2)
    sharded = copy.deepcopy(plain)
    wanted = reloaded(plain)
    with checkpointed_layers(sharded, [models.Block], ()):
        precision = Precision(param_dtype=torch.bfloat16, cast_inputs=True, output_dtype=torch.float32)
        torch_shard.shard(sharded, units=[models.Block], precision=precision)
    with state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT):
        same(reloaded(sharded), wanted)


@ranks(2)
def test_copies_are_sharded_and_can_be_saved(rank: int) -> None:
    sharded, ddp = trained(batch=0)  # on all ranks, so that plain copies train as sharded ones do
    plain = ddp.module
    copied = copy.deepcopy(sharded)
    assert isinstance(copied.scale, ShardTensor) and torch_shard.engine_of(copied) is not None
    twin = copy.deepcopy(plain)
    twin.head.weight.decays = False  # plain torch leaves it out
    same(reloaded(copied), reloaded(twin))
    for model in (copied, twin):
        train(model, 0)
    same(reloaded(copied), reloaded(twin))
    same(reloaded(sharded), reloaded(plain))
    assert vars(copy.copy(sharded)).keys() == vars(sharded).keys()


class Own(nn.Linear):
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cache": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.was_loaded = True


@ranks(2)
def test_a_class_with_a_state_of_its_own(rank: int) -> None:
    torch.manual_seed(0)
    plain = Own(5, 3)
    plain.cache = object
    sharded = copy.deepcopy(plain)
    torch_shard.shard(sharded)
    same(reloaded(sharded), reloaded(plain))
    assert reloaded(sharded).was_loaded


@ranks(2)
def test_plain_modules_are_pickled_as_before(rank: int) -> None:
    plain = models.Remembered()
    before = pickle.dumps(plain)
    own = models.MLP()
    torch_shard.shard(own)
    assert pickle.dumps(plain) == before


@ranks(2)
def test_only_shared_memory_the_engine_and_reads_alone_that_are_off_are_refused(rank: int) -> None:
    sharded, _ = trained(rank)
    engine = torch_shard.engine_of(sharded)
    with (
        engine.gathered(),
        pytest.raises(ShardPicklingError, match=rf"rank {rank}: \S+ is pickled .* Save the model outside"),
    ):
        pickle.dumps(sharded)
    with pytest.raises(ShardPicklingError, match=rf"rank {rank}: the engine .* Pickle the model itself"):
        pickle.dumps(engine)
    sharded, _ = trained(rank, alone="error")
    with pytest.raises(ShardPicklingError, match=rf"rank {rank}: .*sharded scale.*engine\.state_dict"):
        pickle.dumps(sharded)


def test_without_a_process_group_it_is_saved_and_printed_too() -> None:
    code = """
import io, torch, torch_shard
from tests.support import models
model = models.MLP()
torch_shard.shard(model)
file = io.BytesIO()
torch.save({"model": model, "state": model.state_dict()}, file)
found = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
for one, other in zip(found["model"].parameters(), found["state"].values(), strict=True):
    assert type(one) is torch.nn.Parameter and type(other) is torch.Tensor
    torch.testing.assert_close(one.detach(), other)
assert str(model.head.bias) == str(found["model"].head.bias)
"""
    run_python("-c", code)
