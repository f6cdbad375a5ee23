"""ShardMonitor: what it logs is what happened, and what it says helps."""

from __future__ import annotations

import contextlib
import csv
import io
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

import lightning_shard
from lightning_shard.monitor.hints import hints
from lightning_shard.monitor.metrics import Window
from lightning_shard.registration import registry as _registry
from tests.lightning.support import (
    BATCHES,
    NAMESPACES,
    Net,
    TwoOptimizers,
    both_namespaces,
    fitted,
    loader,
    net_class,
    single,
    trainer,
)
from tests.support.logs import captured_log
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import ShardConfig
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


@both_namespaces
@ranks(2)
def test_each_logger_gets_the_figures_of_the_steps_that_are_logged(rank, world_size, namespace, tmp_path):
    lightnings = NAMESPACES[namespace].loggers.CSVLogger(tmp_path / str(rank))
    loggers = [recorder(namespace), recorder(namespace, "."), lightnings]
    sent = []

    class Look(NAMESPACES[namespace].Callback):
        def on_train_start(self, trainer, module):
            sent.append(trainer.strategy.engine.bytes_sent)

        def on_train_end(self, trainer, module):
            sent.append(trainer.strategy.engine.bytes_sent)
            held = trainer.strategy.engine.memory_summary(trainer.optimizers)
            sent.append(held["parameters"] + held["gradients"] + held["optimizer"])

    callbacks = [monitor(namespace), Look()]
    t = trainer(namespace, world_size, callbacks=callbacks, logger=loggers, log_every_n_steps=2)
    t.fit(net_class(namespace)(), loader(world_size))
    for logger, between in zip(loggers[:2], "/.", strict=True):
        assert [step for step, _ in logger.logged] == [1, 3, 5]
        for _, figures in logger.logged:
            assert not [name for name in figures if not name.startswith(f"shard{between}")]
    figures = {name: [f[f"shard/{name}"] for _, f in loggers[0].logged] for name in ("bytes_sent", "resident_bytes")}
    assert sum(figures["bytes_sent"]) * 2 == sent[1] - sent[0] > 0
    assert figures["resident_bytes"][-1] == sent[2]
    for _, f in loggers[0].logged:
        assert 0 < f["shard/wait_share"] < 1
        assert min(f["shard/gather_wait"], f["shard/reduce_wait"], f["shard/other_wait"]) > 0
        assert f["shard/host_wait"] >= 0
        assert f["shard/gathered_bytes"] == 0 < f["shard/peak_gathered_bytes"]
    if rank == 0:  # where Lightning's own logger writes
        with open(Path(lightnings.log_dir) / "metrics.csv", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["shard/bytes_sent"]]
        assert [float(row["shard/bytes_sent"]) for row in rows] == figures["bytes_sent"]


class Norms(Callback):
    """On a single device: norms of parameters by name, for each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if optimizer is trainer.optimizers[0]:
            self.steps.append({})
        self.steps[-1].update({n: p.grad.norm() for n, p in module.named_parameters() if id(p) in mine})


@pytest.mark.parametrize(
    ("several", "options"),
    [(False, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}), *exhaustive((True, {}))],
)
@ranks(2)
def test_norms_of_units_are_those_of_a_single_device(several, options):
    make = TwoOptimizers if several else Net
    reference, records, units = Norms(), recorder("lightning"), {}

    class Look(Callback):
        def on_train_start(self, trainer, module):
            units.update({unit.name: list(unit.names) for unit in trainer.strategy.engine.units})

    single("lightning", callbacks=[reference], **options).fit(make(), loader(1))
    options = {**options, "callbacks": [monitor("lightning", grad_norms=True), Look()], "log_every_n_steps": 1}
    strategy = lightning_shard.ShardStrategy(units=["blocks.*"])
    fitted(make(), strategy, logger=records, **options)
    assert len(records.logged) == len(reference.steps) == BATCHES // options.get("accumulate_grad_batches", 1)
    assert len(units) > 1
    for (_, figures), norms in zip(records.logged, reference.steps, strict=True):
        for unit, names in units.items():
            wanted = torch.stack([norms[name] for name in names]).norm().item()
            assert figures[f"shard/grad_norm/{unit}"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("bar", [None, *exhaustive(TQDMProgressBar, RichProgressBar)])
@ranks(2)
def test_one_line_an_epoch_whatever_the_bar(rank, bar):
    callbacks = [monitor("lightning"), *([bar()] if bar else [])]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        fitted(Net(), callbacks=callbacks, max_epochs=2, enable_progress_bar=bar is not None)
    lines = [line for line in out.getvalue().replace("\r", "\n").splitlines() if "shard: epoch" in line]
    assert len(lines) == (2 if rank == 0 else 0)
    assert rank > 0 or ("shard: epoch 1:" in lines[1] and "KiB sent per step" in lines[1])


class Slow(Net):
    """One rank computes for long inside its forward; the other waits for it in a gather."""

    def on_train_start(self) -> None:
        if self.global_rank == 1:
            self.blocks[0].register_forward_hook(lambda *_: time.sleep(0.05))


@pytest.mark.parametrize("fails", [False, *exhaustive(True)])
@ranks(2)
def test_rank_0_writes_a_report_at_the_end(rank, fails, tmp_path):
    pytest.importorskip("matplotlib")

    class Fails(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if fails and batch_idx == 1:
                raise RuntimeError("the run ends here")

    paths = [tmp_path / f"{number}.html" for number in (0, 1)]
    watcher = monitor("lightning", report=paths[rank], summary=False)
    with pytest.raises(RuntimeError, match="ends here") if fails else contextlib.nullcontext():
        fitted(Fails(), callbacks=[watcher], logger=False, log_every_n_steps=1)
    if rank == 0:
        text = paths[0].read_text()
        assert text.count("<svg") == 4 and "Fails, rank 0 of 2" in text
        steps = 2 if fails else BATCHES
        assert len(re.findall(r'<tr class=""><td>\d+</td>', text)) == min(steps, 10)
    assert not paths[1].exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"threshold": 0.2, "warm_up": 1, "patience": 2}, True),
        ({"threshold": 1.0, "warm_up": 0, "patience": 1}, False),
        ({"warm_up": 2 * BATCHES}, False),
        ({"warm_up": 0, "patience": 2 * BATCHES + 1}, False),
    ],
)
@ranks(2)
def test_waiting_that_does_not_end_is_warned_about_once_with_remedies(rank, options, warned):
    watcher = monitor("lightning", summary=False, **options)
    with captured_log() as said:
        fitted(Slow(), callbacks=[watcher], max_epochs=2)
    said = [text for text in said if "communication does not hide" in text]
    assert len(said) == (warned and rank == 0)
    for part in ("2 steps in a row", "precision='bf16-mixed'", "strategy='shard_zero2'", "a larger batch"):
        assert all(part in text for text in said)


def test_hints_follow_from_what_the_run_does():
    def asked(gathers=1.0, reductions=0.0, nodes=1, accumulate=1, itemsize=4, **config):
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
