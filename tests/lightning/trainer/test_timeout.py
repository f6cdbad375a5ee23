"""Ranks may be as far apart as under DDP: a rank is waited for as long as the process group waits, unless the user chose less."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
import torch

from lightning_shard import ShardStrategy
from tests.lightning.fabric import support as fabric_helpers
from tests.lightning.support import NAMESPACES, either_namespace, lightning_shard, loader, net_class, trainer
from tests.support.logs import captured_log
from tests.support.ranks import ranks
from tests.support.run_python import run_python
from torch_shard import ShardConfig
from torch_shard.comm import watchdog
from torch_shard.comm.process_groups import group_timeout
from torch_shard.errors import MissingRankError

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


def strategy(namespace: str, config: ShardConfig | None = None) -> ShardStrategy:
    return lightning_shard.registration.registry.strategy_class(namespace)(config)


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
        t = trainer("lightning", 2, strategy("lightning", config), max_steps=1)
        seen = []
        t.callbacks.append(_at_start(lambda own, seen=seen: seen.append(own.strategy.engine.config.timeout)))
        t.fit(net_class("lightning")(), loader(2))
        assert seen == [expected]


def _at_start(function):
    return NAMESPACES["lightning"].callbacks.LambdaCallback(on_train_start=lambda own, _: function(own))


@pytest.mark.exhaustive
@either_namespace
@ranks(2)
def test_a_callback_that_works_on_rank_0_alone_is_waited_for_with_a_warning(rank, namespace):
    with soon_warned(1.2) as seen:
        t = trainer(namespace, 2, strategy(namespace), max_steps=3, callbacks=[slow_on_rank_0(namespace, 2.5)])
        t.fit(net_class(namespace)(), loader(2))
    assert t.global_step == 3
    if rank == 1:
        (line,) = [line for line in seen if "waited 1.2 s in" in line]
        assert f"goes on waiting for up to {GROUP:g} s" in line and "rank 0 waits in no operation of the engine" in line


@pytest.mark.exhaustive
@ranks(2, fresh=True)
def test_a_chosen_timeout_ends_the_run_sooner(rank):
    t = trainer(
        "lightning", 2, strategy("lightning", ShardConfig(timeout=2.0)), callbacks=[slow_on_rank_0("lightning", 5.0)]
    )
    with pytest.raises(MissingRankError):
        t.fit(net_class("lightning")(), loader(2))


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
