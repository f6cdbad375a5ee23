"""Which settings of a launch keep parameters and optimizer state in host memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

from accelerate_shard.cli.show import effective
from accelerate_shard.settings.from_environment import launch_plugin
from accelerate_shard.settings.from_fsdp import from_fsdp_plugin
from tests.accelerate.support.accelerators import clean_state
from tests.accelerate.support.launching import FSDP1, FSDP2, write_yaml
from torch_shard import Offload
from torch_shard.config.offload_text import read_offload, text_of
from torch_shard.errors import ConfigError

TEXTS = {
    "none": None, "No": None, "CPU": Offload(), "true": Offload(), "params=false": Offload(params=False),
    "cpu, params=no , pin_memory=off": Offload(params=False, pin_memory=False), "nvme=/scratch/a": Offload(nvme="/scratch/a"),
    "cpu,nvme=d,nvme_params=true": Offload(nvme="d", nvme_params=True), "nvme=none": Offload(),
}  # fmt: skip
BAD = {
    "gpu": "no name=value", "param=false": "Offload has no field 'param'", "params=maybe": "params must be True or False",
    "nvme=": "no name=value", "optimizer=false": "works where the parameters are",
    "nvme_params=true": "needs a directory", "params=false,cpu": "'cpu' is no name=value",
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with clean_state():
        yield


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_says_what_is_offloaded_and_is_written_so_that_it_says_the_same(text: str) -> None:
    assert read_offload(text) == TEXTS[text] == read_offload(text_of(TEXTS[text]))


def test_every_field_can_be_said_and_is_written() -> None:
    for field in dataclasses.fields(Offload):
        value = not field.default if isinstance(field.default, bool) else "x"
        others = {"nvme": "d"} if field.name == "nvme_params" else {}
        try:
            wanted = Offload(**others, **{field.name: value})
        except ConfigError:
            continue  # optimizer=False says what there is not
        assert read_offload(text_of(wanted)) == wanted != Offload(**others)


@pytest.mark.parametrize("text", BAD)
def test_what_a_text_cannot_mean_is_refused_with_the_part_that_is_wrong(text: str) -> None:
    os.environ["SHARD_OFFLOAD"] = text
    with pytest.raises(ConfigError, match=f"^SHARD_OFFLOAD must be none, cpu, or .*{BAD[text]}"):
        launch_plugin()


@pytest.mark.parametrize("value", ["params=false", {"params": False}], ids=str)
def test_a_yaml_says_it_as_text_or_as_a_mapping(value: Any, tmp_path: Path) -> None:
    path = write_yaml(tmp_path, {**FSDP2, "fsdp_offload_params": True, "shard_offload": value})
    assert effective(str(path)).offload == Offload(params=False)
    os.environ.update(SHARD_CONFIG_FILE=str(path), SHARD_OFFLOAD="none")  # a variable wins over the file
    found = launch_plugin()
    assert found is not None and found.offload is None


def test_a_mapping_with_a_field_that_there_is_not_is_refused(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, {**FSDP2, "shard_offload": {"nvne": "/x"}})
    with pytest.raises(ConfigError, match=r"shard_offload must be .*no field 'nvne'"):
        effective(str(path))


def test_fsdps_key_offloads_and_loading_has_a_meaning_of_its_own(tmp_path: Path) -> None:
    for fsdp in (FSDP1, FSDP2):
        for asked, loading, wanted in ((True, False, Offload()), (False, True, None)):
            keys = {**fsdp, "fsdp_offload_params": asked, "fsdp_cpu_ram_efficient_loading": loading}
            assert effective(str(write_yaml(tmp_path, keys))).offload == wanted


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"cpu_offload": True}, Offload()),
        ({"cpu_offload": CPUOffload(offload_params=True)}, Offload()),
        ({"cpu_offload": True, "fsdp_version": 2}, Offload()),
        ({"cpu_offload": CPUOffloadPolicy(pin_memory=False), "fsdp_version": 2}, Offload(pin_memory=False)),
        ({"cpu_offload": OffloadPolicy(), "fsdp_version": 2}, None),
        ({"cpu_offload": False}, None),
    ],
    ids=str,
)
def test_a_plugins_setting_offloads(options: dict[str, Any], wanted: Offload | None) -> None:
    assert from_fsdp_plugin(FullyShardedDataParallelPlugin(**options)).offload == wanted
