"""Training with parameters, gradients and optimizer state in host memory, chosen through the Trainer, Fabric and LightningCLI."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision

import torch_shard
from lightning_shard.for_lightning import ShardStrategy
from lightning_shard.registration.registry import strategy_class
from tests.lightning.fabric.support import NAMESPACES as FABRIC_NAMESPACES
from tests.lightning.fabric.test_strategy import assert_trains_like_ddp
from tests.lightning.registration.test_cli import CLASS, cli
from tests.lightning.support import assert_same_state, either_namespace, loader, net_class, trainer
from tests.lightning.trainer.test_weight_averaging import assert_same_average, ema, fit_both, swa
from tests.marks import exhaustive, quick
from tests.ranks import ranks, run
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [{"offload": KEEPS}, *exhaustive({"offload": "cpu", "strategy": "no_shard"}, {"offload": KEEPS, "prefetch": 0})],
    ids=str,
)
@ranks(2)
def test_the_argument_trains_validates_clips_and_accumulates_like_ddp(world_size, settings):
    offload = KEEPS if settings["offload"] == KEEPS else Offload()
    assert_fits_like_ddp(world_size, ShardStrategy(**settings), offload)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01},
        {"gradient_clip_val": None, "optimizer": "adamw"},
        {"precision": "64-true"},
    ],
    ids=str,
)
@ranks(2)
def test_other_arguments_of_the_trainer_work_like_ddp(world_size, options):
    assert_fits_like_ddp(world_size, "shard_offload", Offload(), **options)


@pytest.mark.exhaustive
@ranks(2)
def test_gradients_that_are_reduced_once_a_step_are_those_of_ddp(world_size):
    assert_fits_like_ddp(world_size, ShardStrategy(offload="cpu", defer_gradient_sync=True), Offload())


@ranks(2)
def test_manual_optimization_with_two_optimizers_is_that_of_ddp(world_size):
    class Manual(net_class("lightning")):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            body, head = self.optimizers()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.clip_gradients(body, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            for optimizer in (body, head):
                optimizer.step()
                optimizer.zero_grad()
            self.seen.append(float(self.trainer.strategy.reduce(loss.detach().clone())))

        def configure_optimizers(self) -> Any:
            rest = [p for name, p in self.named_parameters() if not name.startswith("head")]
            return [torch.optim.SGD(rest, lr=0.05, momentum=0.9), torch.optim.SGD(self.head.parameters(), lr=0.02)]

    found = []
    for strategy in ("ddp", "shard_offload"):
        module = Manual()
        trainer("lightning", world_size, strategy, max_epochs=2).fit(module, loader(world_size))
        found.append(module)
    assert found[1].seen == pytest.approx(found[0].seen, rel=1e-5)
    assert_same_state(found[1].state_dict(), found[0].state_dict())


# -- precision ----------------------------------------------------------------------------------------------------------


@ranks(2)
def test_16_mixed_skips_the_same_steps_as_ddp_and_ends_where_it_ends_without_offload(world_size, rank):
    class Overflows(net_class("lightning")):
        def __init__(self, overflows: bool) -> None:
            super().__init__()
            self.overflows = overflows

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.seen.append(self.trainer.precision_plugin.scaler.get_scale())
            return self.loss(batch) * (1e30 if index == 2 and self.overflows else 1.0)

    def fitted(strategy: Any) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        module = Overflows(rank == 1)
        t = trainer(
            "lightning", world_size, strategy,
            plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)], gradient_clip_val=0.5,
        )  # fmt: skip
        t.fit(module, loader(world_size))
        return module

    expected, plain, module = (fitted(strategy) for strategy in ("ddp", "shard", "shard_offload"))
    assert module.seen == plain.seen == expected.seen == [256.0, 256.0, 512.0, 256.0, 256.0, 512.0]
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=0.02, atol=0.01)


@pytest.mark.exhaustive
@ranks(2)
def test_bf16_mixed_ends_where_it_ends_without_offload(world_size):
    # Gathered and reduced alike: the same numbers, not only close ones. Those of ddp but for the rounding.
    expected, _ = fit(world_size, "ddp", precision="bf16-mixed")
    plain, _ = fit(world_size, ShardStrategy(), precision="bf16-mixed")
    module, _ = fit(world_size, "shard_offload", precision="bf16-mixed")
    assert module.seen == pytest.approx(plain.seen, rel=1e-5)
    assert module.seen == pytest.approx(expected.seen, rel=0.05, abs=0.02)
    assert_same_state(module.state_dict(), plain.state_dict())


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
@ranks(2)
def test_low_precision_trains_like_ddp(world_size, precision):
    # Steps round in 16 bits, and kernels round the last elements of what is stepped together another way: close numbers.
    expected, _ = fit(world_size, "ddp", precision=precision)
    module, _ = fit(world_size, "shard_offload", precision=precision)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=0.05, atol=0.02)


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


class SavesAndCounts(Callback):
    """Saves behind the third batch; after each: of how many flat buffers the step goes on behind it, and of how many not."""

    def __init__(self, path: Any) -> None:
        self.path, self.counts = path, []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        flats = [flat for unit in trainer.strategy.engine.units for flat in unit.flats]
        self.counts.append((sum(bool(f.host.moving) for f in flats), sum(not f.host.moving for f in flats)))
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["sharded", *exhaustive("full")])
@ranks(2)
def test_a_checkpoint_costs_no_step_in_the_training_thread(world_size, form, tmp_path):
    for resume in (None, tmp_path / "a.ckpt"):
        counter = SavesAndCounts(tmp_path / "a.ckpt")
        strategy = ShardStrategy(offload="cpu", state_dict_type=form)
        t = trainer("lightning", world_size, strategy, max_epochs=4, callbacks=[counter], gradient_clip_val=0.5)
        t.fit(recording_class()("adamw"), loader(world_size), ckpt_path=resume)
        found = [not waited for _, waited in counter.counts]
        assert len(found) > 5 and found == [False] + [True] * (len(found) - 1)  # the first one makes the state


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategies", [("ddp", "cpu"), ("cpu", "ddp")], ids=str)
def test_a_file_goes_to_ddp_and_comes_from_it(tmp_path, strategies):
    run(2, resumed, strategies, "full", tmp_path / "first.ckpt")


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


@ranks(2)
def test_optimizer_state_is_in_the_order_of_ddp_while_training_and_behind_it(world_size):
    def fitted(strategy: Any) -> Any:
        orders = []

        class Unfrozen(net_class("lightning")):
            """Of parameters that take part later, the state is made later."""

            def on_train_start(self) -> None:
                self.inner.requires_grad_(False)

            def on_train_epoch_start(self) -> None:
                self.inner.requires_grad_(self.current_epoch > 0)

            def configure_optimizers(self) -> Any:
                named = dict(self.named_parameters())
                groups = ([p for p in named.values() if p.ndim == n] for n in (1, 2, 0))
                return torch.optim.AdamW([{"params": params} for params in groups if params], lr=0.01)

            def on_train_end(self) -> None:
                orders.append(list(t.optimizers[0].state_dict()["state"]))

        t = trainer("lightning", world_size, strategy, max_epochs=2)
        t.fit(Unfrozen(), loader(world_size))
        return [*orders, list(t.optimizers[0].state_dict()["state"])]

    expected, found = fitted("ddp_find_unused_parameters_true"), fitted("shard_offload")
    assert found == expected and expected[0] != sorted(expected[0])


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


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["full", "sharded"])
@ranks(2)
def test_state_on_disk_trains_resumes_and_leaves_no_files_behind(world_size, tmp_path, form):
    expected, _ = fit(world_size, "ddp", optimizer="adamw", max_epochs=3)
    for params in (False, True):
        disk, path = tmp_path / f"disk {params}", tmp_path / f"{params}.ckpt"
        losses = []
        for epochs, resume in ((1, None), (3, path)):
            strategy = ShardStrategy(offload=Offload(nvme=disk, nvme_params=params), state_dict_type=form)
            module = recording_class()("adamw")
            t = trainer(
                "lightning", world_size, strategy,
                max_epochs=epochs, gradient_clip_val=0.5, accumulate_grad_batches=2,
            )  # fmt: skip
            module.on_train_end = lambda t=t, path=path: t.save_checkpoint(path)
            t.fit(module, loader(world_size), loader(world_size, 2), ckpt_path=resume)
            losses += module.seen
        assert losses == pytest.approx(expected.seen, rel=1e-5)
        assert_same_state(module.state_dict(), expected.state_dict())
        t.strategy.barrier()
        assert not any(disk.iterdir())


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


@pytest.mark.parametrize("offload", ["cpu", KEEPS])
@pytest.mark.exhaustive
@ranks(2)
def test_fabrics_argument_trains_like_ddp_set_up_apart(offload):
    made = strategy_class("lightning.fabric")(offload=offload)
    assert made.config.offload == (Offload() if offload == "cpu" else KEEPS)
    assert_trains_like_ddp(made, apart=True)


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
