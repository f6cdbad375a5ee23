"""Which functions of an engine's parameter stay on shards, and which get the gathered parameter."""

from __future__ import annotations

import copy
import gc
from unittest import mock

import pytest
import torch
from torch import nn

import torch_shard
from tests.support.inside import runtime_of
from tests.support.ranks import ranks
from tests.support.shard_cases import GATHERED, REDUCTIONS, UNARY, VIEWED
from tests.support.shard_helpers import same
from torch_shard.errors import NeedsGatherError
from torch_shard.shard_tensor.tensor import ShardTensor

F = nn.functional


def made():
    """An engine, its weight of 5 x 7, and the plain one."""
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    plain = copy.deepcopy(model)
    engine = torch_shard.shard(model)
    return engine, model.weight, plain.weight


@ranks(2)
def test_arithmetic_and_reductions_to_a_scalar_gather_nothing(rank):
    engine, p, w = made()
    with torch.no_grad():
        for function in [*UNARY, *REDUCTIONS, lambda a: torch._foreach_norm([a])[0]]:
            same(function(p), function(w))
        for t in (p, w):
            t.data.mul_(torch.arange(7.0)).lerp_(torch.ones(5, 7), 0.5)
            t[t > 0.5] = 1.0
            torch.maximum(t, t * 2, out=t.data)
            torch.manual_seed(1)
            nn.init.trunc_normal_(t.data)
            t.add_(torch.zeros_like(t) * torch.arange(7.0) + 1)  # what is no parameter's value stays on shards
    same(p.detach(), w.detach())
    assert type((p.detach() * torch.tensor(2.0)).abs()) is ShardTensor
    assert engine.statistics().peak_gathered == 0


@ranks(2)
def test_edits_by_tensors_that_train_gather_nothing_where_nothing_is_recorded(rank):
    engine, p, w = made()
    with torch.no_grad():
        for factor in (torch.tensor(2.0), torch.arange(7.0)):
            factor.requires_grad_()
            for t in (p, w):
                t.mul_(factor)
    assert engine.statistics().peak_gathered == 0
    same(p.detach(), w.detach())


@ranks(2)
def test_a_number_that_trains_gets_its_gradient_from_all_of_a_frozen_parameter(rank):
    """Though a number leaves a shard a shard: each rank has to have the whole gradient."""
    _, p, w = made()
    grads = []
    for t in (p, w):
        t.requires_grad_(False)
        factor = torch.tensor(2.0, requires_grad=True)
        (t * factor).sum().backward()
        grads.append(factor.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("recording", [True, False])
@ranks(2)
def test_what_needs_all_elements_is_computed_from_the_gathered_parameter(rank, recording):
    engine, p, w = made()
    x = torch.arange(35.0).view(5, 7)
    functions = [*VIEWED, *GATHERED[:-6], lambda a: F.linear(input=x, weight=a), lambda a: torch.where(x > 0, a, 0.0)]
    for compute in (lambda a: a * 2, lambda a: (a.detach() + 1).detach().abs(), lambda a: a.double().float().data):
        assert type(compute(p)) is ShardTensor
        functions += [
            lambda a, c=compute: c(a) @ x.t(),
            lambda a, c=compute: c(a) * x,
            lambda a, c=compute: c(a).sum(0),
        ]
    with torch.set_grad_enabled(recording):
        for function in functions:
            found, expected = ([*r] if isinstance(r, (tuple, list)) else [r] for r in (function(p), function(w)))
            for ours, plain in zip(found, expected, strict=True):
                assert type(ours) is torch.Tensor and (ours.requires_grad == plain.requires_grad or not recording)
                assert torch.equal(ours, plain)
        assert p.tolist() == w.tolist()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            F.linear(torch.ones(2, 3), p)
        with pytest.raises(NeedsGatherError):
            (p.detach() * 2)[0] = 1.0
    assert engine.statistics().peak_gathered > 0


@ranks(2)
def test_reading_metadata_asks_nobody(rank):
    engine, p, w = made()
    if rank == 0:  # so it is not collective
        _ = p.grad, p.grad_fn, p.data, p.detach(), hash(p), repr(p), p._version
        for t in (p, w):
            t.requires_grad_(False).requires_grad_()
            t.grad = torch.ones(5, 7)
            t.grad = None
        for read in ("numel", "dim", "stride", "is_contiguous", "is_floating_point"):
            assert getattr(p, read)() == getattr(w, read)()
        assert (p.shape, p.size(0), len(p), p.dtype, p.device, p.is_leaf) == (w.shape, 5, 5, w.dtype, w.device, True)
        x = torch.ones(5, 7, dtype=torch.float64, requires_grad=True)
        assert x.to(p).dtype == x.type_as(p).dtype == torch.result_type(p, 2) == torch.float32
        assert torch.ones(35).view_as(x).expand_as(p).reshape_as(p).shape == (5, 7)
    assert engine.statistics().peak_gathered == 0
    same(p.detach(), w.detach())


class Converting(nn.Module):
    """Converts its input to what another unit's weight is, in each way that torch has."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x):
        weight, y = self.second.weight, x.double()
        self.found = [
            y.to(weight),
            y.to(tensor=weight),
            y.to(weight, non_blocking=True, copy=True),
            y.to(weight, True, True),
            y.type_as(weight),
            y.type_as(other=weight),
        ]
        self.asked = weight.device, weight.dtype
        return x


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@ranks(2)
def test_what_is_converted_to_an_offloaded_weight_stays_where_the_model_computes(rank, dtype):
    model = Converting()
    config = {} if dtype is None else {"precision": torch_shard.Precision(dtype)}
    engine = torch_shard.shard(model, units=[nn.Linear], offload=torch_shard.Offload(), **config)
    elsewhere = torch.device("meta")  # in place of a GPU
    with mock.patch.object(runtime_of(engine).host, "device", elsewhere):
        model(torch.ones(2, 7))
    assert model.asked == (elsewhere, dtype or torch.float32)
    assert {(t.device, t.dtype) for t in model.found} == {model.asked}


@ranks(2)
def test_inside_gathered_a_reference_from_before_is_the_full_parameter(rank):
    engine, p, _ = made()
    full = engine.model
    full(torch.ones(2, 7)).sum().backward()
    with engine.gathered(write=True, grads=True), torch.no_grad():
        q = p
        q += 1
        assert q is p and p.mul_(2) is p  # so that `module.weight += 1` keeps the parameter
        p[0, 0] = 5.0
        assert full.weight[0, 0] == 5 and p[0].shape == (7,) and type(p.data) is torch.Tensor
        p.data = torch.zeros(5, 7)
        assert not full.weight.any()
        p.data.fill_(3)
        assert p.grad is full.weight.grad
        p.grad = None
        assert full.weight.grad is None
    assert (p.full_tensor() == 3).all() and p.grad is None


@ranks(2)
def test_a_parameter_whose_model_is_gone_computes_on_shards_alone(rank):
    engine, p, w = made()
    del engine
    other = made()  # for which the ranks meet: until then the model is kept for those that read it alone
    gc.collect()
    same(p.detach() * 2, w.detach() * 2)
    with pytest.raises(NeedsGatherError):
        p @ p.t()
    del other
