"""Models of the transformers library train one step exactly as without sharding, unconfigured."""

from __future__ import annotations

import copy

import pytest
import torch

import torch_shard
from tests.compat.modes import as_computed
from tests.support.hf_models import NAMES, build
from tests.support.marks import quick
from tests.support.ranks import ranks

pytest.importorskip("transformers")

# One decoder, one with an encoder, one without a causal mask, a mixture of experts, a state space model, one of images.
QUICK = ["t5", "mixtral", "mamba"]

# float32, and sums that run in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


def one_step(name, rank, world_size, **choices):
    model, _, loss_fn = build(name, seed=0)
    # A batch for each rank; the model is the same whatever the batch, so only the inputs of the other seeds are used.
    batches = [build(name, seed=s)[1] for s in range(world_size)]
    plain = as_computed(copy.deepcopy(model))
    engine = torch_shard.shard(model, **choices)

    expected = torch.stack([loss_fn(plain(**batch)) for batch in batches]).mean()
    expected.backward()
    wanted = {n: p.grad for n, p in plain.named_parameters()}

    loss = loss_fn(model(**batches[rank]))
    loss.backward()
    with engine.gathered(grads=True):
        found = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    assert found.keys() == wanted.keys()
    for n, grad in wanted.items():
        assert (grad is None) == (found[n] is None), f"{n}: {grad} and {found[n]}"
        if grad is not None:
            torch.testing.assert_close(found[n], grad, **TOLERANCE, msg=lambda text, n=n: f"gradient of {n}: {text}")

    for m in (plain, model):
        torch.optim.SGD(m.parameters(), lr=0.1).step()
    with engine.gathered():
        for (n, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.detach(), p.detach(), **TOLERANCE, msg=lambda text, n=n: f"{n}: {text}")
    # And it goes on: the second step has gathers that were recorded in the first.
    loss_fn(model(**batches[rank])).backward()
    return engine


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", quick(NAMES, QUICK))
@ranks(2)
def test_a_transformers_model_trains_like_the_plain_one(rank, world_size, name):
    one_step(name, rank, world_size)


@pytest.mark.parametrize("name", quick(NAMES, ["t5"]))
@ranks(2, exhaustive=(3,))
def test_a_transformers_model_in_many_small_units(rank, world_size, name):
    engine = one_step(name, rank, world_size, unit_bytes=4096)
    assert len(engine.units) > 3
