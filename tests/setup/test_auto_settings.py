"""``strategy="auto"``: the script is planned by one rank, in a process of its own, and all ranks train with what that finds."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard
from tests.support.run_python import run_python
from torch_shard import Offload
from torch_shard.activation_checkpointing import has_checkpointed_layers, offload_of
from torch_shard.errors import BudgetError, ConfigError
from torch_shard.plan import Candidate, Estimate
from torch_shard.setup import auto_settings

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)

COMMON = """
import json
import sys

import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from torch_shard.errors import ShardError

layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(6)]
model = nn.Sequential(nn.Linear(64, 256), nn.Sequential(*layers), nn.Linear(256, 10))
torch.manual_seed(0)
for p in model.parameters():
    nn.init.normal_(p, std=0.05)
x, y = torch.randn(4096, 64), torch.randint(10, (4096,))
"""

PLAIN = """
dist.init_process_group("gloo")
optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
try:
    engine = torch_shard.shard(model, strategy="auto", memory=sys.argv[1])
except ShardError as error:
    print(json.dumps([type(error).__name__, str(error)]), flush=True)
    dist.barrier()
    sys.exit()
losses = []
for _ in range(3):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
recomputes = torch_shard.activation_checkpointing.has_checkpointed_layers(model)
print(json.dumps([engine.config.strategy, recomputes, losses]), flush=True)
engine.close()
assert not torch_shard.activation_checkpointing.has_checkpointed_layers(model)
"""

LIGHTNING = """
import lightning

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Tell(lightning.Callback):
    def on_train_end(self, trainer, module):
        print(json.dumps([trainer.strategy.engine.config.strategy]), flush=True)

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64)
trainer = lightning.Trainer(
    strategy="shard_auto", accelerator="cpu", devices=2, max_steps=2, logger=False, enable_checkpointing=False, callbacks=[Tell()]
)
trainer.fit(Module(), data)
"""

ACCELERATE = """
from accelerate_shard import Accelerator, ShardPlugin

accelerator = Accelerator(shard_plugin=ShardPlugin(strategy="auto", memory=sys.argv[1]))
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=1024)
model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
for rows, labels in data:
    accelerator.backward(nn.functional.cross_entropy(model(rows), labels))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
engine = torch_shard.engine_of(model)
print(json.dumps([engine.config.strategy, engine.recomputes]), flush=True)
accelerator.end_training()
"""


def printed(folder: Path, text: str, *arguments: Any) -> list[Any]:
    path = folder / "train.py"
    path.write_text(COMMON + text)
    out = run_python(*arguments[:-1], path, arguments[-1], folder=folder).stdout
    found, decoder = [], json.JSONDecoder()
    for line in out.splitlines():
        while line.startswith("["):  # both ranks may write at once, and what they write may come in one line
            entry, end = decoder.raw_decode(line)
            found.append(entry)
            line = line[end:]
    return found


def expected_losses() -> list[float]:
    space: dict[str, Any] = {}
    exec(COMMON, space)
    model, x, y = space["model"], space["x"], space["y"]
    optimizer, losses = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9), []
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.exhaustive
def test_layers_recompute_if_nothing_fits_without(tmp_path: Path) -> None:
    text = PLAIN.replace('dist.init_process_group("gloo")', "")
    ((strategy, recomputes, losses),) = printed(tmp_path, text, "-u", "60MiB")
    assert (strategy, recomputes) == ("no_shard", True)
    assert losses == pytest.approx(expected_losses(), rel=1e-5)


@pytest.mark.exhaustive
def test_two_ranks_train_with_the_settings_that_fit(tmp_path: Path) -> None:
    found = printed(tmp_path, PLAIN, *TORCHRUN, "48.6MiB")
    assert len(found) == 2 and found[0][:2] == found[1][:2]
    strategy, recomputes, losses = found[0]
    assert (strategy, recomputes) == ("full_shard", True)
    assert losses == pytest.approx(expected_losses(), rel=1e-5)


@pytest.mark.exhaustive
def test_with_much_memory_nothing_need_be_sharded(tmp_path: Path) -> None:
    found = printed(tmp_path, PLAIN, *TORCHRUN, "8GiB")
    assert [entry[1] for entry in found] == [False, False]
    assert found[0][0] != "auto"


@pytest.mark.exhaustive
def test_if_nothing_fits_all_ranks_raise(tmp_path: Path) -> None:
    found = printed(tmp_path, PLAIN, *TORCHRUN, "1MiB")
    assert [entry[0] for entry in found] == ["BudgetError", "BudgetError"]
    for _, text in found:
        assert "The closest is" in text
        assert re.search(
            r"Parameters, gradients and optimizer state alone are 4\.\d\d MiB on each rank under full_shard", text
        )


@pytest.mark.exhaustive
def test_a_plan_that_does_not_end_is_an_error(tmp_path: Path) -> None:
    slow = "import torch_shard.setup.auto_settings as auto\nauto._LONGEST = 0.5\n"
    text = slow + PLAIN.replace('dist.init_process_group("gloo")', "").replace("    dist.barrier()\n", "")
    ((kind, said),) = printed(tmp_path, text, "-u", "8GiB")
    assert kind == "TraceError" and "has not ended within 0.5 s. Name a strategy" in said


@pytest.mark.exhaustive
def test_lightning_knows_it_by_name(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    found = printed(tmp_path, LIGHTNING, "-u", "")
    assert len(found) == 2 and found[0] == found[1] != ["auto"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("memory", "recomputes"), [("8GiB", False), ("20MiB", True)])
def test_accelerate_chooses_and_recomputes(tmp_path: Path, memory: str, recomputes: bool) -> None:
    pytest.importorskip("accelerate")
    found = printed(tmp_path, ACCELERATE, *TORCHRUN, memory)
    assert len(found) == 2 and found[0] == found[1]
    assert found[0][0] != "auto" and found[0][1] is recomputes


@pytest.mark.exhaustive
def test_layers_still_recompute_in_later_runs_of_lightning_with_the_same_engine(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    text = LIGHTNING.replace("import lightning", "import lightning, lightning_shard", 1)
    text = text.replace(
        '"shard_auto"', 'lightning_shard.ShardStrategy(strategy="auto", memory="60MiB", unshard_at_end=False)'
    )
    text = text.replace("devices=2, max_steps=2", "devices=1, max_epochs=1, limit_train_batches=1").replace(
        "json.dumps([trainer.strategy.engine.config.strategy])",
        "json.dumps([torch_shard.activation_checkpointing.has_checkpointed_layers(module), id(trainer.strategy.engine)])",
    )
    text = text.replace("batch_size=64", "batch_size=4096").replace(
        "trainer.fit(Module(), data)",
        "module = Module()\nfor epochs in (1, 2):\n    trainer.fit_loop.max_epochs = epochs\n    trainer.fit(module, data)\n"
        "trainer.validate(module, data, verbose=False)",
    )
    text = text.replace(
        "def configure_opt", "def validation_step(self, batch, index):\n        pass\n\n    def configure_opt"
    )
    text = text.replace(
        "(lightning.Callback):", "(lightning.Callback):\n    on_validation_end = lambda *args: Tell.on_train_end(*args)"
    )
    first, second, evaluating = printed(tmp_path, text, "-u", "")
    assert first == second == evaluating
    assert first[0] is True


@pytest.mark.exhaustive
def test_lightning_evaluates_without_a_plan_and_plans_the_fit_that_follows(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    text = LIGHTNING.replace(
        "def configure_optimizers",
        "def validation_step(self, batch, index):\n        pass\n\n    def configure_optimizers",
    )
    text = text.replace(
        "def on_train_end",
        "def on_validation_end(self, trainer, module):\n        self.on_train_end(trainer, module)\n\n    def on_train_end",
    )
    text = text.replace("trainer.fit(", "trainer.validate(Module(), data, verbose=False)\ntrainer.fit(").replace(
        "devices=2", "devices=1"
    )
    assert printed(tmp_path, text, "-u", "") == [["full_shard"], ["no_shard"]]


def test_a_model_that_does_not_train_is_not_planned() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    engine = torch_shard.shard(model, strategy="auto")
    assert engine.config.strategy == "full_shard"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "auto", "offload": "cpu"}, 'offload: strategy="auto" chooses without it'),
        ({"strategy": "auto", "memory": "lots"}, "memory must be a number of bytes such as 80GiB"),
        ({"memory": 1 << 30}, 'memory is for strategy="auto"'),
        ({"strategy": "auto", "memory": 0}, "memory must be an integer of at least 1"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        torch_shard.ShardConfig(**settings)


def test_what_the_plan_chooses_reaches_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = Candidate("full_shard", 0, None, Offload(params=False), ("TransformerEncoderLayer",), True)
    smaller = ["full_shard, prefetch 0 (1.00 MiB)"]
    estimate = dataclasses.asdict(Estimate(candidate, 1, 1, 1.0, 0, {})) | {
        "settings": str(candidate),
        "smaller": smaller,
    }
    monkeypatch.setattr(auto_settings, "_planned", lambda *_: json.loads(json.dumps(estimate)))
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(16, 1))
    engine = torch_shard.shard(model, strategy="auto")
    config = engine.config
    assert (config.strategy, config.prefetch, config.offload) == ("full_shard", 0, Offload(params=False))
    assert has_checkpointed_layers(model) and not has_checkpointed_layers(model[1])
    assert offload_of(model) is not None
    engine.close()
    assert engine.smaller_settings == tuple(smaller)


def planned(monkeypatch: pytest.MonkeyPatch, code: int, found: dict[str, Any]) -> dict[str, Any]:
    """Return what is made of the answer of ``torch-shard plan``."""
    monkeypatch.setattr(auto_settings, "_run", lambda command: (code, json.dumps(found), ""))
    monkeypatch.setattr(auto_settings, "_program", list)
    return auto_settings._planned(torch_shard.ShardConfig(strategy="auto", memory=1 << 30), torch.device("cpu"), 1)


def test_the_next_smaller_settings_are_the_fastest_ones_that_take_less(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"best": 8 << 20, "slower": 9 << 20, "small": 6 << 20, "smaller": 4 << 20, "smallest": 2 << 20}
    candidates = [{"settings": name, "nbytes": nbytes} for name, nbytes in sizes.items()]
    best = planned(monkeypatch, 0, {"candidates": candidates})
    assert best["settings"] == "best"
    assert best["smaller"] == ["small (6.00 MiB)", "smaller (4.00 MiB)"]


def test_an_error_that_nothing_fits_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BudgetError, match="no settings fit 1 MiB"):
        planned(monkeypatch, 1, {"candidates": [{}], "shortage": "no settings fit 1 MiB"})
