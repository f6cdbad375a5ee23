"""Which strategies become ours, however a program names them; nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lightning.runner.support import RUNNER, run, script
from tests.support.run_python import run_python
from torch_shard import Offload

OURS = ("lightning_shard.run.for_lightning", "lightning_shard.run.for_lightning_dot_fabric")
TRAINERS, FABRICS = OURS

# Makes one Trainer or Fabric after the other, and prints what became of each: its strategy, or the error.
MAKER = """
import json, os, sys, warnings
import lightning as L
import torch
from lightning.fabric.plugins import FSDPPrecision as FabricFSDPPrecision
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy, FSDPStrategy as FabricFSDPStrategy
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, StrategyRegistry

warnings.filterwarnings("ignore")


class Own(DDPStrategy):
    def setup(self, trainer):
        super().setup(trainer)


class Named(DDPStrategy):
    def __init__(self):
        super().__init__(broadcast_buffers=False, process_group_backend="gloo")


StrategyRegistry.register("named", Named)


def made(kind, options):
    try:
        made = kind(**{"accelerator": "cpu", "devices": 2, **options})
    except Exception as error:
        return [type(error).__name__, str(error)]
    strategy = made.strategy
    found = [type(strategy).__module__]
    config = getattr(strategy, "config", None)
    if config is not None:
        precision = made.precision_plugin if kind is L.Trainer else strategy.precision
        found += [config.strategy, config.prefetch, str(config.offload), type(precision).__name__, precision.precision]
        found += [strategy._settings.state_dict_type, config.broadcast_buffers, getattr(strategy, "_ddp_kwargs", None)]
    return found


for line in open(sys.argv[1]):
    kind, options = line.split(" ", 1)
    print("RESULT", json.dumps(made(getattr(L, kind), eval(options))), flush=True)
"""


def made(folder: Path, *lines: str, settings: tuple[str, ...] = (), **variables: str) -> list[Any]:
    (folder / "lines").write_text("\n".join(lines))
    return run(*RUNNER, *settings, script(folder, MAKER), folder / "lines", folder=folder, **variables)


def test_names_instances_and_auto_become_ours_and_others_stay(tmp_path):
    lines = {
        'Trainer dict(strategy="ddp")': [TRAINERS, "full_shard"],
        'Trainer dict(strategy="DDP_find_unused_parameters_true")': [TRAINERS, "full_shard"],
        'Trainer dict(strategy="deepspeed_stage_1")': [TRAINERS, "shard_optim"],
        'Trainer dict(strategy="fsdp_cpu_offload")': [TRAINERS, "full_shard"],
        "Trainer dict()": [TRAINERS, "full_shard"],
        "Trainer dict(devices=1, num_nodes=2)": [TRAINERS, "full_shard"],
        'Trainer dict(strategy=FSDPStrategy(sharding_strategy="NO_SHARD"))': [TRAINERS, "no_shard"],
        'Trainer dict(strategy="named")': [TRAINERS, "full_shard"],
        "Trainer dict(strategy=Named())": [TRAINERS, "full_shard"],
        "Trainer dict(devices=1)": ["lightning.pytorch.strategies.single_device"],
        'Trainer dict(strategy="shard_zero2")': ["lightning_shard.for_lightning", "shard_grad_op"],
        'Fabric dict(strategy="ddp")': [FABRICS, "full_shard"],
        'Fabric dict(strategy="dp")': [FABRICS, "full_shard"],  # which Lightning makes ddp on CPUs
        'Fabric dict(strategy="fsdp")': [FABRICS, "full_shard"],
        "Fabric dict(strategy=FabricDDPStrategy())": [FABRICS, "full_shard"],
        "Fabric dict()": [FABRICS, "full_shard"],
        "Fabric dict(devices=1)": ["lightning.fabric.strategies.single_device"],
        'Fabric dict(strategy="shard")': ["lightning_shard.fabric.for_lightning", "full_shard"],
    }
    for line, found in zip(lines, made(tmp_path, *lines), strict=True):
        assert found[:2] == lines[line], (line, found)
        if "amed" in line:
            assert found[-2] is False and found[-1] == {"broadcast_buffers": False}


@pytest.mark.exhaustive
def test_what_the_launch_says_counts_for_more_than_the_program(tmp_path):
    lines = ['Trainer dict(strategy="fsdp")', 'Trainer dict(strategy="shard_zero2")', 'Fabric dict(strategy="shard")']
    settings = ("--shard.strategy=shard_optim", "--shard.state_dict_type", "sharded")
    for found in made(tmp_path, *lines, settings=settings, SHARD_PREFETCH="3", SHARD_STRATEGY="no_shard"):
        assert found[1:3] == ["shard_optim", 3] and found[6] == "sharded"


@pytest.mark.exhaustive
def test_strategies_come_from_variables_of_lightning_too(tmp_path):
    variables = {"PL_TRAINER_STRATEGY": "deepspeed_stage_3_offload", "LT_STRATEGY": "fsdp"}
    found = made(tmp_path, "Trainer dict()", "Fabric dict()", **variables)
    assert found[0][:4] == [TRAINERS, "full_shard", 1, str(Offload())] and found[1][:2] == [FABRICS, "full_shard"]
    assert [f[6] for f in found] == ["full", "sharded"]


@pytest.mark.exhaustive
def test_precision_becomes_that_of_ddp(tmp_path):
    lines = {
        'Trainer dict(strategy="fsdp", precision="bf16-mixed")': ["MixedPrecision", "bf16-mixed"],
        'Trainer dict(strategy="fsdp", precision="bf16-true")': ["HalfPrecision", "bf16-true"],
        'Trainer dict(strategy="fsdp", plugins=[FSDPPrecision("bf16-true")])': ["HalfPrecision", "bf16-true"],
        'Trainer dict(strategy=FSDPStrategy(precision_plugin=FSDPPrecision("bf16-mixed")))': [
            "MixedPrecision",
            "bf16-mixed",
        ],
        'Trainer dict(strategy="deepspeed", precision="bf16-true")': ["MixedPrecision", "bf16-mixed"],
        'Trainer dict(strategy="deepspeed", precision="32-true")': ["Precision", "32-true"],
        'Fabric dict(strategy="fsdp", plugins=[FabricFSDPPrecision("bf16-true")])': ["HalfPrecision", "bf16-true"],
        'Fabric dict(strategy="deepspeed", precision="16-true")': ["MixedPrecision", "bf16-mixed"],  # on a CPU
    }
    for line, found in zip(lines, made(tmp_path, *lines), strict=True):
        plugin, name = found[4:6]
        assert ([plugin.removeprefix("ShardedClipping"), name]) == lines[line], (line, found)


@pytest.mark.exhaustive
def test_what_can_not_be_right_is_refused_with_a_remedy(tmp_path):
    lines = {
        "Trainer dict(strategy=Own())": ("Own is a DDPStrategy with setup of its own", "strategy=DDPStrategy(...)"),
        "Trainer dict(strategy=DDPStrategy(model_averaging_period=2))": ("model_averaging_period",),
        'Trainer dict(strategy="deepspeed", precision="32-true")': None,
        'Trainer dict(strategy=DeepSpeedStrategy(config={"gradient_clipping": 1.0}))': (
            "gradient_clipping",
            "gradient_clip_val",
        ),
        'Trainer dict(strategy="surprise")': ("invalid strategy name",),
    }
    for line, found in zip(lines, made(tmp_path, *lines), strict=True):
        if lines[line] is None:
            assert found[0] == TRAINERS
        else:
            assert found[0] in ("ConfigError", "ValueError") and all(text in found[1] for text in lines[line] or ())


@pytest.mark.exhaustive
def test_one_warning_names_all_that_has_no_effect(tmp_path):
    (tmp_path / "lines").write_text(
        "Trainer dict(strategy=DDPStrategy(bucket_cap_mb=3, bucket_cap_mb_list=[1], find_unused_parameters=True))"
    )
    done = run_python(*RUNNER, script(tmp_path, MAKER), tmp_path / "lines", folder=tmp_path)
    (line,) = [line for line in done.stderr.splitlines() if "without effect" in line]
    assert "DDPStrategy: without effect in a sharded run: bucket_cap_mb=3, bucket_cap_mb_list=[1]." in line


@pytest.mark.exhaustive
def test_a_wrong_setting_or_program_ends_the_runner_with_its_reason(tmp_path):
    done = run_python(*RUNNER, "--shard.prefech=2", "train.py", folder=tmp_path, expected=2)
    assert (
        "lightning_shard: --shard.prefech is no setting" in done.stderr
        and "Did you mean --shard.prefetch" in done.stderr
    )
    done = run_python(*RUNNER, "absent.py", folder=tmp_path, expected=2)
    assert "there is no script 'absent.py'" in done.stderr and "Traceback" not in done.stderr
