"""What steps do besides a loss: talk to the other ranks, log, predict, skip, drive schedulers."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, GradientAccumulationScheduler, ModelCheckpoint
from torch import nn

import torch_shard
from tests.lightning.support import BATCHES, assert_same_state, loader, net_class, single, trainer
from tests.lightning.trainer.test_training import compare
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import ShardConfig, ShardError, ShardTensor


@pytest.mark.exhaustive
@ranks(2, fresh=True)
def test_a_step_that_returns_none_on_one_rank_is_an_error_on_all(rank, world_size):
    from lightning_shard.for_lightning import ShardStrategy

    class Skips(net_class("lightning")):
        def training_step(self, batch, index):
            loss = self.loss(batch)
            return None if index == 2 and rank == 1 else loss

    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        trainer("lightning", world_size, ShardStrategy(ShardConfig(timeout=2.0))).fit(Skips(), loader(world_size))
    assert time.monotonic() - started < 20
    if rank == 1:
        assert "returning None in distributed training is not supported" in str(caught.value)
    else:
        assert isinstance(caught.value, ShardError)


class Talks(net_class("lightning")):
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
        reduced = self.trainer.strategy.reduce(outputs["loss"].clone(), reduce_op="sum")
        self.seen.append(float(reduced))
        sent = self.trainer.strategy.broadcast({"rank": self.global_rank, "x": outputs["extra"]}, src=1)
        assert sent["rank"] == 1
        self.seen.append(float(sent["x"].sum()))
        gathered = self.all_gather({"a": torch.tensor(self.global_rank), "b": [outputs["extra"]]})
        assert gathered["a"].tolist() == [0, 1]
        self.seen.append(float(gathered["b"][0].sum()))


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
        module = net_class("lightning")()
        returned = t.predict(module, loader(1, 3))
        assert t.predict(module, loader(1, 3), return_predictions=False) is None
        return writer.written, writer.all, returned

    for mode in (True, False):
        torch.testing.assert_close(run("shard", inference_mode=mode), run("ddp", inference_mode=mode))


@pytest.mark.parametrize("how", ["plateau", *exhaustive("one_cycle", "chained")])
@ranks(2)
def test_schedulers_drive_the_rate_as_on_a_single_device(world_size, how):
    class Scheduled(net_class("lightning")):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            lr = torch.optim.lr_scheduler
            if how == "plateau":
                made = lr.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "monitor": "val"}}
            if how == "one_cycle":
                made = lr.OneCycleLR(optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches)
                return [optimizer], [{"scheduler": made, "interval": "step"}]
            return [optimizer], [{"scheduler": lr.SequentialLR(
                optimizer, [lr.LinearLR(optimizer, 0.1, total_iters=2), lr.CosineAnnealingLR(optimizer, 6)], [2]
            ), "interval": "step", "frequency": 2}]  # fmt: skip

        def on_train_batch_start(self, batch, index):
            self.seen.append(self.optimizers().param_groups[0]["lr"])

    expected, module = Scheduled(), Scheduled()
    options = {"max_epochs": 3, "accumulate_grad_batches": 2}
    single("lightning", **options).fit(expected, loader(1), loader(1, 2))
    trainer("lightning", world_size, **options).fit(module, loader(world_size), loader(world_size, 2))
    assert module.seen == pytest.approx(expected.seen) and len(set(module.seen)) > 1
    assert_same_state(module.state_dict(), expected.state_dict())


@pytest.mark.exhaustive
@ranks(2)
def test_accumulation_changes_from_epoch_to_epoch(world_size):
    # The last batches of an epoch are a step of their own: 6 are not divided by 4.
    from lightning_shard.for_lightning import ShardStrategy

    for defer in (False, True):
        expected, module = net_class("lightning")(), net_class("lightning")()
        made = [GradientAccumulationScheduler({0: 1, 1: 4, 2: 3}) for _ in range(2)]
        single("lightning", max_epochs=3, callbacks=made[:1]).fit(expected, loader(1))
        given = ShardStrategy(defer_gradient_sync=defer)
        t = trainer("lightning", world_size, given, max_epochs=3, callbacks=made[1:], gradient_clip_val=100.0)
        t.fit(module, loader(world_size))
        assert t.global_step == BATCHES + 2 + 2
        assert_same_state(module.state_dict(), expected.state_dict())


@pytest.mark.exhaustive
@ranks(2)
def test_fits_and_tests_go_on_from_the_last_the_best_and_a_preempted_jobs_checkpoint(rank, world_size, tmp_path):
    def run(t_of, folder, n):
        path = t_of().strategy.broadcast(str(tmp_path / folder))
        module = net_class("lightning")(optimizer="adamw")
        checkpoint = ModelCheckpoint(path, monitor="val", save_last=True, save_top_k=1, mode="min", filename="best")
        options = {"callbacks": [checkpoint], "enable_checkpointing": True, "default_root_dir": path}
        t = t_of(max_epochs=1, **options)
        data = loader(n), loader(n, 2)
        t.fit(module, *data)
        found = [t.test(module, data[1], ckpt_path=which, verbose=False)[0]["test"] for which in ("last", "best")]
        assert checkpoint.best_model_path.endswith("best.ckpt")
        again = t_of(max_epochs=3, **options)
        again.fit(module, *data, ckpt_path="last")
        assert again.current_epoch == 3 and again.global_step == 3 * BATCHES
        found.append(again.validate(module, data[1], ckpt_path="best", verbose=False)[0]["val"])
        again.save_checkpoint(f"{path}/hpc_ckpt_7.ckpt")
        other = net_class("lightning")(optimizer="adamw")
        last = t_of(max_epochs=4, **options)
        last.fit(other, *data, ckpt_path="hpc")
        assert last.global_step == 4 * BATCHES
        return other, found

    expected, wanted = run(lambda **options: single("lightning", **options), f"single{rank}", 1)
    module, found = run(lambda **options: trainer("lightning", world_size, **options), "sharded", world_size)
    assert found == pytest.approx(wanted, rel=1e-4)
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-4)
    assert torch_shard.engine_of(module) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize(("whole", "backend"), [(True, "aot_eager"), (False, "aot_eager"), (False, "inductor")])
@ranks(2, timeout=300)
def test_compiling_to_graphs_in_configure_model_trains_like_a_single_device(world_size, whole, backend):
    class Compiled(net_class("lightning")):
        compiled = False

        def configure_model(self):
            if not self.compiled:
                self.compiled = True
                for part in [self] if whole else self.blocks:
                    part.compile(backend=backend)

    torch._dynamo.reset()
    compare("lightning", world_size, Compiled, max_epochs=2, accumulate_grad_batches=2)


@ranks(2)
def test_configure_model_shards_what_it_makes_and_init_module_gives_the_precision(world_size):
    class Late(net_class("lightning")):
        def __init__(self):
            super().__init__()
            self.extra = None

        def configure_model(self):
            if self.extra is None:
                torch.manual_seed(2)
                self.extra = nn.Linear(3, 3)

        def forward(self, x):
            return self.extra(super().forward(x))

        def on_train_start(self):
            if self.trainer.world_size > 1:
                assert isinstance(self.extra.weight, ShardTensor)

    compare("lightning", world_size, Late)
    t = trainer("lightning", world_size, precision="64-true")
    with t.init_module():
        module = net_class("lightning")()
    assert {p.dtype for p in module.parameters()} == {torch.float64} and not module.scale.is_meta
    t.fit(module, loader(world_size))
