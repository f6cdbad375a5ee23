"""Lightning's own callbacks see and do under sharding what they see and do on a single device."""

from __future__ import annotations

import contextlib
import csv
import json
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as builtin
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.utils import prune

import torch_shard
from lightning_shard.for_lightning import ShardStrategy
from tests.lightning.support import BATCHES, assert_same_state, loader, net_class, single, trainer
from tests.support.marks import exhaustive
from tests.support.ranks import ranks

ELSEWHERE = {
    "Callback", "Checkpoint", "ProgressBar",  # base classes
    "ModelCheckpoint",  # test_model_checkpoint.py
    "StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging", "ModelPruning",  # test_weight_averaging.py
    "BasePredictionWriter",  # test_steps.py
    "BatchSizeFinder", "LearningRateFinder",  # test_tuner.py
}  # fmt: skip
HERE = {
    "BackboneFinetuning", "BaseFinetuning", "DeviceStatsMonitor", "EarlyStopping",
    "GradientAccumulationScheduler", "LambdaCallback", "LearningRateMonitor", "ModelSummary", "OnExceptionCheckpoint",
    "RichModelSummary", "RichProgressBar", "SpikeDetection", "TQDMProgressBar", "ThroughputMonitor", "Timer",
}  # fmt: skip


def test_every_callback_has_a_test():
    assert set(builtin.__all__) == HERE | ELSEWHERE


def watched(world_size: int, folder: Path, strategy: Any, rich: bool) -> dict[str, Any]:
    """Fit under everything that watches; what they have seen."""
    seen: dict[str, Any] = {"grads": []}

    def norms(trainer: Any, module: Any, optimizer: Any) -> None:
        grads = {name: p.grad for name, p in module.named_parameters()}
        seen["grads"].append({name: (float(g.norm()), float(g.abs().max())) for name, g in grads.items()})

    module = net_class("lightning")(optimizer="adamw")
    stopping = builtin.EarlyStopping("val", min_delta=0.35, patience=1)
    spikes = builtin.SpikeDetection(exclude_batches_path=folder, rtol=100)
    timer = builtin.Timer(duration="00:01:00:00")
    summary = builtin.RichModelSummary() if rich else builtin.ModelSummary(max_depth=2)
    t = trainer(
        "lightning", world_size, strategy, max_epochs=8, default_root_dir=folder, log_every_n_steps=1,
        logger=CSVLogger(folder), enable_progress_bar=True,
        callbacks=[
            stopping, spikes, timer, summary,
            builtin.LearningRateMonitor(log_momentum=True, log_weight_decay=True), builtin.DeviceStatsMonitor(True),
            builtin.GradientAccumulationScheduler({0: 1, 1: 3}), builtin.ThroughputMonitor(lambda batch: len(batch[0])),
            builtin.LambdaCallback(on_before_optimizer_step=norms),
            builtin.RichProgressBar() if rich else builtin.TQDMProgressBar(),
        ],
    )  # fmt: skip
    t.fit(module, loader(world_size), loader(world_size, 2))
    rows: list[dict[str, str]] = []
    if dist.get_rank() == 0:  # the only one that writes files, also where each rank trains for itself
        with open(Path(t.logger.log_dir) / "metrics.csv", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    seen |= {
        "stopped": (stopping.stopped_epoch, float(stopping.best_score), t.current_epoch, t.global_step),
        "state": module.state_dict(),
        "rates": [float(value) for row in rows for key, value in row.items() if "-AdamW" in key and value],
        "time": timer.time_elapsed("train") > 0,
        "logged": {key for row in rows for key in row},
    }
    return seen


@pytest.mark.parametrize("rich", [True, *exhaustive(False)])
@ranks(2)
def test_callbacks_that_watch_a_run_see_what_they_see_on_a_single_device(rank, world_size, tmp_path, rich):
    expected = watched(1, tmp_path / f"single{rank}", "auto", rich)
    found = watched(world_size, tmp_path / "shard", "shard", rich)
    assert_same_state(found["state"], expected["state"])
    assert found["stopped"][0] == expected["stopped"][0] > 0 and found["stopped"][2:] == expected["stopped"][2:]
    assert found["stopped"][1] == pytest.approx(expected["stopped"][1], rel=1e-5)
    assert len(found["grads"]) == len(expected["grads"]) == expected["stopped"][3]
    for own, wanted in zip(found["grads"], expected["grads"], strict=True):
        for name, values in wanted.items():
            assert own[name] == pytest.approx(values, rel=1e-4), name
    assert found["time"]
    if rank == 0:
        assert found["rates"] == pytest.approx(expected["rates"])
        # Rates of work are logged once some time has passed, by the clock.
        own, wanted = ({name for name in run["logged"] if "_per_sec" not in name} for run in (found, expected))
        assert own == wanted and expected["rates"]
        assert any(name.startswith("train") and name.endswith("batches") for name in own), sorted(own)
        assert any("cpu_percent" in name for name in found["logged"]), found["logged"]


class Backbone(net_class("lightning")):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=0.5), nn.Tanh())

    def forward(self, x):
        return super().forward(self.backbone(x))

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("train_bn", [False, *exhaustive(True)])
@ranks(2)
def test_a_backbone_is_thawed_as_on_a_single_device(rank, world_size, train_bn, tmp_path):
    """Frozen, then trained at a rate of its own that grows; also from a checkpoint of before and of after."""
    # All ranks get the whole batch, whose statistics are those of a single device. (DDP does not reduce the gradients of
    # parameters that are thawed later.)

    def fit(strategy: Any, folder: Path, ckpt_path: Any = None) -> Any:
        finetuning = builtin.BackboneFinetuning(
            2, lambda epoch: 1.5, backbone_initial_ratio_lr=0.2, train_bn=train_bn, verbose=True
        )
        saving = builtin.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        options = {"max_epochs": 5, "enable_checkpointing": True, "callbacks": [finetuning, saving]}
        t = trainer("lightning", 1 if strategy == "auto" else world_size, strategy, **options)
        module = Backbone()
        t.fit(module, loader(1), ckpt_path=ckpt_path)
        return module, [group["lr"] for group in t.optimizers[0].param_groups]

    for epoch in (None, 3, 1) if train_bn else (None, 3):
        alone, sharded = (
            (folder, epoch and folder / f"epoch={epoch}.ckpt")
            for folder in (tmp_path / f"single{rank}", tmp_path / "shard")
        )
        (expected, rates), (module, found) = fit("auto", *alone), fit("shard", *sharded)
        assert found == rates and len(rates) == 2
        assert_same_state(module.state_dict(), expected.state_dict())


@pytest.mark.parametrize("form", ["full", *exhaustive("sharded")])
@ranks(2)
def test_the_state_at_an_exception_is_saved(world_size, form, tmp_path):
    class Keeps(builtin.OnExceptionCheckpoint):
        def teardown(self, *args, **kwargs):
            """Without deleting it, as if the machine had failed."""

    class Fails(net_class("lightning")):
        fail = True

        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            if index == 3 and self.fail:
                raise ZeroDivisionError("on purpose")
            return loss

    def run(strategy: Any, folder: Path) -> Any:
        module = Fails()
        for ckpt_path in (None, folder / "failed.ckpt"):
            options = {"enable_checkpointing": True, "callbacks": [Keeps(folder, "failed")]}
            t = trainer("lightning", world_size, strategy(), **options)
            module.fail = ckpt_path is None
            with pytest.raises(ZeroDivisionError) if module.fail else contextlib.nullcontext():
                t.fit(module, loader(world_size), ckpt_path=ckpt_path)
        return module, t.global_step

    expected, steps = run(lambda: "ddp", tmp_path / "ddp")
    module, found = run(lambda: ShardStrategy(state_dict_type=form), tmp_path / "shard")
    assert (tmp_path / "shard" / "failed.ckpt").is_dir() == (form == "sharded")
    assert found == steps
    assert_same_state(module.state_dict(), expected.state_dict())


@ranks(2)
def test_a_spike_ends_the_run_on_all_ranks(rank, world_size, tmp_path):
    class Spikes(net_class("lightning")):
        def training_step(self, batch, index):
            return super().training_step(batch, index) * (1000 if (index, self.global_rank) == (4, 1) else 1)

    with pytest.raises(Exception, match="spike") as caught:
        trainer(
            "lightning", world_size, callbacks=[builtin.SpikeDetection(exclude_batches_path=tmp_path, rtol=100)]
        ).fit(Spikes(), loader(world_size))
    assert type(caught.value).__name__ == "TrainingSpikeException"
    if rank == 0:
        assert json.loads((tmp_path / "skip_batches.json").read_text()) == [3, 4]


class Watched(net_class("lightning")):
    """Watched as Weights & Biases does it: hooks on the parameters' gradients, and one on the module that reads parameters."""

    def statistics(self, tensor: torch.Tensor) -> list[float]:
        flat = tensor.data.reshape(-1)
        low, high = float(flat.min()), float(flat.max())
        return [low, high, *torch.histc(flat, bins=4, min=low, max=high).tolist()]

    def on_train_start(self):
        self.grads: dict[str, list[Any]] = {name: [] for name, _ in self.named_parameters()}
        for name, p in self.named_parameters():
            p.register_hook(lambda grad, name=name: self.grads[name].append(self.statistics(grad.cpu())))
        self.blocks[0].register_forward_hook(
            lambda block, *_: self.seen.append([self.statistics(p.data.cpu()) for p in block.parameters()])
        )


@ranks(2)
def test_hooks_that_watch_gradients_and_parameters_see_those_of_ddp(world_size):
    """Gradients before they are reduced: this rank's, as under DDP."""
    expected, module = Watched(), Watched()
    for strategy, watched in (("ddp", expected), ("shard", module)):
        trainer("lightning", world_size, strategy).fit(watched, loader(world_size))
    assert all(len(values) == BATCHES for values in expected.grads.values())
    for name, values in expected.grads.items():
        assert torch.tensor(module.grads[name]).numpy() == pytest.approx(torch.tensor(values).numpy(), rel=1e-4)
    assert torch.tensor(module.seen).numpy() == pytest.approx(torch.tensor(expected.seen).numpy(), rel=1e-4)


@ranks(2)
def test_a_module_that_was_pruned_before_is_trained_under_its_masks(world_size):
    def make() -> Any:
        module = net_class("lightning")()
        prune.l1_unstructured(module.inner, "weight", amount=0.5)
        prune.random_unstructured(module.blocks[1], "bias", amount=0.3)
        return module

    expected, module = make(), make()
    with torch.no_grad():
        module.load_state_dict(expected.state_dict())
    single("lightning", max_epochs=2).fit(expected, loader(1))
    trainer("lightning", world_size, max_epochs=2).fit(module, loader(world_size))
    assert torch_shard.engine_of(module) is None
    assert_same_state(module.state_dict(), expected.state_dict())
    prune.remove(module.inner, "weight")
    assert int((module.inner.weight == 0).sum()) == module.inner.weight.numel() // 2
