"""Training with parameters, gradients and optimizer state in host memory, chosen through the Trainer, Fabric and LightningCLI."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback

import torch_shard
from lightning_shard.for_lightning import ShardStrategy
from lightning_shard.registration.registry import strategy_class
from tests.lightning.fabric.support import NAMESPACES as FABRIC_NAMESPACES
from tests.lightning.fabric.test_strategy import assert_trains_like_ddp
from tests.lightning.registration.test_cli import CLASS, cli
from tests.lightning.support import assert_same_state, either_namespace, loader, net_class, trainer
from tests.lightning.trainer.test_weight_averaging import assert_same_average, ema, fit_both, swa
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks, run
from torch_shard import Offload, ShardConfig

KEEPS = Offload(params=False)


class Offloaded(Callback):
    """What the engine of a run has in host memory."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.offload = trainer.strategy.engine.config.offload
        self.on_host = all(flat.host is not None for unit in trainer.strategy.engine.units for flat in unit.flats)


def recording_class(namespace: str = "lightning") -> Any:
    class Recording(net_class(namespace)):
        """Keeps the loss of each step and of each validation, and the validation's own figures."""

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = super().training_step(batch, index)
            mean = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
            self.seen.append(float(mean))
            return loss

        def on_validation_epoch_end(self) -> None:
            self.seen.append(float(self.trainer.callback_metrics["val"]))

    return Recording


def fit(world_size: int, strategy: Any, namespace: str = "lightning", optimizer: str = "sgd", **options: Any) -> Any:
    module = recording_class(namespace)(optimizer)
    callbacks = [] if strategy == "ddp" else [Offloaded()]
    settings = {"max_epochs": 2, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2, **options}
    t = trainer(namespace, world_size, strategy, callbacks=callbacks, **settings)
    t.fit(module, loader(world_size), loader(world_size, 2))
    return module, t


def assert_fits_like_ddp(world_size: int, strategy: Any, offload: Offload, **options: Any) -> None:
    expected, _ = fit(world_size, "ddp", **options)
    module, t = fit(world_size, strategy, **options)
    (callback,) = [c for c in t.callbacks if isinstance(c, Offloaded)]
    assert callback.on_host and callback.offload == offload
    assert module.seen == pytest.approx(expected.seen, rel=1e-5)
    assert_same_state(module.state_dict(), expected.state_dict())


@either_namespace
@ranks(2)
def test_the_registered_name_trains_validates_clips_and_accumulates_like_ddp(world_size, namespace):
    assert_fits_like_ddp(world_size, "shard_offload", Offload(), namespace=namespace)


# -- runs one after the other -------------------------------------------------------------------------------------------


def resumed(rank, world_size, strategies, form, path):
    """Losses of an epoch and of one more from its checkpoint, each under its strategy; and of two in one run."""

    def fitted(strategy, epochs, resume=None, save=None):
        chosen = strategy if strategy == "ddp" else ShardStrategy(offload=strategy, state_dict_type=form)
        t = trainer("lightning", world_size, chosen, max_epochs=epochs)
        module = recording_class()("adamw")
        if save:  # while the module is sharded
            module.on_train_end = lambda: t.save_checkpoint(save)
        t.fit(module, loader(world_size), ckpt_path=resume)
        return module.seen, dict(module.state_dict())

    first, _ = fitted(strategies[0], 1, save=path)
    second, state = fitted(strategies[1], 2, resume=path)
    whole, wanted = fitted("ddp", 2)
    assert first + second == pytest.approx(whole, rel=1e-5)
    assert_same_state(state, wanted)
    return path.is_dir()


@pytest.mark.parametrize("form", [*exhaustive("full"), "sharded"])
@pytest.mark.parametrize(
    ("first", "second"), [("cpu", "cpu"), *exhaustive(("cpu", None), (None, "cpu"), (KEEPS, "cpu"))], ids=str
)
def test_a_run_resumes_from_both_forms_with_and_without_offload(tmp_path, form, first, second):
    assert run(2, resumed, (first, second), form, tmp_path / "first.ckpt") == [form == "sharded"] * 2


@ranks(2)
def test_after_a_run_the_module_is_plain_and_a_later_run_trains_on(world_size):
    found = []
    for strategy in ("ddp", "shard_offload"):
        module = recording_class()("adamw")
        for _ in range(2):
            trainer("lightning", world_size, strategy).fit(module, loader(world_size))
        assert all(type(p) is torch.nn.Parameter and p.device.type == "cpu" for p in module.parameters())
        found.append(module)
    assert found[1].seen == pytest.approx(found[0].seen, rel=1e-5)
    assert_same_state(found[1].state_dict(), found[0].state_dict())


@pytest.mark.exhaustive
@ranks(2)
def test_a_module_that_stayed_sharded_is_sharded_anew_only_for_other_settings(world_size):
    module, engines = net_class("lightning")(), []
    for offload in ("cpu", Offload(), KEEPS, None):
        strategy = ShardStrategy(offload=offload, unshard_at_end=False)
        trainer("lightning", world_size, strategy).fit(module, loader(world_size))
        engines.append(torch_shard.engine_of(module))
    assert engines[0] is engines[1]
    assert len(set(map(id, engines))) == 3
    assert [engine.config.offload for engine in engines] == [Offload(), Offload(), KEEPS, None]


@pytest.mark.parametrize("kind", [*exhaustive(swa, ema)])
@ranks(2)
def test_averages_of_the_weights_are_those_of_a_single_device(world_size, kind):
    (expected, reference, _), (module, callback, _) = fit_both(
        world_size, net_class("lightning"), kind, "shard_offload"
    )
    assert_same_state(module.state_dict(), expected.state_dict())
    assert_same_average(callback, reference)


# -- the other ways to choose it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", quick(FABRIC_NAMESPACES, ["lightning.fabric"]))
@ranks(2)
def test_fabric_trains_like_ddp(namespace):
    assert_trains_like_ddp("shard_offload", namespace, accumulate=2, clip={"max_norm": 0.1})


OPTION = "--trainer.strategy.offload"
LINES = {
    "a name": (["--trainer.strategy", "shard_offload"], Offload()),
    "cpu": (["--trainer.strategy", CLASS, OPTION, "cpu"], Offload()),
    "a field": (["--trainer.strategy", CLASS, f"{OPTION}.params", "false"], KEEPS),
    "a mapping": (["--trainer.strategy", CLASS, OPTION, "{params: false, pin_memory: false}"], Offload(False, True, False)),
    "null": (["--trainer.strategy", CLASS, OPTION, "null"], None),
}  # fmt: skip


@pytest.mark.parametrize("way", LINES)
def test_the_command_line_sets_it(way):
    words, wanted = LINES[way]
    assert cli(*words, run=False).trainer.strategy.config.offload == wanted


@pytest.mark.parametrize(
    "value", ["cpu", {"params": False}, {"class_path": "torch_shard.Offload", "init_args": {"params": False}}], ids=str
)
@pytest.mark.parametrize("of", ["strategy", *exhaustive("config")])
def test_a_file_sets_it(tmp_path, value, of):
    settings: Any = {"offload": value}
    if of == "config":
        settings = {"config": {"class_path": "torch_shard.ShardConfig", "init_args": settings}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"trainer": {"strategy": {"class_path": CLASS, "init_args": settings}}}))
    offload = cli("--config", file, run=False).trainer.strategy.config.offload
    assert offload == (Offload() if value == "cpu" else KEEPS)


@pytest.mark.parametrize("namespace", ["lightning", "pytorch_lightning", *FABRIC_NAMESPACES])
def test_the_argument_changes_the_config(namespace):
    made = strategy_class(namespace)(ShardConfig(offload="cpu", prefetch=2), offload=KEEPS)
    assert (made.config.offload, made.config.prefetch) == (KEEPS, 2)
