"""DeepSpeed's ZeRO section means the same to all front ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch.strategies
import pytest

from accelerate_shard.settings.from_deepspeed import fields_of, of_yaml
from lightning_shard.run.from_deepspeed import from_deepspeed
from lightning_shard.run.translation import defaults_of
from tests.support.logs import captured_log
from torch_shard import Offload
from torch_shard.errors import ConfigError

Found = tuple[str, Any, list[str]]
BOTH_ON_DISK = {
    "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
    "offload_param": {"device": "nvme", "nvme_path": "/b"},
}


def by_lightning(zero: dict[str, Any], folder: Path) -> Found:
    defaults = defaults_of(lightning.pytorch.strategies.DeepSpeedStrategy)
    found = from_deepspeed({"config": {"zero_optimization": zero}}, defaults)
    return found.config["strategy"], found.config.get("offload"), found.unused


def by_accelerate(zero: dict[str, Any], folder: Path) -> Found:
    path = folder / "ds.json"
    path.write_text(json.dumps({"zero_optimization": zero}), encoding="utf-8")
    with captured_log() as messages:
        found = fields_of(of_yaml({"deepspeed_config": {"deepspeed_config_file": str(path)}}))
    return found["strategy"], found["offload"], messages


front_ends = pytest.mark.parametrize("translated", [by_lightning, by_accelerate])


@front_ends
@pytest.mark.parametrize(
    ("zero", "strategy", "offload"),
    [
        ({}, "no_shard", None),
        ({"stage": "auto", "offload_param": {"device": "auto"}}, "no_shard", None),
        ({"stage": 1, "offload_optimizer": {"device": "none", "pin_memory": False}}, "shard_optim", None),
        ({"stage": 2, "offload_optimizer": {"pin_memory": True}}, "shard_grad_op", Offload(params=False)),
        (
            {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}},
            "full_shard",
            Offload(pin_memory=False),
        ),
        (
            {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}},
            "full_shard",
            Offload(params=False, nvme="/a"),
        ),
        (
            {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": BOTH_ON_DISK["offload_param"]},
            "full_shard",
            Offload(nvme="/b", nvme_params=True),
        ),
    ],
    ids=str,
)
def test_stages_and_offload_mean_the_same(
    zero: dict[str, Any], strategy: str, offload: Any, translated: Callable[..., Found], tmp_path: Path
) -> None:
    assert translated(zero, tmp_path) == (strategy, offload, [])


@front_ends
def test_of_two_directories_that_of_optimizer_state_counts(translated: Callable[..., Found], tmp_path: Path) -> None:
    strategy, offload, unused = translated({"stage": 3, **BOTH_ON_DISK}, tmp_path)
    assert (strategy, offload) == ("full_shard", Offload(nvme="/a", nvme_params=True))
    (text,) = unused
    assert "zero_optimization.offload_param.nvme_path='/b'" in text


@front_ends
@pytest.mark.parametrize(
    ("zero", "named"),
    [
        ({"stage": 4}, r"zero_optimization\.stage must be 0, 1, 2 or 3, not '4'"),
        (
            {"stage": 3, "offload_param": {"device": "gpu"}},
            r"offload_param\.device must be none, cpu or nvme, not 'gpu'",
        ),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, r"offload_optimizer\.nvme_path names no directory"),
    ],
    ids=str,
)
def test_values_that_mean_nothing_are_named(
    zero: dict[str, Any], named: str, translated: Callable[..., Found], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        translated(zero, tmp_path)
