"""Callbacks that average the weights: with slices on each rank, the averages are those of a single device."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

import torch_shard
from tests.lightning.support import (
    NAMESPACES,
    Net,
    assert_same_state,
    both_forms,
    copied_state,
    fitted,
    late_class,
    loader,
    net_class,
    shard_strategy,
    single,
    trainer,
)
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import ShardTensor


def swa(namespace: str = "lightning", **options: Any) -> Any:
    """From the third of four epochs, with an annealing that changes the learning rate."""
    settings: dict[str, Any] = {"swa_lrs": 0.02, "swa_epoch_start": 3, "annealing_epochs": 2}
    return NAMESPACES[namespace].callbacks.StochasticWeightAveraging(**(settings | options))


def ema(namespace: str = "lightning", **options: Any) -> Any:
    settings: dict[str, Any] = {"decay": 0.8, "update_every_n_steps": 2}
    return NAMESPACES[namespace].callbacks.EMAWeightAveraging(**(settings | options))


def every_epoch(namespace: str = "lightning", **options: Any) -> Any:
    class EveryEpoch(NAMESPACES[namespace].callbacks.WeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None):
            return epoch_idx is not None

    return EveryEpoch(**options)


MAKERS = {
    "swa": swa,
    "ema": ema,
    "epoch": every_epoch,
    "from step": functools.partial(ema, update_starting_at_step=7),
    "from epoch": functools.partial(ema, update_starting_at_epoch=1),
}


class Looks(Net):
    """Keeps what validation says, and the part of the average that this rank holds while training."""

    share = 1.0

    def on_validation_epoch_end(self):
        self.seen.append(float(self.trainer.callback_metrics.get("val", 0.0)))

    def on_train_end(self):
        average = next(c for c in self.trainer.callbacks if hasattr(c, "_average_model"))._average_model
        if all(isinstance(p, ShardTensor) for p in average.parameters()):
            self.share = sum(p.to_local().numel() for p in average.parameters()) / sum(
                p.numel() for p in average.parameters()
            )


def assert_same_average(found: Any, expected: Any) -> None:
    assert_same_state(found._average_model.state_dict(), expected._average_model.state_dict())
    for name in ("n_averaged", "_latest_update_step", "_latest_update_epoch"):
        assert getattr(found, name, None) == getattr(expected, name, None)


MORE = [
    ("swa", "shard"),
    ("epoch", "shard"),
    ("ema", "shard_zero2"),
    ("swa", "shard_offload"),
    ("ema", "shard_offload"),
    ("from step", "shard"),
    ("from epoch", "shard"),
]


@pytest.mark.parametrize(("kind", "strategy"), [("ema", "shard"), *exhaustive(*MORE)])
@ranks(2)
def test_averages_and_what_is_validated_with_them_are_those_of_a_single_device(world_size, kind, strategy):
    reference, callback, expected, module = MAKERS[kind](), MAKERS[kind](), Looks(), Looks()
    plain = single("lightning", max_epochs=4, callbacks=[reference])
    t = trainer("lightning", world_size, strategy, max_epochs=4, callbacks=[callback])
    for run, each, n in ((plain, expected, 1), (t, module, world_size)):
        run.fit(each, loader(n), loader(n, 2))
        run.validate(each, loader(n), verbose=False)  # The average takes part in later runs, too.
    assert module.share < 0.75 and expected.share == 1
    assert_same_state(module.state_dict(), expected.state_dict())
    assert_same_average(callback, reference)
    assert module.seen == pytest.approx(expected.seen, rel=1e-5)
    assert float(t.callback_metrics["val"]) == pytest.approx(float(plain.callback_metrics["val"]), rel=1e-5)
    assert all(type(p) is nn.Parameter for p in callback._average_model.parameters())


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [swa, ema])
@ranks(2)
def test_averages_of_the_other_namespace(world_size, make):
    namespace = "pytorch_lightning"
    reference, callback, expected, module = make(namespace), make(namespace), *(net_class(namespace)() for _ in "ab")
    single(namespace, max_epochs=4, callbacks=[reference]).fit(expected, loader(1))
    trainer(namespace, world_size, max_epochs=4, callbacks=[callback]).fit(module, loader(world_size))
    assert_same_state(module.state_dict(), expected.state_dict())
    assert_same_average(callback, reference)


class WithLambda(Net):
    """Its scheduler's state has what SWALR's lacks."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]


def saving(folder: Path) -> Any:
    return NAMESPACES["lightning"].callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "form"), [("swa", "full"), ("ema", "full"), ("swa", "sharded"), ("ema", "sharded")])
@ranks(2)
def test_a_run_that_is_resumed_while_it_averages_ends_as_one_that_was_not_interrupted(rank, kind, form, tmp_path):
    make_callback = (lambda: swa(swa_epoch_start=2)) if kind == "swa" else ema
    options = {"enable_checkpointing": True, "max_epochs": 4}
    expected, reference = WithLambda(), make_callback()
    plain = single("lightning", **options, callbacks=[reference, saving(tmp_path / f"plain{rank}")])
    plain.fit(expected, loader(1))

    def run(ckpt_path=None):
        module, callback = WithLambda(), make_callback()
        strategy = shard_strategy(state_dict_type=form)
        fitted(module, strategy, ckpt_path=ckpt_path, **options, callbacks=[callback, saving(tmp_path / "saved")])
        assert_same_state(module.state_dict(), expected.state_dict())
        assert_same_average(callback, reference)

    run()
    saved = tmp_path / "saved" / "epoch=2.ckpt"
    run(saved)
    if form == "full":
        run(tmp_path / "plain0" / "epoch=2.ckpt")
    if rank == 0 and form == "full":
        paths = (saved, tmp_path / "plain0" / "epoch=2.ckpt")
        found, wanted = (torch.load(path, weights_only=False) for path in paths)
        for key in ("state_dict", "current_model_state", "averaging_state"):
            assert (key in found) == (key in wanted)
            assert_same_state(found.get(key, {}), wanted.get(key, {}))


class Average(Callback):
    def __init__(self):
        self.values = {}

    def on_train_batch_end(self, trainer, module, *args):
        with torch.no_grad():
            for name, p in module.named_parameters():
                self.values[name] = self.values[name] * 0.5 + p * 0.5 if name in self.values else p.detach().clone()

    def state_dict(self):
        return {"values": self.values, "beside": [{"twice": (self.values["scale"], 7)}]}

    def load_state_dict(self, state):
        assert state["beside"][0]["twice"][1] == 7
        self.values = state["values"]


@pytest.mark.exhaustive
@both_forms
@ranks(2)
def test_slices_that_a_users_own_callback_saves_are_saved_whole_and_loaded(rank, world_size, form, tmp_path):
    def run(folder, epochs, ckpt_path=None):
        callback = Average()
        options = {"max_epochs": epochs, "enable_checkpointing": True, "callbacks": [callback, saving(folder)]}
        alone = folder.name.startswith("plain")
        t = single("lightning", **options) if alone else None
        t = t or trainer("lightning", world_size, shard_strategy(state_dict_type=form), **options)
        t.fit(Net(), loader(1 if alone else world_size), ckpt_path=ckpt_path)
        return callback

    expected = run(tmp_path / f"plain{rank}", 2).values
    run(tmp_path / "saved", 1)
    saved = tmp_path / "saved" / "epoch=0.ckpt"
    if form == "full":
        values = torch.load(saved, weights_only=False)["callbacks"]["Average"]["values"]
        wanted = torch.load(tmp_path / "plain0" / "epoch=0.ckpt", weights_only=False)["callbacks"]["Average"]["values"]
        assert_same_state(values, wanted)
    resumed = run(tmp_path / "saved", 2, saved).values
    for name, value in expected.items():
        own = resumed[name]
        own = own.full_tensor() if isinstance(own, ShardTensor) else own
        torch.testing.assert_close(own, value)


@pytest.mark.exhaustive
@ranks(2)
def test_a_module_that_stays_sharded_keeps_its_average_sharded_and_trains_on_cut_in_another_way():
    expected, module = Net(), Net()
    for strategy in (shard_strategy(unshard_at_end=False), "shard_zero2"):
        callback, reference = ema(), ema()
        fitted(module, strategy, callbacks=[callback])
        single("lightning", callbacks=[reference]).fit(expected, loader(1))
        stays = strategy != "shard_zero2"
        assert all(isinstance(p, ShardTensor) == stays for p in callback._average_model.parameters())
    assert_same_state(module.state_dict(), expected.state_dict())
    assert_same_average(callback, reference)


@pytest.mark.exhaustive
@ranks(2)
def test_ranks_that_begin_with_different_weights_average_those_of_rank_0(rank):
    module, expected = Net(), copied_state(Net())
    with torch.no_grad():
        module.inner.weight.add_(rank)
    never = ema(update_starting_at_step=1000)
    fitted(module, callbacks=[never])
    assert_same_state(module.state_dict(), expected)


@ranks(2)
def test_what_cannot_be_right_is_refused_before_anything_changes(world_size):
    def refused(module, callback, match):
        with pytest.raises(MisconfigurationException, match=match):
            fitted(module, callbacks=[callback])
        assert torch_shard.engine_of(module) is None

    late = late_class("lightning", lambda: nn.Linear(3, 3))()
    refused(late, swa(), r"StochasticWeightAveraging has averaged another module .* extra\.bias, extra\.weight")
    refused(Net(), ModelPruning("l1_unstructured"), "Prune before fit")
    used = ema()
    fitted(Net(), callbacks=[used])
    with pytest.raises(MisconfigurationException, match="use a new callback"):
        trainer("lightning", world_size, callbacks=[used]).validate(Net(width=5), loader(world_size))


@ranks(2)
def test_the_average_is_computed_with_while_training():
    averaging, compared = ema(), []

    class Computes(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            average, plain, x = averaging._average_model, Net(), torch.linspace(-1, 1, 12).view(2, 6)
            state = average.module.state_dict()
            plain.load_state_dict({k: v.full_tensor() if isinstance(v, ShardTensor) else v for k, v in state.items()})
            with torch.no_grad():
                compared.append(torch.equal(average(x), plain(x)))

    fitted(Net(), callbacks=[averaging, Computes()])
    assert compared and all(compared)


def filled(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.constant_(tensor, 0.1)


@pytest.mark.exhaustive
@ranks(2)
def test_a_module_made_without_memory_is_averaged_by_swa_buffers_included(world_size):
    expected = Net()
    expected.apply(filled)
    single("lightning", max_epochs=4, callbacks=[swa()]).fit(expected, loader(1))
    t = trainer("lightning", world_size, shard_strategy(init_fn=filled), max_epochs=4, callbacks=[swa()])
    with t.init_module(empty_init=True):
        module = Net()
    t.fit(module, loader(world_size))
    assert_same_state(module.state_dict(), expected.state_dict())


@ranks(2)
def test_an_average_that_copies_a_module_without_memory_is_an_error():
    module = late_class("lightning", lambda: nn.Linear(2, 2))()
    with pytest.raises(NotImplementedError, match="meta tensor"):  # torch's own, in the callback's setup hook
        fitted(module, callbacks=[ema()])
