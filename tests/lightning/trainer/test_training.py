"""Training through the Trainer gives what a single device gives."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BasePredictionWriter, ModelSummary
from lightning.pytorch.plugins import LayerSync
from torch import nn
from torch.utils.data import DataLoader

import torch_shard
from lightning_shard.trainer.clipping import ShardedClipping
from tests.lightning.support import (
    BATCH,
    Claims,
    Net,
    assert_same_state,
    both_namespaces,
    compare,
    either_namespace,
    fitted,
    late_class,
    loader,
    recording_class,
    shard_strategy,
    single,
    trainer,
)
from tests.support.inside import runtime_of
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import Offload, ShardTensor

ACCUMULATED = {"accumulate_grad_batches": 4}  # of which the last batches of an epoch, 2, are a step of their own
HOW: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"strategy": "shard_optim"}, {}),
    ({"strategy": "shard_grad_op"}, ACCUMULATED),
    ({"defer_gradient_sync": True}, ACCUMULATED),
    ({}, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
    ({}, {"precision": "64-true"}),
]


@both_namespaces
@ranks(2)
def test_fit_equals_a_single_device(world_size, namespace):
    module, _, t = compare(world_size, namespace=namespace, **ACCUMULATED, gradient_clip_val=0.3)
    assert t.strategy.engine_or_none is None
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert type(t.strategy).__module__ == f"lightning_shard.for_{namespace}"
    assert isinstance(t.precision_plugin, ShardedClipping) and type(t.precision_plugin).__qualname__ == "Precision"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("settings", "options"), HOW, ids=str)
@ranks(2)
def test_strategies_accumulation_and_clipping_equal_a_single_device(world_size, settings, options):
    compare(world_size, strategy=shard_strategy(**settings), **options)


BATCHES_AND_CHECKS: list[dict[str, Any]] = [
    {"fast_dev_run": 2},
    {"limit_train_batches": 0.5, "limit_val_batches": 1, "val_check_interval": 2},
    {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 2},
    {"num_sanity_val_steps": 2, "max_steps": 4, "max_epochs": -1},
    {"barebones": True},
]


@pytest.mark.exhaustive
@ranks(2)
def test_other_arguments_of_the_trainer_do_what_they_do_on_a_single_device(world_size):
    for options in BATCHES_AND_CHECKS:
        _, _, t = compare(world_size, val_batches=3, **options)
        assert t.global_step > 0


@ranks(2)
def test_samples_are_dealt_out_and_shuffled_as_with_ddp(world_size):
    def run(strategy: str) -> Any:
        pl.seed_everything(11, verbose=False)
        module = Net()
        data = DataLoader(loader(1).dataset, batch_size=BATCH // world_size, shuffle=True)
        trainer("lightning", world_size, strategy, max_epochs=2, use_distributed_sampler=True).fit(module, data)
        return module

    assert_same_state(run("shard").state_dict(), run("ddp").state_dict())


class Offloaded(Callback):
    """Whether all of the engine of a run is in host memory."""

    on_host = False

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.on_host = all(flat.host is not None for unit in trainer.strategy.engine.units for flat in unit.flats)


@either_namespace
@ranks(2)
def test_the_registered_name_trains_validates_clips_accumulates_and_resumes_like_ddp(world_size, namespace, tmp_path):
    found = []
    for strategy in ("ddp", "shard_offload"):
        path, seen = None, []
        for epochs in (1, 2):  # The second run goes on from the checkpoint of the first.
            module, offloaded = recording_class(namespace)("adamw"), Offloaded()
            options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": epochs}
            callbacks = [] if strategy == "ddp" else [offloaded]
            t = trainer(namespace, world_size, strategy, callbacks=callbacks, **options)
            t.fit(module, loader(world_size), loader(world_size, 2), ckpt_path=path)
            assert all(type(p) is torch.nn.Parameter for p in module.parameters())
            path = tmp_path / f"{strategy}{epochs}.ckpt"
            t.save_checkpoint(path)
            seen += [*module.seen, t.callback_metrics["val"].item()]
        found.append((module, seen))
    assert offloaded.on_host and t.strategy.config.offload == Offload()
    (expected, wanted), (module, seen) = found
    assert seen == pytest.approx(wanted, rel=1e-5)
    assert_same_state(module.state_dict(), expected.state_dict())


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["hybrid_shard", *exhaustive("hybrid_shard_zero2")])
@ranks(4)
def test_hybrid_on_two_nodes_equals_a_single_device(rank, strategy):
    """Lightning numbers ranks by node, and says how many a node has."""
    found = []

    class Look(Callback):
        def on_train_start(self, trainer, module):
            found.append(runtime_of(torch_shard.engine_of(module)).collectives.topology.shard_groups)

    options = {"num_nodes": 2, "devices": 2, "plugins": [Claims(4, rank, rank % 2, rank // 2)], "callbacks": [Look()]}
    expected, module = Net(), Net()
    single("lightning").fit(expected, loader(1))
    fitted(module, shard_strategy(strategy=strategy), **options)
    assert_same_state(module.state_dict(), expected.state_dict())
    assert found == [((0, 1), (2, 3))]


@ranks(2)
def test_clipping_in_configure_gradient_clipping_sees_the_global_norm(world_size):
    class Clips(Net):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.seen.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.2, norm_type=1.0)))

    module, expected, _ = compare(world_size, Clips)
    assert module.seen == pytest.approx(expected.seen, rel=1e-5)


@ranks(2)
def test_a_step_that_returns_none_on_all_ranks_is_lightnings_own_error_and_the_module_trains_on():
    class Skips(Net):
        skip = True

        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            return None if index == 2 and self.skip else loss

    module = Skips()
    with pytest.raises(RuntimeError, match="returning None in distributed training is not supported"):
        fitted(module)
    module.skip = False
    fitted(module)
    assert torch_shard.engine_of(module) is None


@ranks(2)
def test_in_fit_the_parameters_are_sharded_and_the_engine_is_reachable(world_size):
    class Looks(Net):
        def on_train_start(self):
            engine = self.trainer.strategy.engine
            assert engine is torch_shard.engine_of(self)
            assert all(isinstance(p, ShardTensor) for p in self.parameters())
            whole = sum(p.numel() * p.element_size() for p in self.parameters())
            assert engine.memory_summary()["parameters"] < 0.75 * whole
            with engine.gathered(self.inner):
                assert type(self.inner.weight) is nn.Parameter

    t = trainer("lightning", world_size)
    with pytest.raises(RuntimeError, match="no module is sharded now"):
        _ = t.strategy.engine
    t.fit(Looks(), loader(world_size))


@ranks(2)
def test_a_module_that_stays_sharded_is_sharded_anew_only_for_other_settings(world_size):
    module, expected, engines = Net(), Net(), []
    for offload in (None, None, "cpu", Offload(), Offload(params=False)):
        t = fitted(module, shard_strategy(offload=offload, unshard_at_end=False))
        t.test(module, loader(world_size), verbose=False)
        engines.append(torch_shard.engine_of(module))
        single("lightning").fit(expected, loader(1))
    assert engines[0] is engines[1] and engines[2] is engines[3]
    assert [engine.config.offload for engine in engines[1::2]] == [None, Offload()]
    assert engines[4].config.offload == Offload(params=False)
    fitted(module)
    single("lightning").fit(expected, loader(1))
    assert torch_shard.engine_of(module) is None
    assert_same_state(module.state_dict(), expected.state_dict())


@ranks(2)
def test_configure_model_on_meta(world_size):
    class Late(late_class("lightning", lambda: nn.Linear(3, 3))):
        def forward(self, x):
            return self.extra(super().forward(x))

    module = Late()
    t = fitted(module)
    t.test(module, loader(world_size), verbose=False)
    assert module.extra.weight.device.type == "cpu" and bool(module.extra.weight.isfinite().all())


@ranks(2)
def test_a_module_made_without_memory_goes_on_from_a_checkpoint_as_on_a_single_device(rank, world_size, tmp_path):
    plain, path = single("lightning"), tmp_path / "plain.ckpt"
    plain.fit(Net(optimizer="adamw"), loader(1))
    if rank == 0:
        plain.save_checkpoint(path)
    torch.distributed.barrier()
    expected = Net(optimizer="adamw")
    single("lightning", max_epochs=2).fit(expected, loader(1), ckpt_path=path)

    def fill(part: nn.Module) -> None:
        for value in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            value.fill_(7.0)

    t = trainer("lightning", world_size, shard_strategy(init_fn=fill), max_epochs=2)
    with t.init_module(empty_init=True):
        module = Net(optimizer="adamw")
    assert all(value.is_meta for value in module.state_dict().values())
    t.fit(module, loader(world_size), ckpt_path=path)
    assert_same_state(module.state_dict(), expected.state_dict())


class Doubled(nn.Linear):
    """What the layer plugin of the next test puts in place of a Linear."""


class Swap(LayerSync):
    """Replaces classes of layers while they are not sharded."""

    def apply(self, model, old=nn.Linear, new=Doubled):
        assert not any(isinstance(p, ShardTensor) for p in model.parameters())
        for module in model.modules():
            if type(module) is old:
                module.__class__ = new
        return model

    def revert(self, model):
        return self.apply(model, Doubled, nn.Linear)


@pytest.mark.exhaustive
@ranks(2)
def test_layer_synchronisation_is_applied_before_sharding_and_reverted(world_size):
    class Checks(Net):
        def on_train_start(self):
            assert type(self.inner) is Doubled

    module, t = Checks(), trainer("lightning", world_size, plugins=[Swap()])
    for epochs in (1, 2):
        t.fit_loop.max_epochs = epochs
        t.fit(module, loader(world_size))
        assert type(module.inner) is nn.Linear


@ranks(2)
def test_a_model_that_would_not_fit_stays_sharded(rank, world_size):
    module, t = Net(), trainer("lightning", world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_shard.trainer.memory.free_host_bytes", lambda: 1000 if rank == 1 else 10**12)
        t.fit(module, loader(world_size))
    assert torch_shard.engine_of(module) is not None, "on all ranks, since one has no room"
    t.test(module, loader(world_size), verbose=False)


@ranks(2)
def test_progress_bar_and_summary_count_whole_parameters():
    class Counts(Callback):
        def on_train_start(self, trainer, module):
            summary = next(c for c in trainer.callbacks if isinstance(c, ModelSummary))._summary(trainer, module)
            assert summary.total_parameters == wanted

    module = Net()
    wanted = sum(p.numel() for p in module.parameters())
    options = {"enable_model_summary": True, "enable_progress_bar": True, "callbacks": [Counts()]}
    fitted(module, **options)


# -- what steps do besides a loss ------------------------------------------------------------------------------------------


class Talks(Net):
    """Logs in every way, and has a loss over the samples of all ranks."""

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        out = self(x) * self.scale
        loss = (out - y).square().mean()
        everyone = self.all_gather(out, sync_grads=True)
        assert everyone.shape[0] == self.trainer.world_size
        loss = loss + 0.1 * (everyone.flatten(0, 1).mean(0) - y.mean(0)).square().sum()
        for fx in ("mean", "min", "max", "sum"):
            self.log(fx, loss, sync_dist=True, reduce_fx=fx, on_step=True, on_epoch=True)
        self.log_dict({"rank": float(self.global_rank), "index": float(index)}, sync_dist=True, reduce_fx="max")
        self.log("zero", loss.detach() * 0 + self.global_rank, rank_zero_only=True)
        return {"loss": loss, "extra": out.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        sent = self.trainer.strategy.broadcast({"rank": self.global_rank, "x": outputs["extra"]}, src=1)
        assert sent["rank"] == 1
        gathered = self.all_gather({"a": torch.tensor(self.global_rank), "b": [outputs["extra"]]})
        self.seen += [float(sent["x"].sum()), *gathered["a"].tolist(), float(gathered["b"][0].sum())]


@ranks(2)
def test_steps_talk_to_each_other_and_log_as_with_ddp(world_size):
    def run(strategy):
        module, t = Talks(), trainer("lightning", world_size, strategy, max_epochs=2)
        t.fit(module, loader(world_size))
        return module, {name: float(value) for name, value in t.callback_metrics.items()}

    expected, wanted = run("ddp")
    module, found = run("shard")
    assert found == pytest.approx(wanted, rel=1e-5) and len(found) > 8
    assert module.seen == pytest.approx(expected.seen, rel=1e-4)
    assert_same_state(module.state_dict(), expected.state_dict())


@ranks(2)
def test_predictions_are_returned_and_written_as_with_ddp(world_size):
    class Writer(BasePredictionWriter):
        def __init__(self):
            super().__init__("batch_and_epoch")
            self.written, self.all = [], None

        def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
            self.written.append((batch_indices, prediction))

        def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
            self.all = (batch_indices, predictions)

    def run(strategy, **options):
        writer = Writer()
        t = trainer("lightning", world_size, strategy, callbacks=[writer], use_distributed_sampler=True, **options)
        module = Net()
        returned = t.predict(module, loader(1, 3))
        assert t.predict(module, loader(1, 3), return_predictions=False) is None
        return writer.written, writer.all, returned

    for mode in (True, False):
        torch.testing.assert_close(run("shard", inference_mode=mode), run("ddp", inference_mode=mode))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("whole", "backend"), [(True, "aot_eager"), (False, "inductor")])
@ranks(2, timeout=300)
def test_compiling_to_graphs_in_configure_model_trains_like_a_single_device(world_size, whole, backend):
    class Compiled(Net):
        compiled = False

        def configure_model(self):
            if not self.compiled:
                self.compiled = True
                for part in [self] if whole else self.blocks:
                    part.compile(backend=backend)

    torch._dynamo.reset()
    compare(world_size, Compiled, max_epochs=2, accumulate_grad_batches=2)


@ranks(2)
def test_configure_model_shards_what_it_makes(world_size):
    class Late(late_class("lightning", lambda: nn.Linear(3, 3), device="cpu")):
        def forward(self, x):
            return self.extra(super().forward(x))

        def on_train_start(self):
            if self.trainer.world_size > 1:
                assert isinstance(self.extra.weight, ShardTensor)

    compare(world_size, Late)


@ranks(2)
def test_init_module_gives_the_precision(world_size):
    t = trainer("lightning", world_size, precision="64-true")
    with t.init_module():
        module = Net()
    assert {p.dtype for p in module.parameters()} == {torch.float64} and not module.scale.is_meta
    t.fit(module, loader(world_size))
