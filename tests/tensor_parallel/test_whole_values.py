"""``gathered``, ``close``, copies and edits of tensor-parallel parameters."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.ranks import ranks
from tests.tensor_parallel.harness import (
    DTYPE,
    EXACT,
    backward,
    both_backward,
    mesh_of,
    optimizer_of,
    pair_of,
    same,
    train,
    trained,
)
from torch_shard import shard
from torch_shard.errors import ConfigError, NeedsGatherError, UnitStateError


@ranks(4)
def test_gradients_of_distributed_parameters_are_read_from_copies_and_have_no_views():
    mesh, model, oracle, _ = pair_of()
    both_backward(mesh, model, oracle, 0)
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        for read in (lambda g: torch.cat([g, g]), lambda g: g.sum(0), lambda g: torch.tensor(g.tolist(), dtype=DTYPE)):
            torch.testing.assert_close(read(p.grad), read(q.grad), **EXACT)
        if p.grad._spec.part is None:
            assert float(p.grad.view(-1)[1]) == pytest.approx(q.grad.view(-1)[1].item())
        else:
            with pytest.raises(NeedsGatherError):
                p.grad.unsqueeze(0)
            with pytest.raises(NeedsGatherError):
                p.grad[0].zero_()
            p.grad[0] = q.grad[0] = 0.0
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, **EXACT)


@ranks(4)
def test_gathered_parameters_are_dtensors_and_edits_are_kept():
    mesh, model, oracle, engine = pair_of()
    both_backward(mesh, model, oracle, 0)
    with engine.gathered(write=True, grads=True):
        for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
            assert isinstance(p, nn.Parameter)
            if isinstance(p, DTensor):
                torch.testing.assert_close(p.detach().full_tensor(), q.detach(), **EXACT)
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, **EXACT)
            else:
                assert name.startswith("head") or name.endswith("gain")
                torch.testing.assert_close(p.grad, q.grad, **EXACT)
            with torch.no_grad():
                p.mul_(2.0)
                p.grad.mul_(3.0)
        weight = model.blocks[0].up.weight
        weight.data = weight.data + 1.0
    with torch.no_grad():
        for q in oracle.parameters():
            q.mul_(2.0)
            q.grad.mul_(3.0)
        oracle.blocks[0].up.weight.add_(1.0)
    same(model, oracle)
    same(model, oracle, grads=True)
    with pytest.raises(ConfigError, match=r"ranks: unit .* has .*, a DTensor"), engine.gathered(ranks=0):
        pass
    with pytest.raises(UnitStateError, match="distributed parameter"), engine.gathered():
        model.blocks[0].up.weight.data = torch.zeros(12, 6, dtype=DTYPE)


@pytest.mark.exhaustive
@ranks(4)
def test_a_backward_inside_gathered_is_reduced():
    mesh, model, oracle, engine = pair_of(debug=True)
    with engine.gathered():
        both_backward(mesh, model, oracle, 0)
    same(model, oracle, grads=True)
    both_backward(mesh, model, oracle, 1)
    same(model, oracle, grads=True)


@pytest.mark.exhaustive
@ranks(4)
def test_random_edits_of_what_is_gathered_leave_tensor_parallel_ranks_alike(rank):
    mesh, model, _, engine = pair_of()
    backward(model, mesh, 0)
    torch.manual_seed(rank)
    with engine.gathered(write=True, grads=True), torch.no_grad():
        model.head.weight.normal_()
        model.gain.grad.add_(torch.randn(model.gain.shape, dtype=model.gain.dtype))
        if rank % 2:
            model.head.bias.grad = None
    assert model.head.bias.grad is not None
    for own in (model.head.weight.full_tensor(), model.gain.grad.full_tensor()):
        everyone = [torch.empty_like(own) for _ in range(4)]
        dist.all_gather(everyone, own)
        assert all(torch.equal(other, own) for other in everyone)


class Sloped(nn.Module):
    """A buffer with values for each row of a weight that tensor parallelism cuts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 4, dtype=torch.float64)
        self.down = nn.Linear(4, 6, dtype=torch.float64)
        self.register_buffer("slopes", torch.arange(1.0, 5.0, dtype=torch.float64))

    def forward(self, x):
        return self.down(self.up(x) * self.slopes)


@pytest.mark.exhaustive
@ranks(4)
def test_buffers_of_a_tensor_parallel_ranks_own_stay(rank):
    mesh, oracle, model = mesh_of(2, 2), Sloped(), Sloped()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    own = model.slopes.chunk(2)[mesh["tp"].get_local_rank()].clone()
    model.slopes = own if rank < 2 else torch.zeros_like(own)  # the first data-parallel rank's count
    shard(model, mesh=mesh["dp"])
    x = torch.ones(2, 6, dtype=torch.float64)
    for _ in range(2):
        y = model(x)
        torch.testing.assert_close(y, oracle(x), **EXACT)
        y.sum().backward()
    assert torch.equal(model.slopes, own)


@pytest.mark.exhaustive
@ranks(4)
def test_close_gives_dtensors_back():
    mesh = mesh_of(2, 2)
    engine, model, oracle, optimizers = trained(mesh)
    both_backward(mesh, model, oracle, 5)
    engine.close(optimizers[0])
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        found, grad = (
            (p.detach(), p.grad) if not isinstance(p, DTensor) else (p.full_tensor().detach(), p.grad.full_tensor())
        )
        torch.testing.assert_close(found, q.detach(), **EXACT)
        torch.testing.assert_close(grad, q.grad, **EXACT)
        moment = optimizers[0].state[p]["exp_avg"]
        assert isinstance(moment, DTensor) == isinstance(p, DTensor)
        moment = moment.full_tensor() if isinstance(moment, DTensor) else moment
        torch.testing.assert_close(moment, optimizers[1].state[q]["exp_avg"], **EXACT)
    assert type(model.blocks[0].up.weight) is DTensor
    for optimizer in optimizers:
        optimizer.step()  # as plain tensor parallelism, which the gradients are whole for
    again = shard(model, mesh=mesh["dp"])
    same(model, oracle)
    train(mesh, model, oracle, optimizers, range(2))
    same(model, oracle)
    again.close()


@pytest.mark.exhaustive
@ranks(4)
def test_a_copy_trains_by_itself():
    mesh = mesh_of(2, 2)
    _, model, oracle, _ = trained(mesh)
    twin, other = copy.deepcopy(model), copy.deepcopy(oracle)
    optimizers = optimizer_of(twin), optimizer_of(other)
    train(mesh, twin, other, optimizers, range(2))
    same(twin, other)
    same(model, oracle)


@ranks(4)
def test_edits_inside_a_forward_and_views_outside_one():
    mesh, model, oracle, _ = pair_of()

    def clamp(module, _):
        with torch.no_grad():
            module.weight.clamp_(-0.1, 0.1)

    for m in (model, oracle):
        m.blocks[1].up.register_forward_pre_hook(clamp)
    both_backward(mesh, model, oracle, 0)
    same(model, oracle)
    same(model, oracle, grads=True)
    rows = model.blocks[0].up.weight.t()  # of memory that is released at once
    torch.testing.assert_close(rows.full_tensor(), oracle.blocks[0].up.weight.t().detach(), **EXACT)
