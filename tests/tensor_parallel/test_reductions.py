"""Norms, other reductions and clipping of tensor-parallel parameters are those of the whole model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from tests.tensor_parallel.harness import (
    DTYPE,
    EXACT,
    backward,
    batch,
    both_backward,
    loss_of,
    mesh_of,
    pair_of,
    parallel,
    same,
)
from torch_shard import shard
from torch_shard.errors import NonFiniteError


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
