"""Between the micro-batches of an accumulation: gradients are means over the ranks, where DDP's ranks have their own."""

from __future__ import annotations

import pytest
import torch

from accelerate_shard import ShardPlugin
from tests.accelerate.support.accelerators import (
    BOTH,
    OURS,
    Result,
    accelerator,
    assert_same,
    full_parameters,
    loader,
    loss_of,
    net,
    sgd,
)
from tests.support.marks import quick
from tests.support.ranks import ranks
from torch_shard.errors import ShardError

PLUGINS = {
    "full_shard": ShardPlugin(),
    "no_shard": ShardPlugin(strategy="no_shard"),
    "deferred": ShardPlugin(defer_gradient_sync=True),
}


def clip_by_accelerator(acc, model, optimizer):
    acc.clip_grad_norm_(model.parameters(), 0.05)


def clip_values_by_accelerator(acc, model, optimizer):
    acc.clip_grad_value_(model.parameters(), 1e-3)


def clip_by_torch(acc, model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clip_values_by_torch(acc, model, optimizer):
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def edit(acc, model, optimizer):
    for p in model.parameters():
        p.grad.sign_()


def replace(acc, model, optimizer):
    for p in model.parameters():
        p.grad = p.grad.sign()


def step(acc, model, optimizer):
    optimizer.step()
    optimizer.zero_grad()


MISTAKES = [
    clip_by_accelerator,
    clip_values_by_accelerator,
    clip_by_torch,
    clip_values_by_torch,
    edit,
    replace,
    step,
]


@pytest.mark.parametrize("plugin", quick(PLUGINS, ["full_shard"]))
@pytest.mark.parametrize("mistake", quick(MISTAKES, [clip_by_accelerator, step]))
@ranks(2)
def test_after_a_backward_under_no_sync_what_ddp_would_do_with_each_ranks_own_gradients_is_an_error(mistake, plugin):
    """At once, or where it can't be seen before the next backward, there."""
    with accelerator(OURS, shard_plugin=PLUGINS[plugin]) as acc:
        model = net()
        model, optimizer, data = acc.prepare(model, sgd(model.parameters()), loader())
        before = full_parameters(acc.unwrap_model(model))
        batch = next(iter(data))
        with pytest.raises(ShardError, match="no_sync"):
            with acc.no_sync(model):
                acc.backward(loss_of(model, batch))
            mistake(acc, model, optimizer)
            acc.backward(loss_of(model, batch))
        after = full_parameters(acc.unwrap_model(model))
        assert all(torch.equal(after[name], value) for name, value in before.items())
        # And it trains on, once they are cleared.
        optimizer.zero_grad()
        acc.backward(loss_of(model, batch))
        acc.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@pytest.mark.exhaustive
@pytest.mark.parametrize("plugin", list(PLUGINS))
@ranks(2)
def test_under_accumulate_torchs_own_clipping_in_each_micro_batch_is_an_error(plugin):
    with accelerator(OURS, shard_plugin=PLUGINS[plugin], gradient_accumulation_steps=2) as acc:
        model = net()
        model, optimizer, data = acc.prepare(model, sgd(model.parameters()), loader())
        with pytest.raises(ShardError, match=r"edited.*no_sync"):
            for batch in data:
                with acc.accumulate(model):
                    acc.backward(loss_of(model, batch))
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                    optimizer.step()
                    optimizer.zero_grad()


def cleared(acc, model, optimizer, batches, way):
    """What was accumulated is dropped, in several ways, and the next accumulation is a whole one."""
    with acc.no_sync(model):
        acc.backward(loss_of(model, batches[0]))
    if way == "none":
        optimizer.zero_grad()
    elif way == "zeros":
        optimizer.zero_grad(set_to_none=False)
    else:
        model.zero_grad(set_to_none=False)
    if way == "zeros":
        with acc.no_sync(model):
            acc.backward(loss_of(model, batches[1]))


def regularised(acc, model, optimizer, batches, way):
    """A loss with terms in the parameters themselves, and a backward of those terms alone."""
    with acc.no_sync(model):
        acc.backward(loss_of(model, batches[0]) + sum(p.square().sum() for p in model.parameters()))
        acc.backward(sum(p.abs().sum() for p in model.parameters()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("plugin", list(PLUGINS))
@pytest.mark.parametrize(
    ("begin", "way"), [(cleared, "none"), (cleared, "zeros"), (cleared, "module"), (regularised, "")]
)
@ranks(2)
def test_gradients_that_were_cleared_or_added_to_by_a_loss_on_parameters_are_no_mistake(begin, way, plugin):
    if begin is regularised and plugin == "deferred":
        pytest.skip("what a loss on parameters adds is edited after the reduction there")
    results = []
    for kind in BOTH:
        with accelerator(kind, shard_plugin=PLUGINS[plugin]) as acc:
            model = net()
            model, optimizer, data = acc.prepare(model, sgd(model.parameters()), loader(48))
            batches, found = list(data), Result()
            for start in (0, 3):
                begin(acc, model, optimizer, batches[start:], way)
                loss = loss_of(model, batches[start + 2])
                acc.backward(loss)
                found.norms.append(float(acc.clip_grad_norm_(model.parameters(), 0.05)))
                found.losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            found.parameters = full_parameters(acc.unwrap_model(model))
            results.append(found)
    assert_same(results[1], results[0])
