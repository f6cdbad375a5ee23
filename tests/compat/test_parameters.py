"""What scripts do with parameters and gradients themselves, between steps and inside forward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.compat.harness import (
    MLP,
    Pair,
    average_grads,
    batch,
    loss_of,
    plain_backward,
    same,
    same_grads,
    same_params,
    train_both,
    whole,
)
from tests.compat.modes import tolerance
from tests.support.marks import exhaustive, seldom
from tests.support.models import Codebook, MixedTypes
from tests.support.ranks import ranks
from torch_shard.shard_tensor.tensor import ShardTensor


@ranks(3, exhaustive=(2, 4))
@pytest.mark.parametrize("norm", [2.0, *seldom(1.0, float("inf"))])
def test_torch_clip_grad_norm_gives_the_plain_norm_and_gradients(rank, world_size, norm):
    pair = Pair(MLP, rank, world_size)
    for step in range(3):
        pair.backward(plain_backward, batch(rank, step))
        same(*pair.each(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type=norm)), "the norm")
        same_grads(pair.model, pair.plain)
        pair.update()
    pair.check()


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("unit_bytes", [100, *seldom(1 << 20)])
@pytest.mark.parametrize("clip", ["none", "of torch", "of the engine"])
def test_several_dtypes_inside_one_unit_train_like_plain(rank, world_size, unit_bytes, clip):
    pair = Pair(MixedTypes, rank, world_size, double=False, unit_bytes=unit_bytes)
    for step in range(3):
        pair.backward(plain_backward, batch(rank, step))
        if clip != "none":
            plain = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
            if clip == "of torch":
                ours = nn.utils.clip_grad_norm_(pair.model.parameters(), 0.05)
            else:
                ours = pair.engine.clip_grad_norm_(0.05)
            torch.testing.assert_close(whole(ours).double(), plain.double(), rtol=1e-6, atol=0)
        pair.update()
    for ours, plain in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        torch.testing.assert_close(whole(ours), plain.detach(), rtol=1e-5, atol=1e-7)


@ranks(3, exhaustive=(2, 4))
def test_norms_of_parameters_and_gradients_are_those_of_the_plain_model(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    for step in range(2):
        pair.backward(plain_backward, batch(rank, step))
        for ours, plain in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
            same(ours.norm(), plain.norm())
            same(ours.grad.norm(), plain.grad.norm())
            same(ours.grad.detach().data.norm(2), plain.grad.norm(2))
            same(torch.linalg.vector_norm(ours.detach(), float("inf")), plain.detach().abs().max())
            assert ours.grad.abs().max().item() == pytest.approx(plain.grad.abs().max().item(), rel=tolerance()[0])
            assert ours.detach().mean().item() == pytest.approx(
                plain.detach().mean().item(), rel=tolerance()[0], abs=1e-12
            )
        total = [torch.stack([p.grad.norm() for p in m.parameters()]).norm() for m in (pair.model, pair.plain)]
        same(*total, "total norm")
        pair.update()
    pair.check()


@ranks(2, exhaustive=(3, 4))
def test_in_place_edits_of_parameters_between_steps_train_like_plain(rank, world_size):
    def edit(model):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
            model.head.weight.add_(model.head.weight.sign(), alpha=-0.01)
            model.inp.bias.data.clamp_(-0.2, 0.2)
            model.head.bias.copy_(torch.arange(3.0))
            model.blocks[0].up.bias.fill_(0.25)

    pair = Pair(MLP, rank, world_size)
    for step in range(3):
        pair.step(plain_backward, batch(rank, step))
        pair.each(edit)
        with torch.no_grad():
            same(*pair.each(lambda m, x: m(x), batch(rank, 50)), "output after the edit")
    pair.check()


@pytest.mark.exhaustive(usual=True)
@ranks(2, exhaustive=(3, 4))
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
@pytest.mark.parametrize("of", ["the sharded model", "the model before it was sharded, by lists"])
def test_an_average_of_weights_by_deepcopy_and_lerp_equals_the_plain_one(rank, world_size, strategy, of):
    pair = Pair(MLP, rank, world_size, strategy=strategy)
    by_lists = of != "the sharded model"
    averages = [copy.deepcopy(m) for m in (pair.plain if by_lists else pair.model, pair.plain)]
    for average in averages:
        average.requires_grad_(False)
    for step in range(3):
        pair.step(plain_backward, batch(rank, step))
        with torch.no_grad():
            for average, model in zip(averages, (pair.model, pair.plain), strict=True):
                if by_lists:
                    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.25)
                    continue
                for a, p in zip(average.parameters(), model.parameters(), strict=True):
                    a.lerp_(p, 0.25)
        with torch.no_grad():
            same(averages[0](batch(rank, 50)), averages[1](batch(rank, 50)), "the average's output")
    pair.check()
    same_params(*averages)


@ranks(3, exhaustive=(2, 4))
def test_the_full_state_dict_has_the_plain_names_and_values_on_the_cpu(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    pair.step(plain_backward, batch(rank, 0))
    assert list(pair.model.state_dict()) == list(pair.plain.state_dict())
    state = pair.engine.state_dict()
    if rank == 0:
        expected = pair.plain.state_dict()
        assert list(state) == list(expected)
        for name, value in expected.items():
            assert type(state[name]) is torch.Tensor and state[name].device.type == "cpu"
            same(state[name], value, name)
        pair.plain.load_state_dict(state)
    else:
        assert not state
    pair.check()


class Tiny(nn.Module):
    """0-dim and zero-element parameters, alone in a unit and among others."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.alone = Alone()

    def forward(self, x):
        return torch.cat([self.alone(self.lin(x)) * self.scale, self.empty])


class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x + self.shift


@ranks(3, exhaustive=(1, 2, 4))
@pytest.mark.parametrize("unit_bytes", [1, *seldom(1 << 20)])
def test_zero_dim_and_zero_element_parameters_train_like_plain(rank, world_size, unit_bytes):
    train_both(Tiny, rank, world_size, unit_bytes=unit_bytes)


PENALTIES = {
    "squares": lambda p: p.pow(2).sum(),
    "norm": lambda p: p.norm(2),
    "absolutes": lambda p: p.abs().sum(),
    "mean square": lambda p: (p * p).mean(),
}


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize(
    ("kind", "after"),
    [("squares", False), ("squares", True), ("norm", False), *seldom(("absolutes", False), ("mean square", False))],
)
def test_a_penalty_on_parameters_in_the_loss_trains_like_plain(rank, world_size, kind, after):
    def penalty(model):
        return 0.01 * sum(PENALTIES[kind](p) for p in model.parameters())

    def run(model, x):
        (loss_of(model(x)) + penalty(model) if after else penalty(model) + loss_of(model(x))).backward()

    train_both(MLP, rank, world_size, run=run)


@pytest.mark.exhaustive(usual=True)
@ranks(2)
def test_an_l2_term_under_accumulation_without_sync_trains_like_plain(rank, world_size):
    def run(model, x):
        (loss_of(model(x)) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())).backward()

    pair = Pair(MLP, rank, world_size)
    for step in range(2):
        with pair.engine.no_sync():
            pair.each(run, batch(rank, 10 * step))
        pair.step(run, batch(rank, 10 * step + 1))
    pair.check()


@pytest.mark.exhaustive(usual=True)
@ranks(2)
def test_a_proximal_term_towards_earlier_weights_trains_like_plain(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    before = {m: [p.detach().clone() for p in m.parameters()] for m in (pair.model, pair.plain)}

    def run(model, x):
        distance = sum((p - q).pow(2).sum() for p, q in zip(model.parameters(), before[model], strict=True))
        (loss_of(model(x)) + 0.1 * distance).backward()

    pair.train(*range(3), run=run)


@ranks(2, exhaustive=(3,))
def test_a_codebook_updated_inside_forward_trains_like_plain(rank, world_size):
    # Every rank makes the same update, as a codebook that is kept in step by the user does.
    train_both(Codebook, rank, world_size, make_batch=lambda rank, step: batch(0, step), unit_bytes=1 << 20)


@ranks(2, exhaustive=(3, 4))
def test_replaced_gradients_train_like_plain(rank, world_size):
    """PCGrad, as a wrapper of an optimizer does it: flat vectors of two losses' gradients, projected and written back."""

    def run(model, x):
        found = []
        for scale in (1.0, -0.5):
            model.zero_grad()
            (scale * loss_of(model(x * scale))).backward()
            if not isinstance(model.head.weight, ShardTensor):
                average_grads(model)
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        total = found[0] - (found[0] @ found[1]) / found[1].norm() ** 2 * found[1]
        parameters = list(model.parameters())
        for p, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p).clone()

    train_both(MLP, rank, world_size, run=run)


@pytest.mark.exhaustive(usual=True)
@ranks(2, exhaustive=(3,))
def test_gradients_set_to_none_zeroed_or_replaced_by_plain_tensors_train_like_plain(rank, world_size):
    pair = Pair(MLP, rank, world_size)

    def edit(model):
        model.inp.weight.grad = None
        model.inp.bias.grad.zero_()
        model.head.weight.grad = torch.ones(3, 7, dtype=torch.float64)
        model.head.bias.grad = torch.zeros_like(model.head.bias)
        model.blocks[0].up.weight.grad.mul_(3)
        model.blocks[1].up.weight.grad = model.blocks[1].up.weight.grad * 0.5
        model.blocks[2].up.weight.grad.data.clamp_(-0.01, 0.01)

    for step in range(3):
        pair.backward(plain_backward, batch(rank, step))
        pair.each(edit)
        same_grads(pair.model, pair.plain)
        pair.update()
    pair.check()
