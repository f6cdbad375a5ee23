"""LightningCLI under the runner, by name and by class path, with a traceback as without it."""

from __future__ import annotations

import pytest

from tests.lightning.runner.support import RUNNER, run, script
from tests.support.run_python import run_python

CLI = """
import json, sys
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

cli = LightningCLI(BoringModel, BoringDataModule, run=False, save_config_callback=None)
strategy = cli.trainer.strategy
print("RESULT", json.dumps([type(strategy).__module__, strategy.config.strategy, cli.config.trainer.strategy is not None]))
"""
WAYS = {
    "name": ["--trainer.strategy=deepspeed_stage_2"],
    "class": ["--trainer.strategy=FSDPStrategy", "--trainer.strategy.sharding_strategy=SHARD_GRAD_OP"],
    "deepspeed": ["--trainer.strategy=DeepSpeedStrategy", "--trainer.strategy.stage=2"],
    "kwargs": ["--trainer.strategy=DDPStrategy", "--trainer.strategy.find_unused_parameters=true"],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
def test_the_command_line_names_a_strategy_that_becomes_ours(tmp_path, way):
    path = script(tmp_path, CLI)
    (found,) = run(*RUNNER, path, "--trainer.accelerator=cpu", "--trainer.devices=2", *WAYS[way], folder=tmp_path)
    wanted = "full_shard" if way == "kwargs" else "shard_grad_op"
    assert found == ["lightning_shard.run.for_lightning", wanted, True]


@pytest.mark.exhaustive
def test_an_error_of_the_program_is_told_as_without_the_runner(tmp_path):
    text = "import lightning\ndef fail():\n    raise KeyError('on purpose')\nfail()\n"
    path = script(tmp_path, text)
    plain = run_python(path, folder=tmp_path, expected=1)
    ours = run_python(*RUNNER, path, folder=tmp_path, expected=1)
    trace = plain.stderr[plain.stderr.index("Traceback") :]
    assert ours.stderr[ours.stderr.index("Traceback") :] == trace
