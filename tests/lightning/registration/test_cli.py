"""LightningCLI takes the strategy by name and by class path, from the command line and from files, as it takes ddp."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import yaml
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI

from tests.lightning.support import Net, assert_same_state, loader, quiet
from tests.support.ranks import ranks
from torch_shard import Offload

OPTIONS = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "use_distributed_sampler": False,
}
CLASS = "lightning_shard.ShardStrategy"


class Model(Net):  # type: ignore[misc]
    def __init__(self, optimizer: str = "sgd", width: int = 7) -> None:
        super().__init__(optimizer, width)


class Data(LightningDataModule):
    def __init__(self, ranks: int = 1, features: int = 7) -> None:
        super().__init__()
        self.ranks, self.features = ranks, features

    def train_dataloader(self) -> Any:
        return loader(self.ranks)


class Linked(LightningCLI):
    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.link_arguments("data.features", "model.width")
        parser.link_arguments("trainer.devices", "data.ranks")


def cli(*arguments: object, devices: int = 2, run: bool = True) -> Any:
    quiet()
    trainer = {**OPTIONS, "devices": devices}
    words = [*(["fit"] if run else []), *map(str, arguments)]
    return Linked(Model, Data, save_config_callback=None, trainer_defaults=trainer, args=words, run=run)


def printed(*arguments: object) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
        cli(*arguments, run=False)
    assert ended.value.code == 0
    return out.getvalue()


WAYS = {
    "name": ["--trainer.strategy", "shard_zero2"],
    "class path": ["--trainer.strategy", CLASS, "--trainer.strategy.strategy", "shard_grad_op"],
    "init_args": ["--trainer.strategy.class_path", CLASS, "--trainer.strategy.init_args.strategy", "shard_grad_op"],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
@ranks(2)
def test_a_run_from_the_command_line_trains_like_ddp(way):
    width = ["--data.features", 5]
    found = cli(*WAYS[way], *width)
    wanted = cli("--trainer.strategy", "ddp", *width)
    assert found.trainer.strategy.config.strategy == "shard_grad_op"
    assert found.model.inner.out_features == 5 and found.trainer.global_step == wanted.trainer.global_step
    assert_same_state(found.model.state_dict(), wanted.model.state_dict())


def test_a_file_sets_what_the_strategy_and_its_config_take(tmp_path):
    file = tmp_path / "config.yaml"
    settings = {
        "class_path": CLASS,
        "init_args": {
            "config": {
                "class_path": "torch_shard.ShardConfig",
                "init_args": {"strategy": "shard_optim", "timeout": 7.0},
            },
            "prefetch": 2,
            "unit_bytes": 1000,
            "state_dict_type": "sharded",
            "process_group_backend": "gloo",
        },
    }
    file.write_text(yaml.safe_dump({"trainer": {"strategy": settings}}))
    strategy = cli("--config", file, run=False).trainer.strategy
    assert (strategy.config.strategy, strategy.config.timeout) == ("shard_optim", 7.0)
    assert (strategy.config.prefetch, strategy.config.unit_bytes) == (2, 1000)
    assert strategy._settings.state_dict_type == "sharded" and strategy.process_group_backend == "gloo"


def test_what_print_config_writes_makes_the_same_strategy(tmp_path):
    text = printed("--trainer.strategy", CLASS, "--trainer.strategy.prefetch", 3, "--print_config")
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert yaml.safe_load(text)["trainer"]["strategy"]["class_path"].endswith("ShardStrategy")
    assert cli("--config", file, run=False).trainer.strategy.config.prefetch == 3


def test_help_lists_the_settings_and_those_of_its_config():
    text = printed(f"--trainer.strategy.help={CLASS}")
    for setting in ("start_method", "state_dict_type", "defer_gradient_sync", "prefetch", "shard_size"):
        assert f"--trainer.strategy.{setting} " in text, text


def test_a_setting_that_there_is_not_is_refused(capsys):
    with pytest.raises(SystemExit):
        cli("--trainer.strategy", CLASS, "--trainer.strategy.prefetsch", 2, run=False)
    assert "'prefetsch' is not accepted" in capsys.readouterr().err


# -- offload, which is a name or has fields of its own -------------------------------------------------------------------

KEEPS = Offload(params=False)
OPTION = "--trainer.strategy.offload"
LINES = {
    "a name": (["--trainer.strategy", "shard_offload"], Offload()),
    "cpu": (["--trainer.strategy", CLASS, OPTION, "cpu"], Offload()),
    "a field": (["--trainer.strategy", CLASS, f"{OPTION}.params", "false"], KEEPS),
}  # fmt: skip


@pytest.mark.parametrize("way", LINES)
def test_the_command_line_sets_offload(way):
    words, wanted = LINES[way]
    assert cli(*words, run=False).trainer.strategy.config.offload == wanted


@pytest.mark.parametrize(
    "value", ["cpu", {"params": False}, {"class_path": "torch_shard.Offload", "init_args": {"params": False}}], ids=str
)
def test_a_file_sets_offload(tmp_path, value):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"trainer": {"strategy": {"class_path": CLASS, "init_args": {"offload": value}}}}))
    offload = cli("--config", file, run=False).trainer.strategy.config.offload
    assert offload == (Offload() if value == "cpu" else KEEPS)
