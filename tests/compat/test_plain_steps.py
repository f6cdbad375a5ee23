"""Plain steps, as any training script does them."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_shard
from tests.compat.harness import (
    MLP,
    Block,
    Pair,
    batch,
    loss_of,
    plain_backward,
    same,
    same_params,
    train_alike,
    train_both,
)
from tests.compat.modes import as_computed
from tests.support.marks import exhaustive, seldom
from tests.support.models import FrozenFirst, LoRA, Structured, Uneven, WithEncode
from tests.support.ranks import ranks


@ranks(2, 3, exhaustive=(1, 4))
@pytest.mark.parametrize("strategy", ["full_shard", *seldom("shard_grad_op", "shard_optim"), "no_shard"])
def test_a_plain_step_trains_like_the_plain_model(rank, world_size, strategy):
    train_both(MLP, rank, world_size, strategy=strategy)


@ranks(2, exhaustive=(3,))
def test_keyword_arguments_and_nested_dict_outputs_train_like_plain(rank, world_size):
    def run(model, x):
        return plain_backward(model, x=x, scale=0.5, extra=None)

    train_both(Structured, rank, world_size, run=run, unit_bytes=100)


@ranks(3, exhaustive=(2, 4))
def test_uneven_shapes_train_like_plain(rank, world_size):
    train_both(Uneven, rank, world_size)


@ranks(2)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_training_steps_gives_the_plain_results(rank, world_size, context):
    pair = Pair(MLP, rank, world_size)
    for step in range(3):
        pair.each(nn.Module.eval)
        with context():  # also as the very first use
            same(*pair.each(lambda m, x: m(x), batch(rank, 50 + step)), "evaluation")
            same(*pair.each(lambda m, x: m.head(m.inp(x)), batch(rank, 50 + step)), "evaluation of parts")
        pair.each(nn.Module.train)
        pair.step(plain_backward, batch(rank, step))
    pair.check()


@ranks(2)
def test_a_forward_without_gradients_between_forward_and_backward_changes_nothing(rank, world_size):
    def run(model, x):
        loss = loss_of(model(x))
        with torch.no_grad():
            target = model(x + 1).mean()
        with torch.no_grad():
            target = target + model.blocks[0](torch.ones(2, 7, dtype=x.dtype)).mean()
            target = target + (model.head.weight @ model.head.weight.new_ones(7)).mean()
        (loss + target).backward()

    train_both(MLP, rank, world_size, run=run)


@ranks(2, exhaustive=(3, 4))
def test_accumulation_with_gradient_sync_every_time_trains_like_plain(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    for step in range(3):
        for micro in range(3):
            plain_backward(pair.model, batch(rank, 10 * step + micro))
            # The mean over ranks is linear: averaging the plain sum once is the same.
            plain_backward(pair.plain, batch(rank, 10 * step + micro))
        pair.step(lambda model: None)
    pair.check()


@ranks(2, exhaustive=(3, 4))
@pytest.mark.parametrize("strategy", ["full_shard", *seldom("shard_grad_op", "shard_optim", "no_shard")])
def test_accumulation_without_gradient_sync_trains_like_plain(rank, world_size, strategy):
    pair = Pair(MLP, rank, world_size, strategy=strategy)
    for step in range(3):
        with pair.engine.no_sync():
            for micro in range(2):
                pair.each(plain_backward, batch(rank, 10 * step + micro))
        pair.step(plain_backward, batch(rank, 10 * step + 2))
    pair.check()


@ranks(2)
def test_accumulation_through_the_attribute_that_ddp_has_trains_like_plain(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    for step in range(2):
        pair.engine.require_backward_grad_sync = False
        pair.each(plain_backward, batch(rank, 10 * step))
        pair.engine.require_backward_grad_sync = True
        pair.step(plain_backward, batch(rank, 10 * step + 1))
    pair.check()


@ranks(3, exhaustive=(2, 4))
def test_a_method_other_than_forward_trains_like_plain(rank, world_size):
    def run(model, x):
        loss_of(model.encode(x)).backward()

    train_both(WithEncode, rank, world_size, run=run, unit_bytes=100)


@ranks(2)
def test_a_method_and_the_forward_in_one_loss_train_like_plain(rank, world_size):
    def run(model, x):
        (loss_of(model.encode(x)) + loss_of(model(x)) + loss_of(model.dec(model.enc(x)))).backward()

    train_both(WithEncode, rank, world_size, run=run, unit_bytes=100)


@ranks(2)
def test_the_forward_of_a_submodule_trains_like_plain(rank, world_size):
    def run(model, x):
        h = model.inp(x)
        loss_of(model.blocks[1](h)).backward()

    train_both(MLP, rank, world_size, run=run)


def _frozen_in_part():
    model = MLP()
    for name, p in model.named_parameters():
        if "up" in name or name == "inp.weight":
            p.requires_grad_(False)
    return model


@ranks(2, exhaustive=(3, 4))
@pytest.mark.parametrize("unit_bytes", [500, *seldom(1 << 20)])
def test_frozen_and_trainable_parameters_in_one_unit_train_like_plain(rank, world_size, unit_bytes):
    train_both(_frozen_in_part, rank, world_size, unit_bytes=unit_bytes)


class Tied(nn.Module):
    """A weight shared by the first and the last unit, and a block that is used twice."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 7)
        self.block = Block(7)
        self.mid = Block(7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        return self.head(self.block(self.mid(self.block(self.emb(x)))))


def _tokens(rank, step):
    return torch.randint(0, 11, (4, 3), generator=torch.Generator().manual_seed(100 * step + rank))


@ranks(2, exhaustive=(3, 4))
@pytest.mark.parametrize("unit_bytes", [100, *seldom(1 << 20)])
def test_tied_parameters_across_units_and_a_block_used_twice_train_like_plain(rank, world_size, unit_bytes):
    train_both(Tied, rank, world_size, make_batch=_tokens, unit_bytes=unit_bytes)


class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, x, branch):
        h = self.first(x)
        h = {"left": self.left, "right": self.right, "none": nn.Identity()}[branch](h)
        return self.last(h)


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("unit_bytes", [100, *seldom(1 << 20)])
def test_parameters_unused_on_all_ranks_keep_no_gradient(rank, world_size, unit_bytes):
    pair = Pair(Partly, rank, world_size, unit_bytes=unit_bytes)
    for step in range(4):
        pair.step(lambda m, x, b: plain_backward(m, x, b), batch(rank, step), ["left", "right", "none", "left"][step])
        assert pair.model.never.weight.grad is None
    pair.check()


class Halves(nn.Module):
    """One unit whose parameters are used on some ranks only."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.left, self.right = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6))
        self.last = nn.Linear(6, 2)

    def forward(self, x, left):
        return self.last(self.first(x) @ (self.left if left else self.right))


@ranks(3, exhaustive=(2, 4))
def test_parameters_unused_on_some_ranks_train_like_plain(rank, world_size):
    pair = Pair(Halves, rank, world_size, unit_bytes=1 << 20)
    for step in range(4):
        pair.step(plain_backward, batch(rank, step), rank == step % world_size)
    pair.check()


class Tall(nn.Module):
    """A partly used unit at the end, so that every reduction before it waits for it on the ranks that don't use it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Linear(6, 6) for _ in range(7)])
        self.tail = Tail()

    def forward(self, x, all_used):
        return self.tail(self.blocks(x), all_used)


class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.often, self.seldom = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, h, all_used):
        return h * self.often * self.seldom if all_used else h * self.often


@pytest.mark.exhaustive(usual=True)
@ranks(2, exhaustive=(3,))
def test_a_parameter_unused_on_one_rank_with_many_units_of_one_size_trains_like_plain(rank, world_size):
    pair = Pair(Tall, rank, world_size, unit_bytes=100)
    for step in range(4):
        pair.step(plain_backward, batch(rank, step, 4, 6), rank == step % world_size)
    pair.check()


class Side(nn.Module):
    """A branch that runs everywhere but adds to the loss on some ranks only."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, use):
        h = self.a(x)
        side = self.b(h)
        return self.c(h + side if use else h)


@ranks(2, exhaustive=(3,))
def test_a_unit_whose_backward_runs_on_one_rank_only_trains_like_plain(rank, world_size):
    pair = Pair(Side, rank, world_size, unit_bytes=100)
    for step in range(4):
        pair.step(plain_backward, batch(rank, step, 4, 6), rank == 0 or step % 2 == 0)
    pair.check()


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list


class Custom:
    def __init__(self, value):
        self.value = value


class Objects(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        out = self.b(h)
        return Output(out, [h]) if self.kind == "dataclass" else Custom({"deep": Custom(out * 2)})


class Nest(nn.Module):
    """Objects pass between units as well."""

    def __init__(self, kind):
        super().__init__()
        self.inner = Objects(kind)
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        out = self.inner(x)
        if isinstance(out, Output):
            return Output(self.last(out.logits), out.hidden)
        return Custom(self.last(out.value["deep"].value))


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("kind", ["dataclass", "custom"])
def test_an_object_as_output_trains_like_plain(rank, world_size, kind):
    train_both(lambda: Nest(kind), rank, world_size, unit_bytes=100)


def _lora():
    return nn.Sequential(LoRA(5), LoRA(5), LoRA(5))


@ranks(2, exhaustive=(3, 4))
@pytest.mark.parametrize("unit_bytes", [100, *seldom(1 << 20), *exhaustive(300)])
def test_lora_trains_like_plain(rank, world_size, unit_bytes):
    train_both(_lora, rank, world_size, unit_bytes=unit_bytes)


def _frozen_first():
    return nn.Sequential(FrozenFirst(), FrozenFirst(), FrozenFirst())


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("strategy", ["full_shard", *seldom("shard_grad_op")])
@pytest.mark.parametrize("unit_bytes", [500, *exhaustive(100, 1 << 20)])
def test_a_frozen_layer_first_in_a_unit_whose_input_needs_a_gradient_trains_like_plain(
    rank, world_size, strategy, unit_bytes
):
    def run(model, x):
        x = x.clone().requires_grad_()
        loss_of(model(x)).backward()
        return x.grad

    pair = Pair(_frozen_first, rank, world_size, strategy=strategy, unit_bytes=unit_bytes)
    for step in range(3):
        same(*pair.step(run, batch(rank, step)), "the input's gradient")
    pair.check()


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        h = self.a(x)
        return F.linear(self.b(h), self.a.weight.detach(), self.b.bias.detach()) + F.linear(h, self.b.weight.data)


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("unit_bytes", [100, *exhaustive(1 << 20)])
def test_linear_with_a_detached_weight_trains_like_plain(rank, world_size, unit_bytes):
    train_both(Detached, rank, world_size, unit_bytes=unit_bytes)


@ranks(2, exhaustive=(3, 4))
def test_an_optimizer_built_before_sharding_trains_the_sharded_model(rank, world_size):
    torch.manual_seed(0)
    model = MLP().double()
    plain = as_computed(copy.deepcopy(model))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    torch_shard.shard(model, unit_bytes=500)
    train_alike(model, plain, optimizers, rank)
    same_params(model, plain)
