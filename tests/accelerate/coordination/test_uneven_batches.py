"""Ranks with different numbers of batches: they may evaluate so, and training is refused on all of them."""

from __future__ import annotations

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from torch import nn

from tests.accelerate.support.accelerators import BOTH, OURS, accelerator
from tests.accelerate.support.models import loader, loss_of, net, sgd
from tests.accelerate.support.training import assert_same, steps
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError

UNEVEN = {"dataloader_config": DataLoaderConfiguration(even_batches=False)}


@ranks(2)
def test_training_with_different_numbers_of_batches_is_refused_on_all_ranks_before_it_begins():
    with accelerator(**UNEVEN) as acc:
        model, data, even = acc.prepare(net(), loader(20), loader(24))  # 3 batches and 2; 3 and 3
        hooks = len(model._forward_pre_hooks)
        for used in (data, acc.skip_first_batches(data, 1)):
            with acc.join_uneven_inputs([model]):
                for batch in even:  # nobody goes on alone here
                    acc.backward(loss_of(model, batch))
            with pytest.raises(ConfigError, match=r"join_uneven_inputs.*even_batches"), acc.join_uneven_inputs([model]):
                for batch in used:
                    loss_of(model, batch)
                    raise AssertionError
        assert len(model._forward_pre_hooks) == hooks


@ranks(2)
def test_training_over_an_even_loader_is_not_disturbed_by_an_uneven_one():
    results = []
    for kind in BOTH:
        with accelerator(kind, **UNEVEN) as acc:
            model = net()
            model, optimizer, data, _ = acc.prepare(model, sgd(model.parameters()), loader(24), loader(20))
            with acc.join_uneven_inputs([model]):
                results.append(steps(acc, model, optimizer, data))
    assert_same(results[1], results[0])


@pytest.mark.exhaustive
@ranks(2)
def test_training_where_a_rank_has_no_batch_at_all_is_an_error_on_every_rank(rank):
    with accelerator(OURS, **UNEVEN) as acc:
        model, data, even = acc.prepare(net(), loader(4), loader(16))
        assert len(data) == (1 if rank == 0 else 0)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"join_uneven_inputs.*even_batches"), acc.join_uneven_inputs([model]):
                for batch in data:
                    acc.backward(loss_of(model, batch))
        with acc.join_uneven_inputs([model]):  # what is not iterated over does not count
            for batch in even:
                acc.backward(loss_of(model, batch))
        if rank == 0:
            with pytest.raises(OSError, match="mine"), acc.join_uneven_inputs([model]):
                raise OSError("mine")
        else:
            with acc.join_uneven_inputs([model]):
                pass


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
