"""A launch for DeepSpeed is refused; ``accelerate-shard config --deepspeed`` translates its stages and offload."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelerate_shard import ShardPlugin
from accelerate_shard.cli import main
from accelerate_shard.cli.show import effective
from accelerate_shard.settings.from_deepspeed import fields_of, of_yaml
from tests.accelerate.support.accelerators import clean_state
from tests.accelerate.support.launching import write_yaml
from torch_shard import Offload
from torch_shard.errors import ConfigError

ZERO3: dict[str, Any] = {
    "zero_stage": 3, "offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/nvme", "offload_param_device": "cpu",
    "gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "zero3_init_flag": True, "zero3_save_16bit_model": False,
    "deepspeed_multinode_launcher": "standard",
}  # fmt: skip
"""As the questionnaire of ``accelerate config`` writes it."""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with clean_state():
        yield


def write(folder: Path, section: dict[str, Any], **top: Any) -> Path:
    return write_yaml(folder, {}, **{"distributed_type": "DEEPSPEED", "deepspeed_config": section, **top})


@pytest.mark.parametrize(
    ("said", "strategy", "offload"),
    [
        ({}, "shard_grad_op", None),
        ({"zero_stage": 0}, "no_shard", None),
        ({"zero_stage": "1", "offload_optimizer_device": "none"}, "shard_optim", None),
        ({"zero_stage": 2, "offload_optimizer_device": "cpu"}, "shard_grad_op", Offload(params=False)),
        ({"zero_stage": 3, "offload_param_device": "CPU", "offload_optimizer_device": "cpu"}, "full_shard", Offload()),
        (ZERO3, "full_shard", Offload(nvme="/nvme")),
        ({**ZERO3, "zero_stage": 2, "offload_param_device": "none"}, "shard_grad_op", Offload(params=False, nvme="/nvme")),
        (
            {"offload_param_device": "nvme", "offload_param_nvme_path": "/b"},
            "shard_grad_op", Offload(nvme="/b", nvme_params=True),
        ),
        (
            {**ZERO3, "offload_param_device": "nvme", "offload_param_nvme_path": "/b"},
            "full_shard", Offload(nvme="/nvme", nvme_params=True),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_stages_and_devices_have_settings_here(said: dict[str, Any], strategy: str, offload: Any) -> None:
    assert fields_of(said) == {"strategy": strategy, "offload": offload}


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"zero_stage": 4}, "zero_stage must be 0, 1, 2 or 3"),
        ({"offload_param_device": "gpu"}, "offload_param_device must be none, cpu or nvme"),
        ({"offload_param_device": "nvme"}, "offload_param_nvme_path names no directory"),
        ({"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "none"}, "offload_optimizer_nvme_path names no"),
    ],
    ids=str,
)  # fmt: skip
def test_values_that_mean_nothing_are_named(said: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        fields_of(said)
    assert main(["config", "--yes", "--deepspeed", str(write(tmp_path, said))]) == 2
    assert not Path("accelerate_shard.yaml").exists()


def test_deepspeeds_own_file_is_read() -> None:
    config = {
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "none"},
        },
        "gradient_clipping": 0.3, "gradient_accumulation_steps": "auto", "bf16": {"enabled": True},
    }  # fmt: skip
    Path("ds.json").write_text(json.dumps(config), encoding="utf-8")
    said = of_yaml({"deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}})
    assert fields_of(said) == {"strategy": "full_shard", "offload": Offload(params=False)}
    Path("old.json").write_text('{"zero_optimization": true}', encoding="utf-8")  # as before there were stages
    assert fields_of(of_yaml({"deepspeed_config": {"deepspeed_config_file": "old.json"}}))["strategy"] == "no_shard"
    with pytest.raises(ConfigError, match=r"deepspeed_config_file: none\.json can't be read"):
        of_yaml({"deepspeed_config": {"deepspeed_config_file": "none.json"}})


def test_the_refusal_of_a_launch_names_the_command_that_translates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ACCELERATE_USE_DEEPSPEED.*accelerate-shard config --deepspeed FILE"):
        effective(str(write(tmp_path, ZERO3)))


def test_config_writes_what_stands_for_it_unless_an_option_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "")
    path = write(tmp_path, ZERO3, use_cpu=True, num_processes=3, mixed_precision="bf16")
    command = ["config", "--deepspeed", str(path), "--config_file", "ours.yaml"]
    for options, strategy in ((["--yes"], "full_shard"), (["--force", "--strategy", "shard_optim"], "shard_optim")):
        assert main([*command, *options]) == 0
        wanted = ShardPlugin(strategy=strategy, offload=Offload(nvme="/nvme"), fp32_masters=True)  # type: ignore[arg-type]
        assert effective("ours.yaml") == wanted
        contents = yaml.safe_load(Path("ours.yaml").read_text(encoding="utf-8"))
        assert (contents["num_processes"], contents["mixed_precision"], contents["use_cpu"]) == (3, "bf16", True)
    assert any("[nvme=/nvme]" in text for text in asked) and any("[3]" in text for text in asked)


def test_only_a_file_for_deepspeed_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--yes", "--deepspeed", str(write_yaml(tmp_path, {}))]) == 2
    assert "distributed_type is FSDP" in capsys.readouterr().err
