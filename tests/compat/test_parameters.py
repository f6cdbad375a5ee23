"""What scripts do with parameters and gradients themselves, between steps and inside forward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_shard
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
from tests.support.ranks import ranks


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


class MixedTypes(nn.Module):
    """Parameters of two dtypes in one unit."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 7).double()
        self.b = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor([1.5, 0.5, 2.0], dtype=torch.float64))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)).float()).double() * self.scale


@ranks(2, exhaustive=(3,))
def test_clipping_with_gradients_of_two_dtypes_trains_like_plain(rank, world_size):
    pair = Pair(MixedTypes, rank, world_size, double=False, unit_bytes=1 << 20)
    for step in range(3):
        pair.backward(plain_backward, batch(rank, step))
        plain = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
        ours = (pair.engine.clip_grad_norm_ if step % 2 else _torch_clip(pair.model))(0.05)
        torch.testing.assert_close(whole(ours).double(), plain.double(), rtol=1e-6, atol=0)
        pair.update()
    for ours, plain in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        torch.testing.assert_close(whole(ours), plain.detach(), rtol=1e-5, atol=1e-7)


def _torch_clip(model):
    return lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit)


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("unit_bytes", [100, *seldom(1 << 20)])
def test_several_dtypes_inside_one_unit_train_like_plain(rank, world_size, unit_bytes):
    pair = Pair(MixedTypes, rank, world_size, double=False, unit_bytes=unit_bytes)
    for step in range(3):
        pair.step(plain_backward, batch(rank, step), grads=False)
    for ours, plain in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        assert ours.dtype == plain.dtype
        torch.testing.assert_close(whole(ours), plain.detach(), rtol=1e-5, atol=1e-7)


@ranks(2, exhaustive=(3,))
def test_clip_grad_value_trains_like_plain(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    for step in range(3):
        pair.backward(plain_backward, batch(rank, step))
        pair.each(lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01))
        pair.update()
    pair.check()


@ranks(2, exhaustive=(3, 4))
def test_shapes_and_sizes_of_parameters_stay_those_of_the_plain_model(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    for (name, ours), (other, plain) in zip(pair.model.named_parameters(), pair.plain.named_parameters(), strict=True):
        assert name == other
        assert (ours.ndim, ours.shape, ours.numel(), ours.dtype) == (
            plain.ndim,
            plain.shape,
            plain.numel(),
            plain.dtype,
        )
        assert (ours.stride(), ours.size(0), len(ours), ours.dim()) == (
            plain.stride(), plain.size(0), len(plain), plain.dim(),
        )  # fmt: skip
        assert isinstance(ours, nn.Parameter) and ours.is_leaf and ours.requires_grad


def _groups_by_ndim(model):
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    assert decay and rest
    return torch.optim.SGD([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.1)


@ranks(2, exhaustive=(3, 4))
def test_optimizer_groups_chosen_by_ndim_train_like_plain(rank, world_size):
    train_both(MLP, rank, world_size, optimizer=_groups_by_ndim)


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
def test_an_average_of_weights_by_deepcopy_and_lerp_equals_the_plain_one(rank, world_size, strategy):
    pair = Pair(MLP, rank, world_size, strategy=strategy)
    averages = [copy.deepcopy(m) for m in (pair.model, pair.plain)]
    for average in averages:
        average.requires_grad_(False)
    for step in range(3):
        pair.step(plain_backward, batch(rank, step))
        with torch.no_grad():
            for average, model in zip(averages, (pair.model, pair.plain), strict=True):
                for a, p in zip(average.parameters(), model.parameters(), strict=True):
                    a.lerp_(p, 0.25)
        with torch.no_grad():
            same(averages[0](batch(rank, 50)), averages[1](batch(rank, 50)), "the average's output")
    pair.check()
    same_params(*averages)


@pytest.mark.exhaustive(usual=True)
@ranks(2, exhaustive=(3,))
def test_both_a_deepcopy_and_the_original_train_like_plain(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    pair.step(plain_backward, batch(rank, 0))
    other = Pair.__new__(Pair)
    other.model, other.plain = copy.deepcopy(pair.model), copy.deepcopy(pair.plain)
    other.optimizer, other.plain_optimizer = (
        torch.optim.SGD(m.parameters(), lr=0.05) for m in (other.model, other.plain)
    )
    for step in range(1, 4):
        pair.step(plain_backward, batch(rank, step))
        other.step(plain_backward, batch(rank, step + 20))
    pair.check()
    other.check()


@ranks(2)
def test_averaged_model_of_torch_trains_like_plain(rank, world_size):
    from torch.optim.swa_utils import AveragedModel

    pair = Pair(MLP, rank, world_size)
    averages = pair.each(AveragedModel)
    for step in range(3):
        pair.step(plain_backward, batch(rank, step))
        for average, model in zip(averages, (pair.model, pair.plain), strict=True):
            average.update_parameters(model)
    same_params(averages[0].module, averages[1].module)


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


@ranks(2, exhaustive=(3, 4))
def test_an_l2_term_on_parameters_in_the_loss_trains_like_plain(rank, world_size):
    def run(model, x):
        penalty = sum(p.pow(2).sum() for p in model.parameters())
        (loss_of(model(x)) + 0.01 * penalty).backward()

    train_both(MLP, rank, world_size, run=run)


@ranks(2)
@pytest.mark.parametrize("kind", ["norm", *seldom("abs_sum", "mean_square"), "square_after"])
def test_other_penalties_on_parameters_train_like_plain(rank, world_size, kind):
    def run(model, x):
        params = [model.head.weight, model.blocks[1].up.weight]
        if kind == "square_after":
            out = model(x)
            penalty = sum((p**2).sum() for p in params)
        else:
            terms = {
                "norm": lambda p: p.norm(2),
                "abs_sum": lambda p: p.abs().sum(),
                "mean_square": lambda p: (p * p).mean(),
            }
            penalty = sum(terms[kind](p) for p in params)
            out = model(x)
        (loss_of(out) + 0.1 * penalty).backward()

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

    for step in range(3):
        pair.step(run, batch(rank, step))
    pair.check()


class Clamped(nn.Module):
    """Edits its parameters inside forward."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        if self.how == "no_grad":
            with torch.no_grad():
                self.a.weight.clamp_(-0.2, 0.2)
        elif self.how == "data":
            self.a.weight.data.clamp_(-0.2, 0.2)
        return self.b(self.a(x))


class ClampsItself(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
            self.bias.data.mul_(0.5)
        return super().forward(x)


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("how", ["no_grad", "data"])
@pytest.mark.parametrize("unit_bytes", [100, *exhaustive(1 << 20)])
def test_parameters_clamped_inside_the_parents_forward_train_like_plain(rank, world_size, how, unit_bytes):
    train_both(lambda: Clamped(how), rank, world_size, unit_bytes=unit_bytes)


@ranks(2, exhaustive=(3,))
def test_parameters_clamped_inside_their_own_forward_train_like_plain(rank, world_size):
    train_both(lambda: nn.Sequential(ClampsItself(5, 6), ClampsItself(6, 3)), rank, world_size, unit_bytes=100)


@ranks(2)
@pytest.mark.parametrize("old", [True, False], ids=["old", "parametrization"])
def test_spectral_norm_trains_like_plain(rank, world_size, old):
    wrap = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm

    def build():
        return nn.Sequential(wrap(nn.Linear(5, 6)), nn.Tanh(), wrap(nn.Linear(6, 3)))

    def same_batch(rank, step):
        return batch(0, step)

    train_both(build, rank, world_size, make_batch=same_batch, unit_bytes=100)


class Codebook(nn.Module):
    """A vector quantizer whose codes follow the data: an update of a frozen parameter inside forward."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 4)
        self.codes = nn.Parameter(torch.randn(6, 4), requires_grad=False)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        h = self.lin(x)
        index = torch.cdist(h.detach(), self.codes).argmin(1)
        q = self.codes[index]
        if self.training:
            with torch.no_grad():
                self.codes.data.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.out(h + (q - h).detach())


@ranks(2, exhaustive=(3,))
def test_a_codebook_updated_inside_forward_trains_like_plain(rank, world_size):
    # Every rank makes the same update, as a codebook that is kept in step by the user does.
    train_both(Codebook, rank, world_size, make_batch=lambda rank, step: batch(0, step), unit_bytes=1 << 20)


@ranks(2, exhaustive=(3, 4))
def test_replaced_gradients_train_like_plain(rank, world_size):
    """PCGrad: gradients of two losses, projected and written back."""

    def run(model, x):
        found = []
        for scale in (1.0, -0.5):
            model.zero_grad()
            (scale * loss_of(model(x * scale))).backward()
            if model is not pair.model:
                average_grads(model)
            found.append([p.grad.clone() for p in model.parameters()])
        dot = sum((a * b).sum() for a, b in zip(*found, strict=True))
        norm = sum((b * b).sum() for b in found[1])
        for p, a, b in zip(model.parameters(), *found, strict=True):
            p.grad = a - (dot / norm) * b

    pair = Pair(MLP, rank, world_size)
    for step in range(3):
        pair.step(run, batch(rank, step))
    pair.check()


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


@ranks(2)
def test_gradients_kept_over_steps_accumulate_like_plain(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    kept = {}

    def edit(model):
        # Momentum by hand: what was kept is added to the new gradient.
        for name, p in model.named_parameters():
            key = (id(model), name)
            kept[key] = p.grad.clone() if key not in kept else kept[key] * 0.9 + p.grad
            p.grad = kept[key].clone()

    for step in range(3):
        pair.backward(plain_backward, batch(rank, step))
        pair.each(edit)
        pair.update()
    pair.check()


@ranks(2)
@pytest.mark.parametrize("to_none", [True, *seldom(False)])
def test_zero_grad_of_model_and_optimizer_trains_like_plain(rank, world_size, to_none):
    pair = Pair(MLP, rank, world_size)
    for step in range(3):
        pair.backward(plain_backward, batch(rank, step))
        same_grads(pair.model, pair.plain)
        for model, optimizer in ((pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer)):
            optimizer.step()
            (model if step % 2 else optimizer).zero_grad(set_to_none=to_none)
    pair.check()


class Borrowing(nn.Module):
    """Uses another module's weight directly."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        return F.linear(self.b(x), self.a.weight, self.b.bias) + self.a.weight.sum(0)


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("unit_bytes", [100, *exhaustive(1 << 20)])
def test_direct_use_of_another_modules_weight_trains_like_plain(rank, world_size, unit_bytes):
    train_both(Borrowing, rank, world_size, unit_bytes=unit_bytes)


@ranks(2)
def test_a_weight_used_outside_any_forward_trains_like_plain(rank, world_size):
    def run(model, x):
        h = model(x)
        (loss_of(F.linear(h, model.head.weight.t())) + model.head.bias[1] * 2).backward()

    train_both(MLP, rank, world_size, run=run)


@ranks(2)
def test_an_engine_is_found_from_its_model(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    assert torch_shard.engine_of(pair.model) is pair.engine
    assert torch_shard.engine_of(pair.plain) is None
