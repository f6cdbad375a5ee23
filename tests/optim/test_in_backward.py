"""engine.step_in_backward: as stepping after backward, with the gradients of two units at most."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_shard
from tests.compat.harness import MLP, Pair, average_grads, batch, plain_backward, same, same_params
from tests.optim.helpers import Descent, Odd, by_ndim, same_optimizers
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError, ShardError
from torch_shard.shard_tensor.spec import shard_of_full

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


@pytest.mark.parametrize("name", [*exhaustive("SGD"), "AdamW", *exhaustive("AdamW for-loop", "RMSprop")])
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
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
        same(slices[-1], shard_of_full(pair.plain.head.weight.grad, pair.model.head.weight._spec))
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


class Early(nn.Module):
    """A weight that is computed with, without a gradient, before the forward that gives it one: backward needs it later."""

    def __init__(self, way="plain"):
        super().__init__()
        self.way = way
        self.inp, self.again, self.mid = nn.Linear(5, 6), Own(), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.early = True

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        if self.early:
            x = torch.tanh(self.part(x, "detached"))
        x = torch.tanh(self.mid(x))
        return self.head(torch.tanh(self.part(x, "both" if self.way == "one forward" else "usual")))

    def part(self, x, how):
        if "checkpoint" in self.way:
            return checkpoint(self.again, x, how, use_reentrant=self.way == "reentrant checkpoint")
        return self.again(x, how)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x, how):
        if how != "usual":
            x = torch.tanh(x @ self.weight.detach().t())
        return x if how == "detached" else x @ self.weight.t()


@pytest.mark.parametrize("way", ["plain", "checkpoint", "one forward"])
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard", "shard_grad_op")])
@ranks(2, exhaustive=(1, 3))
def test_weights_that_backward_needs_behind_their_gradient(rank, world_size, strategy, way):
    pair = Pair(lambda: Early(way), rank, world_size, unit_bytes=100, strategy=strategy, optimizer=OPTIMIZERS["SGD"])
    pair.engine.step_in_backward(pair.optimizer)
    train(pair, range(3))
    pair.model.early = pair.plain.early = False
    train(pair, range(3, 5))
    pair.model.early = pair.plain.early = True
    train(pair, range(5, 7))
    pair.check()
    same_optimizers(pair.optimizer, pair.plain_optimizer)


class Regions(nn.Module):
    """All of it in checkpoints whose forward records nothing, a weight in two of them."""

    def __init__(self, how, tail):
        super().__init__()
        self.inp, self.again, self.between, self.how = nn.Linear(5, 6), Own(), nn.Linear(6, 6), how
        self.tail = nn.Linear(6, 6) if tail else nn.Identity()

    def forward(self, x):
        x = checkpoint(self.inp, x.requires_grad_(), use_reentrant=True)
        x = checkpoint(self.again, torch.tanh(x), self.how, use_reentrant=True)
        x = checkpoint(self.between, torch.tanh(x), use_reentrant=True)
        return self.tail(checkpoint(self.again, torch.tanh(x), "usual", use_reentrant=True))


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("how", ["detached", "both"])
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard")])
@ranks(2)
def test_uses_that_nothing_announces_are_right_or_an_error_on_all_ranks(rank, world_size, strategy, how, tail):
    options = {"unit_bytes": 100, "strategy": strategy, "optimizer": OPTIMIZERS["SGD"]}
    pair = Pair(lambda: Regions(how, tail), rank, world_size, **options)
    pair.engine.step_in_backward(pair.optimizer)
    try:
        train(pair, range(3))
    except ShardError as error:
        assert "again.weight" in str(error) and "step_in_backward" in str(error)  # noqa: PT017
        failed = 1.0
    else:
        pair.check()
        failed = 0.0
    everyone = torch.tensor([failed, 1 - failed])
    dist.all_reduce(everyone)
    assert everyone.max() == world_size


@ranks(2)
def test_a_use_that_only_one_rank_has_is_right_or_an_error_on_all(rank, world_size):
    pair = Pair(Early, rank, world_size, unit_bytes=100)
    pair.engine.step_in_backward(pair.optimizer)

    def run(model, x, early):
        y = torch.tanh(model.again(torch.tanh(model.inp(x)), "detached"))
        z = model.head(torch.tanh(model.again(torch.tanh(model.mid(torch.tanh(model.inp(x)))), "usual")))
        loss = z.pow(2).mean() + (y.pow(2).mean() if early else 0.0)
        del y, z
        loss.backward()

    train(pair, range(2), lambda model, x: run(model, x, True))
    try:
        train(pair, range(2, 4), lambda model, x: run(model, x, rank == 0))
    except ShardError as error:
        assert "again" in str(error)  # noqa: PT017
    else:
        pair.check()


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@ranks(2)
def test_the_mode_may_begin_between_forward_and_backward(rank, world_size, strategy):
    pair = Pair(Early, rank, world_size, unit_bytes=100, strategy=strategy)
    loss = pair.model(batch(rank, 0)).pow(2).mean()
    pair.engine.step_in_backward(pair.optimizer)
    loss.backward()
    pair.plain(batch(rank, 0)).pow(2).mean().backward()
    average_grads(pair.plain)
    pair.plain_optimizer.step()
    pair.check()


class Deep(nn.Module):
    def __init__(self, layers, reentrant=None):
        super().__init__()
        self.layers, self.reentrant = nn.ModuleList(nn.Linear(5, 5) for _ in range(layers)), reentrant

    def forward(self, x):
        for layer in self.layers:
            plainly = self.reentrant is None
            x = torch.tanh(layer(x) if plainly else checkpoint(layer, x, use_reentrant=self.reentrant))
        return x


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard")])
@ranks(2)
def test_ordinary_models_are_stepped_before_the_end(rank, world_size, strategy, reentrant):
    pair = Pair(lambda: Deep(6, reentrant), rank, world_size, unit_bytes=1, strategy=strategy)
    pair.engine.step_in_backward(pair.optimizer)
    for step in range(3):
        events = []
        first, last = pair.model.layers[0].weight, pair.model.layers[-1].weight
        handles = [
            first.register_hook(lambda g, seen=events: seen.append("computed")),
            last.register_post_accumulate_grad_hook(lambda p, seen=events: seen.append("stepped")),
        ]
        plain_backward(pair.model, batch(rank, step).requires_grad_())
        assert events == ["stepped", "computed"]
        for handle in handles:
            handle.remove()


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


@ranks(2)
def test_a_gradient_scaler_is_refused_by_name(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    pair.engine.step_in_backward(pair.optimizer)
    scaler = torch.amp.GradScaler("cpu")

    def step():
        scaler.scale(pair.model(batch(rank, 1)).pow(2).mean()).backward()
        scaler.step(pair.optimizer)

    refused(step, "GradScaler", "step_in_backward")
    same_params(pair.model, pair.plain)  # before anything was changed


@ranks(2)
def test_a_gradient_scaler_that_scales_nothing_of_the_model_is_none_of_its_business(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    pair.engine.step_in_backward(pair.optimizer)
    other, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    other.scale(nn.Linear(2, 2)(torch.ones(2)).sum()).backward()
    train(pair, range(2), lambda m, x: off.scale(m(x).pow(2).mean()).backward())
    pair.check()


class Counting(Descent):
    """Counts in its groups, as apex's FusedAdam does; once as a number and once as a tensor."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["seen"] = torch.zeros(())

    def begin(self, group):
        group["step"] = group.get("step", 0) + 1
        group["seen"] += 1

    def update(self, p, group):
        p.sub_(p.grad * group["step"] * group["seen"], alpha=group["lr"])


class CountingGradients(Counting):
    """Counts only the steps in which a group has a gradient."""

    def begin(self, group):
        if any(p.grad is not None for p in group["params"]):
            super().begin(group)


for declared in (Counting, CountingGradients):
    torch_shard.optim.register(declared, "elementwise")


@pytest.mark.parametrize("make", [O.AdamW, Counting, CountingGradients])
@ranks(2)
def test_the_users_step_may_stay_where_it_is_and_counts_no_second_step(rank, world_size, make):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: make(by_ndim(m), lr=0.01))
    pair.engine.step_in_backward(pair.optimizer)
    optimizers = (pair.optimizer, pair.plain_optimizer)
    schedulers = [O.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]
    for step in range(4):
        pair.backward(plain_backward, batch(rank, step))
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        for group in optimizers[0].param_groups if make is not O.AdamW else ():
            assert group["step"] == group["seen"] == step + 1
    pair.check()
    same_optimizers(*optimizers)


@ranks(2)
def test_what_is_not_sharded_is_left_to_the_users_step_which_counts_no_second_step(rank, world_size):
    pair = Pair(Odd, rank, world_size, ignore=["extra"], optimizer=lambda m: Counting(by_ndim(m)))
    pair.engine.step_in_backward(pair.optimizer)
    for step in range(4):
        for model in (pair.model, pair.plain):
            plain_backward(model, batch(rank, step))
        average_grads(pair.plain)
        pair.model.extra.grad = pair.plain.extra.grad.clone()
        pair.update()
        for group, other in zip(pair.optimizer.param_groups, pair.plain_optimizer.param_groups, strict=True):
            assert group["step"] == other["step"] and group["seen"] == other["seen"]
    pair.check()


@ranks(2)
def test_options_edited_before_the_users_step_stay_edited(rank, world_size):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: Counting(m.parameters()))
    pair.engine.step_in_backward(pair.optimizer)
    plain_backward(pair.model, batch(rank, 0))
    group = pair.optimizer.param_groups[0]
    group["step"] = 10
    group["seen"].fill_(20)
    pair.optimizer.step()
    assert (group["step"], group["seen"].item()) == (11, 21)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@ranks(2)
def test_a_parameter_that_is_listed_twice_is_refused_by_name(rank, world_size):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: O.SGD([*m.parameters(), m.head.weight], lr=0.1))
    refused(
        lambda: pair.engine.step_in_backward(pair.optimizer), "head.weight", f"rank {rank}", "once", error=ConfigError
    )
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        optimizer.param_groups[0]["params"].pop()
    pair.engine.step_in_backward(pair.optimizer)
    train(pair, range(1))
    pair.optimizer.param_groups[0]["params"].append(pair.model.head.weight)
    refused(lambda: plain_backward(pair.model, batch(rank, 1)), "head.weight", "once", error=ConfigError)
    pair.check()


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


@ranks(2)
def test_counting_where_each_checkpoint_is_a_backward_of_its_own(rank, world_size):
    pair = Pair(lambda: Deep(3, True), rank, world_size, unit_bytes=1, optimizer=lambda m: Counting(m.parameters()))
    pair.engine.step_in_backward(pair.optimizer)
    train(pair, range(3), lambda model, x: plain_backward(model, x.requires_grad_()))
    pair.check()
    assert pair.optimizer.param_groups[0]["step"] == 3
