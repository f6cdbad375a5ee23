"""FSDP's settings become ours: from each YAML that `accelerate config` can write, and from the plugin."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, _recursive_wrap, transformer_auto_wrap_policy

from accelerate_shard import ShardPlugin
from accelerate_shard.settings.from_fsdp import KEYS, WholeModel, from_fsdp_environment, from_fsdp_plugin
from tests.accelerate.support.accelerators import clean_state
from tests.accelerate.support.launching import FSDP1, FSDP2, exported, write_yaml
from tests.accelerate.support.models import Layer, net
from tests.support.logs import captured_log
from torch_shard.errors import ConfigError
from torch_shard.frontend.fsdp_settings import Wrapped

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
WRAPS: tuple[dict[str, Any], ...] = (
    {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "Layer, Linear"},
    {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 200},
    {"fsdp_auto_wrap_policy": "NO_WRAP"},
)


def from_yaml(folder: Path, fsdp: dict[str, Any]) -> ShardPlugin:
    with clean_state():
        return from_fsdp_environment(exported(write_yaml(folder, fsdp)))


def plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    with clean_state():  # it writes to the environment
        return FullyShardedDataParallelPlugin(**options)


def check_wrap(found: ShardPlugin, wrap: dict[str, Any]) -> None:
    policy = wrap["fsdp_auto_wrap_policy"]
    assert found.layer_classes == (("Layer", "Linear") if "fsdp_transformer_layer_cls_to_wrap" in wrap else ())
    kind = {"SIZE_BASED_WRAP": Wrapped, "NO_WRAP": WholeModel}.get(policy, type(None))
    assert isinstance(found.units, kind)


def test_every_fsdp1_yaml_is_translated(tmp_path: Path) -> None:
    prefetches = {"BACKWARD_PRE": 1, "BACKWARD_POST": 0, "NO_PREFETCH": 0}
    forms = {"FULL_STATE_DICT": "full", "SHARDED_STATE_DICT": "sharded", "LOCAL_STATE_DICT": "sharded"}
    for wrap, prefetch, form, flag in itertools.product(WRAPS, prefetches, forms, (False, True)):
        answers = {
            "fsdp_backward_prefetch": prefetch, "fsdp_forward_prefetch": flag, "fsdp_state_dict_type": form,
            "fsdp_activation_checkpointing": flag,
        }  # fmt: skip
        found = from_yaml(tmp_path, {**FSDP1, **answers, **wrap})
        assert found.prefetch == (1 if flag else prefetches[prefetch])
        assert found.state_dict_type == forms[form]
        assert found.activation_checkpointing is flag and found.fp32_masters
        check_wrap(found, wrap)


def test_every_fsdp2_yaml_is_translated(tmp_path: Path) -> None:
    for reshard, wrap, form, flag in itertools.product(
        (True, False), WRAPS, ("FULL_STATE_DICT", "SHARDED_STATE_DICT"), (False, True)
    ):
        answers = {
            "fsdp_reshard_after_forward": reshard, "fsdp_state_dict_type": form,
            "fsdp_activation_checkpointing": flag, "fsdp_cpu_ram_efficient_loading": flag,
            "fsdp_activation_checkpointing_offload": flag,
        }  # fmt: skip
        found = from_yaml(tmp_path, {**FSDP2, **answers, **wrap})
        assert found.strategy == ("full_shard" if reshard else "shard_grad_op")
        assert found.state_dict_type == form.split("_")[0].lower()
        assert found.activation_checkpointing is found.activation_offload is flag and found.prefetch == 1
        check_wrap(found, wrap)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_have_one_name_in_yamls_and_plugins_and_may_be_numbered(strategy: str, tmp_path: Path) -> None:
    older = {name: value for name, value in FSDP1.items() if name not in ("fsdp_version", "fsdp_reshard_after_forward")}
    number = STRATEGIES.index(strategy) + 1
    assert from_yaml(tmp_path, {**FSDP1, "fsdp_reshard_after_forward": strategy}).strategy == strategy.lower()
    for said in (strategy, number):
        assert from_yaml(tmp_path, {**older, "fsdp_sharding_strategy": said}).strategy == strategy.lower()
    for value in (strategy, ShardingStrategy(number)):  # the last one's name begins with an underscore
        assert from_fsdp_plugin(plugin(sharding_strategy=value)).strategy == strategy.lower()


def test_every_variable_that_the_launcher_exports_has_a_row(tmp_path: Path) -> None:
    extra = {"fsdp_transformer_layer_cls_to_wrap": "Layer", "fsdp_ignored_modules": "head"}
    with clean_state():
        names = exported(write_yaml(tmp_path, {**FSDP1, **extra}))
    assert set(names) == {key.variable for key in KEYS if key.variable}


def test_every_field_of_the_plugin_has_a_row() -> None:
    fields = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
    assert fields == {key.field for key in KEYS}


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        ({"fsdp_offload_params": "mostly"}, "FSDP_OFFLOAD_PARAMS"),
        ({"fsdp_activation_checkpointing_offload": True}, "CHECKPOINTING_OFFLOAD.*FSDP_ACTIVATION_CHECKPOINTING .* is false"),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "A"}, "AUTO_WRAP_POLICY"),
        ({"fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_transformer_layer_cls_to_wrap": "A"}, "TRANSFORMER_CLS_TO_WRAP"),
        ({"fsdp_auto_wrap_policy": "BLOCKS"}, "FSDP_AUTO_WRAP_POLICY"),
        ({"fsdp_reshard_after_forward": "MOSTLY"}, "FSDP_RESHARD_AFTER_FORWARD"),
        ({"fsdp_state_dict_type": "TINY"}, "FSDP_STATE_DICT_TYPE"),
        ({"fsdp_activation_checkpointing": "perhaps"}, "FSDP_ACTIVATION_CHECKPOINTING"),
        ({"fsdp_ignored_modules": "layers.("}, "FSDP_IGNORED_MODULES"),
        ({"fsdp_version": 3}, "FSDP_VERSION"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_there_or_contradicts_itself_is_refused_by_name(
    answers: dict[str, Any], named: str, tmp_path: Path
) -> None:
    base = {**FSDP2, "fsdp_reshard_after_forward": True}
    with pytest.raises(ConfigError, match=named):
        from_yaml(tmp_path, {**base, **answers})


def test_keys_without_a_meaning_are_named_in_one_warning(tmp_path: Path) -> None:
    with captured_log() as messages:
        from_yaml(tmp_path, FSDP1)
        from_yaml(tmp_path, FSDP2)
    assert messages == []
    answers = {"fsdp_use_orig_params": False, "fsdp_state_dict_type": "LOCAL_STATE_DICT"}
    loading = {"fsdp_cpu_ram_efficient_loading": False, "fsdp_sync_module_states": False}
    with captured_log() as messages:
        from_yaml(tmp_path, {**FSDP1, **answers, **loading})
    (said,) = messages
    for name in ("fsdp_use_orig_params=", "fsdp_sync_module_states=", "LOCAL_STATE_DICT"):
        assert name in said


def test_the_default_plugins_are_translated_without_a_warning() -> None:
    with warnings.catch_warnings(), captured_log() as messages:
        warnings.simplefilter("error")
        first = from_fsdp_plugin(plugin())
        second = from_fsdp_plugin(plugin(fsdp_version=2))
    assert messages == []
    assert first == ShardPlugin(state_dict_type="full", fp32_masters=True)
    assert second == ShardPlugin(fp32_masters=True)


def test_the_plugins_precision_is_ours() -> None:
    first = from_fsdp_plugin(
        plugin(mixed_precision_policy=MixedPrecision(torch.bfloat16, torch.float32, keep_low_precision_grads=True))
    ).precision
    assert (first.param_dtype, first.reduce_dtype, first.buffer_dtype) == (torch.bfloat16, torch.float32, None)
    assert first.cast_inputs == "root" and first.keep_low_precision_grads
    second = from_fsdp_plugin(
        plugin(fsdp_version=2, mixed_precision_policy=MixedPrecisionPolicy(torch.float16, output_dtype=torch.float32))
    ).precision
    assert (second.param_dtype, second.output_dtype, second.cast_inputs) == (torch.float16, torch.float32, True)
    named = from_fsdp_plugin(plugin(mixed_precision_policy="bf16")).precision
    assert (named.param_dtype, named.reduce_dtype, named.buffer_dtype) == (torch.bfloat16,) * 3


def test_a_plugin_that_asks_for_what_is_not_there_is_refused() -> None:
    both = {"auto_wrap_policy": "size_based_wrap", "transformer_cls_names_to_wrap": ["A"], "min_num_params": 1}
    for options, named in (({"param_init_fn": lambda m: None}, "param_init_fn"), (both, "classes")):
        with pytest.raises(ConfigError, match=rf"fsdp_plugin\..*{named}"):
            from_fsdp_plugin(plugin(**options))
    with pytest.raises(ConfigError, match="FullyShardedDataParallelPlugin"):
        from_fsdp_plugin(ShardPlugin())


def test_units_are_where_fsdp_wraps() -> None:
    policies: list[Any] = [
        from_fsdp_plugin(plugin(auto_wrap_policy="size_based_wrap", min_num_params=n)).units.policy
        for n in (20, 100, 300)
    ]
    policies.append(functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer, nn.LayerNorm}))
    policies.append(ModuleWrapPolicy({Layer}))

    class Marked(nn.Module):  # stands for FSDP's wrapper, which needs a process group
        def __init__(self, module: nn.Module, **_: Any) -> None:
            super().__init__()
            self.wrapped = module

    for policy in policies:
        model = net()
        original = {id(module): name for name, module in model.named_modules()}
        units = from_fsdp_plugin(plugin(auto_wrap_policy=policy)).units
        chosen = {name for name, module in model.named_modules() if units(name, module)}
        _recursive_wrap(model, policy, Marked, set(), set(), True)
        wrapped = {original[id(m.wrapped)] for m in model.modules() if isinstance(m, Marked)}
        assert chosen == wrapped and chosen
