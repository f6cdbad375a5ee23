"""Sharded checkpoints: a folder that all ranks write, restored to the last bit and on any number of ranks."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import numpy
import pytest
import torch

from lightning_shard.for_lightning import ShardStrategy
from lightning_shard.registration.registry import strategy_class
from tests.lightning.support import assert_same_state, either_namespace, loader, net_class, trainer
from tests.support.logs import captured_log
from tests.support.marks import exhaustive
from tests.support.ranks import ranks, run
from torch_shard import ShardTensor
from torch_shard.errors import CheckpointError, ConfigError, StateDictError


def sharded(namespace: str = "lightning", **options: Any) -> Any:
    return strategy_class(namespace)(state_dict_type="sharded", unshard_at_end=False, **options)


def recording_class(namespace: str = "lightning") -> Any:
    class Recording(net_class(namespace)):
        """Keeps the loss of each step."""

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = super().training_step(batch, index)
            self.seen.append(loss.item())
            return loss

    return Recording


def fit(rank, world_size, namespace, epochs, path=None, save=None, form="sharded"):
    """Fit from a checkpoint, or from the beginning, to `epochs`: the losses, and the whole state in the end."""
    strategy = "auto" if form == "auto" else strategy_class(namespace)(state_dict_type=form)
    t = trainer(namespace, world_size, strategy, max_epochs=epochs)
    module = recording_class(namespace)(optimizer="adamw")
    if save:  # while the module is sharded
        module.on_train_end = lambda: t.save_checkpoint(save)
    t.fit(module, loader(world_size), ckpt_path=path)
    return module.seen, dict(module.state_dict())


@pytest.mark.parametrize("form", ["sharded", *exhaustive("full")])
@either_namespace
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(tmp_path, namespace, form):
    path = tmp_path / "first.ckpt"
    whole = run(2, fit, namespace, 2, None, None, form)
    first = run(2, fit, namespace, 1, None, path, form)
    second = run(2, fit, namespace, 2, path, None, form)
    assert path.is_dir() == (form == "sharded")
    for rank in range(2):
        assert first[rank][0] + second[rank][0] == whole[rank][0]
        for name, value in whole[rank][1].items():
            assert torch.equal(second[rank][1][name], value), name


@pytest.mark.exhaustive
def test_training_continues_on_another_number_of_ranks_and_in_another_form(tmp_path):
    first, second, third = (tmp_path / f"{i}.ckpt" for i in range(3))
    run(2, fit, "lightning", 1, None, first)
    run(4, fit, "lightning", 2, first, second)
    run(1, fit, "lightning", 3, second, third, "full")
    assert first.is_dir() and second.is_dir() and third.is_file()
    found = run(2, fit, "lightning", 4, third)[0][1]
    assert_same_state(found, run(1, fit, "lightning", 4, None, None, "auto")[0][1])


@ranks(2)
def test_nothing_is_gathered_and_the_folder_holds_what_the_trainer_handed_over(rank, world_size, tmp_path):
    class Looks(net_class("lightning")):
        def on_save_checkpoint(self, checkpoint):
            assert isinstance(checkpoint["state_dict"]["inner.weight"], ShardTensor)
            state = checkpoint["optimizer_states"][0]["state"]["inner.weight"]
            assert isinstance(state["exp_avg"], ShardTensor)
            checkpoint["mine"] = {"tensor": torch.arange(3), "number": 4}

    path = tmp_path / "a.ckpt"
    t = trainer("lightning", world_size, sharded())
    module = Looks(optimizer="adamw")
    t.fit(module, loader(world_size))
    t.save_checkpoint(path)
    other = net_class("lightning")(optimizer="adamw")
    t2 = trainer("lightning", world_size, sharded(), max_epochs=0)
    t2.fit(other, loader(world_size))
    extra = t2.strategy.engine.load(path, t2.optimizers[0])  # the engine's own loading reads it, too
    assert extra["mine"]["number"] == 4 and extra["mine"]["tensor"].tolist() == [0, 1, 2]
    assert {"pytorch-lightning_version", "loops", "callbacks", "lr_schedulers", "epoch"} <= set(extra)
    wanted, found = t.strategy.engine.state_dict(), t2.strategy.engine.state_dict()
    if rank == 0:
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


@ranks(2)
def test_edits_in_checkpoint_hooks_count(world_size, tmp_path):
    class Edits(net_class("lightning")):
        def on_save_checkpoint(self, checkpoint):
            del checkpoint["state_dict"]["offset"]
            checkpoint["state_dict"]["renamed"] = checkpoint["state_dict"].pop("scale")
            checkpoint["state_dict"]["added"] = torch.full((2,), 9.0)

        def on_load_checkpoint(self, checkpoint):
            state = checkpoint["state_dict"]
            assert isinstance(state["head.weight"], ShardTensor) and type(state["renamed"]) is torch.Tensor
            state["offset"] = state.pop("added")[0]
            state["scale"] = state.pop("renamed") * 0 + 2
            state["head.weight"] = state["head.weight"] * 0 + 3
            checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 0.125

    path = tmp_path / "edited.ckpt"
    t = trainer("lightning", world_size, sharded())
    t.fit(Edits(), loader(world_size))
    t.save_checkpoint(path)

    class Checks(Edits):
        def on_train_start(self):
            assert float(self.offset) == 9.0
            assert self.trainer.optimizers[0].param_groups[0]["lr"] == 0.125
            with self.trainer.strategy.engine.gathered():
                assert self.scale.tolist() == [2.0] * 3
                assert self.head.weight.eq(3).all()

    trainer("lightning", world_size, sharded()).fit(Checks(), loader(world_size), ckpt_path=path)


@pytest.mark.exhaustive
@ranks(2)
def test_optimizers_start_anew_where_a_hook_drops_their_state(world_size, tmp_path):
    class Drops(net_class("lightning")):
        def on_load_checkpoint(self, checkpoint):
            checkpoint["optimizer_states"] = []

        def on_train_start(self):
            assert not self.trainer.optimizers[0].state

    path = tmp_path / "a.ckpt"
    t = trainer("lightning", world_size, sharded())
    t.fit(Drops(), loader(world_size))
    t.save_checkpoint(path)
    trainer("lightning", world_size, sharded(), max_epochs=2).fit(Drops(), loader(world_size), ckpt_path=path)


@pytest.mark.parametrize("what", ["validate", *exhaustive("test", "predict")])
@either_namespace
@ranks(2)
def test_evaluation_takes_the_weights_of_a_checkpoint(rank, world_size, namespace, what, tmp_path):
    path = tmp_path / "a.ckpt"
    t = trainer(namespace, world_size, sharded(namespace))
    module = net_class(namespace)(optimizer="adamw")
    t.fit(module, loader(world_size))
    t.save_checkpoint(path, weights_only=True)

    def results(module, **options):
        t = trainer(namespace, world_size, sharded(namespace))
        options |= {} if what == "predict" else {"verbose": False}
        return getattr(t, what)(module, loader(world_size), **options)

    found, wanted = results(net_class(namespace)(optimizer="adamw"), ckpt_path=path), results(module)
    if what == "predict":
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    else:
        assert found == wanted
    with pytest.raises(KeyError, match="contains only the model"):
        trainer(namespace, world_size, sharded(namespace)).fit(
            net_class(namespace)(optimizer="adamw"), loader(world_size), ckpt_path=path
        )


@ranks(2)
def test_weights_come_from_a_checkpoint_that_the_engine_saved(world_size, tmp_path):
    t = trainer("lightning", world_size, sharded())
    module = net_class("lightning")()
    t.fit(module, loader(world_size))
    t.strategy.engine.save(tmp_path / "engine", extra=[1, 2])
    found = trainer("lightning", world_size).validate(
        net_class("lightning")(), loader(world_size), ckpt_path=tmp_path / "engine", verbose=False
    )
    assert found == trainer("lightning", world_size).validate(module, loader(world_size), verbose=False)


@ranks(2)
def test_strict_loading_is_respected(world_size, tmp_path):
    class Less(net_class("lightning")):
        def on_save_checkpoint(self, checkpoint):
            del checkpoint["state_dict"]["head.bias"]

    path = tmp_path / "less.ckpt"
    t = trainer("lightning", world_size, sharded())
    t.fit(Less(), loader(world_size))
    t.save_checkpoint(path)
    module = Less()
    before = module.head.bias.detach().clone()
    with pytest.raises(StateDictError, match=r"head\.bias"):
        trainer("lightning", world_size, sharded()).validate(module, loader(world_size), ckpt_path=path, verbose=False)
    module = Less()
    module.strict_loading = False
    t = trainer("lightning", world_size, ShardStrategy(state_dict_type="sharded", unshard_at_end=True))
    t.validate(module, loader(world_size), ckpt_path=path, verbose=False)
    assert torch.equal(module.head.bias, before)


@ranks(2)
def test_hyper_parameters_that_are_not_tensors_load_safely(world_size, tmp_path):
    class Configured(net_class("lightning")):
        def __init__(self, **options):
            super().__init__()
            self.save_hyperparameters()

        def on_load_checkpoint(self, checkpoint):
            assert checkpoint["hyper_parameters"]["settings"].depth == 3

    path = tmp_path / "options.ckpt"
    options = {
        "where": pathlib.Path("a/b"),
        "rate": numpy.float64(0.1),
        "settings": argparse.Namespace(depth=3, names=["x"]),
        "kinds": {"a", "b"},
    }
    t = trainer("lightning", world_size, sharded())
    t.fit(Configured(**options), loader(world_size))
    t.save_checkpoint(path)
    trainer("lightning", world_size, sharded()).validate(
        Configured(), loader(world_size), ckpt_path=path, verbose=False
    )


class Unknown:
    """A class that the safe loader has not heard of."""


@pytest.mark.exhaustive
@ranks(2)
def test_objects_of_other_classes_are_saved_with_a_warning_and_loaded_with_consent(rank, world_size, tmp_path):
    class Odd(net_class("lightning")):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["odd"] = Unknown()

    path = tmp_path / "odd.ckpt"
    t = trainer("lightning", world_size, sharded())
    t.fit(Odd(), loader(world_size))
    with captured_log() as messages:
        t.save_checkpoint(path)
    assert any("Unknown" in text for text in messages) == (rank == 0)
    data = loader(world_size)
    with pytest.raises(CheckpointError, match=r"Unknown[\s\S]*weights_only=False"):
        trainer("lightning", world_size, sharded()).validate(Odd(), data, ckpt_path=path, verbose=False)
    trainer("lightning", world_size, sharded()).validate(Odd(), data, ckpt_path=path, verbose=False, weights_only=False)
    trusting = sharded(weights_only=False)
    trainer("lightning", world_size, trusting).validate(Odd(), data, ckpt_path=path, verbose=False)


def muon_class() -> Any:
    class WithMuon(recording_class()):
        """Muon for matrices, AdamW for the rest; two optimizers are stepped by hand in Lightning."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            matrices = [p for p in self.parameters() if p.ndim == 2]
            others = [p for p in self.parameters() if p.ndim != 2]
            return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]

        def training_step(self, batch: Any, index: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            loss = self.loss(batch)
            self.seen.append(loss.item())
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()

    return WithMuon


def fit_muon(rank, world_size, epochs, path=None, save=None):
    t = trainer("lightning", world_size, sharded(), max_epochs=epochs)
    module = muon_class()()
    t.fit(module, loader(world_size), ckpt_path=path)
    if save:
        t.save_checkpoint(save)
    return module.seen


@pytest.mark.exhaustive
def test_several_optimizers_resume_each_with_its_state(tmp_path):
    whole = run(2, fit_muon, 2)
    first = run(2, fit_muon, 1, None, tmp_path / "a.ckpt")
    second = run(2, fit_muon, 2, tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    assert [a + b for a, b in zip(first, second, strict=True)] == whole
    # On other ranks the sums have another order, and Muon rounds to bfloat16.
    assert run(4, fit_muon, 3, tmp_path / "b.ckpt")[0]


@ranks(2)
def test_another_number_of_optimizers_is_an_error(world_size, tmp_path):
    t = trainer("lightning", world_size, sharded())
    t.fit(muon_class()(), loader(world_size))
    t.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(StateDictError, match="2 optimizers"):
        trainer("lightning", world_size, sharded()).fit(
            net_class("lightning")(), loader(world_size), ckpt_path=tmp_path / "a.ckpt"
        )


@pytest.mark.exhaustive
@ranks(2)
def test_the_learning_rate_finder_saves_and_restores(world_size, tmp_path):
    from lightning.pytorch.tuner import Tuner

    class Tuned(net_class("lightning")):
        def __init__(self):
            super().__init__()
            self.lr = 0.01

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    module = Tuned()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    strategy = ShardStrategy(state_dict_type="sharded")
    t = trainer("lightning", world_size, strategy, default_root_dir=tmp_path)
    Tuner(t).lr_find(module, loader(world_size), num_training=4, update_attr=False)
    assert_same_state(dict(module.state_dict()), before)
    assert not list(tmp_path.glob(".lr_find*"))


@ranks(2)
def test_after_a_run_that_gave_the_plain_module_back_a_checkpoint_is_one_file(rank, world_size, tmp_path):
    t = trainer("lightning", world_size, ShardStrategy(state_dict_type="sharded"))
    module = net_class("lightning")(optimizer="adamw")
    t.fit(module, loader(world_size))
    assert t.strategy.engine_or_none is None
    t.save_checkpoint(tmp_path / "after.ckpt")
    found = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert_same_state(found["state_dict"], dict(module.state_dict()))
    t = trainer("lightning", world_size, sharded(), max_epochs=2)
    t.fit(net_class("lightning")(optimizer="adamw"), loader(world_size), ckpt_path=tmp_path / "after.ckpt")


def test_unknown_settings_are_refused():
    with pytest.raises(ConfigError, match="state_dict_type"):
        ShardStrategy(state_dict_type="shared")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="AsyncCheckpointIO"):
        ShardStrategy(async_save=True)


@ranks(2)
def test_a_sharded_checkpoint_needs_a_shared_file_system(world_size):
    t = trainer("lightning", world_size, sharded())
    t.fit(net_class("lightning")(), loader(world_size))
    with pytest.raises(ConfigError, match="file system"):
        t.save_checkpoint("memory://a.ckpt")
