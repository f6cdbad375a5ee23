"""Checkpoints in both forms, one file and a folder that all ranks write: what they hold, and that runs go on from them."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.lightning.support import (
    Net,
    TwoOptimizers,
    assert_alike,
    assert_same_state,
    either_form,
    either_namespace,
    fitted,
    loader,
    recording_class,
    shard_strategy,
    single,
    trainer,
)
from tests.support.logs import captured_log
from tests.support.marks import exhaustive
from tests.support.ranks import ranks, run
from torch_shard import ShardTensor
from torch_shard.errors import CheckpointError, ConfigError, StateDictError


def strategy(form: str, namespace: str = "lightning", **options: Any) -> Any:
    return shard_strategy(namespace, state_dict_type=form, **{"unshard_at_end": False, **options})


def fit(rank, world_size, form, epochs, path=None, save=None, namespace="lightning", make=None):
    """Fit from a checkpoint, or from the beginning, to `epochs`: the losses, and the whole state in the end."""
    how = "auto" if form == "auto" else strategy(form, namespace, unshard_at_end=True)
    t = trainer(namespace, world_size, how, max_epochs=epochs)
    module = make() if make else recording_class(namespace)(optimizer="adamw")
    if save:  # while the module is sharded
        module.on_train_end = lambda: t.save_checkpoint(save)
    t.fit(module, loader(world_size), ckpt_path=path)
    return module.seen, dict(module.state_dict())


# -- runs that go on ------------------------------------------------------------------------------------------------------


@either_form
@either_namespace
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(tmp_path, namespace, form):
    path = tmp_path / "first.ckpt"
    whole = run(2, fit, form, 2, None, None, namespace)
    first = run(2, fit, form, 1, None, path, namespace)
    second = run(2, fit, form, 2, path, None, namespace)
    assert path.is_dir() == (form == "sharded")
    for rank in range(2):
        assert first[rank][0] + second[rank][0] == whole[rank][0]
        for name, value in whole[rank][1].items():
            assert torch.equal(second[rank][1][name], value), name


@pytest.mark.exhaustive
def test_training_continues_on_another_number_of_ranks_and_in_another_form(tmp_path):
    path = None
    for epochs, (ranks_used, form) in enumerate([(2, "sharded"), (4, "full"), (1, "sharded"), (2, "full")], 1):
        path, before = tmp_path / f"{epochs}.ckpt", path
        run(ranks_used, fit, form, epochs, before, path)
        assert path.is_dir() == (form == "sharded")
    # The last one is a file, from which a Trainer on a single device goes on.
    assert_same_state(run(1, fit, "auto", 5, path)[0][1], run(1, fit, "auto", 5)[0][1])


def test_a_sharded_run_continues_from_a_plain_checkpoint(tmp_path):
    run(1, fit, "auto", 1, None, tmp_path / "plain.ckpt")
    for _, state in run(2, fit, "full", 2, tmp_path / "plain.ckpt"):
        assert_same_state(state, run(1, fit, "auto", 2)[0][1])


@pytest.mark.exhaustive
def test_several_optimizers_resume_each_with_its_state(tmp_path):
    path = tmp_path / "a.ckpt"
    whole = run(2, fit, "sharded", 2, None, None, "lightning", TwoOptimizers)
    first = run(2, fit, "sharded", 1, None, path, "lightning", TwoOptimizers)
    second = run(2, fit, "sharded", 2, path, None, "lightning", TwoOptimizers)
    assert [a[0] + b[0] for a, b in zip(first, second, strict=True)] == [losses for losses, _ in whole]


@ranks(2)
def test_another_number_of_optimizers_is_an_error(tmp_path):
    t = fitted(TwoOptimizers(), strategy("sharded"))
    t.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(StateDictError, match="2 optimizers"):
        fitted(Net(), ckpt_path=tmp_path / "a.ckpt")


# -- what they hold -------------------------------------------------------------------------------------------------------


@ranks(2)
def test_the_file_is_the_one_that_a_single_device_writes(rank, world_size, tmp_path):
    def last(folder: str, make: Any) -> Any:
        saves = ModelCheckpoint(dirpath=tmp_path / folder, save_last=True, monitor="train", save_top_k=1)
        t = make(callbacks=[saves], enable_checkpointing=True, max_epochs=2)
        t.fit(Net(optimizer="adamw"), loader(t.world_size))
        checkpoint = torch.load(tmp_path / folder / "last.ckpt", weights_only=True)
        del checkpoint["callbacks"]  # paths, and a best score that is rounded differently
        return checkpoint

    plain = last(f"plain{rank}", lambda **options: single("lightning", **options))
    assert_alike(last("sharded", lambda **options: trainer("lightning", world_size, **options)), plain)
    assert len(list((tmp_path / "sharded").iterdir())) == 2, "the best of an earlier epoch was removed"


@pytest.mark.parametrize(("form", "unshard"), [("sharded", True), *exhaustive(("full", False))])
@ranks(2)
def test_a_checkpoint_after_the_run_is_complete(rank, world_size, form, unshard, tmp_path):
    """It is one file in either form where the run has given the plain module back."""
    plain, t = single("lightning"), trainer("lightning", world_size, strategy(form, unshard_at_end=unshard))
    plain.fit(Net(optimizer="adamw"), loader(1))
    plain.save_checkpoint(tmp_path / f"plain{rank}.ckpt")
    wanted = torch.load(tmp_path / f"plain{rank}.ckpt", weights_only=True)
    module = Net(optimizer="adamw")
    t.fit(module, loader(world_size))
    for between in (lambda: None, lambda: t.test(module, loader(world_size), verbose=False)):
        between()
        assert (t.strategy.engine_or_none is None) == unshard
        t.save_checkpoint(tmp_path / "sharded.ckpt")
        found = torch.load(tmp_path / "sharded.ckpt", weights_only=True)
        for entry in ("state_dict", "optimizer_states", "lr_schedulers"):
            assert_alike(found[entry], wanted[entry], entry)


@either_form
@ranks(2)
def test_hyper_parameters_that_are_not_tensors_load_safely(world_size, form, tmp_path):
    class Configured(Net):
        def __init__(self, **options):
            super().__init__()
            self.save_hyperparameters()

        def on_load_checkpoint(self, checkpoint):
            assert checkpoint["hyper_parameters"]["settings"].depth == 3

    options = {
        "where": pathlib.Path("a/b"),
        "rate": numpy.float64(0.1),
        "settings": argparse.Namespace(depth=3, names=["x"]),
        "kinds": {"a", "b"},
    }
    t = fitted(Configured(**options), strategy(form))
    t.save_checkpoint(tmp_path / "options.ckpt")
    t.validate(Configured(), loader(world_size), ckpt_path=tmp_path / "options.ckpt", verbose=False)


class Unknown:
    """A class that the safe loader has not heard of."""


@either_form
@ranks(2)
def test_objects_of_other_classes_are_loaded_with_consent(rank, world_size, form, tmp_path):
    class Odd(Net):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["odd"] = Unknown()

    path = tmp_path / "odd.ckpt"
    t = fitted(Odd(), strategy(form))
    with captured_log() as messages:
        t.save_checkpoint(path)
    if form == "sharded":
        assert any("Unknown" in text for text in messages) == (rank == 0)

    def validate(trusting: bool | None = None, **options: Any) -> None:
        t = trainer("lightning", world_size, strategy(form, weights_only=trusting))
        t.validate(Odd(), loader(world_size), ckpt_path=path, verbose=False, **options)

    with pytest.raises(CheckpointError, match=r"Unknown[\s\S]*weights_only=False"):
        validate()
    validate(weights_only=False)
    validate(trusting=False)


# -- weights alone --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["validate", *exhaustive("test", "predict")])
@either_form
@ranks(2)
def test_weights_alone_are_for_evaluation(world_size, form, what, tmp_path):
    saves = ModelCheckpoint(tmp_path, "weights", save_weights_only=True)
    t = trainer("lightning", world_size, strategy(form), callbacks=[saves], enable_checkpointing=True)
    module = Net(optimizer="adamw")
    t.fit(module, loader(world_size))

    def results(module: Any, **options: Any) -> Any:
        options |= {} if what == "predict" else {"verbose": False}
        return getattr(trainer("lightning", world_size), what)(module, loader(world_size), **options)

    fresh = Net(optimizer="adamw")
    torch.testing.assert_close(results(fresh, ckpt_path=tmp_path / "weights.ckpt"), results(module), rtol=0, atol=0)
    with pytest.raises(KeyError, match="contains only the model"):
        fitted(fresh, ckpt_path=tmp_path / "weights.ckpt")


@either_form
@ranks(2)
def test_strict_loading_is_respected(world_size, form, tmp_path):
    class Less(Net):
        def on_save_checkpoint(self, checkpoint):
            del checkpoint["state_dict"]["head.bias"]

    path = tmp_path / "less.ckpt"
    t = fitted(Less(), strategy(form))
    t.save_checkpoint(path)
    module = Less()
    before = module.head.bias.detach().clone()
    with pytest.raises(StateDictError, match=r"head\.bias"):
        trainer("lightning", world_size).validate(Less(), loader(world_size), ckpt_path=path, verbose=False)
    module.strict_loading = False
    trainer("lightning", world_size).validate(module, loader(world_size), ckpt_path=path, verbose=False)
    assert torch.equal(module.head.bias, before)


# -- folders --------------------------------------------------------------------------------------------------------------


@ranks(2)
def test_nothing_is_gathered_and_the_folder_holds_what_the_trainer_handed_over(rank, world_size, tmp_path):
    class Looks(Net):
        def on_save_checkpoint(self, checkpoint):
            assert isinstance(checkpoint["state_dict"]["inner.weight"], ShardTensor)
            state = checkpoint["optimizer_states"][0]["state"]["inner.weight"]
            assert isinstance(state["exp_avg"], ShardTensor)
            checkpoint["mine"] = {"tensor": torch.arange(3), "number": 4}

    t = fitted(Looks(optimizer="adamw"), strategy("sharded"))
    t.save_checkpoint(tmp_path / "a.ckpt")
    other = trainer("lightning", world_size, strategy("sharded"), max_epochs=0)
    other.fit(Net(optimizer="adamw"), loader(world_size))
    extra = other.strategy.engine.load(tmp_path / "a.ckpt", other.optimizers[0])
    assert extra["mine"]["number"] == 4 and extra["mine"]["tensor"].tolist() == [0, 1, 2]
    assert {"pytorch-lightning_version", "loops", "callbacks", "lr_schedulers", "epoch"} <= set(extra)
    wanted, found = t.strategy.engine.state_dict(), other.strategy.engine.state_dict()
    if rank == 0:
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


@ranks(2)
def test_weights_come_from_a_checkpoint_that_the_engine_saved(world_size, tmp_path):
    t = trainer("lightning", world_size, strategy("sharded"))
    module = Net()
    t.fit(module, loader(world_size))
    t.strategy.engine.save(tmp_path / "engine", extra=[1, 2])
    found = trainer("lightning", world_size).validate(
        Net(), loader(world_size), ckpt_path=tmp_path / "engine", verbose=False
    )
    assert found == trainer("lightning", world_size).validate(module, loader(world_size), verbose=False)


@ranks(2)
def test_a_sharded_checkpoint_needs_a_shared_file_system():
    t = fitted(Net(), strategy("sharded"))
    with pytest.raises(ConfigError, match="file system"):
        t.save_checkpoint("memory://a.ckpt")
