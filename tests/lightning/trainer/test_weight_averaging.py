"""Callbacks that average the weights: with slices on each rank, the averages are those of a single device."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn, get_ema_multi_avg_fn

import torch_shard
from lightning_shard.for_lightning import ShardStrategy
from tests.lightning.support import (
    NAMESPACES,
    assert_same_state,
    late_class,
    loader,
    net_class,
    single,
    trainer,
)
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import ShardTensor
from torch_shard.cli.main import main as command_line


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


class Held(Callback):
    """Counts what of the average this rank holds while training."""

    def __init__(self, averaging: Any) -> None:
        self.averaging = averaging

    def on_train_end(self, trainer, module):
        values = list(self.averaging._average_model.parameters())
        assert all(isinstance(p, ShardTensor) for p in values)
        self.share = sum(p.to_local().numel() for p in values) / sum(p.numel() for p in values)


def fit_both(world_size: int, make: Any, make_callback: Any, strategy: Any = "shard", **options: Any) -> Any:
    """Fit with validation on one device and sharded: for each the module, the callback and the Trainer."""
    found = []
    for ranks_used in (1, world_size):
        module, callback = make(), make_callback()
        chosen = {"max_epochs": 4, **options}
        given = [callback, *chosen.pop("callbacks", list)()]
        if ranks_used == 1:
            t = single("lightning", **chosen, callbacks=given)
        else:
            held = Held(callback)
            t = trainer("lightning", world_size, strategy, **chosen, callbacks=[*given, held])
        t.fit(module, loader(ranks_used), loader(ranks_used, 2))
        found.append((module, callback, t))
    assert held.share < 0.75
    return found


def assert_same_average(found: Any, expected: Any) -> None:
    assert_same_state(found._average_model.state_dict(), expected._average_model.state_dict())
    for name in ("n_averaged", "_latest_update_step", "_latest_update_epoch"):
        assert getattr(found, name, None) == getattr(expected, name, None)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("ema", "shard"),
        *exhaustive(
            ("swa", "shard"),
            ("epoch", "shard"),
            ("ema", "shard_zero2"),
            ("from step", "shard"),
            ("from epoch", "shard"),
        ),
    ],
)
@ranks(2)
def test_averages_and_what_is_validated_with_them_are_those_of_a_single_device(world_size, kind, strategy):
    class Validates(net_class("lightning")):
        def on_validation_epoch_end(self):
            self.seen.append(float(self.trainer.callback_metrics.get("val", 0.0)))

    (expected, reference, plain), (module, callback, t) = fit_both(world_size, Validates, MAKERS[kind], strategy)
    assert_same_state(module.state_dict(), expected.state_dict())
    assert_same_average(callback, reference)
    assert module.seen == pytest.approx(expected.seen, rel=1e-5)
    assert all(type(p) is nn.Parameter for p in callback._average_model.parameters())
    # The average takes part in later runs, too.
    for run, data in ((plain, loader(1)), (t, loader(world_size))):
        run.validate(run.lightning_module, data, verbose=False)
    assert float(t.callback_metrics["val"]) == pytest.approx(float(plain.callback_metrics["val"]), rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["swa", "ema"])
@ranks(2)
def test_averages_of_the_other_namespace(world_size, kind):
    namespace, make_callback = "pytorch_lightning", MAKERS[kind]

    class Looks(net_class(namespace)):
        def on_train_end(self):
            average = next(c for c in self.trainer.callbacks if hasattr(c, "_average_model"))._average_model
            self.sharded = all(isinstance(p, ShardTensor) for p in average.parameters())

    (expected, reference), (module, callback) = ((Looks(), make_callback(namespace)) for _ in range(2))
    single(namespace, max_epochs=4, callbacks=[reference]).fit(expected, loader(1))
    trainer(namespace, world_size, max_epochs=4, callbacks=[callback]).fit(module, loader(world_size))
    assert module.sharded and not expected.sharded
    assert_same_state(module.state_dict(), expected.state_dict())
    assert_same_average(callback, reference)


class WithLambda(net_class("lightning")):
    """Its scheduler's state has what SWALR's lacks."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]


def saving(folder: Path) -> Any:
    return NAMESPACES["lightning"].callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "form"), [("swa", "full"), *exhaustive(("ema", "sharded"), ("swa", "sharded"), ("ema", "full"))]
)
@ranks(2)
def test_a_run_that_is_resumed_while_it_averages_ends_as_one_that_was_not_interrupted(
    rank, world_size, kind, form, tmp_path
):
    make_callback = (lambda: swa(swa_epoch_start=2)) if kind == "swa" else ema
    options = {"enable_checkpointing": True, "max_epochs": 4}
    expected, reference = WithLambda(), make_callback()
    plain = single("lightning", **options, callbacks=[reference, saving(tmp_path / f"plain{rank}")])
    plain.fit(expected, loader(1))

    def run(ckpt_path=None):
        module, callback = WithLambda(), make_callback()
        strategy = ShardStrategy(state_dict_type=form)
        t = trainer("lightning", world_size, strategy, **options, callbacks=[callback, saving(tmp_path / "saved")])
        t.fit(module, loader(world_size), ckpt_path=ckpt_path)
        assert_same_state(module.state_dict(), expected.state_dict())
        assert_same_average(callback, reference)

    run()
    saved = tmp_path / "saved" / "epoch=2.ckpt"
    run(saved)
    if form == "full":
        run(tmp_path / "plain0" / "epoch=2.ckpt")
    if rank == 0:
        one_file = saved
        if form == "sharded":
            one_file = tmp_path / "consolidated.ckpt"
            assert command_line(["consolidate", str(saved), str(one_file)]) == 0
        paths = (one_file, tmp_path / "plain0" / "epoch=2.ckpt")
        found, wanted = (torch.load(path, weights_only=False) for path in paths)
        for key in ("state_dict", "current_model_state", "averaging_state"):
            assert (key in found) == (key in wanted)
            assert_same_state(found.get(key, {}), wanted.get(key, {}))
        for name in found["callbacks"].keys() - {key for key in found["callbacks"] if "Checkpoint" in key}:
            own, other = (c["callbacks"][name].pop("average_model_state", {}) for c in (found, wanted))
            assert_same_state(own, other)
            assert found["callbacks"][name] == wanted["callbacks"][name]


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["full", "sharded"])
@ranks(2)
def test_a_run_that_begins_to_average_goes_on_from_a_checkpoint_without_averages(rank, world_size, form, tmp_path):
    found = []
    for strategy in ("ddp", form):

        def run(folder, epochs, callbacks, ckpt_path=None, strategy=strategy):
            chosen = strategy if strategy == "ddp" else ShardStrategy(state_dict_type=strategy)
            options = {"enable_checkpointing": True, "max_epochs": epochs, "callbacks": [*callbacks, saving(folder)]}
            module = WithLambda()
            trainer("lightning", world_size, chosen, **options).fit(module, loader(world_size), ckpt_path=ckpt_path)
            return module

        run(tmp_path / strategy, 1, [])
        callback = MAKERS["from step"]()
        found.append((run(tmp_path / "other", 3, [callback], tmp_path / strategy / "epoch=0.ckpt"), callback))
    (expected, reference), (module, callback) = found
    assert_same_state(module.state_dict(), expected.state_dict())
    assert_same_average(callback, reference)


class Normed(NAMESPACES["lightning"].LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))

    def training_step(self, batch, index):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch, index):
        self.log("val", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize("kind", ["swa", *exhaustive("ema", "epoch")])
@ranks(2)
def test_running_statistics_are_those_of_ddp(rank, world_size, kind):
    """SWA passes over the data once more for them; the others average them, too."""
    found = []
    for strategy in ("ddp", "shard"):
        module, callback = Normed(), MAKERS[kind]()
        t = trainer("lightning", world_size, strategy, max_epochs=4, callbacks=[callback])
        t.fit(module, loader(world_size), loader(world_size, 2))
        assert module.net[1].momentum == 0.1 and t.accumulate_grad_batches == 1
        found.append((module, callback))
    (expected, reference), (module, callback) = found
    if rank == 0:  # under DDP the other ranks' statistics are their own, and rank 0's are saved
        assert_same_state(module.state_dict(), expected.state_dict())
        assert_same_average(callback, reference)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@ranks(2)
def test_an_average_keeps_a_higher_precision_than_the_module(world_size, precision):
    averages = []
    for strategy in ("ddp", "shard"):
        module = net_class("lightning")()
        # torch's function for several tensors wants both of one dtype.
        several = (
            {"multi_avg_fn": get_ema_multi_avg_fn(0.7)}
            if precision == "bf16-mixed"
            else {"avg_fn": get_ema_avg_fn(0.7)}
        )
        callback = every_epoch(**several)
        trainer("lightning", world_size, strategy, max_epochs=3, callbacks=[callback], precision=precision).fit(
            module, loader(world_size), loader(world_size, 2)
        )
        averages.append(callback._average_model.state_dict())
    assert {v.dtype for k, v in averages[1].items() if k.startswith("module.")} == {torch.float32}
    for name, value in averages[0].items():
        torch.testing.assert_close(averages[1][name], value, rtol=2e-2, atol=2e-2)


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
@pytest.mark.parametrize("form", ["sharded", *exhaustive("full")])
@ranks(2)
def test_slices_that_a_users_own_callback_saves_are_saved_whole_and_loaded(rank, world_size, form, tmp_path):
    def run(folder, epochs, ckpt_path=None):
        callback = Average()
        options = {"max_epochs": epochs, "enable_checkpointing": True, "callbacks": [callback, saving(folder)]}
        alone = folder.name.startswith("plain")
        t = single("lightning", **options) if alone else None
        t = t or trainer("lightning", world_size, ShardStrategy(state_dict_type=form), **options)
        t.fit(net_class("lightning")(), loader(1 if alone else world_size), ckpt_path=ckpt_path)
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
def test_a_module_that_stays_sharded_keeps_its_average_sharded_and_trains_on(world_size):
    expected, module = net_class("lightning")(), net_class("lightning")()
    callback, reference = ema(), ema()
    t = trainer("lightning", world_size, ShardStrategy(unshard_at_end=False), callbacks=[callback])
    t.fit(module, loader(world_size))
    assert all(isinstance(p, ShardTensor) for p in callback._average_model.parameters())
    t.validate(module, loader(world_size), verbose=False)
    plain = single("lightning", callbacks=[reference])
    plain.fit(expected, loader(1))
    # Copied while it is sharded, and then cut in another way.
    again = ema()
    t = trainer("lightning", world_size, "shard_zero2", callbacks=[again])
    t.fit(module, loader(world_size))
    assert torch_shard.engine_of(module) is None
    reference = ema()
    single("lightning", callbacks=[reference]).fit(expected, loader(1))
    assert_same_state(module.state_dict(), expected.state_dict())
    assert_same_average(again, reference)


@pytest.mark.exhaustive
@ranks(2)
def test_ranks_that_begin_with_different_weights_average_those_of_rank_0(rank, world_size):
    class Late(NAMESPACES["lightning"].callbacks.WeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None):
            return False

    module, callback = net_class("lightning")(), Late()
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        module.inner.weight.add_(rank)
    trainer("lightning", world_size, callbacks=[callback]).fit(module, loader(world_size))
    assert_same_state(module.state_dict(), expected)


@ranks(2)
def test_what_cannot_be_right_is_refused_before_anything_changes(world_size):
    from lightning.pytorch.callbacks import ModelPruning

    def refused(module, callback, match):
        with pytest.raises(MisconfigurationException, match=match):
            trainer("lightning", world_size, callbacks=[callback]).fit(module, loader(world_size))
        assert torch_shard.engine_of(module) is None

    late = late_class("lightning", lambda: nn.Linear(3, 3))()
    refused(late, swa(), r"StochasticWeightAveraging has averaged another module .* extra\.bias, extra\.weight")
    refused(net_class("lightning")(), ModelPruning("l1_unstructured"), "Prune before fit")
    used = ema()
    trainer("lightning", world_size, callbacks=[used]).fit(net_class("lightning")(), loader(world_size))
    with pytest.raises(MisconfigurationException, match="use a new callback"):
        trainer("lightning", world_size, callbacks=[used]).validate(net_class("lightning")(width=5), loader(world_size))


@ranks(2)
def test_the_average_is_computed_with_while_training(world_size):
    averaging, compared = ema(), []

    class Computes(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            average, plain, x = averaging._average_model, net_class("lightning")(), torch.linspace(-1, 1, 12).view(2, 6)
            state = average.module.state_dict()
            plain.load_state_dict({k: v.full_tensor() if isinstance(v, ShardTensor) else v for k, v in state.items()})
            with torch.no_grad():
                compared.append(torch.equal(average(x), plain(x)))

    trainer("lightning", world_size, callbacks=[averaging, Computes()]).fit(
        net_class("lightning")(), loader(world_size)
    )
    assert compared and all(compared)


# -- a module that has no memory when it is copied --------------------------------------------------------------------------


def filled(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.constant_(tensor, 0.1)


@pytest.mark.exhaustive
@ranks(2)
def test_a_module_made_without_memory_is_averaged_by_swa_buffers_included(world_size):
    expected = net_class("lightning")()
    expected.apply(filled)
    single("lightning", max_epochs=4, callbacks=[swa()]).fit(expected, loader(1))
    t = trainer("lightning", world_size, ShardStrategy(init_fn=filled), max_epochs=4, callbacks=[swa()])
    with t.init_module(empty_init=True):
        module = net_class("lightning")()
    t.fit(module, loader(world_size))
    assert_same_state(module.state_dict(), expected.state_dict())


@pytest.mark.parametrize("made", [*exhaustive("init_module"), "configure_model"])
@ranks(2)
def test_an_average_that_copies_a_module_without_memory_is_an_error(world_size, made):
    callback = ema()
    t = trainer("lightning", world_size, callbacks=[callback])
    with t.init_module(empty_init=made == "init_module"):
        module = net_class("lightning")()
    if made == "configure_model":
        module = late_class("lightning", lambda: nn.Linear(2, 2))()
    with pytest.raises(NotImplementedError, match="meta tensor"):  # torch's own, in the callback's setup hook
        t.fit(module, loader(world_size))
