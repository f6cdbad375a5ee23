"""Which settings of a launch keep parameters and optimizer state in host memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

from accelerate_shard import ShardPlugin
from accelerate_shard.cli import main
from accelerate_shard.cli.show import effective
from accelerate_shard.settings.from_environment import launch_plugin
from accelerate_shard.settings.from_fsdp import from_fsdp_plugin
from accelerate_shard.settings.offload_text import read_offload, text_of
from tests.accelerate.launch.test_launch import RUNNER, check_same, result, script, stock
from tests.accelerate.support.accelerators import clean_state
from tests.accelerate.support.launching import FSDP1, FSDP2, SCRIPT, accelerate_launch, write_yaml
from torch_shard import Offload
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


# -- our own settings ---------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("value", ["params=false", {"params": False}, ["cpu", "params=false"]], ids=str)
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


# -- FSDP's -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fsdp", [FSDP1, FSDP2], ids=["1", "2"])
@pytest.mark.parametrize("loading", [True, False])
def test_fsdps_key_offloads_and_loading_has_a_meaning_of_its_own(
    fsdp: dict[str, Any], loading: bool, tmp_path: Path
) -> None:
    for asked, wanted in ((True, Offload()), (False, None)):
        keys = {**fsdp, "fsdp_offload_params": asked, "fsdp_cpu_ram_efficient_loading": loading}
        assert effective(str(write_yaml(tmp_path, keys))).offload == wanted


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"cpu_offload": True}, Offload()),
        ({"cpu_offload": CPUOffload(offload_params=True)}, Offload()),
        ({"cpu_offload": CPUOffload()}, None),
        ({"cpu_offload": True, "fsdp_version": 2}, Offload()),
        ({"cpu_offload": CPUOffloadPolicy(pin_memory=False), "fsdp_version": 2}, Offload(pin_memory=False)),
        ({"cpu_offload": OffloadPolicy(), "fsdp_version": 2}, None),
        ({"cpu_offload": False}, None),
        ({}, None),
    ],
    ids=str,
)
def test_a_plugins_setting_offloads(options: dict[str, Any], wanted: Offload | None) -> None:
    assert from_fsdp_plugin(FullyShardedDataParallelPlugin(**options)).offload == wanted


# -- accelerate-shard ---------------------------------------------------------------------------------------------------

ANSWERS = {
    "none": (None, False), "cpu": (Offload(), True), "params=false": (Offload(params=False), False),
    "nvme=/scratch,pin_memory=false": (Offload(nvme="/scratch", pin_memory=False), False),
}  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS)
def test_the_answer_comes_back_from_the_file_which_says_it_in_fsdps_words_where_they_do(answer: str) -> None:
    wanted, in_fsdps = ANSWERS[answer]
    assert main(["config", "--yes", "--cpu", "yes", "--offload", answer]) == 0
    assert effective("accelerate_shard.yaml") == ShardPlugin(offload=wanted, fp32_masters=True)
    section = yaml.safe_load(Path("accelerate_shard.yaml").read_text(encoding="utf-8"))["fsdp_config"]
    assert section["fsdp_offload_params"] is in_fsdps
    assert ("shard_offload" in section) is (wanted is not None and not in_fsdps)


def test_env_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["SHARD_OFFLOAD"] = "params=false,nvme=/scratch"
    assert main(["env"]) == 0
    wanted = Offload(params=False, nvme="/scratch")
    assert f"* offload                   {wanted!r}" in capsys.readouterr().out


# -- as a user runs it --------------------------------------------------------------------------------------------------


SHOWN = SCRIPT.replace(
    '"state_dict_type")}', '"state_dict_type")} | {"offload": repr(getattr(plugin, "offload", None))}'
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fsdp", "variables", "wanted"),
    [
        ({**FSDP2, "fsdp_offload_params": True}, {}, Offload()),
        ({**FSDP1, "fsdp_offload_params": True}, {}, Offload()),
        (FSDP2, {"SHARD_OFFLOAD": "params=false"}, Offload(params=False)),
        ({**FSDP2, "shard_offload": {"nvme": "disk"}}, {}, Offload(nvme="disk")),
    ],
    ids=["fsdp 2", "fsdp 1", "a variable", "a mapping"],
)  # fmt: skip
def test_an_unmodified_script_trains_with_the_numbers_of_ddp(
    fsdp: dict[str, Any], variables: dict[str, str], wanted: Offload, tmp_path: Path
) -> None:
    assert SHOWN != SCRIPT
    script(tmp_path, SHOWN)
    expected = stock(tmp_path)
    path = write_yaml(tmp_path, fsdp)
    found = result(accelerate_launch("--config_file", path, *RUNNER, "train.py", folder=tmp_path, **variables).stdout)
    check_same(found, expected)
    assert found["settings"]["offload"] == repr(wanted)
    assert not any((tmp_path / "disk").glob("*")), "files on disk are removed at the end"
