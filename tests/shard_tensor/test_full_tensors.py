"""Full tensors from shards: each rank sends what it has, in its own dtype, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_shard
from tests.comm.test_traffic import Collectives
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from tests.support.shard_helpers import GroupComm, sharded
from torch_shard.errors import DivergenceError
from torch_shard.shard_tensor.full_tensor import full_tensors

DTYPES = [torch.bool, torch.int64, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.float32]
LARGE = (300, 301)


def values(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same plain tensors on every rank; one is without elements, one has a single one, which one rank holds alone."""
    shapes = {"large": LARGE, "scalar": (), "none": (0, 3), "row": (1, 5), "image": (4, 3, 3, 3), "small": (7,)}
    found = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        bits = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        value = (bits > 0) if dtype is torch.bool else (10 * bits).to(dtype)
        found[name] = value.to(memory_format=torch.channels_last) if name == "image" else value
    if dtype is torch.float32:
        found["small"][:4] = torch.tensor([-0.0, float("nan"), float("inf"), 1e-45])
    return found


def equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape and actual.stride() == expected.stride()
    assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (actual, expected)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ranks(3, exhaustive=(1, 2, 6))
def test_full_tensors_have_every_bit_of_the_shards(dtype: torch.dtype, rank: int, world_size: int) -> None:
    plain = values(dtype)
    comm = GroupComm(world_size, rank)
    tensors = sharded(plain, rank, world_size, comm)
    assert world_size == 1 or any(t._local.numel() == 0 for t in tensors.values()), "ranks without a part of a tensor"
    for name, expected in plain.items():
        equal(tensors[name].full_tensor(), expected)
    for value, expected in zip(full_tensors(list(tensors.values()), "a test"), plain.values(), strict=True):
        equal(value, expected)


@ranks(2)
def test_tensors_of_several_dtypes_come_in_one_message_from_each_rank(rank: int, world_size: int) -> None:
    comm = GroupComm(world_size, rank)
    plain = [values(dtype)["image"] for dtype in DTYPES]
    tensors = [sharded({"image": value}, rank, world_size, comm)["image"] for value in plain]
    for value, expected in zip(full_tensors(tensors, "a test"), plain, strict=True):
        equal(value, expected)
    assert comm.calls == 1 + world_size, "what is gathered, and each rank's shards"


@pytest.mark.parametrize("shape", [LARGE, (5, 3)], ids=["large", "small"])
@ranks(2)
def test_ranks_that_gather_different_tensors_find_out(shape: tuple[int, ...], rank: int, world_size: int) -> None:
    value = torch.zeros(shape)
    (tensor,) = sharded({"a" if rank == 0 else "b": value}, rank, world_size).values()
    with pytest.raises(DivergenceError, match="met another operation"):
        tensor.full_tensor()


# -- bytes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, *exhaustive(torch.float64)], ids=str)
@ranks(3, exhaustive=(2, 6))
def test_each_rank_sends_its_shard_once_to_each_other_rank(dtype: torch.dtype, rank: int, world_size: int) -> None:
    model = nn.Linear(300, 301, dtype=dtype)
    engine = torch_shard.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 300, dtype=dtype)).sum().backward()
    optimizer.step()
    weight = model.weight
    for tensor in (weight, weight.grad, optimizer.state[weight]["momentum_buffer"]):
        before = engine.statistics()
        with Collectives() as calls:
            tensor.full_tensor()
        counted = engine.statistics().since(before)
        padding = -tensor.to_local().nbytes % 16
        assert counted.bytes_sent == (world_size - 1) * (tensor.to_local().nbytes + padding)
        assert all(nbytes <= 64 for _, nbytes, _, _ in calls.named("allreduce_"))  # do all ranks want it?
        assert {d for _, _, dtypes, _ in calls.named("broadcast_") for d in dtypes} == {torch.uint8}


@ranks(3)
def test_a_tensor_that_one_rank_has_is_sent_by_that_rank_alone(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(200, 401, bias=False))
    engine = torch_shard.shard(model, units=[["0.weight", "1.weight"]])
    weight = model[0].weight  # a third of the flat buffer, so that the first rank has it all
    before = engine.statistics()
    weight.full_tensor()
    counted = engine.statistics().since(before)
    assert counted.bytes_sent == (world_size - 1) * weight.to_local().nbytes
    assert (counted.bytes_sent > 0) == (rank == 0)
