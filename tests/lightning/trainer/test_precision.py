"""Precision plugins: those that are right, and those that are refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision as PrecisionPlugin
from torch import nn

from lightning_shard.trainer.clipping import ShardedClipping
from tests.lightning.support import (
    NAMESPACES,
    Net,
    assert_same_state,
    both_namespaces,
    fitted,
    loader,
    shard_strategy,
    single,
    trainer,
)
from tests.support.logs import captured_log
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import Precision


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", *exhaustive("16-true")])
@ranks(2)
def test_low_precisions_train_like_a_single_device(precision):
    expected, module = Net(), Net()
    single("lightning", precision=precision, gradient_clip_val=0.5).fit(expected, loader(1))
    fitted(module, precision=precision, gradient_clip_val=0.5)
    # Sums over 8 samples and sums over 2 x 4 are rounded differently.
    for name, value in expected.state_dict().items():
        assert module.state_dict()[name].dtype == value.dtype
        torch.testing.assert_close(module.state_dict()[name], value, rtol=0.05, atol=0.02)


@ranks(2)
def test_with_16_mixed_a_step_that_overflows_on_one_rank_is_skipped_on_all(rank, world_size):
    class Overflows(Net):
        def training_step(self, batch, index):
            loss = self.loss(batch)
            return loss * float("inf") if index == 2 and (rank == 1 or self.trainer.world_size == 1) else loss

        def on_train_batch_end(self, outputs, batch, index):
            self.seen.append(self.trainer.precision_plugin.scaler.get_scale())

    expected, module = Overflows(), Overflows()
    for n, each in ((1, expected), (world_size, module)):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        options = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "gradient_clip_val": 0.5}
        trainer("lightning", n, "auto" if n == 1 else "shard", **options).fit(each, loader(n))
    assert module.seen == expected.seen == [256.0, 512.0, 256.0, 256.0, 512.0, 512.0]
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=1e-2, atol=1e-2)


class Notes(Net):
    """A norm, and what dtypes a step finds."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.found = []

    def forward(self, x):
        x = self.norm(self.inner(x))
        self.found.append((self.inner.weight.dtype, self.norm.weight.dtype, torch.is_autocast_enabled("cpu")))
        return self.head(x) + self.offset


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@ranks(2)
def test_mixed_precision_gathers_in_low_precision_keeps_norms_and_leaves_autocast_on(precision):
    # Without a GPU the Trainer itself takes "16-mixed" for "bf16-mixed".
    options = {"plugins": [MixedPrecision("16-mixed", "cpu")]} if precision == "16-mixed" else {"precision": precision}
    module = Notes()
    t = fitted(module, shard_strategy(unshard_at_end=False), **options, max_steps=2)
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    assert set(module.found) == {(dtype, torch.float32, True)}
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert t.strategy.engine.config.precision.param_dtype is dtype


@ranks(2)
def test_autocast_alone_is_a_choice_with_a_warning(rank):
    module = Notes()
    strategy = shard_strategy(precision=Precision())
    with captured_log() as lines:
        fitted(module, precision="bf16-mixed", max_steps=1, strategy=strategy)
    assert set(module.found) == {(torch.float32, torch.float32, True)}
    assert rank or any("autocast alone" in line for line in lines)


@both_namespaces
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


class Shrinks(PrecisionPlugin):
    """Clips in its own way."""

    def clip_grad_by_norm(self, optimizer, clip_val):
        for param in self.main_params(optimizer):
            param.grad.mul_(clip_val)

    def clip_grad_by_value(self, optimizer, clip_val):
        self.clip_grad_by_norm(optimizer, clip_val / 2)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@ranks(2)
def test_clipping_of_the_users_own_plugin_is_that_of_a_single_device(world_size, algorithm):
    expected, module = Net(), Net()
    for n, each in ((1, expected), (world_size, module)):
        options = {"plugins": [Shrinks()], "gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm}
        trainer("lightning", n, "auto" if n == 1 else "shard", **options).fit(each, loader(n))
    assert_same_state(module.state_dict(), expected.state_dict())


REFUSED = [f"{name}Precision" for name in ("Bitsandbytes", "DeepSpeed", "FSDP", "TransformerEngine", "XLA")]


@both_namespaces
def test_plugins_that_replace_layers_or_belong_to_other_strategies_are_refused(namespace):
    pl = NAMESPACES[namespace]
    error = pl.utilities.exceptions.MisconfigurationException
    for name in REFUSED:
        plain = getattr(pl.plugins.precision, name)
        plugin = plain.__new__(plain)  # what they are for is not installed
        with pytest.raises(error, match=rf"{name} does not work with ShardStrategy\. Supported are '32-true'"):
            shard_strategy(namespace, precision_plugin=plugin)
        if name != "BitsandbytesPrecision":  # Lightning itself refuses it without a GPU
            with pytest.raises(error, match=name):
                trainer(namespace, 1, plugins=[plugin])
