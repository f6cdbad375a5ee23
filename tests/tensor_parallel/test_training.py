"""Tensor-parallel parameters sharded on top train as the plain model does, on a mesh of 2 x 2 ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from tests.tensor_parallel.harness import (
    DTYPE,
    EXACT,
    Model,
    backward,
    batch,
    both_backward,
    loss_of,
    mesh_of,
    optimizer_of,
    pair_of,
    parallel,
    same,
    trained,
)
from torch_shard import shard
from torch_shard.errors import NonFiniteError


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("full_shard", "sgd"),
        *exhaustive(("full_shard", "adamw"), ("shard_grad_op", "sgd"), ("shard_optim", "sgd"), ("no_shard", "adamw")),
    ],
)
@ranks(4)
def test_training_gives_the_numbers_of_the_plain_model(strategy, kind):
    mesh = mesh_of(2, 2)
    model, oracle = parallel(mesh), Model()
    before = dict(model.named_parameters())
    optimizers = optimizer_of(model, kind), optimizer_of(oracle, kind)  # built before sharding: it stays valid
    engine = shard(model, mesh=mesh["dp"], strategy=strategy)
    assert engine.world_size == 4 and engine.rank == dist.get_rank()
    assert all(p is before[name] for name, p in model.named_parameters())
    assert [p.shape for p in model.parameters()] == [p.shape for p in oracle.parameters()]
    same(model, oracle)
    for step in range(3):
        both_backward(mesh, model, oracle, step)
        same(model, oracle, grads=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same(model, oracle)
    with torch.no_grad():
        torch.testing.assert_close(model(batch(0, 9)), oracle(batch(0, 9)), **EXACT)


@ranks(4)
def test_the_first_data_parallel_ranks_values_count(rank):
    mesh = mesh_of(2, 2)
    model, oracle = parallel(mesh, seed=mesh["dp"].get_local_rank()), Model(seed=0)
    shard(model, mesh=mesh["dp"])
    same(model, oracle)
    apart = parallel(mesh, seed=mesh["dp"].get_local_rank())
    engine = shard(apart, mesh=mesh["dp"], sync_module_states=False)
    with engine.gathered():  # each rank has kept its slice
        whole = apart.blocks[0].up.weight.detach().to_local().clone()
    everyone = [torch.empty_like(whole) for _ in range(4)]
    dist.all_gather(everyone, whole)
    assert torch.equal(everyone[0], everyone[2]) and torch.equal(everyone[1], everyone[3])
    assert not torch.equal(everyone[0], everyone[1])


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard")])
@ranks(4)
def test_parameters_on_meta_are_initialised_as_a_plain_models(strategy):
    mesh = mesh_of(2, 2)
    plan = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "1": SequenceParallel(),
        "2": RowwiseParallel(input_layouts=Replicate()),
    }
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(6, 2))
    parallelize_module(model, mesh["tp"], plan)
    torch.manual_seed(5 + dist.get_rank())  # rank 0's counts
    shard(model, mesh=mesh["dp"], strategy=strategy)
    torch.manual_seed(5)
    oracle = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(6, 2))
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)


@pytest.mark.exhaustive
@ranks(4)
def test_a_communication_hook_reduces_over_the_data_parallel_ranks():
    mesh, model, oracle, engine = pair_of(single_communicator=True)
    assert dist.get_process_group_ranks(engine.shard_group) == dist.get_process_group_ranks(mesh.get_group("dp"))

    def hook(group, grad, output):
        parts = list(grad.chunk(2))
        for place, part in enumerate(parts):
            dist.reduce(part, group=group, group_dst=place)
        output.copy_(parts[dist.get_rank(group)] / 2)

    engine.register_comm_hook(mesh.get_group("dp"), hook)
    both_backward(mesh, model, oracle, 0)
    same(model, oracle, grads=True)


@ranks(4)
def test_the_dimension_may_be_named_and_memory_is_a_quarter():
    mesh = mesh_of(2, 2)
    model = parallel(mesh, width=64, hidden=64)
    engine = shard(model, mesh=mesh, mesh_dims="dp")
    cut = sum(p.numel() for n, p in model.named_parameters() if any(k in n for k in ("embed", "up", "down.weight")))
    rest = sum(p.numel() for p in model.parameters()) - cut
    held = engine.memory_summary()["parameters"] / 8
    assert cut / 4 + rest / 2 <= held <= cut / 4 + rest / 2 + 64


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
@ranks(2)
def test_one_dimension_may_have_one_rank(shape):
    mesh = mesh_of(*shape)
    _, model, oracle, _ = trained(mesh)
    same(model, oracle)


@pytest.mark.exhaustive
@ranks(4)
def test_parts_of_unequal_size(tmp_path):
    """Hidden 5 over two ranks: three columns and two; and an embedding of one row, of which a rank has none."""
    mesh = mesh_of(2, 2)
    model = nn.Sequential(nn.Linear(3, 5, dtype=DTYPE), nn.Linear(5, 3, dtype=DTYPE))
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p)
    oracle = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()})
    lone = nn.Parameter(distribute_tensor(torch.ones(1, 3, dtype=DTYPE), mesh["tp"], [Shard(0)]))
    oracle.lone, model.lone = nn.Parameter(torch.ones(1, 3, dtype=DTYPE)), lone
    engine = shard(model, mesh=mesh["dp"])
    same(model, oracle)
    x = torch.full((2, 3), 1.0 + mesh["dp"].get_local_rank(), dtype=DTYPE)
    model(x).square().sum().backward()
    (sum(oracle(torch.full((2, 3), 1.0 + i, dtype=DTYPE)).square().sum() for i in range(2)) / 2).backward()
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, **EXACT)
    full = engine.state_dict(rank0_only=False)
    assert all(torch.equal(full[name], value) for name, value in oracle.state_dict().items())
    engine.save(tmp_path / "sharded")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    engine.load(tmp_path / "sharded")
    same(model, oracle)
    engine.close()
    assert tuple(model[0].weight.to_local().shape) == (3 - mesh["tp"].get_local_rank(), 3)


# -- norms, other reductions and clipping are those of the full model ---------------------------------------------------


@pytest.mark.parametrize("order", [2.0, *exhaustive(float("inf"), 0.0, 1.0)])
@ranks(4)
def test_gradient_norms_are_the_whole_models_on_all_ranks(order):
    for strategy in ("full_shard", "no_shard"):
        for clip in ("engine", "torch"):
            mesh, model, oracle, engine = pair_of(strategy=strategy)
            both_backward(mesh, model, oracle, 0)
            expected = nn.utils.clip_grad_norm_(oracle.parameters(), 0.5, order)
            if clip == "engine":
                norm = engine.clip_grad_norm_(0.5, order)
            elif order == 0.0:
                continue  # of ranks' slices, torch would have to be told
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, order)
            torch.testing.assert_close(norm, expected, **EXACT)
            everyone = [torch.empty_like(norm) for _ in range(4)]
            dist.all_gather(everyone, norm)
            assert len({float(n) for n in everyone}) == 1
            same(model, oracle, grads=True)


@pytest.mark.exhaustive
@ranks(4)
def test_reductions_to_a_number_count_every_element_once():
    _, model, oracle, _ = pair_of()
    with torch.no_grad():
        for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
            for reduce in (torch.sum, torch.mean, torch.std, torch.max, torch.Tensor.norm, torch.count_nonzero):
                torch.testing.assert_close(reduce(p), reduce(q), **EXACT)
            weights = torch.arange(q.numel(), dtype=DTYPE).view(q.shape)
            torch.testing.assert_close(p.mul_(weights).full_tensor(), q * weights, **EXACT)
            p.copy_(weights)
            assert torch.equal(p.full_tensor(), weights)


@pytest.mark.exhaustive
@ranks(4)
def test_a_loss_term_on_parameters_themselves():
    mesh, model, oracle, _ = pair_of()
    penalty = sum(p.square().sum() for p in model.parameters())
    (loss_of(model, batch(mesh["dp"].get_local_rank(), 0)) + 0.1 * penalty).backward()
    (sum(loss_of(oracle, batch(i, 0)) for i in range(2)) / 2).backward()
    (0.1 * sum(p.square().sum() for p in oracle.parameters())).backward()
    same(model, oracle, grads=True)


@pytest.mark.exhaustive
@ranks(4)
def test_one_bad_gradient_element_is_seen_by_all_ranks():
    mesh = mesh_of(2, 2)
    model = parallel(mesh)
    engine = shard(model, mesh=mesh["dp"])
    backward(model, mesh, 0)
    bad = torch.zeros(12, 6, dtype=DTYPE)
    bad[7, 2] = float("nan")  # on one rank of one tensor-parallel half
    model.blocks[0].up.weight.grad = bad
    with pytest.raises(NonFiniteError):
        engine.clip_grad_norm_(1.0, error_if_nonfinite=True)
    scale, found = torch.ones(1), torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in model.parameters()], found, scale)
    assert found.item() == 1.0
