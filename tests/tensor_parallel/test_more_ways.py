"""Tensor-parallel parameters with the engine's other features, and optimizer state of plain tensor parallelism."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from tests.tensor_parallel.harness import (
    DTYPE,
    EXACT,
    Model,
    Placed,
    backward,
    both_backward,
    mesh_of,
    optimizer_of,
    pair_of,
    parallel,
    plain_backward,
    same,
)
from torch_shard import shard
from torch_shard.errors import ShardError


@ranks(4)
def test_mixed_precision_computes_in_its_dtype():
    mesh = mesh_of(2, 2)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    seen = []
    model[0].register_forward_hook(lambda m, i, o: seen.append((m.weight.dtype, m.weight.to_local().dtype, o.dtype)))
    engine = shard(model, mesh=mesh["dp"], precision=torch.bfloat16)
    model(torch.ones(2, 8)).sum().backward()
    assert seen == [(torch.bfloat16,) * 3]
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    with engine.gathered(write=True), torch.no_grad():
        assert model[0].weight.dtype == torch.float32 and isinstance(model[0].weight, DTensor)
        model[0].weight.fill_(0.25)
    assert model[0].weight.sum().item() == 16.0


@pytest.mark.exhaustive
@ranks(4)
def test_accumulation_hooks_and_a_frozen_parameter():
    mesh = mesh_of(2, 2)
    model, oracle = parallel(mesh), Model()
    for m in (model, oracle):
        m.blocks[0].down.weight.requires_grad_(False)
        m.blocks[1].up.weight.register_hook(lambda grad: grad * 2)
    engine = shard(model, mesh=mesh["dp"])
    with engine.no_sync():
        backward(model, mesh, 0)
    backward(model, mesh, 1)
    plain_backward(oracle, 0)
    plain_backward(oracle, 1)
    assert model.blocks[0].down.weight.grad is None
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, **EXACT)


@pytest.mark.exhaustive
@ranks(4)
def test_a_step_in_backward_and_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    mesh, model, oracle, engine = pair_of()
    optimizers = optimizer_of(model), optimizer_of(oracle)
    engine.step_in_backward(optimizers[0])
    for m in (model, oracle):
        for block in m.blocks:
            plain = block.forward
            block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
    for step in range(2):
        both_backward(mesh, model, oracle, step)
        optimizers[1].step()
        optimizers[1].zero_grad()
    same(model, oracle)


@ranks(4)
def test_whole_matrix_optimizers_refuse_what_is_cut():
    mesh = mesh_of(2, 2)
    model = parallel(mesh)
    shard(model, mesh=mesh["dp"])
    backward(model, mesh, 0)
    before = model.blocks[0].up.weight.full_tensor()
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.1)
    with pytest.raises(ShardError, match=r"embed.weight is cut by tensor parallelism.*Nothing was changed"):
        optimizer.step()
    assert torch.equal(model.blocks[0].up.weight.full_tensor(), before)
    whole = torch.optim.Muon([model.head.weight], lr=0.1)
    whole.step()


def step_alike(model, oracle, optimizers):
    """A step of both on one batch, the same on all ranks, and whether it has left the same matrices."""
    for m, optimizer in zip((model, oracle), optimizers, strict=True):
        m(torch.linspace(-1.0, 1.0, 48, dtype=DTYPE).view(2, 4, 6)).square().sum().backward()
        optimizer.step()
        m.zero_grad()
    for p, q in zip(model.matrices(), oracle.matrices(), strict=True):
        torch.testing.assert_close(p.full_tensor().detach(), q.detach(), **EXACT)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("Muon", "full_shard"),
        *exhaustive(("Adafactor", "full_shard"), ("Adafactor", "no_shard"), ("AdamW", "full_shard")),
    ],
)
@ranks(4)
def test_state_of_plain_tensor_parallelism_is_taken_and_given_back(kind, strategy):
    mesh = mesh_of(2, 2)
    model, oracle = Placed(mesh["tp"]), Placed()
    optimizers = [getattr(torch.optim, kind)(m.matrices(), lr=0.1) for m in (model, oracle)]
    for _ in range(2):
        step_alike(model, oracle, optimizers)  # plain tensor parallelism
        engine = shard(model, mesh=mesh["dp"], strategy=strategy)
        step_alike(model, oracle, optimizers)
        engine.close(optimizers[0])
        for p, q in zip(model.matrices(), oracle.matrices(), strict=True):
            own, other = optimizers[0].state[p], optimizers[1].state[q]
            assert own.keys() == other.keys()
            for key in own.keys() - {"step"}:
                assert isinstance(own[key], DTensor), key
                torch.testing.assert_close(own[key].full_tensor(), other[key], **EXACT)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["AdamW", "Muon", "Adafactor"])
@ranks(4)
def test_state_of_plain_tensor_parallelism_is_saved_and_given_back_without_a_step_in_between(kind, tmp_path):
    mesh = mesh_of(2, 2)

    def optimizer_for(m):
        return getattr(torch.optim, kind)(m.parameters() if kind == "AdamW" else m.matrices(), lr=0.1)

    def has_the_oracles(found):
        assert type(found) is dict
        for name, q in oracle.named_parameters():
            for key, value in optimizers[1].state.get(q, {}).items():
                assert type(found["state"][name][key]) is torch.Tensor
                torch.testing.assert_close(found["state"][name][key], value, **EXACT)

    model, oracle = Placed(mesh["tp"]), Placed()
    optimizers = optimizer_for(model), optimizer_for(oracle)
    step_alike(model, oracle, optimizers)
    engine = shard(model, mesh=mesh["dp"])
    has_the_oracles(engine.optim_state_dict(optimizers[0], rank0_only=False))
    engine.save(tmp_path / "sharded", optimizers[0])
    engine.save_full(tmp_path / "full.pt", optimizers[0])
    dist.barrier()
    for way in ("sharded", "full.pt"):
        other = Placed(mesh["tp"])
        into, its = shard(other, mesh=mesh["dp"]), optimizer_for(other)
        into.load(tmp_path / way, its)
        has_the_oracles(into.optim_state_dict(its, rank0_only=False))
    engine.close(optimizers[0])
    step_alike(model, oracle, optimizers)


@ranks(4)
def test_whole_matrix_optimizers_refuse_state_that_is_cut_on_one_rank(rank):
    mesh = mesh_of(2, 2)
    model = Placed(mesh["tp"])
    shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.Muon(model.matrices(), lr=0.1)
    model(torch.ones(2, 4, 6, dtype=DTYPE)).sum().backward()
    kept = [p.full_tensor() for p in model.matrices()]
    for p in model.matrices():
        optimizer.state[p] = {
            "momentum_buffer": DTensor.from_local(torch.ones(4, 6, dtype=DTYPE), mesh["tp"], [Replicate()])
        }
    if rank == 3:
        half = DTensor.from_local(torch.ones(2, 6, dtype=DTYPE), mesh["tp"], [Shard(0)])
        optimizer.state[model.after]["momentum_buffer"] = half
    with pytest.raises(
        ShardError, match=rf"rank {rank}: Muon.*ranks \[3\].*state of after.*full_tensor.*Nothing was changed"
    ):
        optimizer.step()
    assert all(torch.equal(p.full_tensor(), value) for p, value in zip(model.matrices(), kept, strict=True))
    assert all(isinstance(optimizer.state[p]["momentum_buffer"], DTensor) for p in model.matrices())
    optimizer.state[model.after] = {"momentum_buffer": torch.ones(4, 6, dtype=DTYPE)}
    optimizer.step()
    assert not any(torch.equal(p.full_tensor(), value) for p, value in zip(model.matrices(), kept, strict=True))
