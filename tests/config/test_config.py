"""ShardConfig: every wrong choice is an error that names the field."""

from __future__ import annotations

import dataclasses
import math

import pytest
from torch import nn

from torch_shard.config.shard_config import ShardConfig
from torch_shard.errors import ConfigError, ShardError
from torch_shard.utils.patterns import matches

pytestmark = pytest.mark.wheel


def test_the_defaults_are_the_documented_ones():
    config = ShardConfig()
    assert config.strategy == "full_shard"
    assert config.units is None
    assert config.unit_bytes == 32 * 1024 * 1024
    assert config.prefetch == 1
    assert config.sync_module_states and config.broadcast_buffers
    assert config.ignore == ()
    assert config.timeout == 30.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("strategy", "fullshard"),
        ("strategy", None),
        ("unit_bytes", 0),
        ("unit_bytes", 1.5),
        ("unit_bytes", True),
        ("prefetch", -1),
        ("prefetch", "1"),
        ("sync_module_states", 1),
        ("broadcast_buffers", None),
        ("debug", "yes"),
        ("single_communicator", 0),
        ("registered_memory", "nccl"),
        ("timeout", 0),
        ("timeout", -1.0),
        ("timeout", math.inf),
        ("timeout", math.nan),
        ("timeout", "30"),
        ("init_fn", "reset_parameters"),
        ("ignore", "head.*"),
        ("ignore", nn.Linear(1, 1)),
        ("ignore", [3]),
        ("ignore", ["re:("]),
        ("units", "layers.*"),
        ("units", nn.Linear),
        ("units", nn.Sequential(nn.Linear(1, 1))),
        ("units", []),
        ("units", [int]),
        ("units", [""]),
        ("units", ["re:["]),
        ("units", [3]),
        ("units", [["a", "a"]]),
        ("units", [[]]),
        ("units", [[nn.Linear]]),
        ("units", [{"a", "b"}]),
        ("units", {nn.Linear, nn.Conv2d}),
        ("units", [["a.weight"], nn.Linear]),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_field(field, value):
    with pytest.raises(ConfigError, match=rf"^{field}\b"):
        ShardConfig(**{field: value})


def test_a_config_error_is_a_shard_error_and_a_value_error():
    assert issubclass(ConfigError, ShardError)
    assert issubclass(ConfigError, ValueError)


def test_an_unknown_strategy_lists_the_known_ones():
    known = "'full_shard', 'shard_grad_op', 'shard_optim', 'hybrid_shard', 'hybrid_shard_zero2', 'no_shard'"
    with pytest.raises(ConfigError, match=known):
        ShardConfig(strategy="zero3")


@pytest.mark.parametrize(
    "units",
    [
        None,
        (nn.TransformerEncoderLayer,),
        (nn.Linear, "layers.*", "re:blocks\\.[0-9]+"),
        (("a.weight", "a.bias"), ("b.weight",)),
        lambda name, module: isinstance(module, nn.Linear),
    ],
)
def test_every_form_of_units_is_accepted(units):
    assert ShardConfig(units=units).units == units


def test_a_config_does_not_change_with_the_lists_it_was_made_from():
    units, ignore, groups = ["layers.*"], ["head.*"], [["a"], ["b", "c"]]
    config, grouped = ShardConfig(units=units, ignore=ignore), ShardConfig(units=groups)
    units.append("x")
    ignore.append("y")
    groups[0].append("z")
    assert config.units == ("layers.*",)
    assert config.ignore == ("head.*",)
    assert grouped.units == (("a",), ("b", "c"))


def test_a_config_is_frozen_and_can_be_replaced():
    config = ShardConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.prefetch = 2
    assert dataclasses.replace(config, prefetch=2).prefetch == 2
    with pytest.raises(ConfigError, match=r"^prefetch"):
        dataclasses.replace(config, prefetch=-2)


def test_modules_and_parameters_may_be_ignored():
    layer = nn.Linear(2, 2)
    config = ShardConfig(ignore=[layer, layer.weight, "head.*"])
    assert config.ignore[0] is layer
    assert config.ignore[1] is layer.weight


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("layers.0", "layers.*", True),
        ("layers.0.mlp", "layers.*", True),
        ("model.layers.0", "layers.*", False),
        ("layers.12", r"re:layers\.\d+", True),
        ("layers.12.mlp", r"re:layers\.\d+", False),
        ("Layers.0", "layers.*", False),
    ],
)
def test_patterns_match_whole_names(name, pattern, expected):
    assert matches(name, pattern) is expected
