"""Parameters used outside a forward: there they are what they show, in the dtype of storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.precision.harness import MLP, Mixed, batch, loss_of, same_bits
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import Precision

BF16, FP32 = torch.bfloat16, torch.float32
LOW = Precision(param_dtype=BF16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.second(self.first(x))


def normalised(w: Any) -> None:
    w.div_(w.norm(dim=1, keepdim=True))


def averaged(w: Any) -> None:
    w[4:] = w[:4].mean(0)


def out(w: Any) -> None:
    torch.add(w, 1e-4, out=w)


@ranks(2, exhaustive=(1, 3))
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_optim", "no_shard")])
@pytest.mark.parametrize("edit", [normalised, averaged, out])
def test_an_edit_that_needs_the_whole_keeps_the_precision_of_storage(edit, strategy, rank):
    pair = Mixed(Net, LOW, strategy=strategy, units=[nn.Linear])
    with torch.no_grad():
        for model in (pair.model, pair.masters):
            edit(model.first.weight)
    for name, p in pair.model.named_parameters():
        torch.testing.assert_close(
            p.detach().full_tensor(), pair.masters.get_parameter(name).detach(), rtol=1e-6, atol=1e-7
        )
    x = torch.ones(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(pair.model(x), pair.low()(x.to(BF16)), rtol=0.02, atol=0.02)


@ranks(2)
def test_features_of_the_computation_meet_weights_of_the_computation(rank):
    """A head that is applied outside its module, with and without gradients."""
    pair = Mixed(Net, LOW, units=[nn.Linear])
    low = pair.low()
    x = torch.ones(2, 6)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            ours = F.linear(pair.model.first(x), pair.model.second.weight)
            same_bits(ours, F.linear(low.first(x.to(BF16)), low.second.weight))
    loss_of(ours).backward()
    assert pair.model.second.weight.grad is not None


@ranks(2)
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard")])
def test_a_regulariser_has_the_dtype_of_storage(strategy, rank):
    pair = Mixed(Net, LOW, strategy=strategy, units=[nn.Linear])
    for term in (lambda w: w.pow(2).sum(), lambda w: w.norm(dim=1).sum()):
        values = []
        for model in (pair.model, pair.masters):
            value = term(model.first.weight)
            value.backward()
            values.append(value.detach())
        assert values[0].dtype == torch.float32
        torch.testing.assert_close(*values, rtol=0.01, atol=0)
        torch.testing.assert_close(
            pair.model.first.weight.grad.full_tensor(), pair.masters.first.weight.grad, rtol=0.02, atol=0.01
        )
        for model in (pair.model, pair.masters):
            model.zero_grad()
    loss_of(pair.model(batch(rank, 0, 4, 6).float())).backward()


@ranks(2)
def test_autograd_grad_gives_gradients_in_the_dtype_of_storage(rank):
    """As plain torch gives them, so that they can be assigned; used by all ranks or by one."""
    pair = Mixed(MLP, Precision(param_dtype=BF16))
    x = batch(rank, 0).float()
    loss_of(pair.model(x)).backward()
    wanted = {name: p.grad.full_tensor() for name, p in pair.model.named_parameters()}
    pair.model.zero_grad()
    named = dict(pair.model.named_parameters())
    for (name, p), grad in zip(
        named.items(), torch.autograd.grad(loss_of(pair.model(x)), list(named.values())), strict=True
    ):
        p.grad = grad
        assert grad.dtype == p.grad.dtype == FP32
        torch.testing.assert_close(p.grad.full_tensor(), wanted[name], rtol=2**-7, atol=1e-4)


@ranks(2)
def test_autograd_grad_where_one_rank_has_used_a_replicated_parameter(rank):
    """That rank alone has a gradient for it, as under DDP, and in the dtype of storage."""
    pair = Mixed(MLP, Precision(param_dtype=BF16), strategy="no_shard")
    x = batch(0, 0).float()
    hidden = pair.model.inp(x)
    out = pair.model.head(hidden)
    parameters = [pair.model.inp.weight, pair.model.head.weight]
    _, grad = torch.autograd.grad(loss_of(out if rank == 0 else hidden), parameters, allow_unused=True)
    if rank == 1:
        assert grad is None
        return
    low = pair.low()
    (expected,) = torch.autograd.grad(loss_of(low.head(low.inp(x.to(BF16)))), [low.head.weight])
    assert grad.dtype == FP32
    torch.testing.assert_close(grad, expected.float(), rtol=2**-7, atol=1e-5)
