"""``Trainer(strategy="shard")`` needs no import, and costs nothing where Lightning is not used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ["shard", "shard_zero2", "shard_spawn", "shard_fork"]
TRAINER = """
from {package}.strategies import StrategyRegistry
assert {names} == [name for name in StrategyRegistry if name.startswith("shard")], list(StrategyRegistry)
t = {package}.Trainer(strategy="SHARD_zero2", accelerator="cpu", devices=2, logger=False, enable_progress_bar=False)
assert type(t.strategy).__name__ == "ShardStrategy" and t.strategy.config.strategy == "shard_grad_op"
assert type(t.strategy).__module__ == "lightning_shard.for_{namespace}"
"""


def python(code: str, *folders: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*map(str, folders), *(p for p in sys.path if p)])
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def entry_point(tmp_path: Path) -> Path:
    """A folder with the entry point alone, as installing the distribution would leave it."""
    info = tmp_path / "entry" / "entry_of_lightning_shard-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: entry-of-lightning-shard\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nentry_of_lightning_shard = lightning_shard._autoload:install\n")
    return info.parent


@pytest.mark.parametrize("namespace", ["lightning", "pytorch_lightning"])
def test_the_names_are_known_without_an_import(namespace, entry_point):
    package = {"lightning": "lightning.pytorch"}.get(namespace, namespace)
    code = f"import sys, {package}\n" + TRAINER.format(package=package, namespace=namespace, names=NAMES)
    done = python(code, entry_point)
    assert done.returncode == 0, done.stderr


def test_where_autoloading_is_off_an_import_does_the_same(entry_point):
    for order in ("import lightning_shard, lightning.pytorch", "import lightning.pytorch, lightning_shard"):
        code = f"{order}\n" + TRAINER.format(package="lightning.pytorch", namespace="lightning", names=NAMES)
        done = python(code, entry_point, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        assert done.returncode == 0, done.stderr


def test_importing_torch_imports_nothing_more(entry_point):
    heavy = "{m.partition('.')[0] for m in sys.modules} & {'torch_shard', 'lightning', 'pytorch_lightning'}"
    done = python(f"import torch, sys; assert 'lightning_shard' in sys.modules; assert not {heavy}, {heavy}", entry_point)
    assert done.returncode == 0, done.stderr


def test_a_broken_front_end_breaks_neither_torch_nor_lightning(entry_point, tmp_path):
    broken = tmp_path / "broken" / "lightning_shard"
    broken.mkdir(parents=True)
    for name in ("__init__.py", "_autoload.py"):
        source = Path(sys.modules["lightning_shard"].__file__ if "lightning_shard" in sys.modules else "", "..", name)
        (broken / name).write_text(source.resolve().read_text())
    (broken / "_registry.py").write_text("raise ValueError('on purpose')\n")
    done = python("import torch, lightning.pytorch as pl; pl.Trainer(logger=False)", broken.parent, entry_point)
    assert done.returncode == 0, done.stderr
    assert "lightning_shard.ShardStrategy()" in done.stderr


def test_the_source_of_lightnings_module_stays_readable(entry_point):
    done = python(
        "import inspect, lightning.pytorch.strategies as s; assert 'StrategyRegistry' in inspect.getsource(s)\n"
        "import importlib; importlib.reload(s); assert 'shard' in s.StrategyRegistry",
        entry_point,
    )
    assert done.returncode == 0, done.stderr
