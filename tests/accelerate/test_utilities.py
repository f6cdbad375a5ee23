"""What Accelerate does beside models is unchanged: metrics, batch sizes that fit, copies."""

from __future__ import annotations

import copy
import pickle

import torch
from accelerate.utils import (
    find_executable_batch_size,
)

from tests.accelerate.support.accelerators import (
    BOTH,
    FEATURES,
    OURS,
    accelerator,
    loader,
    loss_of,
    net,
    sgd,
)
from tests.support.ranks import ranks


def evaluate(acc, model, data):
    model.eval()
    outputs, targets = [], []
    with torch.no_grad():
        for x, y in data:
            logits, labels = acc.gather_for_metrics((model(x), y))
            outputs.append(logits)
            targets.append(labels)
    return torch.cat(outputs), torch.cat(targets)


@ranks(2)
def test_gather_for_metrics_gives_each_example_once():
    """Before training, and with a last batch that is not full."""
    results = []
    for kind in BOTH:
        with accelerator(kind) as acc:
            model, data = acc.prepare(net(), loader(21))
            results.append(evaluate(acc, model, data))
    assert len(results[1][1]) == 21
    torch.testing.assert_close(results[1], results[0])


@ranks(2)
def test_find_executable_batch_size_tries_again_with_fewer_examples():
    tried: list[int] = []
    with accelerator() as acc:

        @find_executable_batch_size(starting_batch_size=8)
        def fit(batch_size: int) -> float:
            tried.append(batch_size)
            acc.free_memory()
            model = net()
            model, optimizer, data = acc.prepare(model, sgd(model.parameters()), loader(16, batch_size))
            for batch in data:
                acc.backward(loss_of(model, batch))
                if batch_size > 2:
                    raise RuntimeError("CUDA out of memory. Tried to allocate more.")
                optimizer.step()
                optimizer.zero_grad()
            assert len(acc._models) == 1
            return batch_size

        assert fit() == tried[-1] <= 2 and len(tried) > 1


@ranks(2)
def test_the_accelerator_copies_as_itself_and_pickles_as_stock_does():
    for kind in BOTH:
        with accelerator(kind) as acc:
            assert copy.deepcopy(acc) is acc
            again = pickle.loads(pickle.dumps(acc))
            assert type(again) is kind and again.num_processes == 2
            if kind is OURS:
                assert again.shard_plugin == acc.shard_plugin


@ranks(2)
def test_a_deep_copy_of_a_prepared_model_trains_on_its_own():
    results = []
    for kind in BOTH:
        with accelerator(kind, mixed_precision="no") as acc:
            model, data = acc.prepare(net(), loader())
            ema = copy.deepcopy(acc.unwrap_model(model))
            optimizer = acc.prepare(sgd(model.parameters()))
            for batch in data:
                acc.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for average, p in zip(ema.parameters(), acc.unwrap_model(model).parameters(), strict=True):
                        average.lerp_(p, 0.1)
            x = torch.ones(2, FEATURES)
            averaged = acc.prepare_model(ema, evaluation_mode=True)  # in its own right
            assert averaged is ema and len(acc._models) == 2
            results.append((ema(x).detach(), model(x).detach()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


@ranks(2)
def test_unwrap_model_takes_the_mixed_precision_off_as_stock_does():
    for kind in BOTH:
        with accelerator(kind, mixed_precision="bf16") as acc:
            model = net()
            plain_forward = model.forward.__func__
            prepared = acc.prepare(model)
            assert acc.unwrap_model(prepared) is model
            assert model.forward.__func__ is not plain_forward
            assert acc.unwrap_model(prepared, keep_fp32_wrapper=False) is model
            assert model.forward.__func__ is plain_forward
            assert model(torch.ones(2, FEATURES)).dtype == torch.float32


# -- different numbers of batches ---------------------------------------------------------------------------------------
