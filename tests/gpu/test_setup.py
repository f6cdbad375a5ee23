"""Sharding a model onto GPUs: from the CPU, from meta, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import torch_shard
from tests.compat.harness import same_params
from tests.gpu.models import GPT, Block, nbytes, peak_bytes, tokens, train_step
from tests.support.ranks import ranks
from torch_shard.errors import SetupError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none here")


def gpu_mesh() -> Any:
    """All ranks, each on its current GPU. Over Gloo, parameters on the CPU would stay there without a mesh."""
    group: Any = dist.group.WORLD
    return DeviceMesh.from_group(group, "cuda")


def check_on(device: torch.device, model: nn.Module) -> None:
    for name, p in model.named_parameters():
        assert p.to_local().device == device, name
    for name, b in model.named_buffers():
        assert b.device == device, name


def check_moves_unit_by_unit(world_size: int, device: torch.device) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(600, 600) for _ in range(12)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(600))
    plain = copy.deepcopy(model)
    whole, unit = nbytes(model), nbytes(layers[0])
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = peak_bytes(device)
    engine = torch_shard.shard(model, mesh=gpu_mesh(), units=[nn.Linear], timeout=60.0)
    above = peak_bytes(device) - before
    assert engine.device == device
    # One unit whole, and one more: the part of it that stays is cut out of it.
    assert above <= whole / world_size + 2 * unit, f"{above / unit:.1f} units, of {whole / unit:.1f}"
    check_on(device, model)
    same_params(model, plain.to(device))


@ranks(2, 3, timeout=240)
def test_parameters_on_the_cpu_move_to_a_shared_gpu_unit_by_unit(world_size, device):
    check_moves_unit_by_unit(world_size, device)


@ranks(1, 2, backend="nccl", timeout=240)
def test_parameters_on_the_cpu_move_to_the_gpu_unit_by_unit_over_nccl(world_size, device):
    check_moves_unit_by_unit(world_size, device)


@ranks(1, 2, backend="nccl", timeout=240)
def test_over_nccl_parameters_on_the_cpu_need_no_mesh_to_move_to_the_current_gpu(rank, device):
    model = GPT(width=24)
    engine = torch_shard.shard(model, timeout=60.0)
    check_on(device, model)
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), tokens(rank, 0, device), engine)


def check_meta(rank: int, world_size: int, device: torch.device) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(40, 50), nn.Embedding(70, 40), nn.Conv1d(30, 40, 2), nn.BatchNorm1d(9))

    torch.manual_seed(5)
    with device:
        plain = build()
    with torch.device("meta"):
        model = build()
    unit = max(nbytes(m) for m in plain)
    torch.manual_seed(5 + 10 * rank)  # rank 0's count
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = peak_bytes(device)
    torch_shard.shard(model, mesh=gpu_mesh(), unit_bytes=1000, timeout=60.0)
    above = peak_bytes(device) - before
    check_on(device, model)
    same_params(model, plain)
    # The random values of one whole parameter at a time, besides a unit.
    assert above <= nbytes(plain) / world_size + 3 * unit, f"{above} bytes; the whole model has {nbytes(plain)}"


@ranks(2, 3, timeout=240)
def test_parameters_on_meta_get_the_values_of_a_plain_model_on_a_shared_gpu(rank, world_size, device):
    check_meta(rank, world_size, device)


@ranks(1, 2, backend="nccl", timeout=240)
def test_parameters_on_meta_get_the_values_of_a_plain_model_over_nccl(rank, world_size, device):
    check_meta(rank, world_size, device)


@ranks(2, timeout=240)
def test_a_gpt_on_meta_trains_on_a_shared_gpu(rank, device):
    with torch.device("meta"):
        model = GPT(width=24)
    torch.manual_seed(7)
    engine = torch_shard.shard(model, mesh=gpu_mesh(), units=[Block], timeout=60.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        train_step(model, optimizer, tokens(rank, step, device), engine)
    assert all(bool(p.detach().full_tensor().isfinite().all()) for p in model.parameters())


# -- what is refused; parameters of one model on several devices: tests/setup/test_bad_input.py ---------------------------------


@ranks(1, backend="nccl", timeout=240)
def test_parameters_on_another_gpu_than_the_meshs_are_an_error_that_names_one(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1 - device.index)
    model = nn.Linear(3, 3).to(other)
    with pytest.raises(SetupError, match=rf"weight is on {other}, but this rank shards on {device}"):
        torch_shard.shard(model, mesh=gpu_mesh())
    assert type(model.weight) is nn.Parameter


@pytest.mark.parametrize("other", ["cpu", "meta"])
@ranks(2, timeout=240)
def test_parameters_on_the_gpu_on_one_rank_only_are_an_error(rank, device, other):
    """Over Gloo the device follows the parameters, and collectives on two kinds of device would never meet."""
    model = nn.Linear(3, 3, device=device if rank == 0 else other)
    with pytest.raises(SetupError, match=r"(?s)cuda.*cpu|cpu.*cuda"):
        torch_shard.shard(model, timeout=20.0)
    assert type(model.weight) is nn.Parameter


# -- the process group ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "nccl"])
@ranks(1, 2, backend="nccl", fresh=True, timeout=240)
def test_a_process_group_without_a_backend_for_the_cpu_trains_like_plain(device, backend):
    """As most programs make it. Without a name torch chooses NCCL, and calls it undefined."""
    dist.destroy_process_group()
    dist.init_process_group(backend)
    torch.manual_seed(0)
    plain = GPT().double()
    model = copy.deepcopy(plain)
    plain.to(device)
    engine = torch_shard.shard(model, unit_bytes=2000, timeout=60.0)
    assert engine.device == device
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (model, plain)]
    for step in range(3):
        for m, optimizer in pairs:
            train_step(m, optimizer, tokens(0, step, device))  # the same on all ranks, so that their mean is it, too
    same_params(model, plain)
