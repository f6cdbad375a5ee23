"""Lightning's own callbacks and loggers see and do under sharding what they see and do on a single device."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as builtin
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.nn.utils import prune

import lightning_shard.trainer.graph
from tests.lightning.support import (
    Net,
    assert_same_state,
    compare,
    copied_state,
    fitted,
    loader,
    shard_strategy,
    trainer,
)
from tests.support.logs import captured_log
from tests.support.marks import exhaustive
from tests.support.ranks import ranks

ELSEWHERE = {
    "Callback", "Checkpoint", "ProgressBar",  # base classes
    "ModelCheckpoint",  # test_model_checkpoint.py
    "StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging", "ModelPruning",  # test_weight_averaging.py
    "BasePredictionWriter",  # test_training.py
    "OnExceptionCheckpoint",  # test_ending.py
}  # fmt: skip
HERE = {
    "BackboneFinetuning", "BaseFinetuning", "BatchSizeFinder", "DeviceStatsMonitor", "EarlyStopping",
    "GradientAccumulationScheduler", "LambdaCallback", "LearningRateFinder", "LearningRateMonitor", "ModelSummary",
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

    module = Net(optimizer="adamw")
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


class Backbone(Net):
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
    """Frozen, then trained at a rate of its own that grows; also from a checkpoint of after, and of before."""
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

    alone, sharded = tmp_path / f"single{rank}", tmp_path / "shard"
    for name in (None, "epoch=3.ckpt", *(["epoch=1.ckpt"] if train_bn else [])):
        expected, rates = fit("auto", alone, name and alone / name)
        module, found = fit("shard", sharded, name and sharded / name)
        assert found == rates and len(rates) == 2
        assert_same_state(module.state_dict(), expected.state_dict())


@ranks(2)
def test_a_module_that_was_pruned_before_is_trained_under_its_masks(world_size):
    class Pruned(Net):
        def __init__(self) -> None:
            super().__init__()
            prune.l1_unstructured(self.inner, "weight", amount=0.5)
            prune.random_unstructured(self.blocks[1], "bias", amount=0.3)  # net_class() seeds what is random

    module, _, _ = compare(world_size, Pruned, max_epochs=2)
    prune.remove(module.inner, "weight")
    assert int((module.inner.weight == 0).sum()) == module.inner.weight.numel() // 2


# -- tuning -------------------------------------------------------------------------------------------------------------


class Tuned(Net):
    """Its losses differ between the ranks, so that those of a single device are no measure."""

    batch_size = 4

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.05

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def found_by_tuner(world_size: int, strategy: Any, folder: Any) -> Any:
    module = Tuned()
    before = copied_state(module)
    t = trainer("lightning", world_size, strategy, max_epochs=2, default_root_dir=folder)
    finder = Tuner(t).lr_find(module, loader(world_size), min_lr=1e-4, num_training=15, early_stop_threshold=None)
    assert_same_state(module.state_dict(), before)
    t.fit(module, loader(world_size))
    return module, finder.results, finder.suggestion(skip_begin=2, skip_end=1)


def found_by_callback(world_size: int, strategy: Any, folder: Any) -> Any:
    module, finder = Tuned(), builtin.LearningRateFinder(min_lr=1e-4, num_training_steps=15, early_stop_threshold=None)
    # Of its steps the callback leaves the first ten out: two epochs have too few.
    fitted(module, strategy, max_epochs=4, default_root_dir=folder, callbacks=[finder])
    return module, finder.optimal_lr.results, finder.optimal_lr.suggestion()


@pytest.mark.parametrize(
    ("find", "form"), [(found_by_tuner, "full"), *exhaustive((found_by_callback, "full"), (found_by_tuner, "sharded"))]
)
@ranks(2)
def test_the_learning_rate_that_is_found_is_that_of_ddp(world_size, find, form, tmp_path):
    expected, wanted, suggestion = find(world_size, "ddp", tmp_path)
    module, results, suggested = find(world_size, shard_strategy(state_dict_type=form), tmp_path)
    assert results["lr"] == wanted["lr"] and len(wanted["loss"]) > 10
    assert results["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    assert suggested == suggestion is not None
    assert module.lr == expected.lr
    assert_same_state(module.state_dict(), expected.state_dict())
    assert list(tmp_path.rglob("*.ckpt")) == []


@ranks(2)
def test_the_batch_size_finder_is_refused_as_under_ddp(world_size):
    for strategy in ("ddp", "shard"):
        with pytest.raises(ValueError, match="not supported with distributed strategies"):
            Tuner(trainer("lightning", world_size, strategy)).scale_batch_size(Tuned(), loader(world_size))
        t = trainer("lightning", world_size, strategy, callbacks=[builtin.BatchSizeFinder()])
        with pytest.raises(MisconfigurationException, match="not supported with distributed strategies"):
            t.fit(Tuned(), loader(world_size))


# -- a logger that traces the model on rank 0, as TensorBoardLogger(log_graph=True) does -----------------------------------


class Traces(Logger):
    """As Lightning's, but that it keeps the graph."""

    name, version, _log_graph = "traces", 0, True

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        pass

    def log_hyperparams(self, *args: Any) -> None:
        pass

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        traced = torch.jit.trace(model, model.example_input_array, strict=False)
        nodes = [str(node.kind()) for node in traced.inlined_graph.nodes()]
        self.graphs.append([kind for kind in nodes if kind.startswith("aten")])


def example() -> Any:
    module = Net()
    module.example_input_array = torch.ones(2, 6)
    return module


@pytest.mark.exhaustive
@ranks(2)
def test_the_graph_that_is_logged_is_that_of_ddp_and_the_run_goes_on(rank, world_size):
    found = []
    for strategy in ("ddp", "shard", shard_strategy(unshard_at_end=False)):
        module, logger = example(), Traces()
        t = trainer("lightning", world_size, strategy, logger=logger)
        t.validate(module, loader(world_size), verbose=False)
        t.fit(module, loader(world_size))
        found.append((logger.graphs, module, t.callback_metrics["train"]))
        assert "log_graph" not in vars(logger)
    (graphs, expected, loss), (own, module, value), (others, _, third) = found
    assert [graph.count("aten::linear") for graph in graphs] == ([5, 5] if rank == 0 else [])
    assert own == graphs and others == graphs
    assert_same_state(module.state_dict(), expected.state_dict())
    torch.testing.assert_close(torch.stack([value, third]), torch.stack([loss, loss]))


@ranks(2)
def test_no_graph_is_logged_where_whole_parameters_do_not_fit(rank, monkeypatch):
    monkeypatch.setattr(lightning_shard.trainer.graph, "fits_on_every_rank", lambda *_: False)
    module, logger = example(), Traces()
    with captured_log() as log:
        fitted(module, shard_strategy(unshard_at_end=False), logger=logger)
    assert not logger.graphs
    assert rank > 0 or any("log_graph=False" in line for line in log)
