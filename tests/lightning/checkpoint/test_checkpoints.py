"""Single-file checkpoints are those of a single-device Trainer, in both directions and on any number of ranks."""

from __future__ import annotations

import argparse
import pathlib
import time
from typing import Any

import numpy
import pytest
import torch

from lightning_shard.for_lightning import ShardStrategy
from tests.lightning.support import BATCHES, assert_same_state, either_namespace, loader, net_class, single, trainer
from tests.support.marks import exhaustive
from tests.support.ranks import ranks, run
from torch_shard import ShardConfig
from torch_shard.errors import ShardError


def adamw(namespace: str = "lightning") -> Any:
    return net_class(namespace)(optimizer="adamw")


def fit(rank, world_size, namespace, epochs, path=None, save=None, strategy="shard"):
    """Fit from a checkpoint, or from the beginning, to `epochs`; returns rank 0's final state."""
    t = trainer(namespace, world_size, "auto" if strategy == "auto" else strategy, max_epochs=epochs)
    module = adamw(namespace)
    t.fit(module, loader(world_size), ckpt_path=path)
    if save:
        t.save_checkpoint(save)
    return dict(module.state_dict())


@pytest.mark.exhaustive
@either_namespace
def test_training_continues_on_another_number_of_ranks(tmp_path, namespace):
    first, second, third = (tmp_path / f"{i}.ckpt" for i in range(3))
    run(2, fit, namespace, 1, None, first)
    run(1, fit, namespace, 2, first, second)  # one rank is enough for the strategy
    run(4, fit, namespace, 3, second, third)
    found = run(1, fit, namespace, 4, third, None, "auto")[0]  # a plain single-device Trainer
    assert_same_state(found, run(1, fit, namespace, 4, None, None, "auto")[0])


@either_namespace
def test_a_sharded_run_continues_from_a_plain_checkpoint(tmp_path, namespace):
    path = tmp_path / "plain.ckpt"
    run(1, fit, namespace, 1, None, path, "auto")
    found = run(2, fit, namespace, 2, path)
    assert_same_state(found[0], found[1])
    assert_same_state(found[0], run(1, fit, namespace, 2, None, None, "auto")[0])


def equal(found: Any, wanted: Any, where: str = "checkpoint") -> None:
    """Same keys in the same order, same types, close numbers."""
    assert type(found) is type(wanted), where
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key in wanted:
            equal(found[key], wanted[key], f"{where}[{key!r}]")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            equal(a, b, f"{where}[{i}]")
    elif isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted, msg=lambda text: f"{where}: {text}")
    else:
        assert found == wanted, where


@ranks(2)
def test_the_file_is_the_one_that_a_single_device_writes(rank, world_size, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    def checkpoints(name):
        saves = ModelCheckpoint(dirpath=tmp_path / name, save_last=True, monitor="train", save_top_k=1)
        return {"callbacks": [saves], "enable_checkpointing": True, "max_epochs": 2}

    single("lightning", **checkpoints(f"plain{rank}")).fit(adamw(), loader(1))
    t = trainer("lightning", world_size, **checkpoints("sharded"))
    module = adamw()
    t.fit(module, loader(world_size))
    sharded = torch.load(tmp_path / "sharded" / "last.ckpt", weights_only=True)
    plain = torch.load(tmp_path / f"plain{rank}" / "last.ckpt", weights_only=True)
    for checkpoint in (sharded, plain):
        del checkpoint["callbacks"]  # paths, and a best score that is rounded differently
    equal(sharded["optimizer_states"], plain["optimizer_states"], "optimizer_states")
    equal(sharded, plain)
    assert len(list((tmp_path / "sharded").iterdir())) == 2, "the best of an earlier epoch was removed"


@pytest.mark.parametrize("unshard", [True, *exhaustive(False)])
@ranks(2)
def test_a_checkpoint_after_the_run_is_complete(rank, world_size, unshard, tmp_path):
    plain, t = single("lightning"), trainer("lightning", world_size, ShardStrategy(unshard_at_end=unshard))
    plain.fit(adamw(), loader(1))
    plain.save_checkpoint(tmp_path / f"plain{rank}.ckpt")
    module = adamw()
    t.fit(module, loader(world_size))
    for between in (lambda: None, lambda: t.test(module, loader(world_size), verbose=False)):
        between()
        assert (t.strategy.engine_or_none is None) == unshard
        t.save_checkpoint(tmp_path / "sharded.ckpt")
        found = torch.load(tmp_path / "sharded.ckpt", weights_only=True)
        wanted = torch.load(tmp_path / f"plain{rank}.ckpt", weights_only=True)
        for entry in ("state_dict", "optimizer_states", "lr_schedulers"):
            equal(found[entry], wanted[entry], entry)


@ranks(2)
def test_edits_in_checkpoint_hooks_count_on_all_ranks(world_size, tmp_path):
    class Edits(net_class("lightning")):
        def on_save_checkpoint(self, checkpoint):
            del checkpoint["state_dict"]["offset"]
            checkpoint["state_dict"]["renamed"] = checkpoint["state_dict"].pop("scale")

        def on_load_checkpoint(self, checkpoint):
            checkpoint["state_dict"]["offset"] = torch.tensor(7.0)
            checkpoint["state_dict"]["scale"] = checkpoint["state_dict"].pop("renamed") * 0 + 2

    t = trainer("lightning", world_size)
    t.fit(Edits(), loader(world_size))
    t.save_checkpoint(tmp_path / "edited.ckpt")

    class Checks(Edits):
        def on_train_start(self):
            assert float(self.offset) == 7.0
            with self.trainer.strategy.engine.gathered():
                assert self.scale.tolist() == [2.0] * 3

    trainer("lightning", world_size, max_epochs=1).fit(Checks(), loader(world_size), ckpt_path=tmp_path / "edited.ckpt")


@ranks(2)
def test_hyper_parameters_that_are_not_tensors_load_safely(world_size, tmp_path):
    class Configured(net_class("lightning")):
        def __init__(self, **options):
            super().__init__()
            self.save_hyperparameters()

    t = trainer("lightning", world_size)
    options = {
        "where": pathlib.Path("a/b"),
        "rate": numpy.float64(0.1),
        "options": argparse.Namespace(depth=3, names=["x"]),
        "kinds": {"a", "b"},
    }
    t.fit(Configured(**options), loader(world_size))
    t.save_checkpoint(tmp_path / "options.ckpt")
    trainer("lightning", world_size).validate(
        Configured(), loader(world_size), ckpt_path=tmp_path / "options.ckpt", verbose=False
    )


class Unknown:
    """A class that the safe loader has not heard of."""


@ranks(2)
def test_a_file_with_code_needs_consent(world_size, tmp_path):
    class Odd(net_class("lightning")):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["odd"] = Unknown()

    path = tmp_path / "odd.ckpt"
    t = trainer("lightning", world_size)
    t.fit(Odd(), loader(world_size))
    t.save_checkpoint(path)
    data = loader(world_size)
    with pytest.raises(ShardError, match="weights_only=False"):
        trainer("lightning", world_size).validate(Odd(), data, ckpt_path=path, verbose=False)
    trainer("lightning", world_size).validate(Odd(), data, ckpt_path=path, verbose=False, weights_only=False)
    trusting = ShardStrategy(weights_only=False)
    trainer("lightning", world_size, trusting).validate(Odd(), data, ckpt_path=path, verbose=False)


@ranks(2)
def test_a_file_replaces_a_sharded_checkpoint_but_no_other_folder(rank, world_size, tmp_path):
    t = trainer("lightning", world_size)
    t.fit(net_class("lightning")(), loader(world_size))
    if rank == 0:
        for name, marker in (("sharded.ckpt", ".metadata"), ("other.ckpt", "thesis.tex")):
            (tmp_path / name).mkdir()
            (tmp_path / name / marker).touch()
    t.strategy.barrier()
    t.save_checkpoint(tmp_path / "sharded.ckpt")
    assert (tmp_path / "sharded.ckpt").is_file()
    # On all ranks, and at once: the others do not wait in a barrier for the rank that writes.
    with pytest.raises(OSError, match="not a checkpoint"):
        t.save_checkpoint(tmp_path / "other.ckpt")
    assert (tmp_path / "other.ckpt" / "thesis.tex").exists()


@ranks(2)
def test_asynchronous_checkpoints_are_complete_when_the_run_ends(rank, world_size, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    saves = ModelCheckpoint(dirpath=tmp_path, filename="last")
    options = {"plugins": [AsyncCheckpointIO()], "callbacks": [saves], "enable_checkpointing": True}
    module = adamw()
    trainer("lightning", world_size, **options).fit(module, loader(world_size))
    if rank == 0:  # the rank that writes
        equal(torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"], module.state_dict())


@pytest.mark.exhaustive
@pytest.mark.parametrize("asynchronous", [False, True])
@ranks(2)
def test_ranks_wait_for_a_save_that_takes_longer_than_the_engines_timeout(world_size, tmp_path, asynchronous):
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    class Slow(TorchCheckpointIO):
        seconds = 4.0

        def save_checkpoint(self, *args, **options):
            time.sleep(self.seconds)
            self.seconds = 0.0
            super().save_checkpoint(*args, **options)

    files = AsyncCheckpointIO(Slow()) if asynchronous else Slow()
    saves = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=BATCHES // 2)  # the first while training
    options = {"plugins": [files], "callbacks": [saves], "enable_checkpointing": True}
    t = trainer("lightning", world_size, ShardStrategy(ShardConfig(timeout=2.0), unshard_at_end=False), **options)
    module = adamw()
    t.fit(module, loader(world_size))
    t.test(module, loader(world_size), verbose=False)
    assert list(tmp_path.iterdir())


@ranks(2)
def test_the_learning_rate_finder_saves_and_restores(world_size, tmp_path):
    from lightning.pytorch.tuner import Tuner

    class Tuned(net_class("lightning")):
        def __init__(self):
            super().__init__()
            self.lr = 0.01

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    module = Tuned()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    t = trainer("lightning", world_size, default_root_dir=tmp_path)
    Tuner(t).lr_find(module, loader(world_size), num_training=4, update_attr=False)
    assert_same_state(dict(module.state_dict()), before)
