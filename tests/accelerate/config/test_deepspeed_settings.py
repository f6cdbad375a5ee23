"""DeepSpeed's settings are refused, and the error says what stands for each; ``accelerate-shard config`` writes it."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from accelerate.commands.config import cluster

from accelerate_shard import ShardPlugin
from accelerate_shard.cli import main
from accelerate_shard.cli.show import effective
from accelerate_shard.settings.from_deepspeed import (
    KEYS,
    advice,
    answers_of,
    by_hand,
    of_environment,
    of_json,
    of_yaml,
)
from accelerate_shard.settings.resolve import refuse_other_engines
from tests.accelerate.config.launching import SCRIPT, accelerate_launch, write_yaml
from tests.accelerate.config.test_launch import RUNNER, script
from tests.accelerate.helpers import OURS, clean_state
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
    ("said", "wanted"),
    [
        ({}, ("shard_grad_op", None)),
        ({"zero_stage": 0}, ("no_shard", None)),
        ({"zero_stage": "1", "offload_optimizer_device": "none"}, ("shard_optim", None)),
        ({"zero_stage": 2, "offload_optimizer_device": "cpu"}, ("shard_grad_op", Offload(params=False))),
        ({"zero_stage": 3, "offload_param_device": "cpu"}, ("full_shard", Offload())),
        (
            {"zero_stage": 3, "offload_param_device": "CPU", "offload_optimizer_device": "cpu"},
            ("full_shard", Offload()),
        ),
        (ZERO3, ("full_shard", Offload(nvme="/nvme"))),
        (
            {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/a"},
            ("shard_grad_op", Offload(params=False, nvme="/a")),
        ),
        (
            {"offload_param_device": "nvme", "offload_param_nvme_path": "/b"},
            ("shard_grad_op", Offload(nvme="/b", nvme_params=True)),
        ),
        (
            {**ZERO3, "offload_param_device": "nvme", "offload_param_nvme_path": "/b"},
            ("full_shard", Offload(nvme="/nvme", nvme_params=True)),
        ),
    ],
    ids=str,
)
def test_stages_and_devices_have_settings_here(said: dict[str, Any], wanted: Any) -> None:
    assert answers_of(said) == dict(zip(("strategy", "offload"), wanted, strict=True))


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
        answers_of(said)
    assert named.split(" must")[0] in advice(said)
    assert main(["config", "--yes", "--deepspeed", str(write(tmp_path, said))]) == 2
    assert not Path("accelerate_shard.yaml").exists()


def test_the_refusal_of_a_file_says_it_key_by_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        effective(str(write(tmp_path, ZERO3)))
    text = str(caught.value)
    for wanted in (
        "accelerate-shard config --deepspeed FILE", "SHARD_STRATEGY=full_shard (zero_stage=3)",
        "SHARD_OFFLOAD=nvme=/nvme (offload_optimizer_device=nvme, offload_optimizer_nvme_path=/nvme, offload_param_device=cpu)",
        "gradient_accumulation_steps (4): Accelerator(", "gradient_clipping (1.0): accelerator.clip_grad_norm_",
        "zero3_init_flag (True): nothing", "deepspeed_multinode_launcher (standard): ",
    ):  # fmt: skip
        assert wanted in text
    assert "zero3_save_16bit_model" not in text  # False asks for nothing


def test_what_a_launcher_exports_is_enough_for_stages_and_devices() -> None:
    os.environ.update(
        ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_ZERO_STAGE="3",
        ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE="cpu", ACCELERATE_GRADIENT_CLIPPING="0.5",
    )  # fmt: skip
    wanted = {"zero_stage": "3", "offload_param_device": "cpu", "gradient_clipping": "0.5"}
    assert of_environment(os.environ) == wanted
    with pytest.raises(
        ConfigError, match=r"SHARD_OFFLOAD=cpu \(offload_param_device=cpu\); gradient_clipping \(0\.5\)"
    ):
        OURS(cpu=True)


def test_deepspeeds_own_file_is_read() -> None:
    config = {
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "none"},
        },
        "gradient_clipping": 0.3, "gradient_accumulation_steps": "auto", "bf16": {"enabled": True},
    }  # fmt: skip
    Path("ds.json").write_text(json.dumps(config), encoding="utf-8")
    said = {
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "none",
        "gradient_clipping": 0.3,
    }
    assert of_json(config) == of_json("ds.json") == said
    assert of_json("none.json") == of_json(None) == of_json({"zero_optimization": 3}) == {}
    named = {"deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}}
    assert of_yaml(named) == said | named["deepspeed_config"]
    assert answers_of(of_yaml(named)) == {"strategy": "full_shard", "offload": Offload(params=False)}


def test_a_plugin_that_is_given_is_refused_with_what_it_says() -> None:
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    for arguments in (
        {"deepspeed_plugin": SimpleNamespace(deepspeed_config=config)},
        {"deepspeed_plugins": {"a": SimpleNamespace(deepspeed_config=config)}},
    ):
        with pytest.raises(ConfigError, match=r"SHARD_STRATEGY=full_shard .*SHARD_OFFLOAD=cpu"):
            refuse_other_engines(arguments)


def test_every_key_that_accelerate_knows_has_a_row() -> None:
    # The questionnaire is the list of keys: deepspeed_config["..."] = ...

    asked = set(re.findall(r'deepspeed_config\[\s*"(\w+)"\s*\]', inspect.getsource(cluster)))
    assert asked and asked <= {key.yaml for key in KEYS}
    assert len({key.yaml for key in KEYS}) == len(KEYS)


def test_config_writes_what_stands_for_it_and_says_what_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, ZERO3, use_cpu=True, num_processes=3, mixed_precision="bf16", num_machines=2)
    assert (
        main(["config", "--yes", "--deepspeed", str(path), "--config_file", "ours.yaml", "--fp32_masters", "no"]) == 0
    )
    assert effective("ours.yaml") == ShardPlugin(strategy="full_shard", offload=Offload(nvme="/nvme"))
    contents = yaml.safe_load(Path("ours.yaml").read_text(encoding="utf-8"))
    assert (contents["num_processes"], contents["mixed_precision"], contents["use_cpu"]) == (3, "bf16", True)
    printed = capsys.readouterr().out
    for hint in [*by_hand(ZERO3), "num_machines (2)"]:
        assert f"No setting stands for {hint}" in printed


def test_an_option_wins_over_the_file_and_the_file_over_the_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "")
    path = write(tmp_path, ZERO3, use_cpu=True, num_processes=1)
    assert main(["config", "--deepspeed", str(path), "--strategy", "shard_optim", "--config_file", "ours.yaml"]) == 0
    assert effective("ours.yaml") == ShardPlugin(
        strategy="shard_optim", offload=Offload(nvme="/nvme"), fp32_masters=True
    )
    assert any("[nvme=/nvme]" in text for text in asked) and any("[1]" in text for text in asked)


def test_only_a_file_for_deepspeed_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--yes", "--deepspeed", str(write_yaml(tmp_path, {}))]) == 2
    assert "distributed_type is FSDP" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_the_runner_says_it_before_the_script_runs(tmp_path: Path) -> None:
    script(tmp_path, SCRIPT)
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}
    done = accelerate_launch(*RUNNER, "train.py", folder=tmp_path, expected=None, **variables)
    assert "SHARD_OFFLOAD=cpu (offload_param_device=cpu)" in done.stderr and "RESULT" not in done.stdout
