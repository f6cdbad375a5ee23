"""Training with the Accelerator gives DistributedDataParallel's numbers at every step."""

from __future__ import annotations

import contextlib

import pytest
import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, GradientAccumulationPlugin
from torch import nn

from accelerate_shard import ShardPlugin
from tests.accelerate.support.accelerators import (
    BOTH,
    OURS,
    STOCK,
    Result,
    accelerator,
    assert_same,
    engine_of,
    full_parameters,
    loader,
    loss_of,
    net,
    sgd,
    train,
)
from tests.support.logs import captured_log
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError, ShardError

STRATEGIES = ["full_shard", "shard_grad_op", "shard_optim", "no_shard"]
DEFERRED = ShardPlugin(defer_gradient_sync=True)


@pytest.mark.parametrize("strategy", quick(STRATEGIES, ["full_shard", "no_shard"]))
@ranks(2)
def test_losses_norms_and_weights_are_those_of_ddp(strategy):
    assert_same(train(OURS, shard_plugin=ShardPlugin(strategy=strategy), epochs=2), train(STOCK, epochs=2))


# -- accumulation -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("defer", [False, *exhaustive(True)])
@pytest.mark.parametrize("strategy", quick(STRATEGIES, ["full_shard"]))
@ranks(2)
def test_accumulated_steps_are_those_of_ddp(strategy, defer):
    """Five batches a rank: the last accumulation ends early, with the dataloader."""
    options = {"gradient_accumulation_steps": 3, "size": 40, "epochs": 2}
    plugin = ShardPlugin(strategy=strategy, defer_gradient_sync=defer)
    assert_same(train(OURS, shard_plugin=plugin, **options), train(STOCK, **options))


@pytest.mark.parametrize("sync_each_batch", [False, *exhaustive(True)])
@ranks(2)
def test_accumulation_across_the_end_of_the_dataloader_is_that_of_ddp(sync_each_batch):
    plan = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False, sync_each_batch=sync_each_batch)
    options = {"gradient_accumulation_plugin": plan, "size": 40, "epochs": 2}
    wanted = train(STOCK, **options)
    for plugin in (ShardPlugin(), DEFERRED):
        assert_same(train(OURS, shard_plugin=plugin, **options), wanted)


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
            model = net()
            model, optimizer, data = acc.prepare(model, sgd(model.parameters()), loader(48))
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
def _all(a, b):
    return list(a.parameters())


def _some(a, b):
    return [p for n, p in a.named_parameters() if "bias" in n][::-1]


def _one(a, b):
    return a.head.weight


def _a_generator(a, b):
    return (p for p in a.parameters() if p.ndim == 2)


def _both(a, b):
    return [*a.parameters(), *b.parameters()]


def _parts_of_both(a, b):
    return [b.head.weight, a.embed.weight, b.embed.bias]


def _none(a, b):
    return []


@pytest.mark.parametrize("norm_type", [2, *exhaustive(1, float("inf"))])
@pytest.mark.parametrize("which", [_all, *exhaustive(_some, _a_generator), _both, _parts_of_both, _none])
@ranks(2)
def test_the_norm_of_any_parameters_of_any_models_is_that_of_ddp(which, norm_type):
    _compare_gradients(
        lambda acc, a, b: acc.clip_grad_norm_(which(a, b), 0.05, norm_type=norm_type), expect_norm=which is not _none
    )


@pytest.mark.parametrize("which", [_all, *exhaustive(_some, _one), _both])
@ranks(2)
def test_values_of_any_gradients_are_clipped_as_under_ddp(which):
    _compare_gradients(lambda acc, a, b: acc.clip_grad_value_(which(a, b), 0.01))


def _compare_gradients(clip, expect_norm=False):
    results = []
    for kind in BOTH:
        with accelerator(kind) as acc:
            a, b, data = acc.prepare(net(0), net(1), loader())
            batch = next(iter(data))
            acc.backward(loss_of(a, batch) + 2 * loss_of(b, batch))
            plain = [acc.unwrap_model(m) for m in (a, b)]
            norm = clip(acc, *plain)
            grads = []
            for model in plain:
                with engine_of(model).gathered(grads=True) if kind is OURS else contextlib.nullcontext():
                    grads += [p.grad.clone() for p in model.parameters()]
            results.append((norm, grads))
    (wanted, grads), (norm, ours) = results
    if expect_norm:
        assert wanted > 0.05
        torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=0)
    for found, grad in zip(ours, grads, strict=True):
        torch.testing.assert_close(found, grad, rtol=1e-5, atol=1e-8)


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
                before = [p.grad.norm() for p in model.parameters()] if plugin is None else []
                with pytest.raises(ShardError, match=f"{clip}.*sync_gradients"):
                    getattr(acc, clip)(model.parameters(), 1e-3)
                assert [p.grad.norm() for p in model.parameters()][: len(before)] == before


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


@ranks(2)
def test_unused_parameters_and_buffers_are_as_under_ddp():
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    assert_same(
        train(OURS, make=wide, kwargs_handlers=handlers), train(STOCK, make=wide, kwargs_handlers=handlers), rtol=2e-5
    )


@pytest.mark.parametrize("broadcast", [True, *exhaustive(False)])
@ranks(2)
def test_broadcast_buffers_is_taken_over(broadcast):
    means = []
    for kind in BOTH:
        handlers = [DistributedDataParallelKwargs(broadcast_buffers=broadcast, find_unused_parameters=True)]
        with accelerator(kind, kwargs_handlers=handlers) as acc:
            model, data = acc.prepare(wide(), loader())
            for batch in data:
                acc.backward(loss_of(model, batch))
            means.append(acc.unwrap_model(model).norm.running_mean)
    torch.testing.assert_close(means[1], means[0])


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard")])
@ranks(2)
def test_the_hook_that_compresses_gradients_gives_ddps_numbers(strategy):
    """fp16's; DDP refuses the one of bf16 on the CPU."""
    handlers = [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)]
    options = {"kwargs_handlers": handlers, "max_norm": 100.0}
    ours = train(OURS, shard_plugin=ShardPlugin(strategy=strategy), **options)
    assert_same(ours, train(STOCK, **options))
    exact = train(STOCK, max_norm=100.0)
    with pytest.raises(AssertionError):
        assert_same(ours, exact, rtol=5e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrapper", [DDPCommunicationHookType.BF16, DDPCommunicationHookType.POWER_SGD])
@ranks(2)
def test_a_wrapper_without_a_hook_compresses_nothing_as_under_ddp(wrapper):
    options = {"kwargs_handlers": [DistributedDataParallelKwargs(comm_wrapper=wrapper)], "max_norm": 100.0}
    assert_same(train(OURS, **options), train(STOCK, **options))


@ranks(2)
def test_hooks_made_for_buckets_are_refused_and_settings_without_a_meaning_named(rank):
    handlers = [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD)]
    with accelerator(kwargs_handlers=handlers) as acc:
        model = net()
        with pytest.raises(ConfigError, match="power_sgd"):
            acc.prepare(model)
        assert not acc._models
    with (
        accelerator(kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=5)]) as acc,
        captured_log() as messages,
    ):
        acc.prepare(net())
    assert any("bucket_cap_mb" in m for m in messages) == (rank == 0)
