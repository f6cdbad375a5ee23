"""``accelerate-shard config`` and ``env``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from accelerate_shard import ShardPlugin
from accelerate_shard.cli import main
from accelerate_shard.cli.config import QUESTIONS
from accelerate_shard.cli.show import effective
from tests.accelerate.support.accelerators import clean_state
from tests.accelerate.support.launching import FSDP2, write_yaml
from torch_shard import Offload

CPU = ("--yes", "--cpu", "yes")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with clean_state():
        yield


def test_defaults_give_a_yaml_that_accelerate_reads_and_the_default_plugin(tmp_path: Path) -> None:
    assert main(["config", *CPU]) == 0
    read = load_config_from_file(str(tmp_path / "accelerate_shard.yaml"))
    assert read.distributed_type == "FSDP" and read.use_cpu and read.num_processes == 2
    assert effective("accelerate_shard.yaml") == ShardPlugin(fp32_masters=True)


ANSWERS: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"strategy": "hybrid_shard", "state_dict_type": "full"}, {"strategy": "hybrid_shard", "state_dict_type": "full"}),
    (
        {"layer_classes": "Block,Head", "fp32_masters": "no"},
        {"layer_classes": ("Block", "Head"), "fp32_masters": False},
    ),
    ({"activation_checkpointing": "yes"}, {"activation_checkpointing": True}),
    (
        {"activation_checkpointing": "yes", "activation_offload": "yes"},
        {"activation_checkpointing": True, "activation_offload": True},
    ),
    ({"offload": "cpu"}, {"offload": Offload()}),
    ({"offload": "params=false"}, {"offload": Offload(params=False)}),
    ({"offload": "nvme=/x,pin_memory=false"}, {"offload": Offload(nvme="/x", pin_memory=False)}),
]


@pytest.mark.parametrize(("answers", "wanted"), ANSWERS, ids=str)
def test_every_answer_comes_back_from_the_file(answers: dict[str, str], wanted: dict[str, Any]) -> None:
    options = {"mixed_precision": "bf16", "num_processes": "3", **answers}
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    assert main(["config", *CPU, "--config_file", "c.yaml", *flags]) == 0
    assert effective("c.yaml") == ShardPlugin(**{"fp32_masters": True, **wanted})
    contents = yaml.safe_load(Path("c.yaml").read_text(encoding="utf-8"))
    assert contents["num_processes"] == 3 and contents["mixed_precision"] == "bf16"
    # FSDP's words where there are some, and ours for the rest.
    offload, section = answers.get("offload"), contents["fsdp_config"]
    assert section["fsdp_offload_params"] is (offload == "cpu")
    assert ("shard_offload" in section) is (offload not in (None, "cpu"))


def test_questions_are_asked_again_until_the_answer_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(
        ["perhaps", "yes", "0", "4", "zero", "shard_optim", "disk", "params=false", "", "bf16", "", "", "", "full"]
    )
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or next(typed))
    assert main(["config"]) == 0
    assert next(typed, None) is None and len(asked) == len(QUESTIONS) + 4  # four of them twice
    assert capsys.readouterr().out.count("Please answer") == 4
    contents = yaml.safe_load(Path("accelerate_shard.yaml").read_text(encoding="utf-8"))
    assert (contents["num_processes"], contents["mixed_precision"]) == (4, "bf16")
    assert effective("accelerate_shard.yaml") == ShardPlugin(
        strategy="shard_optim", offload=Offload(params=False), state_dict_type="full", fp32_masters=True
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--strategy", "zero"), "--strategy must be one of full_shard"),
        (("--num_processes", "0"), "--num_processes"),
        (("--offload", "params=perhaps"), "--offload must be none, cpu"),
        (("--cpu", "maybe"), "--cpu"),
        (("--config_file", "x.toml"), "yaml"),
    ],
)
def test_bad_options_are_refused_and_nothing_is_written(
    arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *CPU, *arguments]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_replaced_unasked_nor_when_nobody_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("accelerate_shard.yaml").write_text("mine", encoding="utf-8")
    assert main(["config", *CPU]) == 2 and "--force" in capsys.readouterr().err

    def nobody(text: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", nobody)
    assert main(["config", "--force"]) == 2 and "--yes" in capsys.readouterr().err
    assert Path("accelerate_shard.yaml").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("own", "in_yaml", "precision"),
    [
        ({"fp16": {"enabled": True}}, None, "fp16"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, None, "bf16"),
        ({"bf16": {"enabled": False}}, "fp16", "no"),
        ({"bf16": {"enabled": "auto"}}, "fp16", "fp16"),
        ({}, None, "no"),
    ],
    ids=str,
)
def test_the_precision_of_deepspeeds_own_file_and_the_machines_are_taken_over(
    own: dict[str, Any], in_yaml: str | None, precision: str, tmp_path: Path
) -> None:
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, **own}), encoding="utf-8")
    top: dict[str, Any] = {
        "num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1", "main_process_port": 29501,
        "rdzv_backend": "c10d", "same_network": False, "num_processes": 16,
    }  # fmt: skip
    section = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    path = write_yaml(tmp_path, {}, **section, **top, mixed_precision=in_yaml)
    assert main(["config", "--yes", "--deepspeed", str(path)]) == 0
    contents = yaml.safe_load(Path("accelerate_shard.yaml").read_text(encoding="utf-8"))
    wanted = {**top, "mixed_precision": precision}
    assert {key: contents[key] for key in wanted} == wanted


def test_env_shows_versions_and_what_a_configuration_comes_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"fsdp_reshard_after_forward": False, "shard_prefetch": 4, "shard_offload": {"params": False, "nvme": "/x"}}
    assert main(["env", "--config_file", str(write_yaml(tmp_path, {**FSDP2, **keys}))]) == 0
    shown = capsys.readouterr().out
    assert f"* offload                   {Offload(params=False, nvme='/x')!r}" in shown
    assert "accelerate " in shown and "* strategy                  'shard_grad_op'" in shown
    assert "* prefetch                  4" in shown and "  timeout " in shown


@pytest.mark.parametrize(
    ("fsdp", "top", "said"),
    [
        ({"shard_prefetch": "many"}, {}, "shard_prefetch"),
        ({"fsdp_offload_params": "mostly"}, {}, "FSDP_OFFLOAD_PARAMS"),
        ({}, {"unknown": 1}, "unknown"),
        ({}, {"distributed_type": "DEEPSPEED"}, "DEEPSPEED"),
        ({}, {"parallelism_config": {"parallelism_config_tp_size": 2}}, "PARALLELISM"),
    ],
    ids=str,
)
def test_env_refuses_what_a_launch_would(
    fsdp: dict[str, Any], top: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_yaml(tmp_path, {**FSDP2, **fsdp}, **top)
    assert main(["env", "--config_file", str(path)]) == 2
    assert said in capsys.readouterr().err
