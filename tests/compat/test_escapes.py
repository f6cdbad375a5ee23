"""What leaves a unit by another way than a fresh output tensor, and what reaches parameters past their modules."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_shard
from tests.compat.harness import MLP, Pair, batch, loss_of, plain_backward, same, train_as_ddp, train_both
from tests.support.marks import exhaustive, seldom
from tests.support.ranks import ranks
from torch_shard.errors import ShardError

STRATEGIES = pytest.mark.parametrize(
    "strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")]
)


class ReturnsView(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(-1, 2, 3)


class EditsViews(nn.Module):
    """In-place operations on views that other units have returned."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = ReturnsView(5, 6), ReturnsView(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.a(x).relu_()
        x = self.b(x.flatten(1)).mul_(2.0)
        x[:, 0] = 0.5
        return self.c(x.flatten(1))


@ranks(2, exhaustive=(3,))
@STRATEGIES
def test_in_place_operations_on_views_from_other_units_train_like_plain(rank, world_size, strategy):
    train_both(EditsViews, rank, world_size, unit_bytes=100, strategy=strategy)


@dataclass
class Output:
    query: torch.Tensor
    extra: dict


class Queries(nn.Module):
    """Returns its own parameter, and views of it."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self):
        if self.how == "parameter":
            return self.weight
        if self.how == "view":
            return self.weight.t()
        return Output(self.weight[:5], {"all": [self.weight]})


class UsesQueries(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.queries = Queries(how)
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 5)

    def forward(self, x):
        q = self.queries()
        if isinstance(q, Output):
            q = q.query + q.extra["all"][0]
        return self.b(self.a(x)) @ q


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("how", [*seldom("parameter"), "view", *seldom("object")])
def test_a_unit_that_returns_its_own_parameter_trains_like_plain(rank, world_size, how):
    pair = train_both(lambda: UsesQueries(how), rank, world_size, unit_bytes=100)
    with torch.no_grad():
        same(*pair.each(lambda m: m(batch(rank, 9))))


class KeepsItsWeight(nn.Linear):
    def forward(self, x):
        self.__dict__["kept"] = self.weight
        return super().forward(x)


class UsesAKeptWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = KeepsItsWeight(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.c(self.b(self.a(x)) @ self.a.__dict__["kept"])


@ranks(2)
def test_a_weight_that_its_module_put_aside_trains_like_plain(rank, world_size):
    train_both(UsesAKeptWeight, rank, world_size, unit_bytes=100)


class KeepsIfTold(KeepsItsWeight):
    """A layer whose weight backward does not need, where its input needs no gradient."""

    def __init__(self, keeps: bool) -> None:
        super().__init__(5, 7)
        self.keeps = keeps

    def forward(self, x):
        return super().forward(x) if self.keeps else nn.Linear.forward(self, x)


class UsesItIfKept(MLP):
    def __init__(self, keeps: bool, uses: bool) -> None:
        super().__init__()
        self.inp, self.uses = KeepsIfTold(keeps), uses

    def forward(self, x):
        out = super().forward(x)
        return out + self.inp.__dict__["kept"].pow(2).sum() if self.uses else out


@pytest.mark.parametrize("uses", [False, True], ids=["unused", "used"])
@ranks(2)
def test_a_weight_that_one_rank_alone_puts_aside_trains_like_plain(rank, world_size, uses):
    first = rank == 0
    train_both(lambda: UsesItIfKept(first, uses and first), rank, world_size, units=["inp", "blocks.*", "head"])


class FusedLoss(torch.autograd.Function):
    """Computes its gradients in forward, as fused linear losses do."""

    @staticmethod
    def forward(ctx, x, weight):
        out = x @ weight.t()
        ctx.save_for_backward(2 * out @ weight, 2 * out.t() @ x)
        return out.pow(2).sum()

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad * a, grad * b


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 4, bias=False)

    def forward(self, x):
        return FusedLoss.apply(self.body(x), self.head.weight)


@ranks(2, exhaustive=(3,))
@STRATEGIES
def test_a_function_that_is_given_another_modules_weight_trains_like_plain(rank, world_size, strategy):
    def run(model, x):
        model(x).backward()

    train_both(Fused, rank, world_size, run=run, unit_bytes=100, strategy=strategy, optimizer=_slow)


def _slow(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3)


@ranks(2)
@STRATEGIES
@pytest.mark.parametrize("how", ["versioned", "data", "assigned", "loaded"])
def test_an_edit_after_a_look_at_a_weight_is_seen_by_the_next_forward(rank, world_size, how, strategy):
    pair = Pair(MLP, rank, world_size, strategy=strategy)

    def look_and_edit(model):
        weight = model.inp.weight
        seen = weight.detach() @ torch.ones(5, dtype=torch.float64)
        model.inp(batch(rank, 5))
        if how == "versioned":
            with torch.no_grad():
                weight.mul_(0.5)
        elif how == "data":
            weight.data.mul_(0.5)
        elif how == "assigned":
            weight.data = weight.data * 0.5
        else:
            state = {k: v * 0.5 for k, v in pair.plain.state_dict().items()}
            (pair.engine if model is pair.model else model).load_state_dict(state)
        return seen, model.inp(batch(rank, 6)), model(batch(rank, 7))

    ours, plain = pair.each(look_and_edit)
    for a, b in zip(ours, plain, strict=True) if how != "loaded" else ():
        same(a, b)
    if how == "loaded":  # the plain model was edited after it was read
        pair.engine.load_state_dict(pair.plain.state_dict())
        same(*pair.each(lambda m: m(batch(rank, 7))))
    pair.train(8)


@ranks(2)
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard")])
def test_a_backward_inside_no_sync_of_a_forward_outside_reduces_as_under_ddp(rank, world_size, strategy):
    def run(model, no_sync, step):
        loss = loss_of(model(batch(rank, step)))
        with no_sync():
            loss.backward()

    train_as_ddp(MLP, run, steps=1, strategy=strategy)


def _explode(grad):
    raise ValueError("bad batch")


@ranks(2)
def test_accumulated_gradients_that_a_failed_backward_lost_are_an_error_until_cleared(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    with pair.engine.no_sync():
        plain_backward(pair.model, batch(rank, 0))
    loss = loss_of(pair.model(batch(rank, 1)))
    handle = pair.model.inp.weight.register_hook(_explode)
    with pytest.raises(ValueError, match="bad batch"):
        loss.backward()
    handle.remove()
    with pytest.raises(ShardError, match=r"lost when a later backward failed"):
        plain_backward(pair.model, batch(rank, 2))
    pair.optimizer.zero_grad()
    pair.train(3)


@ranks(2)
def test_a_backward_that_would_give_gradients_without_their_graph_is_an_error(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    with pytest.raises(ShardError, match=r"create_graph.*torch\.autograd\.grad"):
        loss_of(pair.model(batch(rank, 0))).backward(create_graph=True)
    pair.train(1)


@ranks(2)
def test_a_forward_inside_gathered_with_its_backward_outside_trains_like_plain(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    with pair.engine.gathered():
        ours = loss_of(pair.model(batch(rank, 0)))
    plain = loss_of(pair.plain(batch(rank, 0)))
    pair.backward(lambda m: (ours if m is pair.model else plain).backward())
    pair.update()
    pair.train(1)


@ranks(2, exhaustive=(3,))
def test_a_deepcopy_of_a_part_of_the_model_works_like_the_plain_one(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    pair.step(plain_backward, batch(rank, 0))
    ours, plain = pair.each(lambda m: copy.deepcopy(m.blocks))
    pair.step(plain_backward, batch(rank, 1))
    for step in range(3):
        same(*(_chain(part, batch(rank, step, 4, 7)) for part in (ours, plain)))
    pair.check()


def _chain(blocks, x):
    for block in blocks:
        x = block(x)
    return x


@ranks(2)
def test_weights_of_an_equal_sharded_model_can_be_loaded_and_averaged(rank, world_size):
    online = Pair(MLP, rank, world_size)
    target = Pair(MLP, rank, world_size)
    online.step(plain_backward, batch(rank, 0))
    for o, t in ((online.model, target.model), (online.plain, target.plain)):
        with torch.no_grad():
            for p, q in zip(t.parameters(), o.parameters(), strict=True):
                p.lerp_(q, 0.3)
    target.check()
    for o, t in ((online.model, target.model), (online.plain, target.plain)):
        t.load_state_dict(o.state_dict())
    target.check()


@ranks(2)
def test_a_parameter_frozen_between_forward_and_backward_gets_no_gradient(rank, world_size):
    def run(model, x):
        loss = loss_of(model(x))
        model.head.weight.requires_grad_(False)
        loss.backward()
        model.head.weight.requires_grad_(True)

    pair = Pair(MLP, rank, world_size)
    pair.backward(run, batch(rank, 0))
    assert pair.model.head.weight.grad is None and pair.plain.head.weight.grad is None
    same(pair.model.head.bias.grad, pair.plain.head.bias.grad)


@ranks(2)
@pytest.mark.parametrize("kind", ["accumulation", *seldom("training_layer_in_evaluation")])
def test_buffers_are_those_of_ddp(rank, world_size, kind):
    def run(model, no_sync, step):
        if kind == "accumulation":
            with no_sync():
                plain_backward(model, batch(rank, 3 * step))
                plain_backward(model, batch(rank, 3 * step + 1))
        else:
            for module in model.modules():
                module.train(isinstance(module, nn.BatchNorm1d) and step % 2 == 0)
        plain_backward(model, batch(rank, 3 * step + 2))

    def build():
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    train_as_ddp(build, run, steps=6, unit_bytes=100)


class Grows(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.a = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        if self.rank:
            self.seen = torch.zeros(3)
        return F.relu(self.a(x))


@ranks(2)
def test_buffers_of_different_sizes_are_an_error(rank, world_size):
    model = Grows(rank).double()
    torch_shard.shard(model, timeout=20.0)
    loss_of(model(batch(rank, 0))).backward()
    with pytest.raises(ShardError, match=r"broadcasts 1 buffers of 2 elements.*broadcasts 1 buffers of 3 elements"):
        model(batch(rank, 1))


class ReadsItsGradient(nn.Linear):
    """Scales its input by the norm of the gradient it has accumulated, and clears its bias's."""

    def forward(self, x):
        if self.weight.grad is not None:
            x = x / (1 + self.weight.grad.norm())
            self.bias.grad = None
        return super().forward(x)


@ranks(2)
@STRATEGIES
def test_gradients_read_and_cleared_in_forward_are_the_parameters_own(rank, world_size, strategy):
    pair = Pair(lambda: nn.Sequential(ReadsItsGradient(5, 5), nn.Linear(5, 3)), rank, world_size, strategy=strategy)
    pair.backward(plain_backward, batch(rank, 0))
    outputs = pair.each(lambda m: m(batch(rank, 1)))
    same(*outputs)
    assert pair.model[0].bias.grad is None and pair.model[0].weight.grad is not None
