"""Settings of the strategies that are no ShardConfig."""

from __future__ import annotations

import pytest
from lightning.pytorch.accelerators import CPUAccelerator

from lightning_shard.fabric.for_lightning import ShardFabricStrategy
from lightning_shard.for_lightning import ShardStrategy
from torch_shard.errors import ConfigError


@pytest.mark.parametrize("strategy", [ShardStrategy, ShardFabricStrategy])
def test_the_accelerator_that_ddp_takes_first_is_asked_for_by_its_name(strategy):
    with pytest.raises(
        ConfigError, match=rf"config must be a ShardConfig, .*{strategy.__name__}\(accelerator=\.\.\.\)"
    ):
        strategy(CPUAccelerator())
