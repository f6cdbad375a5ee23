"""engine.step_in_backward: as stepping after backward, with the gradients of two units at most."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.compat.harness import MLP, Pair, average_grads, batch, plain_backward, same, same_params
from tests.marks import exhaustive
from tests.optim.helpers import Odd, by_ndim, same_optimizers
from tests.ranks import ranks
from torch_shard.errors import ConfigError, ShardError
from torch_shard.shard_tensor import slice_full

O = torch.optim
OPTIMIZERS = {
    "SGD": lambda m: O.SGD(by_ndim(m), lr=0.1, momentum=0.9),
    "AdamW": lambda m: O.AdamW(by_ndim(m), lr=0.01),
    "AdamW for-loop": lambda m: O.AdamW(by_ndim(m), lr=0.01, foreach=False),
    "RMSprop": lambda m: O.RMSprop(by_ndim(m), lr=0.01),
}


def train(pair, steps, run=plain_backward):
    """The sharded model is stepped by its backwards, the plain one as ever."""
    for step in steps:
        run(pair.model, batch(pair.rank, step))
        assert all(p.grad is None for p in pair.model.parameters())
        run(pair.plain, batch(pair.rank, step))
        average_grads(pair.plain)
        pair.plain_optimizer.step()
        pair.plain_optimizer.zero_grad()


@pytest.mark.parametrize("name", ["SGD", "AdamW", *exhaustive("AdamW for-loop", "RMSprop")])
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "no_shard")])
@ranks(2, exhaustive=(1, 3))
def test_it_steps_as_after_backward(rank, world_size, name, strategy):
    pair = Pair(Odd, rank, world_size, optimizer=OPTIMIZERS[name], strategy=strategy)
    pair.engine.step_in_backward(pair.optimizer)
    train(pair, range(3))
    pair.model.leave_out = pair.plain.leave_out = True  # a parameter without a gradient
    train(pair, range(3, 5))
    pair.model.leave_out = pair.plain.leave_out = False
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        optimizer.param_groups[0]["lr"] = 0.03
    train(pair, range(5, 7))
    pair.check()
    same_optimizers(pair.optimizer, pair.plain_optimizer)
    pair.engine.step_in_backward(None)
    for step in range(7, 9):  # and the usual way again
        pair.step(plain_backward, batch(rank, step))
    pair.check()


@ranks(2)
def test_a_parameter_that_only_one_rank_uses(rank, world_size):
    pair = Pair(Odd, rank, world_size, optimizer=OPTIMIZERS["SGD"])
    pair.engine.step_in_backward(pair.optimizer)
    pair.model.leave_out = pair.plain.leave_out = rank == 0
    train(pair, range(3))
    pair.check()


@ranks(2)
def test_the_users_step_stays_where_it_is(rank, world_size):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: O.AdamW(m.parameters(), lr=0.01))
    pair.engine.step_in_backward(pair.optimizer)
    schedulers = [O.lr_scheduler.StepLR(o, 1, 0.5) for o in (pair.optimizer, pair.plain_optimizer)]
    for step in range(4):
        pair.backward(plain_backward, batch(rank, step))
        for optimizer, scheduler in zip((pair.optimizer, pair.plain_optimizer), schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    pair.check()
    same_optimizers(pair.optimizer, pair.plain_optimizer)


class Tied(nn.Module):
    """A head that is tied to the embedding, and a block that is used twice."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 6, bias=False)
        self.block = nn.Linear(6, 6)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.detach().t().clone())

    def forward(self, x):
        x = torch.tanh(self.block(torch.tanh(self.block(self.embed(x)))))
        return self.head(x) + x @ self.embed.weight


@ranks(2)
def test_weights_that_are_used_several_times(rank, world_size):
    pair = Pair(Tied, rank, world_size, unit_bytes=100)
    pair.engine.step_in_backward(pair.optimizer)
    train(pair, range(4))
    pair.check()


@ranks(2)
def test_hooks_on_accumulated_gradients_see_them(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    slices = []
    pair.model.head.weight.register_post_accumulate_grad_hook(lambda p: slices.append(p.grad.to_local().clone()))
    pair.engine.step_in_backward(pair.optimizer)
    for step in range(2):
        plain_backward(pair.plain, batch(rank, step))
        average_grads(pair.plain)
        plain_backward(pair.model, batch(rank, step))
        assert len(slices) == step + 1
        same(slices[-1], slice_full(pair.plain.head.weight.grad, pair.model.head.weight._spec))
        pair.plain_optimizer.step()
        pair.plain_optimizer.zero_grad()


@ranks(2)
def test_no_more_gradients_than_those_of_two_units_are_held(rank, world_size):
    pair = Pair(lambda: MLP(width=32, blocks=8), rank, world_size, unit_bytes=1)
    pair.engine.step_in_backward(pair.optimizer)
    held = []

    def count(*_):
        held.append(sum(p.grad is not None for p in pair.model.parameters()))

    for p in pair.model.parameters():
        p.register_post_accumulate_grad_hook(count)
    plain_backward(pair.model, batch(rank, 0))
    most = max(len(unit.params) for unit in pair.engine.units)
    assert len(held) == len(list(pair.model.parameters()))
    assert max(held) <= 2 * most < len(held) / 2


def refused(fn, *words, error=ShardError):
    with pytest.raises(error) as found:
        fn()
    for word in words:
        assert word in str(found.value), f"{word!r} is not in: {found.value}"


@ranks(2)
def test_clipping_is_refused_by_name(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    pair.engine.step_in_backward(pair.optimizer)
    plain_backward(pair.model, batch(rank, 0))
    parameters = list(pair.model.parameters())
    refused(lambda: pair.engine.clip_grad_norm_(1.0), "clip_grad_norm_", "step_in_backward")
    refused(lambda: pair.engine.clip_grad_value_(1.0), "clip_grad_value_", "step_in_backward")
    refused(lambda: nn.utils.clip_grad_norm_(parameters, 1.0), "clipping", "step_in_backward")
    refused(lambda: nn.utils.clip_grad_value_(parameters, 1.0), "clipping", "step_in_backward")


@ranks(2)
def test_no_sync_is_refused_by_name_and_changes_nothing(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    pair.engine.step_in_backward(pair.optimizer)
    with pair.engine.no_sync():
        refused(lambda: plain_backward(pair.model, batch(rank, 0)), "no_sync", "step_in_backward")
    pair.check()
    train(pair, range(2))
    pair.check()


@pytest.mark.parametrize("early", [True, False])
@ranks(2)
def test_a_gradient_scaler_is_refused_by_name(rank, world_size, early):
    pair = Pair(MLP, rank, world_size)
    pair.engine.step_in_backward(pair.optimizer)
    if not early:
        train(pair, range(1))
    scaler = torch.amp.GradScaler("cpu")

    def step():
        scaler.scale(pair.model(batch(rank, 1)).pow(2).mean()).backward()
        scaler.step(pair.optimizer)

    refused(step, "GradScaler", "step_in_backward")
    if early:
        same_params(pair.model, pair.plain)  # before anything was changed


@ranks(2)
def test_a_loss_term_on_the_parameter_itself_is_an_error_or_right(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    pair.engine.step_in_backward(pair.optimizer)

    def run(model, x):
        (model(x).pow(2).mean() + 0.1 * sum(p.pow(2).sum() for p in model.parameters())).backward()

    try:
        train(pair, range(2), run)
    except ShardError as error:
        assert "step_in_backward" in str(error) and "weight" in str(error) or "bias" in str(error)  # noqa: PT017
    else:
        pair.check()


@ranks(2)
def test_other_optimizers_are_refused(rank, world_size):
    pair = Pair(MLP, rank, world_size)

    class Own(O.SGD):
        def step(self, closure=None):
            return super().step(closure)

    matrices = [p for p in pair.model.parameters() if p.ndim == 2]
    for optimizer in (Own(pair.model.parameters()), O.Muon(matrices)):
        refused(lambda o=optimizer: pair.engine.step_in_backward(o), type(optimizer).__name__, error=ConfigError)


@ranks(2)
def test_an_exception_in_backward_and_then_a_step(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    pair.engine.step_in_backward(pair.optimizer)
    train(pair, range(2))

    def fail(_):
        raise ValueError("on purpose")

    handle = pair.model.head.weight.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        plain_backward(pair.model, batch(rank, 2))
    handle.remove()
    train(pair, range(3, 5))
    pair.check()
