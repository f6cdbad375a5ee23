"""Precision plugins: those that are right, and those that are refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_shard
from lightning_shard.precision import ShardedClipping
from tests.lightning.helpers import NAMESPACES, assert_same_state, loader, net_class, single, trainer
from tests.ranks import ranks
from torch_shard.errors import ConfigError


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true"])
@ranks(2)
def test_precisions_train_like_a_single_device(world_size, precision):
    expected, module = net_class("lightning")(), net_class("lightning")()
    single("lightning", precision=precision, gradient_clip_val=0.5).fit(expected, loader(1))
    trainer("lightning", world_size, precision=precision, gradient_clip_val=0.5).fit(module, loader(world_size))
    if precision == "64-true":
        assert module.inner.weight.dtype == torch.float64
        assert_same_state(module.state_dict(), expected.state_dict())
        return
    # Low precision rounds sums over 8 samples and sums over 2 x 4 differently.
    for name, value in expected.state_dict().items():
        assert module.state_dict()[name].dtype == value.dtype
        torch.testing.assert_close(module.state_dict()[name], value, rtol=0.05, atol=0.02)


@ranks(2)
def test_a_gradient_scaler_of_the_users_skips_a_step_on_all_ranks_when_one_rank_overflows(rank, world_size):
    class Scales(net_class("lightning")):
        def __init__(self, overflows):
            super().__init__()
            self.automatic_optimization = False
            self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
            self.overflows = overflows

        def training_step(self, batch, index):
            optimizer = self.optimizers().optimizer
            loss = self.scaler.scale(self.loss(batch))
            self.manual_backward(loss * float("inf") if index == 2 and self.overflows else loss)
            self.scaler.unscale_(optimizer)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            self.scaler.step(optimizer)
            self.scaler.update()
            optimizer.zero_grad()
            self.seen.append(self.scaler.get_scale())

    expected, module = Scales(True), Scales(rank == 1)
    single("lightning").fit(expected, loader(1))
    trainer("lightning", world_size).fit(module, loader(world_size))
    assert module.seen == expected.seen == [256.0, 512.0, 256.0, 256.0, 512.0, 512.0]
    assert_same_state(module.state_dict(), expected.state_dict())


def test_float16_with_a_scaler_is_refused_with_the_remedy():
    with pytest.raises(MisconfigurationException, match="bf16-mixed"):
        trainer("lightning", 1, plugins=[MixedPrecision("16-mixed", "cpu")])


@pytest.mark.parametrize("namespace", list(NAMESPACES))
def test_a_plugin_keeps_its_name_and_survives_pickling_and_copying(namespace):
    t = trainer(namespace, 1, precision="bf16-mixed")
    plugin = t.precision_plugin
    assert isinstance(plugin, ShardedClipping)
    assert type(plugin).__qualname__ == "MixedPrecision"  # the key of its state in checkpoints
    for other in (pickle.loads(pickle.dumps(plugin)), copy.deepcopy(plugin)):
        assert type(other) is type(plugin) and other.precision == "bf16-mixed"


def test_the_users_own_plugin_class_is_kept():
    class Own(MixedPrecision):
        pass

    t = trainer("lightning", 1, plugins=[Own("bf16-mixed", "cpu")])
    assert isinstance(t.precision_plugin, Own) and isinstance(t.precision_plugin, ShardedClipping)


@pytest.mark.parametrize("callback", ["StochasticWeightAveraging", "WeightAveraging"])
@ranks(2)
def test_callbacks_that_average_parameters_are_refused(world_size, callback):
    from lightning.pytorch import callbacks

    made = getattr(callbacks, callback)(*([0.1] if callback.startswith("Stochastic") else []))
    with pytest.raises(MisconfigurationException, match=f"{callback} does not work with ShardStrategy"):
        trainer("lightning", world_size, callbacks=[made]).fit(net_class("lightning")(), loader(world_size))


def test_settings_go_to_the_engine_and_unknown_ones_are_refused():
    strategy = lightning_shard.ShardStrategy(strategy="no_shard", prefetch=2)
    assert (strategy.config.strategy, strategy.config.prefetch) == ("no_shard", 2)
    with pytest.raises(ConfigError, match="prefech"):
        lightning_shard.ShardStrategy(prefech=2)
