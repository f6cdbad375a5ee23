"""Switching over from Lightning's other strategies: each argument of theirs is taken or answered, and in docs/lightning.md."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import lightning.fabric.strategies
import lightning.pytorch.strategies
import pytest
from lightning.pytorch.accelerators import CPUAccelerator
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import lightning_shard as package
from torch_shard import Offload, ShardConfig
from torch_shard.errors import ConfigError
from torch_shard.versions import at_least

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "lightning.md").read_text(encoding="utf-8")
STRATEGIES = {"ddp": "DDPStrategy", "fsdp": "FSDPStrategy", "deepspeed": "DeepSpeedStrategy"}
WRAPPERS = {"ddp": DistributedDataParallel, "fsdp": FullyShardedDataParallel}
# Arguments that the oldest torch that is supported has not.
NEWER = set() if at_least("2.13") else {"batched_grad_copy", "forward_sync_buffers"}


def arguments_of(made: Any) -> set[str]:
    found = inspect.signature(made.__init__).parameters.values()
    return {p.name for p in found if p.kind is not p.VAR_KEYWORD} - {"self", "module"}


def tables(name: str) -> list[set[str]]:
    """What stands in the first columns of the tables about one strategy."""
    section = re.split(r"^## ", TEXT.partition(f"## From {name}\n")[2], flags=re.M)[0]
    found = []
    for table in re.split(r"\n\n", section):
        rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")][2:]
        if rows:
            found.append({word for row in rows for word in re.findall(r"`([\w.]+)`", row)})
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_argument_is_in_the_documentation_and_none_that_there_is_not(name):
    wanted = [arguments_of(getattr(lightning.pytorch.strategies, STRATEGIES[name]))]
    if name in WRAPPERS:
        # What the strategy has an argument of its own for does not come through **kwargs.
        wanted.append(arguments_of(WRAPPERS[name]) - wanted[0])
    found = tables(name)
    for documented, there in zip(found, wanted, strict=False):
        assert documented - NEWER == there
    assert len(found) == 2, "arguments, and what goes through **kwargs or the configuration"


@pytest.mark.parametrize("made", [package.ShardStrategy, package.ShardFabricStrategy])
def test_a_setting_that_there_is_not_is_named(made):
    with pytest.raises(ConfigError, match=r"^prefech: .*Did you mean prefetch\?"):
        made(prefech=2)
    with pytest.raises(ConfigError, match=r"^find_unused_parameters: .*docs/lightning\.md"):
        made(find_unused_parameters=True)


@pytest.mark.parametrize("made", [package.ShardStrategy, package.ShardFabricStrategy])
def test_the_accelerator_that_ddp_takes_first_is_asked_for_by_its_name(made):
    with pytest.raises(ConfigError, match=rf"config must be a ShardConfig, .*{made.__name__}\(accelerator=\.\.\.\)"):
        made(CPUAccelerator())


@pytest.mark.parametrize("made", [package.ShardStrategy, package.ShardFabricStrategy])
def test_an_argument_changes_the_config(made):
    config = made(ShardConfig(offload="cpu", prefetch=2), offload=Offload(params=False)).config
    assert (config.offload, config.prefetch) == (Offload(params=False), 2)
