"""Ranks with different numbers of batches to evaluate."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

import lightning_shard.trainer.uneven_batches
from tests.lightning.support import NAMESPACES, assert_same_state, loader, net_class, trainer
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import DivergenceError


@ranks(2)
def test_predictions_of_samples_that_do_not_divide_evenly_are_those_with_ddp(rank, world_size):
    found = []
    data = DataLoader(Subset(loader(1).dataset, range(5)), batch_size=1)
    for strategy in ("ddp", "shard"):
        module = net_class("lightning")()
        t = trainer("lightning", world_size, strategy, use_distributed_sampler=True)
        found.append(torch.cat(t.predict(module, data)))
        t.validate(module, loader(world_size), verbose=False)  # the next run is an even one
        found.append(t.callback_metrics["val"])
    assert len(found[0]) == 3 - rank
    for wanted, value in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(value, wanted)


@pytest.mark.parametrize("averages", [False, *exhaustive(True)])
@ranks(2)
def test_uneven_validation_within_a_fit_changes_nothing_and_logs_as_with_ddp(rank, world_size, tmp_path, averages):
    callbacks = NAMESPACES["lightning"].callbacks
    found = []
    for strategy in ("ddp", "shard"):
        module = net_class("lightning")()
        given = [callbacks.ModelCheckpoint(tmp_path / strategy, monitor="val")]
        given += [callbacks.EMAWeightAveraging(decay=0.8)] if averages else []
        options = {"max_epochs": 2, "callbacks": given, "enable_checkpointing": True, "num_sanity_val_steps": 2}
        t = trainer("lightning", world_size, strategy, **options)
        t.fit(module, loader(world_size), loader(world_size, 2 + rank))
        found.append((module.state_dict(), t.callback_metrics["val"]))
    (wanted, val), (state, other) = found
    assert_same_state(state, wanted)
    torch.testing.assert_close(other, val)


class Reduces(net_class("lightning")):
    """Has one loader or two, and talks to the other ranks behind the first batch of each."""

    def validation_step(self, batch, index, dataloader_idx=0):
        super().validation_step(batch, index)

    def on_validation_batch_end(self, outputs, batch, index, dataloader_idx=0):
        if index == 0:
            self.seen.append(self.trainer.strategy.reduce(batch[0].sum()).item())


@pytest.mark.parametrize("lengths", [[(1, 2)], *exhaustive([(2, 3), (3, 2)], [(1, 1), (2, 1)])])
@ranks(2)
def test_ranks_that_are_apart_may_reduce_and_have_as_many_batches_but_not_of_each_loader(rank, world_size, lengths):
    found = []
    for strategy in ("ddp", "shard"):
        module, t = Reduces(), trainer("lightning", world_size, strategy)
        t.fit(module, loader(world_size), [loader(world_size, both[rank]) for both in lengths])
        found.append([module.state_dict(), t.callback_metrics, module.seen])
    (wanted, metrics, seen), (state, others, also) = found
    assert_same_state(state, wanted)
    torch.testing.assert_close(others, metrics)
    torch.testing.assert_close(also, seen)


class Stream(IterableDataset):
    """Its length is not known before it has been read."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


@pytest.mark.parametrize("what", ["validate", *exhaustive("test", "predict", "fit", "memory")])
@ranks(2)
def test_uneven_streams_and_models_too_large_to_gather_are_an_error_on_all_ranks_at_once(
    rank, world_size, what, monkeypatch
):
    module, t = net_class("lightning")(), trainer("lightning", world_size, max_epochs=2)
    uneven = loader(world_size, 2 + rank)
    if what == "memory":
        monkeypatch.setattr(lightning_shard.trainer.uneven_batches, "fits_on_every_rank", lambda *_: False)
    else:
        uneven = DataLoader(Stream(list(uneven.dataset)), batch_size=uneven.batch_size)
    with pytest.raises(DivergenceError, match=r"different numbers of batches.*rank 0: computes with the last batch"):
        if what == "fit":
            t.fit(module, loader(world_size), uneven)
        else:
            getattr(t, "validate" if what == "memory" else what)(module, uneven)


@pytest.mark.exhaustive
@ranks(2)
def test_an_error_in_a_step_of_an_uneven_loop_leaves_a_module_that_trains(rank, world_size):
    class Fails(net_class("lightning")):
        failing = True

        def validation_step(self, batch, index):
            if self.failing:
                raise ZeroDivisionError("on purpose")
            super().validation_step(batch, index)

    module = Fails()
    with pytest.raises(ZeroDivisionError):
        trainer("lightning", world_size).validate(module, loader(world_size, 2 + rank), verbose=False)
    module.failing = False
    expected = net_class("lightning")()
    for each in (module, expected):
        trainer("lightning", world_size).fit(each, loader(world_size))
    assert_same_state(module.state_dict(), expected.state_dict())
