"""Edits of parameters at unusual moments, and terms on parameters that each rank weighs in its own way."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from tests.compat.harness import MLP, Pair, batch, loss_of, plain_backward, train_both
from tests.compat.modes import mixed
from tests.compat.test_hooks import WHEN, _pair
from tests.support.marks import exhaustive, seldom
from tests.support.ranks import ranks
from torch_shard.errors import ShardError, ShardPicklingError


def _with_penalty(model, x):
    (loss_of(model(x)) + 0.3 * sum(p.pow(2).sum() for p in model.parameters())).backward()


def _scale(model):
    return [model.blocks[1].up.weight.register_hook(lambda g: g * 3)]


def _clamp(model):
    return [model.blocks[1].up.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))]


@pytest.mark.exhaustive
@ranks(2)
@WHEN
@pytest.mark.parametrize("register", [_scale, _clamp])
def test_hooks_see_the_sum_of_an_l2_term_and_of_the_models_gradient(rank, world_size, when, register):
    pair = _pair(register, when, rank, world_size)
    pair.train(*range(3), run=_with_penalty)


@ranks(2)
def test_a_mask_of_each_ranks_own_on_a_parameter_outside_forward_trains_like_plain(rank, world_size):
    def run(model, x):
        mask = torch.rand(model.head.weight.shape, generator=torch.Generator().manual_seed(rank)).double()
        (loss_of(model(x)) + (model.head.weight * mask).pow(2).sum()).backward()

    train_both(MLP, rank, world_size, run=run)


class Clamps(nn.Module):
    """Edits its layer's weight in forward, from the call after `calm` ones on."""

    def __init__(self, how, calm):
        super().__init__()
        self.how, self.calm = how, calm
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        self.calm -= 1
        if self.calm < 0 and self.how == "data":
            self.a.weight.data.clamp_(-0.2, 0.2)
        elif self.calm < 0:
            with torch.no_grad():
                self.a.weight.clamp_(-0.2, 0.2)
        return self.b(self.a(x))


class ClampsItself(nn.Linear):
    def forward(self, x):
        self.calm -= 1
        if self.calm < 0:
            with torch.no_grad():
                self.weight.clamp_(-0.2, 0.2)
            self.bias.data.mul_(0.5)
        return super().forward(x)


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("unit_bytes", [100, *seldom(1 << 20)])
@pytest.mark.parametrize(
    ("how", "calm"), [("no_grad", 0), ("data", 0), ("data", 3), ("itself", 0), *seldom(("itself", 3))]
)
def test_parameters_clamped_inside_forward_train_like_plain(rank, world_size, how, calm, unit_bytes):
    def build():
        if how != "itself":
            return Clamps(how, calm)
        model = nn.Sequential(ClampsItself(5, 6), ClampsItself(6, 3))
        for layer in model:
            layer.calm = calm
        return model

    train_both(build, rank, world_size, unit_bytes=unit_bytes, steps=3 + calm)


class EditsNext(nn.Module):
    """Each block's forward edits the next one's weight, which may be on its way already."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if i + 1 < len(self.blocks):
                with torch.no_grad():
                    self.blocks[i + 1].weight.mul_(0.9)
            x = block(x)
        return x


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("unit_bytes", [100, *seldom(1 << 20)])
@pytest.mark.parametrize("alias", [False, True])
def test_edits_of_another_modules_weight_in_forward_train_like_plain(rank, world_size, alias, unit_bytes):
    train_both(lambda: _Chain(alias), rank, world_size, unit_bytes=unit_bytes, steps=4)


class _Chain(nn.Module):
    """A stem whose own forward edits later blocks' weights."""

    def __init__(self, alias):
        super().__init__()
        self.stem = EditsFriend(5, 5)
        self.body = EditsNext()
        self.stem.friends = [b.weight for b in self.body.blocks] if alias else None
        self.stem.body = [self.body]

    def forward(self, x):
        return self.body(self.stem(x))


class EditsFriend(nn.Linear):
    friends = None

    def forward(self, x):
        weights = self.friends or [b.weight for b in self.body[0].blocks]
        with torch.no_grad():
            for weight in weights:
                weight.clamp_(-0.3, 0.3)
        return super().forward(x)


class EditsAView(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.friend[0].weight[:2].zero_()
        return super().forward(x)


@ranks(2)
def test_an_edit_of_a_view_of_another_modules_weight_is_an_error(rank, world_size):
    model = nn.Sequential(EditsAView(5, 6), nn.Linear(6, 3))
    model[0].friend = [model[1]]
    pair = Pair(lambda: model, rank, world_size, unit_bytes=100)
    with pytest.raises(ShardError, match=r"1\.weight.*gathered\(write=True\)"):
        pair.model(batch(rank, 0))


class ReadsAView(EditsAView):
    def forward(self, x):
        with torch.no_grad():
            part = self.friend[0].weight[:, :2].sum()
        return nn.Linear.forward(self, x) * part


@ranks(2)
def test_a_view_of_another_modules_weight_that_is_only_read_trains_like_plain(rank, world_size):
    def build():
        model = nn.Sequential(ReadsAView(5, 6), nn.Linear(6, 3))
        model[0].friend = [model[1]]
        return model

    train_both(build, rank, world_size, unit_bytes=100)


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("strategy", ["full_shard", *seldom("shard_grad_op"), *exhaustive("no_shard")])
def test_a_backward_through_weights_that_were_stepped_since_is_an_error_as_in_plain_torch(rank, world_size, strategy):
    pair = Pair(MLP, rank, world_size, strategy=strategy)
    pair.step(plain_backward, batch(rank, 0))
    losses = pair.each(lambda m: loss_of(m(batch(rank, 1))))
    earlier = pair.each(lambda m: loss_of(m(batch(rank, 2))))
    for loss in losses:
        loss.backward()
    pair.update()
    if not mixed():  # where the plain model's graph has copies
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            earlier[1].backward()
    with pytest.raises(ShardError, match=r"weight.*changed"):
        earlier[0].backward()
    pair.optimizer.zero_grad()
    pair.plain_optimizer.zero_grad()
    for model in (pair.plain,):  # the averaged gradients of `losses` differed: start anew from the sharded values
        model.load_state_dict(pair.engine.state_dict(rank0_only=False))
    pair.train(3)


@ranks(2)
def test_a_bias_may_change_between_forward_and_backward(rank, world_size):
    def run(model, x):
        loss = loss_of(model(x))
        with torch.no_grad():
            model.inp.bias.add_(0.1)
        loss.backward()

    train_both(MLP, rank, world_size, run=run)


class AssignsData(nn.Linear):
    def forward(self, x):
        self.weight.data = self.weight.data * 0.9 if self.factor is None else self.factor
        return super().forward(x)


@ranks(2)
def test_data_assigned_in_forward_trains_like_plain(rank, world_size):
    def build():
        model = nn.Sequential(AssignsData(5, 6), nn.Linear(6, 3))
        model[0].factor = None
        return model

    train_both(build, rank, world_size, unit_bytes=100, steps=5)


@ranks(2)
def test_data_of_another_shape_assigned_in_forward_is_an_error(rank, world_size):
    model = nn.Sequential(nn.Linear(5, 5), AssignsData(5, 3, bias=False))
    model[1].factor = torch.zeros(2, 5, dtype=torch.float64)
    pair = Pair(lambda: model, rank, world_size, unit_bytes=100)
    with pytest.raises(ShardError, match=r"1\.weight .*shape \(2, 5\).*shape \(3, 5\)"):
        pair.model(batch(rank, 0))
    pair.model[1].factor = pair.plain[1].factor = None
    pair.train(1)


class HalvesItself(nn.Linear):
    def forward(self, x):
        self.weight.data.mul_(0.5)
        return super().forward(x)


@ranks(2)
def test_a_copy_of_a_parameter_is_put_back_after_edits_that_leave_no_trace(rank, world_size):
    pair = Pair(lambda: nn.Sequential(HalvesItself(5, 6), nn.Linear(6, 3)), rank, world_size, unit_bytes=100)
    for model in (pair.model, pair.plain):
        weight, bias = model[1].weight, model[1].bias
        backups = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            model(batch(rank, 0))
        for p in (weight, bias):
            (p.to_local() if model is pair.model else p.data).add_(1)
        for p, backup in zip(model.parameters(), backups, strict=True):
            p.data = backup
    pair.check()
    pair.train(0, 1)


@pytest.mark.parametrize("how", ["in a forward", "through to_local()"])
@ranks(2)
def test_a_copy_from_before_an_edit_that_leaves_no_trace_is_not_saved_with_the_values_of_now(rank, world_size, how):
    pair = Pair(lambda: nn.Sequential(HalvesItself(5, 6), nn.Linear(6, 3)), rank, world_size, unit_bytes=100)
    number = 0 if how == "in a forward" else 1
    weight, expected = pair.model[number].weight, pair.plain[number].weight.detach().clone()
    backup, narrow = weight.detach().clone(), weight.detach().float()
    if number:
        weight.to_local()[: 1 - rank].add_(1)  # an element of one rank
    else:
        with torch.no_grad():
            pair.model(batch(rank, 0))
    with pytest.raises(ShardPicklingError):
        torch.save(backup, io.BytesIO())
    assert torch.equal(backup.full_tensor(), expected)
    if not number:
        with pytest.raises(ShardPicklingError):
            torch.save(narrow, io.BytesIO())
        assert torch.equal(narrow.full_tensor(), expected.float())
