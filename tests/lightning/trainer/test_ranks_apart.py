"""Ranks may be apart as under DDP: late by minutes, alone in a callback, or with different numbers of batches to evaluate."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, Subset

import lightning_shard.trainer.uneven_batches
from tests.lightning.fabric import support as fabric_helpers
from tests.lightning.support import (
    NAMESPACES,
    Net,
    assert_same_state,
    either_namespace,
    fitted,
    loader,
    net_class,
    shard_strategy,
    trainer,
)
from tests.support.leaving import left_with
from tests.support.logs import captured_log
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from tests.support.run_python import run_python
from torch_shard import ShardConfig
from torch_shard.comm import watchdog
from torch_shard.comm.process_groups import group_timeout
from torch_shard.errors import DivergenceError, MissingRankError

GROUP = 120.0  # of the ranks of these tests


@contextlib.contextmanager
def soon_warned(seconds: float) -> Iterator[list[str]]:
    """The log, with warnings of slow ranks after so long in place of half a minute."""
    slow, watchdog.SLOW = watchdog.SLOW, seconds
    try:
        with captured_log() as seen:
            yield seen
    finally:
        watchdog.SLOW = slow


def slow_on_rank_0(namespace: str, seconds: float) -> object:
    class Slow(NAMESPACES[namespace].Callback):
        # Between batches Lightning waits by itself, in a broadcast of its own.
        def on_train_batch_start(self, trainer, *_):
            if trainer.is_global_zero and trainer.global_step == 1:
                time.sleep(seconds)

    return Slow()


@ranks(2)
def test_an_engine_waits_as_long_as_the_process_group_unless_its_own_timeout_is_chosen():
    assert group_timeout(torch.device("cpu")) == GROUP != ShardConfig.timeout
    for config, expected in ((None, GROUP), (ShardConfig(prefetch=2), GROUP), (ShardConfig(timeout=7), 7)):
        fabric = fabric_helpers.fabric(fabric_helpers.strategy(config=config))
        assert fabric.strategy.engine_of(fabric.setup(fabric_helpers.net())).config.timeout == expected
        t = fitted(Net(), shard_strategy(config=config, unshard_at_end=False), max_steps=1)
        assert t.strategy.engine.config.timeout == expected


@pytest.mark.exhaustive
@either_namespace
@ranks(2)
def test_a_callback_that_works_on_rank_0_alone_is_waited_for_with_a_warning(rank, namespace):
    with soon_warned(1.2) as seen:
        t = trainer(namespace, 2, shard_strategy(namespace), max_steps=3, callbacks=[slow_on_rank_0(namespace, 2.5)])
        t.fit(net_class(namespace)(), loader(2))
    assert t.global_step == 3
    if rank == 1:
        (line,) = [line for line in seen if "waited 1.2 s in" in line]
        assert (
            f"goes on waiting for up to {GROUP:g} s" in line
            and "rank 0 is not waiting in an operation of the engine" in line
        )


@pytest.mark.exhaustive
@ranks(2, fresh=True)
def test_a_chosen_timeout_ends_the_run_sooner():
    t = trainer(
        "lightning", 2, shard_strategy(config=ShardConfig(timeout=2.0)), callbacks=[slow_on_rank_0("lightning", 5.0)]
    )
    with pytest.raises(MissingRankError):
        t.fit(Net(), loader(2))


SCRIPT = """
from datetime import timedelta
import torch
from lightning.fabric import Fabric
from lightning_shard import ShardFabricStrategy

fabric = Fabric(accelerator="cpu", devices=1, strategy=ShardFabricStrategy(timeout=timedelta(seconds=77)))
fabric.launch()
model = fabric.setup(torch.nn.Linear(2, 2))
print("WAITS", fabric.strategy.engine_of(model).config.timeout)
"""


@pytest.mark.exhaustive
def test_the_strategys_timeout_is_the_process_groups_and_so_the_engines(tmp_path):
    (tmp_path / "run.py").write_text(SCRIPT)
    assert "WAITS 77.0" in run_python(tmp_path / "run.py", folder=tmp_path).stdout


# -- one rank computes by itself while the others wait in a collective of the Trainer's ----------------------------------


class Samples(Net):
    def on_validation_epoch_end(self):
        if self.trainer.is_global_zero:
            self.seen.append(self(torch.ones(1, 6)))


@ranks(2)
def test_rank_0_samples_alone_as_with_ddp(rank, world_size):
    found = []
    for strategy in ("ddp", "shard"):
        module, t = Samples(), trainer("lightning", world_size, strategy, max_epochs=2)
        t.fit(module, loader(world_size), loader(world_size))
        found.append(module.seen)
    assert len(found[0]) >= 2 or rank > 0
    torch.testing.assert_close(found[1], found[0])


WAITS = {
    "barrier": lambda module: module.trainer.strategy.barrier("for all"),
    "broadcast": lambda module: module.trainer.strategy.broadcast(["an object"]),
    "reduce": lambda module: module.trainer.strategy.reduce(torch.ones(2)),
    "a decision": lambda module: module.trainer.strategy.reduce_boolean_decision(True),
    "all_gather": lambda module: module.all_gather(torch.ones(2)),
    "the next step": lambda module: None,
}


class Looks(Net):
    """Rank 0 looks at a weight after each batch of training."""

    def __init__(self, wait):
        super().__init__()
        self.wait, self.slowest, self.reads = wait, 0.0, 0

    def on_train_batch_end(self, *_):
        begin = time.monotonic()
        if self.trainer.is_global_zero:
            self.head.weight.detach().norm()
            self.slowest = max(self.slowest, time.monotonic() - begin)
        self.wait(self)
        self.reads = self.trainer.strategy.engine.statistics().lone_reads


@pytest.mark.parametrize("wait", quick(WAITS, ["barrier"]))
@ranks(2)
def test_rank_0_looks_at_a_weight_at_once_while_the_others_wait_in_something_of_lightnings(rank, wait):
    module = Looks(WAITS[wait])
    fitted(module, shard_strategy(config=ShardConfig(alone_after=30.0)), max_steps=3)
    assert module.slowest < 5 and module.reads == (3 if rank == 0 else 0)


class Skips(Net):
    def validation_step(self, batch, index):
        if index < 1 or self.trainer.is_global_zero:
            super().validation_step(batch, index)


def skips(rank, world_size):
    t = trainer("lightning", world_size, shard_strategy(timeout=timedelta(seconds=30)))
    t.validate(Skips(), loader(world_size, 2), verbose=False)


@pytest.mark.parametrize("first", [0, *exhaustive(1)])
def test_a_forward_that_one_rank_skips_within_a_step_is_one_error_on_all_ranks_though_the_first_leaves(first, tmp_path):
    errors = left_with(skips, first=first, folder=tmp_path)
    assert [error.split(":")[0] for error in errors] == ["DivergenceError"] * 2, errors


class Trains(Net):
    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            self(torch.ones(1, 6))
        self.trainer.strategy.barrier()


@pytest.mark.exhaustive
@ranks(2, fresh=True, timeout=60)
def test_a_forward_with_gradients_is_an_error_on_all_ranks_at_once():
    started = time.monotonic()
    with pytest.raises(DivergenceError, match=r"rank [01]"):
        fitted(Trains(), val_batches=2)
    assert time.monotonic() - started < 20


# -- different numbers of batches to evaluate ------------------------------------------------------------------------------


@ranks(2)
def test_predictions_of_samples_that_do_not_divide_evenly_are_those_with_ddp(rank, world_size):
    found = []
    data = DataLoader(Subset(loader(1).dataset, range(5)), batch_size=1)
    for strategy in ("ddp", "shard"):
        module = Net()
        t = trainer("lightning", world_size, strategy, use_distributed_sampler=True)
        found.append(torch.cat(t.predict(module, data)))
        t.validate(module, loader(world_size), verbose=False)  # the next run is an even one
        found.append(t.callback_metrics["val"])
    assert len(found[0]) == 3 - rank
    for wanted, value in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(value, wanted)


class Reduces(Net):
    """Has one loader or two, and talks to the other ranks behind the first batch of each."""

    def validation_step(self, batch, index, dataloader_idx=0):
        super().validation_step(batch, index)

    def on_validation_batch_end(self, outputs, batch, index, dataloader_idx=0):
        if index == 0:
            self.seen.append(self.trainer.strategy.reduce(batch[0].sum()).item())


@pytest.mark.parametrize(
    ("lengths", "averages"),
    [([(2, 3)], False), *exhaustive(([(2, 3)], True), ([(2, 3), (3, 2)], False), ([(1, 1), (2, 1)], False))],
)
@ranks(2)
def test_uneven_validation_within_a_fit_changes_nothing_and_logs_as_with_ddp(
    rank, world_size, tmp_path, lengths, averages
):
    """Ranks may reduce meanwhile, and have as many batches but not of each loader."""
    found = []
    for strategy in ("ddp", "shard"):
        callbacks = [ModelCheckpoint(tmp_path / strategy), *([EMAWeightAveraging(decay=0.8)] if averages else [])]
        options = {"max_epochs": 2, "callbacks": callbacks, "enable_checkpointing": True, "num_sanity_val_steps": 2}
        module, t = Reduces(), trainer("lightning", world_size, strategy, **options)
        t.fit(module, loader(world_size), [loader(world_size, both[rank]) for both in lengths])
        found.append([dict(module.state_dict()), t.callback_metrics, module.seen])
    torch.testing.assert_close(found[1], found[0])


class Stream(IterableDataset):
    """Its length is not known before it has been read."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


@pytest.mark.parametrize("what", ["validate", *exhaustive("test", "predict", "fit", "memory")])
@ranks(2)
def test_uneven_streams_and_models_too_large_to_gather_give_what_ddp_gives(rank, world_size, what, monkeypatch):
    found = []
    if what == "memory":
        monkeypatch.setattr(lightning_shard.trainer.uneven_batches, "fits_on_every_rank", lambda *_: False)
    for strategy in ("ddp", "shard"):
        module, t = Net(), trainer("lightning", world_size, strategy, max_epochs=2)
        uneven = loader(world_size, 2 + rank)
        if what != "memory":
            uneven = DataLoader(Stream(list(uneven.dataset)), batch_size=uneven.batch_size)
        if what == "fit":
            t.fit(module, loader(world_size), uneven)
        else:
            found.append(getattr(t, "validate" if what == "memory" else what)(module, uneven))
        found.append([dict(module.state_dict()), t.callback_metrics, module.seen])
    half = len(found) // 2
    torch.testing.assert_close(found[half:], found[:half])


@pytest.mark.exhaustive
@ranks(2)
def test_an_error_in_a_step_of_an_uneven_loop_leaves_a_module_that_trains(rank, world_size):
    class Fails(Net):
        failing = True

        def validation_step(self, batch, index):
            if self.failing:
                raise ZeroDivisionError("on purpose")
            super().validation_step(batch, index)

    module = Fails()
    with pytest.raises(ZeroDivisionError):
        trainer("lightning", world_size).validate(module, loader(world_size, 2 + rank), verbose=False)
    module.failing = False
    expected = Net()
    for each in (module, expected):
        fitted(each)
    assert_same_state(module.state_dict(), expected.state_dict())
