"""tools/lightning_suite: tests that get DDP by Lightning's own choice are taken, and get ours."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.run_python import run_python

TOOL = Path(__file__).parents[2] / "tools" / "lightning_suite"

pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="the wheel has no tools")

SOURCE = """
SEVERAL = {"accelerator": "cpu", "devices": 2}


def test_by_keyword():
    Trainer(accelerator="cpu", devices=2)


def test_on_several_nodes():
    Fabric(accelerator="cpu", devices=1, num_nodes=2, strategy="auto")


@pytest.mark.parametrize("devices", [1, 2])
def test_by_a_parameter(devices):
    Trainer(accelerator="cpu", devices=devices)


def test_by_a_constant():
    Trainer(**SEVERAL)


def test_one_device():
    Trainer(accelerator="cpu", devices=1, num_nodes=1)
    Trainer(accelerator="auto", devices="auto")


def test_another_strategy():
    Trainer(accelerator="gpu", devices=2, strategy="fsdp")
"""

CHOICES = """
import os, sys
os.environ["LIGHTNING_SUITE_FAMILY"] = sys.argv[1]
import suite_plugin
suite_plugin.pytest_configure()
from lightning import Fabric, Trainer
for devices in (1, 2):
    for made in (Trainer(accelerator="cpu", devices=devices, logger=False), Fabric(accelerator="cpu", devices=devices)):
        print(type(made.strategy).__name__)
"""


def test_tests_on_several_devices_without_a_strategy_are_found():
    spec = importlib.util.spec_from_file_location("rewrite", TOOL / "rewrite.py")
    rewrite = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rewrite)
    expected = {"test_by_keyword", "test_on_several_nodes", "test_by_a_parameter", "test_by_a_constant"}
    assert rewrite.functions_that_change(SOURCE) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "several"), [("shard", ["ShardStrategy", "ShardFabricStrategy"]), ("ddp", ["DDPStrategy"] * 2)]
)
def test_the_default_for_several_devices_is_of_the_family(family, several, tmp_path):
    done = run_python("-c", CHOICES, family, path=[TOOL], folder=tmp_path)
    assert done.stdout.split() == ["SingleDeviceStrategy"] * 2 + several
