"""``Trainer(strategy="shard")`` needs no import, starts its ranks, and leaves torch and Lightning as they are otherwise."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import lightning_shard
from lightning_shard.registration.autoload import AfterImport
from tests.lightning.support import assert_alike
from tests.lightning.trainer.test_launch import SCRIPT, results
from tests.support.run_python import run_python

NAMES = [
    "shard",
    "shard_zero2",
    "shard_zero1",
    "shard_hybrid",
    "shard_hybrid_zero2",
    "shard_auto",
    "shard_offload",
    "shard_spawn",
    "shard_fork",
]


@pytest.fixture
def small_lightning(tmp_path: Path) -> Path:
    """A folder with a package that has Lightning's names and registers as it does, but imports in no time."""
    package = tmp_path / "small" / "pytorch_lightning"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "strategies.py").write_text(
        "class Registry(dict):\n"
        "    def register(self, name, strategy, description, override=False):\n"
        "        assert override or name not in self\n"
        "        self[name] = strategy\n"
        "StrategyRegistry = Registry()\n"
    )
    return package.parent


BOTH = """
import sys
import on_pytorch_lightning

if __name__ == "__main__":
    on_pytorch_lightning.main("shard", 2, 1, "first")
    assert "lightning" not in sys.modules  # each works where the other is not installed
    import on_lightning
    on_lightning.main("shard", 2, 1, "second")
"""


@pytest.mark.wheel
@pytest.mark.skipif("TORCH_SHARD_WHEEL" not in os.environ, reason="slow, and the wheel is what counts: make test-wheel")
def test_a_script_trains_on_two_ranks_without_importing_anything_of_ours(tmp_path):
    """Importing Lightning takes most of the time, so one script serves for both namespaces: much of it they share."""
    # One batch per epoch: the order in which a sampler deals it out does not matter.
    program = SCRIPT.replace("torch.randn(32, 6", "torch.randn(8, 6")
    for name, package in (("on_pytorch_lightning", "pytorch_lightning"), ("on_lightning", "lightning.pytorch")):
        (tmp_path / f"{name}.py").write_text(program.replace("lightning.pytorch", package))
    (tmp_path / "train.py").write_text(BOTH)
    variables: dict[str, Any] = {"__name__": "single"}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, variables)  # on a single device in this process, where Lightning is imported already
        variables["main"]("auto", 1, 1, str(tmp_path / "single"))
    logging.disable(logging.NOTSET)
    (wanted,) = results(printed.getvalue())
    first, second = results(run_python(tmp_path / "train.py", folder=tmp_path).stdout)
    for found in (first, second):
        assert found["trainer"][3] == 2
        for name in ("state", "test"):
            assert_alike(found[name], wanted[name])


OWNERS = {
    "lightning.pytorch": ("Trainer", "StrategyRegistry", "lightning_shard.for_lightning"),
    "pytorch_lightning": ("Trainer", "StrategyRegistry", "lightning_shard.for_pytorch_lightning"),
    "lightning.fabric": ("Fabric", "STRATEGY_REGISTRY", "lightning_shard.fabric.for_lightning"),
    "lightning_fabric": ("Fabric", "STRATEGY_REGISTRY", "lightning_shard.fabric.for_lightning_fabric"),
}


@pytest.mark.parametrize("namespace", OWNERS)
def test_each_namespace_gets_the_names_and_its_own_class(namespace):
    package = importlib.import_module(namespace)
    owner, registry, module = OWNERS[namespace]
    assert [name for name in getattr(package.strategies, registry) if name.startswith("shard")] == NAMES
    strategy = getattr(package, owner)(strategy="SHARD_zero2", accelerator="cpu", devices=2).strategy
    assert isinstance(strategy, package.strategies.ParallelStrategy)
    assert type(strategy).__module__ == module
    assert strategy.config.strategy == "shard_grad_op"


def test_the_package_names_the_classes_of_the_namespaces_in_use():
    assert lightning_shard.ShardStrategy.__module__ == "lightning_shard.for_lightning"
    assert lightning_shard.ShardFabricStrategy.__module__ == "lightning_shard.fabric.for_lightning"


@pytest.mark.exhaustive
def test_a_broken_front_end_breaks_neither_torch_nor_lightning(small_lightning, tmp_path):
    broken = tmp_path / "broken" / "lightning_shard"
    (broken / "registration").mkdir(parents=True)
    for name in ("__init__.py", "registration/__init__.py", "registration/autoload.py"):
        source = Path(lightning_shard.__file__).parent / name
        (broken / name).write_text(source.read_text())
    (broken / "registration" / "registry.py").write_text("raise ValueError('on purpose')\n")
    code = "import torch, pytorch_lightning.strategies as s; assert not s.StrategyRegistry"
    done = run_python("-c", code, folder=tmp_path, path=[broken.parent, small_lightning])
    assert "lightning_shard.ShardStrategy()" in done.stderr


@pytest.mark.exhaustive
def test_a_reload_of_lightning_and_its_source_are_as_without_us(small_lightning, tmp_path):
    code = (
        "import torch, importlib, inspect, pytorch_lightning.strategies as s\n"
        "assert 'StrategyRegistry' in inspect.getsource(s) and 'shard' in s.StrategyRegistry\n"
        "registry = importlib.reload(s).StrategyRegistry\n"
        "assert 'shard' in registry, registry\n"
    )
    run_python("-c", code, folder=tmp_path, path=[small_lightning])


class AsksAll:
    """An import finder that asks all finders for a module, as the import hooks of tracing tools do."""

    def __init__(self, name: str) -> None:
        self.name, self.busy = name, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name or self.busy:
            return None
        self.busy = True
        try:
            return importlib.util.find_spec(name)
        finally:
            self.busy = False


@pytest.mark.parametrize("first", [True, False])
def test_a_module_is_patched_once_though_another_finder_asks_all_finders(tmp_path, monkeypatch, first):
    (tmp_path / "watched_by_two.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, "watched_by_two", raising=False)
    seen: list[Any] = []
    other = AsksAll("watched_by_two")
    if first:
        sys.meta_path.insert(0, other)
    AfterImport(["watched_by_two"], seen.append).install()
    if not first:
        sys.meta_path.insert(0, other)
    module = importlib.import_module("watched_by_two")
    assert seen == [module]
    importlib.reload(module)
    assert seen == [module, module]
