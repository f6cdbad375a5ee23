"""tools/lightning_suite: which of Lightning's tests it takes, and what they become."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

REWRITE = Path(__file__).parents[2] / "tools" / "lightning_suite" / "rewrite.py"

pytestmark = pytest.mark.skipif(not REWRITE.exists(), reason="the wheel has no tools")

SOURCE = '''
from lightning.pytorch.strategies import DDPStrategy

KWARGS = {"strategy": "ddp_spawn"}


def train(**kwargs):
    """With ddp_spawn."""
    return Trainer(**KWARGS, **kwargs)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "ddp_fork_find_unused_parameters_true"])
def test_parameters(strategy):
    assert isinstance(Trainer(strategy=strategy).strategy, DDPStrategy)


class TestTraining:
    def test_by_a_helper(self):
        train()


def test_something_else():
    with pytest.raises(ValueError, match=r"strategy='ddp_notebook'\\)"):
        Trainer(strategy="fsdp", name="addp")
'''


def rewrite():
    spec = importlib.util.spec_from_file_location("rewrite", REWRITE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tests_that_name_ddp_themselves_or_by_a_helper_are_found():
    assert rewrite().functions_that_change(SOURCE) == {"test_parameters", "test_by_a_helper"}


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_names_and_the_class_are_replaced_and_nothing_else(start):
    expected = SOURCE.replace('"ddp_spawn"', f'"shard_{start}"').replace('"ddp"', '"shard"')
    expected = expected.replace('"ddp_fork_find_unused_parameters_true"', '"shard_fork"')
    expected = expected.replace("'ddp_notebook'", "'shard_fork'")
    imported = "import DDPStrategy\n"
    ours = "from lightning_shard.for_lightning import ShardStrategy as DDPStrategy\n"
    assert rewrite().rewritten(SOURCE, "shard", start) == expected.replace(imported, imported + ours)


def test_under_ddp_only_the_start_of_processes_changes():
    module = rewrite()
    assert module.rewritten(SOURCE, "ddp", "spawn") == SOURCE
    assert module.rewritten(SOURCE, "ddp", "fork") == SOURCE.replace('"ddp_spawn"', '"ddp_fork"')
