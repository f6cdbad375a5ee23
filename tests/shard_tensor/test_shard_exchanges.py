"""Collectives of torch.distributed on sharded parameters, gradients and optimizer state: as on plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.support.ranks import ranks
from torch_shard.comm.process_group_ops import reduce_scatter_single
from torch_shard.errors import NeedsGatherError
from torch_shard.versions import at_least


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(model, optimizer, asynchronous):
    """Two steps; what ranks that sync by themselves do between them. Every rank has the same samples."""
    world = dist.get_world_size()
    for p in model.parameters() if at_least("2.13") else ():  # an error before
        dist.broadcast(p.data, 0)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(10.0).view(2, 5)).square().mean().backward()
        for p in model.parameters():
            work = dist.all_reduce(p.grad, async_op=asynchronous)
            if asynchronous:
                work.wait()
            p.grad.div_(2 * world)
        optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            dist.all_reduce(optimizer.state[p]["momentum_buffer"], op=dist.ReduceOp.MAX)
            dist.all_reduce(p)
    gradients = [torch.empty_like(model[0].weight.grad) for _ in range(world)]
    dist.all_gather(gradients, model[0].weight.grad)
    values = [*gradients, *model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]
    return [v.full_tensor().detach() if hasattr(v, "full_tensor") else v.detach() for v in values]


@pytest.mark.parametrize("asynchronous", [False, True])
@ranks(2)
def test_what_they_write_is_kept(rank, asynchronous):
    wanted = trained(*made(), asynchronous)
    model, optimizer = made()
    torch_shard.shard(model)
    for value, plain in zip(trained(model, optimizer, asynchronous), wanted, strict=True):
        torch.testing.assert_close(value, plain)


@ranks(2)
def test_what_would_be_another_tensor_on_each_rank_is_refused(rank):
    model, _ = made()
    engine = torch_shard.shard(model)
    weight = model[0].weight
    with engine.no_sync():
        model(torch.ones(2, 5)).sum().backward()
    given = [torch.ones(7, 5)] * 2 if rank == 0 else None
    for collective in (dist.all_reduce, lambda t: dist.reduce(t, 0), lambda t: dist.scatter(t, given)):
        with pytest.raises(NeedsGatherError):
            collective(weight.grad)
    with pytest.raises(
        NeedsGatherError, match=r"reduce_scatter_\w+ on the sharded 0\.weight gives each rank something else"
    ):
        reduce_scatter_single(torch.empty(4, 5), weight)
