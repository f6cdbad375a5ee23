"""Parameters that are computed with outside their modules' forward: in methods of a model, between steps, in hooks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compat.harness import Pair, batch, loss_of, plain_backward, same, train_both, whole
from tests.support.marks import exhaustive, quick, seldom
from tests.support.ranks import ranks
from torch_shard.errors import NeedsGatherError, ShardError
from torch_shard.shard_tensor.tensor import ShardTensor

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "enable_grad": torch.enable_grad}


class Clip(nn.Module):
    """Parameters of its own, which other methods than forward use."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 6)
        self.proj = nn.Parameter(torch.randn(6, 4))
        self.pos = nn.Parameter(torch.randn(1, 4, 6))
        self.temp = nn.Parameter(torch.tensor(0.3))
        self.scale = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.head = nn.Linear(4, 3)

    def encode(self, x):
        h = torch.einsum("be,oe->bo", x * self.scale, self.body.weight)
        h = (h + self.pos[0, :1] + self.body.bias * self.body.bias).unsqueeze(1) + self.pos
        return (h @ (self.proj * 2)).mean(1) * self.temp.exp()

    def forward(self, x):
        return self.head(self.encode(x))


# -- a rank's own tensors --------------------------------------------------------------------------------------------


def _or_not(p, x):
    """The parameter as a plain tensor, on one of the ranks something else."""
    return torch.where(x.sum() > batch(1, 0).sum(), x[0], whole(p))


OPERATIONS = {
    "product": lambda m, x: (m.scale * x).sum(),
    "product, the other way round": lambda m, x: (x * m.scale).sum(),
    "of one row": lambda m, x: (m.scale * x[0]).sum(),
    "difference": lambda m, x: (m.body.weight - x[:1]).norm(),
    "of a whole matrix": lambda m, x: torch.mul(m.scale, other=x[1]),
    "of a data alias": lambda m, x: (m.scale.data - x[0]).abs().max(),
    "of a frozen one": lambda m, x: (m.frozen * x[0]).sum(),
    "of a copy": lambda m, x: (m.scale.detach().clone() * x[0]).sum(),
    "of what was computed": lambda m, x: ((m.scale * 2 + 1).exp() * x[0]).sum(),
    "of a number less it": lambda m, x: ((1 - m.scale) * x[0]).sum(),
    "of a number divided by it": lambda m, x: ((2 / m.frozen) * x[0]).sum(),
    "of a number to its power": lambda m, x: ((2**m.scale) * x).sum(),
    "of a floor": lambda m, x: ((m.scale // 0.1) * x[0]).sum(),
    "of a conversion": lambda m, x: (m.scale.float().double() * x[0]).sum(),
    "of a detached result": lambda m, x: ((m.scale * 2).detach() * x[0]).sum(),
    "where": lambda m, x: torch.where(x[0] > 0, m.scale, 0.0).sum(),
    "masked_fill": lambda m, x: m.scale.masked_fill(x[0] > 0, 2.0).sum(),
    "maximum": lambda m, x: torch.maximum(m.scale, x[0]).sum(),
    "lerp": lambda m, x: torch.lerp(m.scale, x[0], 0.5).sum(),
    "list": lambda m, x: [t.sum() for t in torch._foreach_mul([m.scale, m.frozen], [x[0], x[1]])],
    "equal": lambda m, x: torch.tensor(torch.equal(m.scale, _or_not(m.scale, x))),
    "allclose": lambda m, x: torch.tensor(torch.allclose(m.frozen * 2, _or_not(m.frozen, x) * 2)),
    "into a plain tensor": lambda m, x: x[0].clone().add_(m.scale),
    "copied": lambda m, x: torch.zeros(5, dtype=x.dtype).copy_(m.scale) * x[0],
}


@pytest.mark.parametrize("mode", quick(MODES, ["no_grad", "enable_grad"]))
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard")])
@ranks(2, exhaustive=(3,))
def test_a_parameter_and_a_ranks_own_tensor_give_each_rank_its_own_result(rank, world_size, mode, strategy):
    pair = Pair(Clip, rank, world_size, unit_bytes=100, strategy=strategy)
    for step in range(2):
        x = batch(rank, step)
        for name, function in OPERATIONS.items():
            with MODES[mode]():
                ours, plain = pair.each(function, x)
            for a, b in zip(*([r] if isinstance(r, torch.Tensor) else r for r in (ours, plain)), strict=True):
                same(a, b, name)
        pair.step(plain_backward, x)
    pair.check()


class Peeks(nn.Module):
    """Uses another module's parameters in its forward, without gradients for a part of it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x):
        h = self.b(self.a(x))
        with torch.no_grad():
            gate = (self.c.weight[0] * x).sum(1, keepdim=True) + (self.b.weight * x).sum() + (self.b.bias - x[0]).norm()
            gate = gate + ((self.b.weight * 2).exp() * x).sum()
        return self.c(h * gate.sigmoid())


@ranks(2, exhaustive=(3,))
def test_another_modules_parameter_and_a_ranks_own_tensor_in_forward_train_like_plain(rank, world_size):
    pair = Pair(Peeks, rank, world_size, unit_bytes=20)
    for step in range(3):
        for mode in MODES.values():
            with mode():
                same(*pair.each(lambda m, x: m(x), batch(rank, 50 + step)))
        pair.step(plain_backward, batch(rank, step))
    pair.check()


@ranks(2)
def test_random_numbers_drawn_with_a_parameters_values_leave_it_as_it_is(rank, world_size):
    pair = Pair(Clip, rank, world_size, unit_bytes=100)
    with torch.no_grad():
        for draw in (lambda m: torch.bernoulli(m.scale.sigmoid()), lambda m: torch.normal(m.scale, 0.5)):
            results = []
            for model in (pair.model, pair.plain):
                torch.manual_seed(rank)
                results.append(draw(model))
            same(*results)
    pair.check()


@ranks(2)
def test_edits_and_arithmetic_among_sharded_tensors_stay_on_slices(rank, world_size):
    pair = Pair(Clip, rank, world_size, unit_bytes=100)
    pair.step(plain_backward, batch(rank, 0))
    pair.backward(plain_backward, batch(rank, 1))
    demanded = []
    runtime = pair.model.scale._unit_ref().runtime
    runtime.unshard = lambda unit, phase: demanded.append(unit)
    noise = torch.arange(5.0, dtype=torch.float64)
    with torch.no_grad():
        for model in (pair.model, pair.plain):
            p = model.scale
            p.add_(noise)
            p.lerp_(noise, 0.25).mul_(noise > 1)
            p.data.sub_(p * 0.5)
            p[noise > 2] = 1.5
            average = p.detach().clone()
            average.mul_(0.9).add_(p, alpha=0.1)
            p.copy_(average * 0.5 + p)
            update = p.grad * noise  # as optimizers do, of gradients that are equal on all ranks
            assert type(update) is type(p.grad)
            p.sub_(torch.addcmul(update, p.grad, noise) + p * torch.tensor(0.1))
            torch._foreach_add_([p], [noise])
    del runtime.unshard
    assert not demanded and isinstance(pair.model.scale.grad, ShardTensor)
    pair.check()


# -- methods beside forward ------------------------------------------------------------------------------------------

USES = {
    "matmul": lambda m, x: m.body(x) @ m.proj,
    "matmul with what was computed": lambda m, x: m.body(x) @ (m.proj * 2).t().t(),
    "einsum": lambda m, x: torch.einsum("be,oe->bo", x, m.body.weight),
    "linear": lambda m, x: F.linear(x, m.body.weight.abs(), m.body.bias * 2),
    "broadcast": lambda m, x: m.body(x)[:, None] + m.pos,
    "slice": lambda m, x: m.body(x)[:, None] + m.pos[:, :2],
    "slice of what was computed": lambda m, x: m.body(x)[:, None] + m.pos.exp()[:, :2],
    "temperature": lambda m, x: x * m.temp.exp(),
    "cat": lambda m, x: torch.cat([m.pos.expand(4, 4, 6), m.body(x)[:, None]], 1),
    "softmax": lambda m, x: m.proj.softmax(0) * m.temp,
    "step": lambda m, x: m.body(x) @ (m.proj - 0.1 * (m.proj * m.proj)),
    "list": lambda m, x: torch.tensor(m.scale.tolist()),
    "encode": lambda m, x: m.encode(x),
}


@pytest.mark.parametrize("mode", quick(MODES, ["no_grad", "inference_mode"]))
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
@ranks(2, exhaustive=(3,))
def test_methods_beside_forward_validate_as_they_train(rank, world_size, mode, strategy):
    pair = Pair(Clip, rank, world_size, unit_bytes=100, strategy=strategy)

    def train(model, x):
        loss_of(model.encode(x)).backward()

    for step in range(3):
        pair.step(train if step == 1 else plain_backward, batch(rank, step))
        for name, use in USES.items():
            with MODES[mode]():
                ours, plain = pair.each(use, batch(rank, 20 + step))
            assert type(ours) is torch.Tensor, name
            same(ours, plain, name)
    pair.check()


@pytest.mark.parametrize("apart", [0.0, 0.3], ids=["at once", "one after the other"])
@ranks(2)
def test_rows_set_between_steps_are_set_as_in_plain_torch(rank, world_size, apart):
    def edit(model):
        with torch.no_grad():
            time.sleep(apart * rank)
            model.proj[1] = 0.5
            column = model.proj[:, 1] * 2
            time.sleep(apart * rank)
            model.proj.data[:, 2] = column
            time.sleep(apart * rank)
            model.body.weight.index_fill_(0, torch.tensor([0, 3]), 0.25)

    pair = Pair(Clip, rank, world_size, unit_bytes=100, alone_after=0.05)
    for step in range(2):
        pair.each(edit)
        pair.check()
        pair.step(plain_backward, batch(rank, step))
    pair.check()


VIEWS = {
    "row": lambda m: m.proj[0],
    "row of data": lambda m: m.proj.data[0],
    "parts": lambda m: m.proj.detach().chunk(2)[1],
    "row of what was computed": lambda m: (m.proj * 2)[0],
    "vector of a copy": lambda m: m.proj.detach().clone().view(-1),
}


@pytest.mark.parametrize(
    ("view", "mode"),
    [*((view, "no_grad") for view in VIEWS), ("row of data", "enable_grad"), ("row of what was computed", "enable_grad"),
     *exhaustive(*((view, "inference_mode") for view in VIEWS))],
)  # fmt: skip
@ranks(2)
def test_an_edit_of_a_view_is_an_error(rank, world_size, view, mode):
    pair = Pair(Clip, rank, world_size, unit_bytes=100)
    with MODES[mode]():
        VIEWS[view](pair.model).zero_()
    with pytest.raises(ShardError, match=r"proj.*was edited.*gathered\(write=True\)"):
        pair.model(batch(rank, 0))
    pair.train(1)


@ranks(2)
def test_what_would_edit_a_gathered_copy_or_hand_out_its_memory_is_an_error(rank, world_size):
    pair = Pair(Clip, rank, world_size, unit_bytes=100)
    twice = pair.model.proj.detach() * 2
    for wrong in (
        lambda: twice.__setitem__(0, 1.0),
        lambda: twice.index_fill_(0, torch.tensor([0]), 1.0),
        lambda: pair.model.proj.t_(),
    ):
        with torch.no_grad(), pytest.raises(NeedsGatherError, match=r"proj.*gathered"):
            wrong()
    for parameter in (pair.model.proj, pair.model.frozen):
        for expose in (lambda p: p.data_ptr(), lambda p: p.untyped_storage()):
            for context in (torch.no_grad, torch.enable_grad):
                with context(), pytest.raises(NeedsGatherError, match=r"(proj|frozen).*gathered"):
                    expose(parameter)
            with pytest.raises(ValueError, match="read-only"):
                parameter.detach().numpy()[0] = 1.0
    assert pair.model.proj.shape == (6, 4)
    pair.train(1)


@ranks(2)
def test_results_on_slices_meet_a_ranks_own_tensor_in_training(rank, world_size):
    def run(model, x):
        twice = model.scale * 2 + model.scale.detach()
        (
            loss_of(model(x)) + (twice * x).pow(2).sum() + (twice.exp() * x[0]).sum() + (model.frozen * x).sum()
        ).backward()

    pair = Pair(Clip, rank, world_size, unit_bytes=100)
    for step in range(3):
        ours, plain = pair.each(lambda m, x: ((m.scale * 2) * x).sum(), batch(rank, step))
        same(ours, plain)
        pair.step(run, batch(rank, step))
    pair.check()


class Scaled(torch.autograd.Function):
    """Reads the weight that it was given in forward and in backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight * weight.sum(0)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        total = weight.sum(0)
        own = grad * total
        return own @ weight.t(), x.t() @ own + (grad * (x @ weight)).sum(0)


@ranks(2)
def test_a_function_outside_forward_that_reads_its_weight_trains_like_plain(rank, world_size):
    def run(model, x):
        loss_of(Scaled.apply(model.body(x), model.proj)).backward()

    train_both(Clip, rank, world_size, unit_bytes=100, run=run)


# -- hooks of backward -----------------------------------------------------------------------------------------------


class Layers(nn.Sequential):
    def __init__(self, first=nn.Linear):
        super().__init__(first(5, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
        for layer in self:
            layer.keep = []


def _look(module, grad_input, grad_output):
    if isinstance(module, nn.Linear):
        g = grad_output[0]
        module.keep += [g @ module.weight, module.weight @ g.new_ones(module.weight.shape[1])]
        module.keep += [
            (module.weight * g.sum()).sum(),
            (module.bias * g).sum(),
            module.weight.norm(),
            module.bias[0] * 1,
        ]
        module.keep.append((module.bias.exp() * g).sum())


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
@ranks(2, exhaustive=(3,))
def test_backward_hooks_of_modules_compute_with_their_weights(rank, world_size, strategy):
    pair = Pair(Layers, rank, world_size, unit_bytes=100, strategy=strategy)
    for model in (pair.model, pair.plain):
        for layer in model:
            layer.register_full_backward_hook(_look)
    for step in range(3):
        pair.step(plain_backward, batch(rank, step))
        for a, b in zip(pair.model, pair.plain, strict=True):
            assert len(a.keep) == len(b.keep)
            for i, (ours, plain) in enumerate(zip(a.keep, b.keep, strict=True)):
                same(ours, plain, str(i))
            a.keep.clear(), b.keep.clear()
    pair.check()


@pytest.mark.parametrize("on", ["loss", "middle", "weight"])
@pytest.mark.parametrize("layer", [*seldom(0), 1, *seldom(4)])
@ranks(2, exhaustive=(3,))
def test_tensor_hooks_compute_with_weights_of_any_layer(rank, world_size, on, layer):
    """Of a layer whose backward has run, runs, or is yet to come: there the weight is gathered for the hook."""

    def run(model, x):
        weight = model[layer].weight

        def hook(grad):
            return grad * (weight @ weight.new_ones(weight.shape[1])).sum().sigmoid()

        middle = model[1](model[0](x))
        if on == "middle":
            middle.register_hook(hook)
        loss = loss_of(model[4](model[3](model[2](middle))))
        if on == "loss":
            loss.register_hook(hook)
        handle = model[3].weight.register_hook(hook) if on == "weight" else None
        loss.backward()
        if handle is not None:
            handle.remove()

    train_both(Layers, rank, world_size, unit_bytes=100, run=run)


@pytest.mark.exhaustive
@ranks(2)
def test_a_hook_that_uses_a_weight_on_one_rank_only_is_an_error_or_right(rank, world_size):
    pair = Pair(Layers, rank, world_size, unit_bytes=100, timeout=5.0)
    for step in range(2):
        pair.step(plain_backward, batch(rank, step))
    loss = loss_of(pair.model(batch(rank, 5)))
    if rank == 0:
        loss.register_hook(lambda grad: grad * (pair.model[0].weight @ torch.ones(5, dtype=torch.float64)).sum())
    with pytest.raises(ShardError):
        loss.backward()
