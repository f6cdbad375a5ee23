"""ShardMonitor: what it logs is what happened, and what it says helps."""

from __future__ import annotations

import contextlib
import csv
import io
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

import lightning_shard
from lightning_shard.monitor.hints import hints
from lightning_shard.monitor.metrics import Window
from lightning_shard.registration import registry as _registry
from tests.lightning.support import (
    BATCHES,
    NAMESPACES,
    both_namespaces,
    either_namespace,
    loader,
    net_class,
    single,
    trainer,
)
from tests.support.logs import captured_log
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError


def monitor(namespace: str, **options: Any) -> Any:
    return _registry.trainer_module(namespace).ShardMonitor(**options)


def recorder(namespace: str, separator: str = "/") -> Any:
    """A logger that keeps what it is given, on every rank."""

    class Records(NAMESPACES[namespace].loggers.Logger):
        name, version, group_separator = "records", 0, separator

        def __init__(self) -> None:
            super().__init__()
            self.logged: list[tuple[int, dict[str, float]]] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            mine = {name: value for name, value in metrics.items() if name.startswith("shard")}
            if mine:
                self.logged.append((step, mine))

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

    return Records()


class UnitNorms(Callback):
    """On a single device: norms of parameters by name, at every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.steps.append({n: p.grad.norm() for n, p in module.named_parameters() if p.grad is not None})


def fit(namespace: str, world_size: int, callback: Any, **options: Any) -> tuple[Any, Any]:
    module = net_class(namespace)()
    t = trainer(namespace, world_size, callbacks=[callback], **options)
    t.fit(module, loader(world_size))
    return module, t


@both_namespaces
@ranks(2)
def test_each_logger_gets_the_figures_of_the_steps_that_are_logged(rank, world_size, namespace):
    loggers = [recorder(namespace), recorder(namespace, ".")]
    sent = []

    class Look(NAMESPACES[namespace].Callback):
        def on_train_start(self, trainer, module):
            sent.append(trainer.strategy.engine.bytes_sent)

        def on_train_end(self, trainer, module):
            sent.append(trainer.strategy.engine.bytes_sent)
            held = trainer.strategy.engine.memory_summary(trainer.optimizers)
            sent.append(held["parameters"] + held["gradients"] + held["optimizer"])

    module = net_class(namespace)()
    callbacks = [monitor(namespace), Look()]
    trainer(namespace, world_size, callbacks=callbacks, logger=loggers, log_every_n_steps=2).fit(
        module, loader(world_size)
    )
    for logger, between in zip(loggers, "/.", strict=True):
        assert [step for step, _ in logger.logged] == [1, 3, 5]
        for _, figures in logger.logged:
            assert not [name for name in figures if not name.startswith(f"shard{between}")]
    figures = {name: [f[f"shard/{name}"] for _, f in loggers[0].logged] for name in ("bytes_sent", "resident_bytes")}
    assert sum(figures["bytes_sent"]) * 2 == sent[1] - sent[0] > 0
    assert figures["resident_bytes"][-1] == sent[2]
    for _, f in loggers[0].logged:
        assert 0 < f["shard/wait_share"] < 1
        assert min(f["shard/gather_wait"], f["shard/reduce_wait"], f["shard/other_wait"]) > 0
        assert f["shard/gathered_bytes"] == 0 < f["shard/peak_gathered_bytes"]


@either_namespace
@ranks(2)
def test_lightnings_own_logger_writes_the_figures_of_every_step(rank, world_size, namespace, tmp_path):
    logger = NAMESPACES[namespace].loggers.CSVLogger(tmp_path)
    fit(namespace, world_size, monitor(namespace, grad_norms=True), logger=logger, log_every_n_steps=1)
    if rank:
        return  # Lightning writes on rank 0
    with open(Path(logger.log_dir) / "metrics.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["shard/bytes_sent"]]
    assert [int(row["step"]) for row in rows] == list(range(BATCHES))
    figures = {name for name in rows[0] if name.startswith("shard/")}
    waits = {"gather_wait", "reduce_wait", "other_wait", "host_wait", "wait_share"}
    sizes = {"bytes_sent", "gathered_bytes", "peak_gathered_bytes", "resident_bytes"}
    assert {f"shard/{name}" for name in waits | sizes} < figures
    assert any(name.startswith("shard/grad_norm/") for name in figures)
    assert all(float(row[name]) >= 0 for row in rows for name in figures)


@pytest.mark.parametrize("accumulate", [*exhaustive(1), 2])
@ranks(2)
def test_norms_of_units_are_those_of_a_single_device(world_size, accumulate):
    options = {"log_every_n_steps": 1, "gradient_clip_val": 0.1, "accumulate_grad_batches": accumulate}
    reference = UnitNorms()
    single("lightning", callbacks=[reference], **options).fit(net_class("lightning")(), loader(1))
    records, units = recorder("lightning"), {}

    class Look(Callback):
        def on_train_start(self, trainer, module):
            units.update({unit.name: list(unit.names) for unit in trainer.strategy.engine.units})

    module = net_class("lightning")()
    callbacks = [monitor("lightning", grad_norms=True), Look()]
    trainer("lightning", world_size, callbacks=callbacks, logger=records, **options).fit(module, loader(world_size))
    assert len(records.logged) == len(reference.steps) == BATCHES // accumulate
    assert len(units) > 1
    for (_, figures), norms in zip(records.logged, reference.steps, strict=True):
        for unit, names in units.items():
            wanted = torch.stack([norms[name] for name in names]).norm().item()
            assert figures[f"shard/grad_norm/{unit}"] == pytest.approx(wanted, rel=1e-5)


def gan_class() -> Any:
    class Two(net_class("lightning")):
        """Two optimizers that step in every batch; they share the root's unit."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            for optimizer in self.optimizers():
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self):
            some = [*self.blocks.parameters(), self.scale]
            mine = {id(p) for p in some}
            rest = [p for p in self.parameters() if id(p) not in mine]
            return torch.optim.SGD(some, lr=0.05), torch.optim.SGD(rest, lr=0.05)

    return Two


@pytest.mark.exhaustive
@ranks(2)
def test_units_of_several_optimizers_have_one_norm(world_size):
    names: dict[str, list[str]] = {}
    wanted: list[dict[str, torch.Tensor]] = []

    class Reference(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            wanted.append({})

        def on_before_optimizer_step(self, trainer, module, optimizer):
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            wanted[-1].update({n: p.grad.norm() for n, p in module.named_parameters() if id(p) in mine})

    class Look(Callback):
        def on_train_start(self, trainer, module):
            names.update({unit.name: list(unit.names) for unit in trainer.strategy.engine.units})

    single("lightning", callbacks=[Reference()]).fit(gan_class()(), loader(1))
    records = recorder("lightning")
    callbacks = [monitor("lightning", grad_norms=True), Look()]
    options = {"callbacks": callbacks, "logger": records, "log_every_n_steps": 1}
    trainer("lightning", world_size, lightning_shard.ShardStrategy(units=["blocks.*"]), **options).fit(
        gan_class()(), loader(world_size)
    )
    assert len(records.logged) == BATCHES
    for (_, figures), norms in zip(records.logged, wanted, strict=True):
        for unit, members in names.items():
            expected = torch.stack([norms[name] for name in members]).norm().item()
            assert figures[f"shard/grad_norm/{unit}"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bar", ["none", *exhaustive("tqdm", "rich")])
@ranks(2)
def test_one_line_an_epoch_whatever_the_bar(rank, world_size, bar, tmp_path):
    from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

    if bar == "rich":
        pytest.importorskip("rich")
    bars = {"none": [], "tqdm": [TQDMProgressBar(refresh_rate=1)], "rich": [RichProgressBar()]}[bar]
    module, out = net_class("lightning")(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        t = trainer(
            "lightning",
            world_size,
            callbacks=[monitor("lightning"), *bars],
            max_epochs=2,
            enable_progress_bar=bar != "none",
        )
        t.fit(module, loader(world_size))
    lines = [line for line in out.getvalue().replace("\r", "\n").splitlines() if "shard: epoch" in line]
    assert len(lines) == (2 if rank == 0 else 0)
    if rank == 0:
        assert "shard: epoch 1:" in lines[1]
        assert "KiB sent per step" in lines[1]


def slow(namespace: str) -> Any:
    class Slow(net_class(namespace)):
        """One rank computes for long inside its forward; the other waits for it in a gather."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            if rank == 1:
                self.blocks[0].register_forward_hook(lambda *_: time.sleep(0.05))

    return Slow


@pytest.mark.exhaustive
@ranks(2)
def test_waiting_that_does_not_end_is_warned_about_once_with_remedies(rank, world_size):
    watcher = monitor("lightning", warm_up=1, patience=2, threshold=0.2, summary=False)
    with captured_log() as said:
        trainer("lightning", world_size, callbacks=[watcher], max_epochs=2).fit(slow("lightning")(rank), loader(2))
    said = [text for text in said if "communication does not hide" in text]
    if rank == 0:
        assert len(said) == 1
        assert "2 steps in a row" in said[0]
        assert "precision='bf16-mixed'" in said[0]
        assert "strategy='shard_zero2'" in said[0]
        assert "a larger batch" in said[0]


@pytest.mark.exhaustive
@ranks(2)
def test_short_waits_and_warm_up_are_not_warned_about(rank, world_size):
    with captured_log() as said:
        for options in ({"threshold": 1.0, "warm_up": 0, "patience": 1}, {"warm_up": 6}, {"patience": 7, "warm_up": 0}):
            watcher = monitor("lightning", summary=False, **options)
            trainer("lightning", world_size, callbacks=[watcher]).fit(slow("lightning")(rank), loader(2))
    assert not [text for text in said if "communication" in text]


def test_hints_follow_from_what_the_run_does():
    def asked(gathers=1.0, reductions=0.0, nodes=1, accumulate=1, itemsize=4, **config):
        from torch_shard import ShardConfig

        plan = SimpleNamespace(units=[SimpleNamespace(numel=10, gathered_nbytes=10 * itemsize)])
        engine = SimpleNamespace(config=ShardConfig(**config), plan=plan)
        given = SimpleNamespace(num_nodes=nodes, accumulate_grad_batches=accumulate)
        found = hints(engine, Window(steps=1, seconds=2.0, gather_wait=gathers, reduce_wait=reductions), given)
        assert "a larger batch" in found[-1]
        return " ".join(found)

    assert "bf16-mixed" in asked() and "bf16-mixed" not in asked(itemsize=2)
    assert "shard_zero2" in asked() and "if 40 bytes fit" in asked()
    assert "shard_zero2" not in asked(strategy="shard_grad_op")
    assert "shard_zero2" not in asked(gathers=0.1, reductions=1.0)
    assert "'shard_hybrid_zero2'" in asked(strategy="hybrid_shard")
    assert "'shard_hybrid'" in asked(nodes=2) and "'shard_hybrid'" not in asked(nodes=2, strategy="hybrid_shard")
    assert "prefetch=2" in asked() and "prefetch" not in asked(prefetch=2)
    assert "defer_gradient_sync" in asked(gathers=0.0, reductions=1.0, accumulate=8)
    assert "defer_gradient_sync" not in asked(gathers=0.0, reductions=1.0)


@both_namespaces
def test_another_strategy_is_refused_before_anything_happens(namespace):
    error = NAMESPACES[namespace].utilities.exceptions.MisconfigurationException
    module = net_class(namespace)()
    with pytest.raises(error, match=r"Trainer\(strategy='shard'\)"):
        single(namespace, callbacks=[monitor(namespace)]).fit(module, loader(1))


@pytest.mark.parametrize(
    "options", [{"threshold": 0}, {"threshold": 1.5}, {"warm_up": -1}, {"patience": 0}, {"patience": 2.5}]
)
def test_bad_arguments_are_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        lightning_shard.ShardMonitor(**options)


def test_the_callback_is_that_of_the_namespace_in_use():
    assert issubclass(lightning_shard.ShardMonitor, Callback)
    assert lightning_shard.ShardMonitor.__module__ == "lightning_shard.for_lightning"
