"""``SHARD_*`` variables and ``shard_*`` keys of a YAML, and which setting wins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin

import accelerate_shard
from accelerate_shard import Precision, ShardConfig, ShardPlugin
from accelerate_shard.settings.from_environment import SETTINGS, launch_plugin, take_over_launch
from tests.accelerate.support.accelerators import OURS, clean_state
from tests.accelerate.support.launching import FSDP1, FSDP2, write_yaml
from tests.support.logs import captured_log
from torch_shard import Offload
from torch_shard.errors import ConfigError

EXAMPLES = {
    "strategy": ("shard_optim", "shard_optim"),
    "layer_classes": ("Block, Head", ("Block", "Head")),
    "units": ("layers.*, re:head.*", ("layers.*", "re:head.*")),
    "unit_bytes": ("1000", 1000),
    "prefetch": ("3", 3),
    "memory": ("2GiB", 2 << 30),
    "offload": ("cpu, params=false", Offload(params=False)),
    "precision": ("bf16", Precision(torch.bfloat16)),
    "fp32_masters": ("true", True),
    "activation_checkpointing": ("Block", ("Block",)),
    "activation_offload": ("Block, Head", ("Block", "Head")),
    "state_dict_type": ("full", "full"),
    "async_save": ("yes", True),
    "weights_only": ("0", False),
    "defer_gradient_sync": ("1", True),
    "ignore": ("head.*,embed.weight", ("head.*", "embed.weight")),
    "sync_module_states": ("false", False),
    "broadcast_buffers": ("off", False),
    "timeout": ("none", None),
    "alone": ("error", "error"),
    "debug": ("True", True),
    "single_communicator": ("on", True),
    "registered_memory": ("true", True),
    "reshard_after_forward": ("2", 2),
}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with clean_state():
        yield


def fsdp(**variables: str) -> None:
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", **variables)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.field)
def test_each_variable_sets_its_field(setting: Any, tmp_path: Path) -> None:
    text, value = EXAMPLES.get(setting.field, ("2", 2))
    strategy: Any = {"shard_size": "hybrid_shard", "memory": "auto"}.get(setting.field, "full_shard")
    base = ShardPlugin(strategy=strategy)
    if strategy != "full_shard":
        os.environ["SHARD_STRATEGY"] = strategy
    os.environ[setting.variable] = text
    wanted = replace(base, **{setting.field: value})
    assert launch_plugin() == wanted
    del os.environ[setting.variable]
    os.environ["SHARD_CONFIG_FILE"] = str(write_yaml(tmp_path, {**FSDP2, setting.key: text}))
    assert launch_plugin() == wanted


def test_an_argument_wins_over_shard_variables_over_fsdp_over_the_defaults(tmp_path: Path) -> None:
    fsdp(FSDP_RESHARD_AFTER_FORWARD="false", FSDP_STATE_DICT_TYPE="FULL_STATE_DICT")
    path = write_yaml(tmp_path, {**FSDP2, "shard_prefetch": 2, "shard_strategy": "no_shard"})
    os.environ.update(SHARD_CONFIG_FILE=str(path), SHARD_STRATEGY="shard_optim")
    found = launch_plugin()
    assert found is not None
    assert (found.strategy, found.prefetch, found.state_dict_type) == ("shard_optim", 2, "full")
    with captured_log() as messages:
        assert OURS(cpu=True, shard_plugin=ShardConfig(prefetch=0)).shard_plugin == ShardPlugin(prefetch=0)
    assert ["shard_plugin is given" in message for message in messages] == [True]


def test_an_fsdp_plugin_that_is_given_wins_and_says_which_of_our_settings_it_overrules() -> None:
    os.environ["SHARD_PREFETCH"] = "3"
    with captured_log() as messages:
        found = OURS(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False))
    assert found.shard_plugin == ShardPlugin(strategy="shard_grad_op", fp32_masters=True)
    assert len(messages) == 1 and "SHARD_PREFETCH" in messages[0]


def test_what_is_gathered_together_is_one_choice() -> None:
    fsdp(FSDP_TRANSFORMER_CLS_TO_WRAP="Block", FSDP_ACTIVATION_CHECKPOINTING="true", SHARD_UNITS="layers.*")
    found = launch_plugin()
    assert found is not None and (found.units, found.layer_classes) == (("layers.*",), ())
    assert found.activation_checkpointing == ("Block",)
    os.environ.update(FSDP_AUTO_WRAP_POLICY="NO_WRAP", SHARD_LAYER_CLASSES="Other")
    del os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"], os.environ["SHARD_UNITS"]
    found = launch_plugin()
    assert found is not None and (found.units, found.layer_classes) == (None, ("Other",))


def test_a_misspelt_variable_or_key_is_an_error_that_names_a_close_one(tmp_path: Path) -> None:
    os.environ["SHARD_STRATGY"] = "full_shard"
    with pytest.raises(ConfigError, match=r"SHARD_STRATGY .*SHARD_STRATEGY"):
        OURS(cpu=True)
    del os.environ["SHARD_STRATGY"]
    for key, close in (("shard_prefetsch", "shard_prefetch"), ("shard_zzz", "no setting")):
        os.environ["SHARD_CONFIG_FILE"] = str(write_yaml(tmp_path, {**FSDP2, key: 1}))
        with pytest.raises(ConfigError, match=f"{key}.*{close}"):
            launch_plugin()


def test_other_programs_variables_and_keys_that_nothing_reads_are_named_in_a_warning(tmp_path: Path) -> None:
    os.environ["SHARD_INDEX_OF_CI"] = "4"
    with captured_log() as messages:
        assert launch_plugin() is None
    assert len(messages) == 1 and "SHARD_INDEX_OF_CI" in messages[0]
    del os.environ["SHARD_INDEX_OF_CI"]
    misspelt = {**FSDP1, "fsdp_ofload_params": True}
    os.environ["SHARD_CONFIG_FILE"] = str(write_yaml(tmp_path, misspelt))
    with captured_log() as messages:
        assert launch_plugin() is None
    assert len(messages) == 1 and "fsdp_ofload_params (did you mean fsdp_offload_params?)" in messages[0]


NAMES = ("activation_checkpointing", "activation_offload")  # whose value may be a class's name


@pytest.mark.parametrize(
    "setting", [s for s in SETTINGS if s.form[0] not in "np" and s.field not in NAMES], ids=lambda s: s.field
)
def test_a_value_that_cannot_be_is_refused_with_those_that_can(setting: Any) -> None:
    os.environ[setting.variable] = "mauve"
    with pytest.raises(ConfigError, match=setting.variable):
        launch_plugin()


def test_settings_that_contradict_each_other_name_where_they_come_from() -> None:
    os.environ.update(SHARD_STRATEGY="full_shard", SHARD_SIZE="2")
    with pytest.raises(ConfigError, match=r"shard_size.*SHARD_SIZE"):
        launch_plugin()


def test_a_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    os.environ["SHARD_CONFIG_FILE"] = str(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match="SHARD_CONFIG_FILE"):
        launch_plugin()
    (tmp_path / "gone.yaml").write_text("- just\n- a list\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no mapping"):
        launch_plugin()


def test_accelerate_and_transformers_do_not_find_fsdp_afterwards_and_later_accelerators_do() -> None:
    fsdp(FSDP_RESHARD_AFTER_FORWARD="false", FSDP_CPU_RAM_EFFICIENT_LOADING="true")
    accelerator = OURS(cpu=True)
    assert accelerator.shard_plugin.strategy == "shard_grad_op"
    assert "ACCELERATE_USE_FSDP" not in os.environ and accelerator.state.distributed_type.value == "NO"
    assert getattr(accelerator.state, "fsdp_plugin", None) is None
    assert OURS(cpu=True).shard_plugin == accelerator.shard_plugin
    assert launch_plugin() == accelerator.shard_plugin


def test_processes_of_a_launch_on_cpus_are_told_to_find_each_other() -> None:
    take_over_launch()
    assert "ACCELERATE_USE_CPU" not in os.environ  # one process: Accelerate finds the device
    os.environ["LOCAL_RANK"] = "0"
    if not torch.accelerator.is_available():
        take_over_launch()
        assert os.environ["ACCELERATE_USE_CPU"] == "true"


def test_use_cpu_of_the_yaml_counts_where_there_are_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    os.environ["LOCAL_RANK"] = "0"
    take_over_launch()
    assert "ACCELERATE_USE_CPU" not in os.environ
    os.environ["SHARD_CONFIG_FILE"] = str(write_yaml(tmp_path, FSDP2, use_cpu=True))
    take_over_launch()
    assert os.environ["ACCELERATE_USE_CPU"] == "true"


def test_other_engines_of_the_launch_are_refused_with_the_remedy() -> None:
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG"):
        os.environ[name] = "true"
        with pytest.raises(ConfigError, match=f"{name}.*accelerate-shard config"):
            accelerate_shard.Accelerator(cpu=True)
        del os.environ[name]
