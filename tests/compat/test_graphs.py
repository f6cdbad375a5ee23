"""Unusual graphs: several forwards, several backwards, gradients of gradients, checkpoints, exceptions."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import torch_shard
from tests.compat.harness import (
    MLP,
    Block,
    Checkpointed,
    Pair,
    batch,
    loss_of,
    plain_backward,
    same,
    train_both,
)
from tests.support.marks import exhaustive, quick, seldom
from tests.support.models import MAML, InnerBackward
from tests.support.ranks import ranks


@ranks(2, exhaustive=(3, 4))
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
def test_a_gradient_penalty_trains_like_plain(rank, world_size, strategy):
    def run(model, x):
        x = x.clone().requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (loss_of(out) + (grad.norm(dim=1) - 1).pow(2).mean()).backward()

    train_both(MLP, rank, world_size, run=run, strategy=strategy)


@ranks(2)
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard", "hybrid_shard")])
def test_a_penalty_on_the_gradients_of_parameters_trains_like_plain(rank, world_size, strategy):
    """On each rank it is a penalty on the gradients of the rank's own loss."""

    def run(model, x):
        loss = loss_of(model(x))
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + 0.01 * sum(g.pow(2).sum() for g in grads)).backward()

    train_both(MLP, rank, world_size, run=run, strategy=strategy)


@ranks(2)
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "no_shard")])
def test_a_loss_weighted_by_gradients_of_one_layer_trains_like_plain(rank, world_size, strategy):
    """The adaptive weight of a VQGAN's discriminator loss: a quotient of two norms, another one on each rank."""

    def run(model, x):
        out = model(x)
        reconstruction, adversarial = loss_of(out), out.mean()
        of_one, of_other = (
            torch.autograd.grad(loss, model.head.weight, retain_graph=True)[0] for loss in (reconstruction, adversarial)
        )
        weight = (torch.norm(of_one) / (torch.norm(of_other) + 1e-4)).clamp(0, 1e4).detach()
        weights.append(float(weight))
        (reconstruction + weight * adversarial).backward()

    weights: list[float] = []
    train_both(MLP, rank, world_size, run=run, strategy=strategy)
    assert weights[::2] == pytest.approx(weights[1::2], rel=1e-9)


@ranks(2, exhaustive=(3, 4))
@pytest.mark.parametrize("strategy", ["full_shard", *seldom("shard_grad_op")])
def test_several_forwards_and_one_backward_train_like_plain(rank, world_size, strategy):
    def run(model, x):
        (loss_of(model(x)) + loss_of(model(x * 2)) + loss_of(model(x - 1)[:2])).backward()

    train_both(MLP, rank, world_size, run=run, strategy=strategy)


@ranks(2)
def test_two_forwards_and_then_a_backward_of_each_train_like_plain(rank, world_size):
    def run(model, x):
        first, second = loss_of(model(x)), loss_of(model(x * 2))
        first.backward()
        second.backward()

    train_both(MLP, rank, world_size, run=run)


@ranks(2)
def test_the_output_fed_back_as_input_trains_like_plain(rank, world_size):
    def run(model, x):
        for _ in range(3):
            x = torch.cat([model(x), x[:, :2]], 1)
        loss_of(x).backward()

    train_both(MLP, rank, world_size, run=run)


@ranks(2, exhaustive=(3, 4))
@pytest.mark.parametrize("strategy", ["full_shard", *seldom("shard_grad_op"), *exhaustive("no_shard")])
def test_backward_twice_with_retain_graph_trains_like_plain(rank, world_size, strategy):
    def run(model, x):
        loss = loss_of(model(x))
        loss.backward(retain_graph=True)
        (2 * loss).backward()

    train_both(MLP, rank, world_size, run=run, strategy=strategy)


@pytest.mark.exhaustive(usual=True)
@ranks(2)
def test_two_losses_that_share_a_graph_train_like_plain(rank, world_size):
    def run(model, x):
        h = model.blocks[0](model.inp(x))
        first, second = loss_of(model.blocks[1](h)), loss_of(model.head(h))
        first.backward(retain_graph=True)
        second.backward()

    train_both(MLP, rank, world_size, run=run)


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op")])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "nonreentrant"])
@pytest.mark.parametrize("span", [1, *seldom(2)])
def test_checkpointing_trains_like_plain(rank, world_size, strategy, reentrant, span):
    train_both(lambda: Checkpointed(reentrant, span, blocks=4), rank, world_size, strategy=strategy)


def again(function, *args, **kwargs):
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


CALLS = {
    "a a": lambda a, b, x: again(lambda h: a(a(h)), x),
    "a a a": lambda a, b, x: again(lambda h: a(a(a(h))), x),
    "a b a": lambda a, b, x: again(lambda h: a(b(a(h))), x),
    "a b a b a": lambda a, b, x: again(lambda h: a(b(a(b(a(h))))), x),
    "branches": lambda a, b, x: again(lambda h: a(h) + a(b(h)), x),
    "outside, too": lambda a, b, x: a(again(lambda h: b(a(b(h))), a(x))),
    "nested": lambda a, b, x: again(lambda h: a(again(lambda g: a(b(a(g))), b(a(h)))), x),
    "reentrant inside": lambda a, b, x: again(
        lambda h: a(b(checkpoint(lambda g: a(b(a(g))), h, use_reentrant=True))), x
    ),
    "to the end": lambda a, b, x: again(lambda h: a(b(a(h))), x, early_stop=False),
}
"""Ways to call two blocks several times in one checkpoint."""


class Adds(Block):
    """Keeps a term of the loss of each call, whose nodes are younger than the output's."""

    def __init__(self):
        super().__init__(7)
        self.terms = []

    def forward(self, x):
        out = super().forward(x)
        self.terms.append((out.detach() @ self.up.weight.t()).pow(2).mean())
        return out


class Looped(nn.Module):
    def __init__(self, calls, block=lambda: Block(7)):
        super().__init__()
        self.inp, self.a, self.b, self.head = nn.Linear(5, 7), block(), block(), nn.Linear(7, 3)
        self.calls = calls

    def forward(self, x):
        return self.head(CALLS[self.calls](self.a, self.b, self.inp(x)))


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("calls", quick(CALLS, ["a b a", "nested"]))
def test_blocks_called_several_times_in_one_checkpoint_train_like_plain(rank, world_size, calls):
    train_both(lambda: Looped(calls), rank, world_size)


@ranks(2)
@pytest.mark.parametrize("calls", ["a b a", *exhaustive("a a")])
def test_terms_of_the_loss_from_each_call_in_one_checkpoint_train_like_plain(rank, world_size, calls):
    def run(model, x):
        for block in (model.a, model.b):
            block.terms.clear()
        out = model(x)
        (loss_of(out) + sum(model.a.terms + model.b.terms)).backward()

    train_both(lambda: Looped(calls, Adds), rank, world_size, run=run)


@ranks(2)
def test_a_model_in_one_checkpoint_that_calls_a_block_twice_trains_like_plain(rank, world_size):
    train_both(lambda: Looped("outside, too"), rank, world_size, run=lambda m, x: plain_backward(partial(again, m), x))


class Oops(Exception):
    pass


def _fail(*_):
    raise Oops


FAILURES = {
    "forward": lambda m: m.blocks[1].norm.register_forward_pre_hook(_fail),
    "forward hook": lambda m: m.blocks[1].up.register_forward_hook(_fail),
    "backward": lambda m: m.blocks[1].up.register_forward_hook(lambda module, args, out: out.register_hook(_fail) and None),
    "hook of the last weight": lambda m: m.head.weight.register_hook(_fail),
    "hook of a weight": lambda m: m.blocks[1].up.weight.register_hook(_fail),
    "hook of the first weight": lambda m: m.inp.weight.register_hook(_fail),
}  # fmt: skip


@ranks(2, exhaustive=(1, 3))
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
@pytest.mark.parametrize(
    "where",
    [*seldom("forward", "forward hook"), "backward", "hook of the loss", *seldom("hook of a weight"),
     *exhaustive("hook of the last weight", "hook of the first weight")],
)  # fmt: skip
def test_an_exception_and_then_training_goes_on_like_plain(rank, world_size, strategy, where):
    def fails(model, x):
        handle = FAILURES[where](model) if where in FAILURES else None
        with pytest.raises(Oops):
            loss = loss_of(model(x))
            if handle is None:
                loss.register_hook(_fail)
            loss.backward()
        if handle is not None:
            handle.remove()
        model.zero_grad()

    pair = Pair(MLP, rank, world_size, strategy=strategy)
    for step in range(4):
        if step in (0, 2):
            pair.each(fails, batch(rank, 50 + step))
        pair.step(plain_backward, batch(rank, step))
    pair.check()


@ranks(2)
def test_a_forward_whose_output_is_dropped_changes_nothing(rank, world_size):
    def run(model, x):
        model(x)
        plain_backward(model, x)
        model(x + 1)

    train_both(MLP, rank, world_size, run=run)


def backward_of_older_torch(loss, inputs):
    """torch 2.11 does not ask ``__torch_function__`` of the inputs of a backward."""
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.backward(loss, None, None, False, None, inputs)


BACKWARDS = {
    "keyword": lambda loss, inputs: loss.backward(inputs=inputs),
    "positional": lambda loss, inputs: torch.autograd.backward(loss, None, None, False, None, inputs),
    "older torch": backward_of_older_torch,
    "iterator": lambda loss, inputs: torch.autograd.backward([loss], inputs=iter(inputs)),
}


@pytest.mark.parametrize(("how", "all_of_them"), [*((how, False) for how in BACKWARDS), *seldom(("keyword", True))])
@ranks(2, exhaustive=(3,))
def test_backward_with_inputs_gives_gradients_to_those_parameters_only(rank, world_size, how, all_of_them):
    def run(model, x):
        loss = loss_of(model(x))
        BACKWARDS[how](loss, list(model.parameters()) if all_of_them else [model.blocks[1].up.weight, model.inp.bias])

    train_both(MLP, rank, world_size, run=run)


@ranks(2)
def test_backward_with_inputs_in_another_mapping_than_a_dict_raises_torchs_own_error(rank):
    model = MLP().double()
    torch_shard.shard(model)
    loss, inputs = loss_of(model(batch(rank, 0))), MappingProxyType(dict(model.named_parameters()))
    texts = []
    for backward in (torch.autograd.backward, torch.autograd.backward.__wrapped__):
        with pytest.raises((TypeError, RuntimeError)) as raised:
            backward(loss, inputs=inputs)
        texts.append(str(raised.value))
    assert texts[0] == texts[1]


@ranks(2)
def test_backward_with_an_edge_of_the_graph_as_its_only_input(rank):
    model = MLP().double()
    torch_shard.shard(model)
    x = batch(rank, 0).requires_grad_()
    loss_of(model(x)).backward(inputs=torch.autograd.graph.get_gradient_edge(x))
    assert x.grad is not None and all(p.grad is None for p in model.parameters())


GRADS = {
    "by_position": lambda loss, inputs: torch.autograd.grad(loss, inputs, None, False, False, True, False),
    "by_name": lambda loss, inputs: torch.autograd.grad(inputs=inputs, outputs=loss, allow_unused=False),
}


@pytest.mark.parametrize("how", GRADS)
@ranks(2, exhaustive=(3,))
def test_autograd_grad_for_parameters_gives_each_rank_the_plain_gradients_of_its_own_loss(rank, world_size, how):
    pair = Pair(MLP, rank, world_size)
    ours, theirs = (
        GRADS[how](loss_of(model(batch(rank, 0))), list(model.parameters())) for model in (pair.model, pair.plain)
    )
    for grad, expected in zip(ours, theirs, strict=True):
        assert type(grad) is torch.Tensor
        same(grad, expected)


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard", "hybrid_shard")])
def test_gradients_of_autograd_grad_that_are_assigned_are_averaged_as_by_backward(rank, world_size, strategy):
    def run(model, x):
        for p, g in zip(
            model.parameters(), torch.autograd.grad(loss_of(model(x)), list(model.parameters())), strict=True
        ):
            p.grad = g

    train_both(MLP, rank, world_size, run=run, strategy=strategy)


@ranks(2)
def test_assigned_zeros_of_a_rank_that_has_not_used_a_parameter_count_in_the_mean(rank, world_size):
    def run(model, x):
        parameters = [model.inp.weight, model.head.weight]
        hidden = model.inp(x)
        out = model.head(hidden)
        loss = loss_of(out if rank == 0 else hidden)
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True):
            p.grad = g

    train_both(MLP, rank, world_size, run=run, strategy="no_shard")


@ranks(2)
def test_gradients_of_autograd_grad_that_the_program_averages_are_assigned_as_they_are(rank, world_size):
    def run(model, x):
        for p, g in zip(
            model.parameters(), torch.autograd.grad(loss_of(model(x)), list(model.parameters())), strict=True
        ):
            if model is pair.model:
                dist.all_reduce(g)
                g /= world_size
            p.grad = g

    pair = Pair(MLP, rank, world_size)
    for step in range(3):
        pair.step(run, batch(rank, step))
    pair.check()


@pytest.mark.exhaustive(usual=True)
@ranks(2)
def test_autograd_grad_leaves_the_gradients_of_parameters_alone(rank, world_size):
    def run(model, x):
        plain_backward(model, x)
        torch.autograd.grad(loss_of(model(x)), [model.head.weight])

    train_both(MLP, rank, world_size, run=run)


@ranks(2)
def test_autograd_grad_for_an_unused_parameter_is_none_or_an_error_as_in_plain(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    for model in (pair.model, pair.plain):
        wanted = [model.inp.weight, model.blocks[0].up.weight]
        loss = loss_of(model.inp(batch(rank, 0)))
        found = torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True)
        assert found[0] is not None and found[1] is None
        zeros = torch.autograd.grad(loss, wanted, materialize_grads=True, retain_graph=True)
        same(zeros[0], found[0])
        same(zeros[1], torch.zeros_like(pair.plain.blocks[0].up.weight))
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(loss, wanted)


@ranks(2, exhaustive=(3,))
def test_functional_call_with_other_values_gives_the_plain_results(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    torch.manual_seed(7)
    other = {n: torch.randn(p.shape, dtype=p.dtype, requires_grad=True) for n, p in pair.plain.named_parameters()}

    def run(model, x):
        # The values replace every parameter; gradients go to them alone.
        loss = loss_of(functional_call(model, other, (x,)))
        return (loss.detach(), *torch.autograd.grad(loss, list(other.values())))

    for step in range(2):
        for ours, theirs in zip(*pair.each(run, batch(rank, step)), strict=True):
            same(ours, theirs)
        pair.step(plain_backward, batch(rank, step))
    pair.check()


GIVEN = {
    "others": lambda m: {"head.weight": torch.full((3, 7), 0.3, dtype=torch.float64)},
    "its own": lambda m: dict(m.named_parameters()),
}


@pytest.mark.parametrize("values", [*seldom("others"), "its own"])
@ranks(2)
def test_functional_call_with_some_values_trains_the_rest_like_plain(rank, world_size, values):
    def run(model, x):
        loss_of(functional_call(model, GIVEN[values](model), (x,))).backward()

    train_both(MLP, rank, world_size, run=run)


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("unit_bytes", [100, *exhaustive(1 << 20)])
def test_maml_with_a_gradient_inside_forward_trains_like_plain(rank, world_size, unit_bytes):
    train_both(MAML, rank, world_size, unit_bytes=unit_bytes)


class Energy(nn.Module):
    """Returns a gradient with respect to its input (forces from an energy)."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            energy = self.net(x).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, -force


@ranks(2, exhaustive=(3,))
def test_a_model_that_differentiates_inside_its_forward_trains_like_plain(rank, world_size):
    train_both(Energy, rank, world_size, unit_bytes=100)


@ranks(2)
def test_a_whole_backward_inside_a_running_forward_trains_like_plain(rank, world_size):
    train_both(InnerBackward, rank, world_size, unit_bytes=100)


@ranks(2)
def test_a_custom_autograd_function_that_saves_weights_trains_like_plain(rank, world_size):
    train_both(lambda: nn.Sequential(Custom(), Custom()), rank, world_size, unit_bytes=100)


class _Mul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5))
        self.lin = nn.Linear(5, 5)

    def forward(self, x):
        return self.lin(_Mul.apply(x, self.w))
