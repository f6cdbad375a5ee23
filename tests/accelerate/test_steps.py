"""Training with the Accelerator gives DistributedDataParallel's numbers at every step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, GradientAccumulationPlugin
from torch import nn

from accelerate_shard import ShardPlugin
from tests.accelerate.support.accelerators import BOTH, OURS, STOCK, accelerator, engine_of
from tests.accelerate.support.models import loader, loss_of, net
from tests.accelerate.support.training import Result, assert_same, full_parameters, prepared, steps, train
from tests.support.logs import captured_log
from tests.support.marks import exhaustive, one_at_a_time, quick
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError, ShardError

STRATEGIES = ["full_shard", "shard_grad_op", "shard_optim", "no_shard"]
DEFERRED = ShardPlugin(defer_gradient_sync=True)


@pytest.mark.parametrize("strategy", quick(STRATEGIES, ["full_shard", "no_shard"]))
@ranks(2)
def test_losses_norms_and_weights_are_those_of_ddp(strategy):
    assert_same(train(OURS, shard_plugin=ShardPlugin(strategy=strategy), epochs=2), train(STOCK, epochs=2))


# -- accumulation -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "plan",
    [
        {"num_steps": 3},
        {"num_steps": 2, "sync_with_dataloader": False},
        *exhaustive({"num_steps": 2, "sync_with_dataloader": False, "sync_each_batch": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("defer", [False, True])
@ranks(2)
def test_accumulated_steps_are_those_of_ddp(defer, plan):
    """Five batches a rank: the last accumulation ends early, with the dataloader, or in its next epoch."""
    options = {"gradient_accumulation_plugin": GradientAccumulationPlugin(**plan), "size": 40, "epochs": 2}
    plugin = ShardPlugin(defer_gradient_sync=defer)
    assert_same(train(OURS, shard_plugin=plugin, **options), train(STOCK, **options))


@ranks(2)
def test_defer_gradient_sync_reduces_once_for_all_micro_batches():
    sent = {}
    for defer in (False, True):
        plugin = ShardPlugin(strategy="shard_optim", defer_gradient_sync=defer)
        with accelerator(shard_plugin=plugin, gradient_accumulation_steps=4) as acc:
            model, data = acc.prepare(net(), loader(32))
            before = engine_of(model).bytes_sent
            for batch in data:
                with acc.accumulate(model):
                    acc.backward(loss_of(model, batch))
            sent[defer] = engine_of(model).bytes_sent - before
    assert sent[True] < 0.5 * sent[False]


def _in_no_sync(acc, model, batches):
    with acc.no_sync(model):
        for batch in batches[:-1]:
            acc.backward(loss_of(model, batch))
    acc.backward(loss_of(model, batches[-1]))


def _triggered(acc, model, batches):
    """All forwards first, without a synchronisation; the last of their backwards reduces."""
    with acc.no_sync(model):
        losses = [loss_of(model, batch) for batch in batches]
    with acc.no_sync(model):
        for loss in losses[:-1]:
            acc.backward(loss)
    with acc.trigger_sync_in_backward(model):
        acc.backward(losses[-1])


@pytest.mark.parametrize("plugin", [ShardPlugin(), *exhaustive(DEFERRED)], ids=["each", "deferred"])
@pytest.mark.parametrize("way", [_in_no_sync, _triggered])
@ranks(2)
def test_no_sync_and_trigger_sync_in_backward_do_what_they_do_under_ddp(way, plugin):
    results = []
    for kind in BOTH:
        with accelerator(kind, shard_plugin=plugin) as acc:
            model, optimizer, data = prepared(acc, 48)
            batches = list(data)
            found = Result()
            for start in (0, 3):
                way(acc, model, batches[start : start + 3])
                found.norms.append(float(acc.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    found.losses.append(loss_of(model, batches[0]).item())
            found.parameters = full_parameters(acc.unwrap_model(model))
            results.append(found)
    assert_same(results[1], results[0])


# -- clipping ---------------------------------------------------------------------------------------------------------
WHICH = {
    "all": lambda a, b: list(a.parameters()),
    "one": lambda a, b: a.head.weight,
    "a generator": lambda a, b: (p for p in a.parameters() if p.ndim == 2),
    "parts of both": lambda a, b: [b.head.weight, a.embed.weight, b.embed.bias],
    "both": lambda a, b: [*a.parameters(), *b.parameters()],
    "none": lambda a, b: [],
}


@pytest.mark.parametrize("norm_type", [2, *exhaustive(float("inf"))])
@pytest.mark.parametrize("which", ["all", "parts of both", "none", *exhaustive("a generator", "both")])
@ranks(2)
def test_the_norm_of_any_parameters_of_any_models_is_that_of_ddp(which, norm_type):
    def clip(acc, a, b):
        return acc.clip_grad_norm_(WHICH[which](a, b), 0.05, norm_type=norm_type)

    (wanted, grads), (norm, ours) = clipped(STOCK, clip), clipped(OURS, clip)
    if which != "none":
        assert wanted > 0.05
        torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours, grads, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("which", ["both", *exhaustive("one", "a generator")])
@ranks(2)
def test_values_of_any_gradients_are_clipped_as_under_ddp(which):
    def clip(acc, a, b):
        return acc.clip_grad_value_(WHICH[which](a, b), 0.01)

    torch.testing.assert_close(clipped(OURS, clip), clipped(STOCK, clip), rtol=1e-5, atol=1e-8)


def clipped(kind, clip):
    """What `clip` returns for the gradients of two models, and these."""
    with accelerator(kind) as acc:
        a, b, data = acc.prepare(net(0), net(1), loader())
        batch = next(iter(data))
        acc.backward(loss_of(a, batch) + 2 * loss_of(b, batch))
        plain = [acc.unwrap_model(m) for m in (a, b)]
        returned = clip(acc, *plain)
        grads = []
        for model in plain:
            with engine_of(model).gathered(grads=True) if kind is OURS else contextlib.nullcontext():
                grads += [p.grad.clone() for p in model.parameters()]
        return returned, grads


@ranks(2)
def test_parameters_left_out_of_sharding_are_clipped_alike_on_all_ranks():
    with accelerator(shard_plugin=ShardPlugin(ignore=["head.*"])) as acc:
        model, data = acc.prepare(net(), loader())
        acc.backward(loss_of(model, next(iter(data))))
        assert model.head.weight.grad.norm() > 0
        norm = acc.clip_grad_norm_(model.parameters(), 0.01)
        assert len(set(acc.gather(norm.view(1)).tolist())) == 1
        other = acc.prepare(net(1))
        acc.backward(loss_of(other, next(iter(data))))
        with pytest.raises(ConfigError, match=r"ShardPlugin\.ignore"):
            acc.clip_grad_norm_([*model.parameters(), *other.parameters()], 0.01)
        acc.clip_grad_norm_([model.embed.weight, *other.layers.parameters()], 0.01)


@pytest.mark.parametrize("clip", ["clip_grad_norm_", *exhaustive("clip_grad_value_")])
@ranks(2)
def test_clipping_between_micro_batches_is_an_error_where_ddp_would_clip_each_ranks_own_gradients(rank, clip):
    for plugin in (None, DEFERRED):
        with accelerator(gradient_accumulation_steps=2, shard_plugin=plugin) as acc:
            model, data = acc.prepare(net(), loader())
            with acc.accumulate(model):
                acc.backward(loss_of(model, next(iter(data))))
                before = [p.grad.to_local().norm() for p in model.parameters() if plugin is None]
                with pytest.raises(ShardError, match=f"{clip}.*sync_gradients"):
                    getattr(acc, clip)(model.parameters(), 1e-3)
                assert [p.grad.to_local().norm() for p in model.parameters() if plugin is None] == before


@ranks(2)
def test_clipping_between_micro_batches_that_are_each_reduced_is_as_under_ddp(rank):
    def clipped(kind):
        plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
        norms = []
        with accelerator(kind, gradient_accumulation_plugin=plugin) as acc:
            model, data = acc.prepare(net(), loader())
            for batch in data:
                with acc.accumulate(model):
                    acc.backward(loss_of(model, batch))
                    norms.append(acc.clip_grad_norm_(model.parameters(), 0.05).item())
        return norms

    assert clipped(OURS) == pytest.approx(clipped(STOCK), rel=1e-5)


# -- DistributedDataParallelKwargs ------------------------------------------------------------------------------------
class Wide(nn.Module):
    """Has a buffer that training changes, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.norm = nn.BatchNorm1d(12)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(x))


def wide():
    torch.manual_seed(0)
    return Wide()


@pytest.mark.parametrize("broadcast", [True, *exhaustive(False)])
@ranks(2)
def test_unused_parameters_and_buffers_are_as_under_ddp(broadcast):
    results, means = [], []
    for kind in BOTH:
        handlers = [DistributedDataParallelKwargs(broadcast_buffers=broadcast, find_unused_parameters=True)]
        with accelerator(kind, kwargs_handlers=handlers) as acc:
            model, optimizer, data = prepared(acc, make=wide)
            results.append(steps(acc, model, optimizer, data))
            means.append(acc.unwrap_model(model).norm.running_mean)
    assert_same(results[1], results[0], rtol=2e-5)
    torch.testing.assert_close(means[1], means[0])


@ranks(2)
def test_a_hook_that_compresses_gradients_gives_ddps_numbers_and_a_wrapper_without_one_compresses_nothing():
    """The hook is fp16's; DDP refuses the one of bf16 on the CPU."""
    exact = train(STOCK, max_norm=100.0)
    for chosen in ({"comm_hook": DDPCommunicationHookType.FP16}, {"comm_wrapper": DDPCommunicationHookType.BF16}):
        options = {"kwargs_handlers": [DistributedDataParallelKwargs(**chosen)], "max_norm": 100.0}
        ours = train(OURS, **options)
        assert_same(ours, train(STOCK, **options))
        with pytest.raises(AssertionError) if "comm_hook" in chosen else contextlib.nullcontext():
            assert_same(ours, exact, rtol=5e-5)


@ranks(2)
def test_hooks_made_for_buckets_are_refused_and_settings_without_a_meaning_named(rank):
    for chosen in ({"comm_hook": DDPCommunicationHookType.POWER_SGD}, {"dim": 1}):
        with accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**chosen)]) as acc:
            model = net()
            with pytest.raises(ConfigError, match=r"power_sgd|dim=1"):
                acc.prepare(model)
            assert not acc._models
    with (
        accelerator(kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=5)]) as acc,
        captured_log() as messages,
    ):
        acc.prepare(net())
    assert any("bucket_cap_mb" in m for m in messages) == (rank == 0)


# -- between the micro-batches: gradients are means over the ranks ----------------------------------------------------
PLUGINS = {
    "full_shard": ShardPlugin(),
    "no_shard": ShardPlugin(strategy="no_shard"),
    "deferred": ShardPlugin(defer_gradient_sync=True),
}


def replace_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = p.grad.sign()


MISTAKES: dict[str, Callable[[Any, nn.Module, Any], Any]] = {
    "step": lambda acc, model, optimizer: optimizer.step(),
    "clip": lambda acc, model, optimizer: acc.clip_grad_norm_(model.parameters(), 0.05),
    "clip values": lambda acc, model, optimizer: acc.clip_grad_value_(model.parameters(), 1e-3),
    "clip by torch": lambda acc, model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    "edit": lambda acc, model, optimizer: [p.grad.sign_() for p in model.parameters()],
    "replace": lambda acc, model, optimizer: replace_gradients(model),
}


@one_at_a_time(mistake=list(MISTAKES), plugin=list(PLUGINS))
@ranks(2)
def test_after_a_backward_under_no_sync_what_ddp_would_do_with_each_ranks_own_gradients_is_an_error(mistake, plugin):
    """At once, or where it can't be seen before the next backward, there."""
    with accelerator(OURS, shard_plugin=PLUGINS[plugin]) as acc:
        model, optimizer, data = prepared(acc)
        before = full_parameters(model)
        batch = next(iter(data))
        with pytest.raises(ShardError, match="no_sync"):
            with acc.no_sync(model):
                acc.backward(loss_of(model, batch))
            MISTAKES[mistake](acc, model, optimizer)
            acc.backward(loss_of(model, batch))
        after = full_parameters(model)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        # And it trains on, once they are cleared.
        optimizer.zero_grad()
        acc.backward(loss_of(model, batch))
        acc.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def cleared(acc, model, optimizer, batches):
    with acc.no_sync(model):
        acc.backward(loss_of(model, batches[0]))
    optimizer.zero_grad()


def zeroed(acc, model, optimizer, batches):
    with acc.no_sync(model):
        acc.backward(loss_of(model, batches[0]))
    optimizer.zero_grad(set_to_none=False)
    with acc.no_sync(model):
        acc.backward(loss_of(model, batches[1]))


def regularised(acc, model, optimizer, batches):
    """A loss with terms in the parameters themselves, and a backward of those terms alone."""
    with acc.no_sync(model):
        acc.backward(loss_of(model, batches[0]) + sum(p.square().sum() for p in model.parameters()))
        acc.backward(sum(p.abs().sum() for p in model.parameters()))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("begin", "plugin"),
    [
        (cleared, "full_shard"),
        (zeroed, "full_shard"),
        (zeroed, "no_shard"),
        (zeroed, "deferred"),
        (regularised, "full_shard"),
        (regularised, "no_shard"),
    ],
)
@ranks(2)
def test_gradients_that_were_cleared_or_added_to_by_a_loss_on_parameters_are_no_mistake(begin, plugin):
    results = []
    for kind in BOTH:
        with accelerator(kind, shard_plugin=PLUGINS[plugin]) as acc:
            model, optimizer, data = prepared(acc, 48)
            batches, found = list(data), Result()
            for start in (0, 3):
                begin(acc, model, optimizer, batches[start:])
                loss = loss_of(model, batches[start + 2])
                acc.backward(loss)
                found.norms.append(float(acc.clip_grad_norm_(model.parameters(), 0.05)))
                found.losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            found.parameters = full_parameters(acc.unwrap_model(model))
            results.append(found)
    assert_same(results[1], results[0])
