"""What Accelerate does beside models is unchanged: metrics, batch sizes that fit, copies, uneven batches."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import (
    DataLoaderConfiguration,
    find_executable_batch_size,
)
from torch import nn

from accelerate_shard import ShardPlugin
from tests.accelerate.helpers import (
    BOTH,
    FEATURES,
    OURS,
    accelerator,
    loader,
    loss_of,
    net,
    sgd,
)
from tests.ranks import ranks
from torch_shard.errors import MissingRankError

UNEVEN = {"dataloader_config": DataLoaderConfiguration(even_batches=False)}


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
@ranks(2)
def test_ranks_may_evaluate_different_numbers_of_batches_under_join_uneven_inputs(rank):
    results = []
    for kind in BOTH:
        with accelerator(kind, **UNEVEN) as acc:
            model, data = acc.prepare(net(), loader(20))
            model.eval()
            with acc.join_uneven_inputs([model]), torch.no_grad():
                found = [model(x) for x, _ in data]
            assert len(found) == (3 if rank == 0 else 2)
            results.append(torch.cat(found))
            if kind is OURS:
                assert type(model.head.weight) is not nn.Parameter
    torch.testing.assert_close(results[1], results[0])


class OnGPUs(OURS):
    """Where ``join_uneven_inputs`` overrides what dataloaders do."""

    multi_device = True


@ranks(2)
def test_join_uneven_inputs_sets_even_batches_inside_where_stock_does(rank):
    with accelerator(OnGPUs) as acc:
        model, data, other = acc.prepare(net(), loader(20), loader(16))
        model.eval()
        with acc.join_uneven_inputs([model], even_batches=False), torch.no_grad():
            assert len([model(x) for x, _ in data]) == (3 if rank == 0 else 2)
            assert type(model.head.weight) is nn.Parameter  # whole
        assert len(list(data)) == 3 and other.batch_sampler.even_batches is True
        model.train()
        with acc.join_uneven_inputs([model]):  # even ones: nothing to join
            for batch in data:
                acc.backward(loss_of(model, batch))
        with accelerator(OURS) as on_cpu:
            model, data = on_cpu.prepare(net(), loader(20))
            with on_cpu.join_uneven_inputs([model], even_batches=False):
                assert len([on_cpu.backward(loss_of(model, batch)) for batch in data]) == 3


@pytest.mark.exhaustive
@ranks(2, fresh=True)
def test_without_it_the_rank_that_goes_on_alone_gets_an_error_and_not_a_hang():
    with accelerator(shard_plugin=ShardPlugin(timeout=3.0), **UNEVEN) as acc:
        model, data = acc.prepare(net(), loader(20))
        model.eval()
        with torch.no_grad():
            if dist.get_rank() == 0:
                with pytest.raises(MissingRankError):
                    for x, _ in data:
                        model(x)
            else:
                for x, _ in data:
                    model(x)
