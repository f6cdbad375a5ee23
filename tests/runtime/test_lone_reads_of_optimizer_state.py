"""One rank alone reads the state of optimizers, as under DDP, while the others do something else."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.runtime.test_lone_reads import TOKENS, elsewhere, made, same, train
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import DivergenceError, ShardPicklingError, UnitStateError


def by_name(plain: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """The state of a plain model's optimizer, by the parameters' names."""
    return {name: dict(optimizer.state[p]) for name, p in plain.named_parameters()}


def file_of(obj: Any) -> Any:
    file = io.BytesIO()
    torch.save(obj, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "groups": lambda params: torch.optim.Adam(
        [{"params": [p], "lr": 0.01 * (1 + n % 2)} for n, p in enumerate(params)], foreach=True
    ),
}


@pytest.mark.parametrize("where", ["in the next step", *exhaustive("in a barrier", "computing")])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optim"])
@ranks(2, exhaustive=(3,))
def test_state_is_read_and_written_alone_as_plain_torch_has_it(
    rank: int, strategy: str, optimizer: str, where: str
) -> None:
    # Batch norm takes a bias before it out again: its gradient is rounding errors, which Adam makes steps of.
    sharded, engine, plain = made(strategy, norm=nn.LayerNorm)
    mine, theirs = (OPTIMIZERS[optimizer](list(model.parameters())) for model in (sharded, plain))
    for _ in range(2):
        for model, own in ((sharded, mine), (plain, theirs)):
            train(model, own)
        if rank == 0:
            same(engine.optim_state_dict(mine)["state"], by_name(plain, theirs))
            same(file_of(mine.state_dict()), theirs.state_dict())
        else:
            elsewhere(where)
        if where == "in a barrier" and rank == 0:
            dist.barrier()
    for model, own in ((sharded, mine), (plain, theirs)):
        train(model, own)
    found = engine.optim_state_dict(mine)
    assert bool(found) == (rank == 0)
    same(found.get("state", {}), by_name(plain, theirs) if rank == 0 else {})
    assert engine.statistics().lone_reads > 0 or rank > 0


@ranks(2)
def test_a_step_waits_while_a_partner_reads_the_state(rank: int) -> None:
    sharded, engine, plain = made()
    mine, theirs = (torch.optim.AdamW(model.parameters(), lr=0.01) for model in (sharded, plain))
    for model, own in ((sharded, mine), (plain, theirs)):
        train(model, own)
    sharded(TOKENS).square().mean().backward()
    if rank == 0:
        with engine.gathered():  # which reads alone until it ends
            dist.barrier()
            time.sleep(0.3)
            same(file_of(mine.state_dict())["state"][0]["exp_avg"], theirs.state[plain.scale]["exp_avg"])
    else:
        dist.barrier()
    mine.step()


@ranks(2)
def test_state_that_the_others_have_stepped_on_is_an_error(rank: int) -> None:
    sharded, _, _ = made()
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    train(sharded, optimizer)
    sharded(TOKENS).square().mean().backward()
    if rank == 1:
        optimizer.step()
    dist.barrier()
    if rank == 0:
        with pytest.raises(DivergenceError, match=r"rank 1 has already made the next one, at .*optimizer_state.py"):
            file_of(optimizer.state_dict())
        optimizer.step()
    dist.barrier()


@ranks(2)
def test_old_state_is_not_mixed_with_new(rank: int) -> None:
    """A tensor that ``load_state_dict`` has replaced on all ranks."""
    sharded, _, _ = made()
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    train(sharded, optimizer)
    old = optimizer.state_dict()["state"][0]["exp_avg"]
    torch_shard.engine_of(sharded).load_optim_state_dict(
        optimizer, torch_shard.engine_of(sharded).optim_state_dict(optimizer, rank0_only=False)
    )
    assert optimizer.state_dict()["state"][0]["exp_avg"] is not old
    if rank == 0:
        with pytest.raises(ShardPicklingError):
            file_of(old)
        file_of(optimizer.state_dict())  # what was loaded is found, without a step
    dist.barrier()


@ranks(2)
def test_state_that_one_rank_alone_cannot_read_is_an_error_that_says_so(rank: int) -> None:
    """Full matrices at their owners, and host memory."""
    for settings, kind in (({}, torch.optim.Muon), ({"offload": "cpu"}, torch.optim.AdamW)):
        sharded, engine, _ = made(**settings)
        optimizer = kind([sharded.blocks[0][0].weight, sharded.blocks[1][0].weight], lr=0.01)
        train(sharded, optimizer)
        with pytest.raises(DivergenceError, match=r"engine\.optim_state_dict"):
            engine.optim_state_dict(optimizer) if rank == 0 else sharded(TOKENS)


@ranks(2)
def test_collective_state_inside_a_lone_read_is_an_error(rank: int) -> None:
    sharded, engine, _ = made()
    optimizer = torch.optim.Muon([sharded.blocks[0][0].weight], lr=0.01)
    train(sharded, optimizer)
    if rank == 0:
        with engine.gathered(), pytest.raises(UnitStateError, match="every rank"):
            engine.optim_state_dict(optimizer)
    dist.barrier()


@ranks(2, exhaustive=(3,))
def test_a_load_waits_for_a_rank_that_saves_later(rank: int) -> None:
    sharded, _engine, plain = made(norm=nn.LayerNorm)
    mine, theirs = (torch.optim.AdamW(model.parameters(), lr=0.01) for model in (sharded, plain))
    for _ in range(2):
        for model, own in ((sharded, mine), (plain, theirs)):
            train(model, own)
        time.sleep(0.3 * rank)
        saved = file_of(mine.state_dict())
        same(saved, theirs.state_dict())
        mine.load_state_dict(saved)
    for model, own in ((sharded, mine), (plain, theirs)):
        train(model, own)
    for ours, other in zip(sharded.parameters(), plain.parameters(), strict=True):
        same(ours.full_tensor(), other.detach())
