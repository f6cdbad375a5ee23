"""Precision plugins: those that are right, and those that are refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

import lightning_shard
from lightning_shard.registration.registry import strategy_class
from lightning_shard.trainer.clipping import ShardedClipping
from tests.lightning.support import NAMESPACES, assert_same_state, loader, net_class, single, trainer
from tests.support.logs import captured_log
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import Precision
from torch_shard.errors import ConfigError


@pytest.mark.parametrize("precision", [*exhaustive("64-true"), "bf16-mixed", "bf16-true", "16-true"])
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


def noted_class():
    class Notes(net_class("lightning")):
        """A norm, and what dtypes a step finds."""

        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(7)
            self.found = []

        def forward(self, x):
            x = self.norm(self.inner(x))
            self.found.append((self.inner.weight.dtype, self.norm.weight.dtype, torch.is_autocast_enabled("cpu")))
            return self.head(x) + self.offset

    return Notes


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@ranks(2)
def test_mixed_precision_gathers_in_low_precision_keeps_norms_and_leaves_autocast_on(world_size, precision):
    plugins = [MixedPrecision("16-mixed", "cpu")] if precision == "16-mixed" else []
    options = {"plugins": plugins} if plugins else {"precision": precision}
    module = noted_class()()
    t = trainer(
        "lightning", world_size, **options, max_steps=2, strategy=lightning_shard.ShardStrategy(unshard_at_end=False)
    )
    t.fit(module, loader(world_size))
    dtype = torch.float16 if plugins else torch.bfloat16
    assert set(module.found) == {(dtype, torch.float32, True)}
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert t.strategy.engine.config.precision.param_dtype is dtype


@ranks(2)
def test_autocast_alone_is_a_choice_with_a_warning(world_size, rank):
    module = noted_class()()
    strategy = lightning_shard.ShardStrategy(precision=Precision())
    with captured_log() as lines:
        trainer("lightning", world_size, precision="bf16-mixed", max_steps=1, strategy=strategy).fit(module, loader(2))
    assert set(module.found) == {(torch.float32, torch.float32, True)}
    assert rank or any("autocast alone" in line for line in lines)


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


REFUSED = [
    "BitsandbytesPrecision",
    "DeepSpeedPrecision",
    "FSDPPrecision",
    "TransformerEnginePrecision",
    "XLAPrecision",
]


@pytest.mark.parametrize("namespace", list(NAMESPACES))
def test_plugins_that_replace_layers_or_belong_to_other_strategies_are_refused(namespace):
    pl = NAMESPACES[namespace]
    error = pl.utilities.exceptions.MisconfigurationException
    for name in REFUSED:
        plain = getattr(pl.plugins.precision, name)
        plugin = plain.__new__(plain)  # what they are for is not installed
        with pytest.raises(error, match=rf"{name} does not work with ShardStrategy\. Supported are '32-true'"):
            strategy_class(namespace)(precision_plugin=plugin)
        if name != "BitsandbytesPrecision":  # Lightning itself refuses it without a GPU
            with pytest.raises(error, match=name):
                trainer(namespace, 1, plugins=[plugin])


def test_settings_go_to_the_engine_and_unknown_ones_are_refused():
    strategy = lightning_shard.ShardStrategy(strategy="no_shard", prefetch=2)
    assert (strategy.config.strategy, strategy.config.prefetch) == ("no_shard", 2)
    with pytest.raises(ConfigError, match="prefech"):
        lightning_shard.ShardStrategy(prefech=2)
