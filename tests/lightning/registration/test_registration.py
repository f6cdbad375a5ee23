"""``Trainer(strategy="shard")`` needs no import, starts its ranks, and leaves torch and Lightning as they are otherwise."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import warnings
from pathlib import Path

import pytest
import torch

import lightning_shard
from tests.support.run_python import run_python

NAMES = [
    "shard",
    "shard_zero2",
    "shard_zero1",
    "shard_hybrid",
    "shard_hybrid_zero2",
    "shard_offload",
    "shard_spawn",
    "shard_fork",
]

SCRIPT = """
import json, logging, sys, warnings
{imports}
import torch

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))

    def training_step(self, batch, index):
        return (self.net(batch[:, :4]) - batch[:, 4:]).square().mean()

    test_step = lambda self, batch, index: self.log("test", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))
    for strategy, devices in {runs}:
        options = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
        t = pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=3, **options)
        net = Net()
        # One batch per epoch: the order in which a sampler deals it out does not matter.
        t.fit(net, torch.utils.data.DataLoader(batch, batch_size=8 // devices))
        state = {{name: value.tolist() for name, value in net.state_dict().items()}}
        test = t.test(net, torch.utils.data.DataLoader(batch, batch_size=8 // devices), verbose=False)[0]["test"]
        if t.is_global_zero:
            print("RESULT", json.dumps([t.world_size, test, state]), flush=True)


if __name__ == "__main__":
    main()
"""


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


def results(printed: str) -> list[list]:
    return [json.loads(line.removeprefix("RESULT ")) for line in printed.splitlines() if line.startswith("RESULT ")]


def single() -> list:
    """What the script gives on a single device, run in this process, where Lightning is imported already."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed:
        variables = {"__name__": "single"}
        exec(SCRIPT.format(imports="import lightning.pytorch as pl", runs=[("auto", 1)]), variables)
        variables["main"]()
    logging.disable(logging.NOTSET)
    return results(printed.getvalue())[0]


def same(found: list, wanted: list) -> None:
    assert found[1] == pytest.approx(wanted[1], rel=1e-4)
    assert list(found[2]) == list(wanted[2])
    for name, value in wanted[2].items():
        torch.testing.assert_close(torch.tensor(found[2][name]), torch.tensor(value), msg=f"{name} differs")


BOTH = """
import sys
import on_pytorch_lightning

if __name__ == "__main__":
    on_pytorch_lightning.main()
    assert "lightning" not in sys.modules  # each works where the other is not installed
    import on_lightning
    on_lightning.main()
"""


@pytest.mark.wheel
@pytest.mark.skipif("TORCH_SHARD_WHEEL" not in os.environ, reason="slow, and the wheel is what counts: make test-wheel")
def test_a_script_trains_on_two_ranks_without_importing_anything_of_ours(tmp_path):
    """Importing Lightning takes most of the time, so one script serves for both namespaces: much of it they share."""
    for name, package in (("on_pytorch_lightning", "pytorch_lightning"), ("on_lightning", "lightning.pytorch")):
        (tmp_path / f"{name}.py").write_text(SCRIPT.format(imports=f"import {package} as pl", runs=[("shard", 2)]))
    script = tmp_path / "train.py"
    script.write_text(BOTH)
    wanted = single()
    first, second = results(run_python(script, folder=tmp_path).stdout)
    for found in (first, second):
        assert found[0] == 2
        same(found, wanted)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_are_started_by_multiprocessing_where_autoloading_is_off(tmp_path, method):
    script = tmp_path / "launch.py"
    imports = "import lightning.pytorch as pl, lightning_shard"
    script.write_text(SCRIPT.format(imports=imports, runs=[(f"shard_{method}", 2)]))
    (found,) = results(run_python(script, folder=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout)
    assert found[0] == 2
    same(found, single())


def test_both_namespaces_get_the_names_and_each_its_own_class():
    import lightning.pytorch
    import pytorch_lightning

    for namespace, package in (("lightning", lightning.pytorch), ("pytorch_lightning", pytorch_lightning)):
        registry = package.strategies.StrategyRegistry
        assert [name for name in registry if name.startswith("shard")] == NAMES
        t = package.Trainer(
            strategy="SHARD_zero2", accelerator="cpu", devices=2, logger=False, enable_progress_bar=False
        )
        assert isinstance(t.strategy, package.strategies.ParallelStrategy)
        assert type(t.strategy).__module__ == f"lightning_shard.for_{namespace}"
        assert t.strategy.config.strategy == "shard_grad_op"
    assert lightning_shard.ShardStrategy.__module__ == "lightning_shard.for_lightning"


@pytest.mark.exhaustive
def test_a_broken_front_end_breaks_neither_torch_nor_lightning(small_lightning, tmp_path):
    broken = tmp_path / "broken" / "lightning_shard"
    (broken / "registration").mkdir(parents=True)
    for name in ("__init__.py", "_autoload.py", "registration/__init__.py", "registration/autoload.py"):
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
