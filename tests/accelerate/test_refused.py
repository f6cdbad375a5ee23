"""What can't be right is a typed error that names the setting and the remedy, on all ranks, before anything has changed."""

from __future__ import annotations

import os
import sys
import types

import pytest
import torch
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DistributedDataParallelKwargs, FP8RecipeKwargs, ParallelismConfig
from torch import nn

import torch_shard
from accelerate_shard import ShardConfig, ShardPlugin
from accelerate_shard.settings.from_ddp_kwargs import config_with
from tests.accelerate.support.accelerators import OURS, STOCK, accelerator, clean_state, engine_of
from tests.accelerate.support.models import net, sgd
from tests.support.logs import captured_log
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError, NeedsGatherError


def refused(match: str, **options) -> None:
    """Our Accelerator raises, and leaves no state behind that the next one would find."""
    with clean_state():
        with pytest.raises(ConfigError, match=match):
            OURS(cpu=True, **options)
        from accelerate.state import AcceleratorState

        assert not AcceleratorState._shared_state
        assert not {"ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"} & set(os.environ)
        OURS(cpu=True)


# -- settings ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("parallelism_config", ParallelismConfig(), "parallelism_config.*ParallelismConfig"),
        ("deepspeed_plugin", object(), "deepspeed_plugin.*DeepSpeed"),
        ("deepspeed_plugins", {"a": object()}, "deepspeed_plugins.*DeepSpeed"),
        ("megatron_lm_plugin", object(), "megatron_lm_plugin.*Megatron-LM"),
        ("torch_tp_plugin", object(), "torch_tp_plugin.*tensor parallelism"),
        ("mixed_precision", "fp8", "mixed_precision.*fp8.*bf16"),
        ("kwargs_handlers", [FP8RecipeKwargs.__new__(FP8RecipeKwargs)], "FP8RecipeKwargs.*fp8"),
        ("shard_plugin", {"strategy": "full_shard"}, "shard_plugin must be a ShardPlugin"),
        ("shard_plugin", ShardPlugin, "shard_plugin must be a ShardPlugin"),
    ],
)
def test_other_engines_are_refused_by_name(name, value, says):
    refused(says, **{name: value})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"strategy": "zero3"}, "strategy"),
        ({"layer_classes": "GPT2Block"}, "layer_classes"),
        ({"layer_classes": ["Layer"], "units": [Layer := nn.Linear]}, "layer_classes and units"),
        ({"activation_checkpointing": "Layer"}, "activation_checkpointing"),
        ({"activation_offload": "Layer"}, "^activation_offload must be"),
        ({"state_dict_type": "SHARDED_STATE_DICT"}, "state_dict_type"),
        ({"state_dict_type": "full", "async_save": True}, "async_save"),
        ({"defer_gradient_sync": 1}, "defer_gradient_sync"),
    ],
)
def test_a_wrong_value_of_a_field_names_the_field(options, says):
    with pytest.raises(ConfigError, match=says):
        ShardPlugin(**options)


# -- models -----------------------------------------------------------------------------------------------------------
def not_prepared(model: nn.Module, match: str) -> None:
    """prepare() raises, alone and with others, and nothing has changed."""
    with accelerator() as acc:
        other, optimizer = net(), sgd(net().parameters())
        for objects in ((model,), (other, optimizer, model)):
            with pytest.raises(ConfigError, match=match):
                acc.prepare(*objects)
            with pytest.raises(ConfigError, match=match):
                acc.prepare_model(model)
        assert not acc._models and not acc._optimizers
        assert torch_shard.engine_of(other) is None


@ranks(2)
def test_models_in_wrappers_of_others_are_refused_and_these_named():
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    not_prepared(nn.parallel.DistributedDataParallel(net()), "DistributedDataParallel already.*plain model")
    inside = net()
    inside.layers[1] = nn.parallel.DistributedDataParallel(inside.layers[1])
    not_prepared(inside, r"module 'layers\.1' of the model is wrapped in DistributedDataParallel")
    not_prepared(FullyShardedDataParallel(net(), device_id=torch.device("cpu")), "FullyShardedDataParallel already")
    not_prepared(fully_shard(net()), "fully_shard")
    model = net()
    torch_shard.shard(model)
    not_prepared(model, "sharded already")
    part = net()
    torch_shard.shard(part.layers[0])
    not_prepared(part, r"layers\.0 is sharded already")


@ranks(2)
def test_a_model_of_an_accwith_another_plugin_is_refused():
    with accelerator(shard_plugin=ShardPlugin(strategy="no_shard")) as acc:
        model = acc.prepare(net())
        other = OURS(cpu=True, shard_plugin=ShardPlugin(prefetch=3))
        with pytest.raises(ConfigError, match=r"strategy='no_shard', now 'full_shard', prefetch=1, now 3"):
            other.prepare(model)
        assert not other._models


@ranks(2)
def test_models_with_a_device_map_over_several_devices_are_refused():
    model = nn.Sequential(net())
    model[0].hf_device_map = {"embed": "cpu", "layers": "disk"}
    not_prepared(model, r"Sequential\.0.*device_map")
    model[0].hf_device_map = {"": "cpu"}  # all of it, here
    with accelerator() as acc:
        assert engine_of(acc.prepare(model))


@pytest.mark.parametrize("method", ["prepare", "prepare_model"])
@ranks(2)
def test_a_model_that_one_rank_alone_refuses_is_an_error_on_all_at_once(method, rank):
    with accelerator() as acc:
        model = net()
        if rank == 1:
            model.hf_device_map = {"embed": "cpu", "layers": "disk"}
        with pytest.raises(ConfigError, match="device_map" if rank == 1 else r"rank 1 failed: .*device_map"):
            getattr(acc, method)(model)
        assert not acc._models and torch_shard.engine_of(model) is None
        model.__dict__.pop("hf_device_map", None)
        assert engine_of(getattr(acc, method)(model))


def test_settings_of_ddps_hooks_that_do_nothing_are_named():
    handler = DistributedDataParallelKwargs(comm_state_option={"rank": 1}, static_graph=True)
    with captured_log() as log:
        config_with(handler, ShardConfig())
        config_with(DistributedDataParallelKwargs(), ShardConfig())
    assert len(log) == 1 and "static_graph, comm_state_option without a meaning" in log[0]


# -- optimizers -------------------------------------------------------------------------------------------------------
@pytest.mark.exhaustive
def test_lomo_optimizers_are_refused_by_name(monkeypatch):
    made = types.ModuleType("lomo_optim")
    monkeypatch.setitem(sys.modules, "lomo_optim", made)
    AdaLomo = type("AdaLomo", (torch.optim.SGD,), {"__module__": "lomo_optim"})
    with accelerator() as acc:
        model = net()
        for call in (acc.prepare, acc.prepare_optimizer):
            with pytest.raises(ConfigError, match=r"AdaLomo.*step_in_backward"):
                call(AdaLomo(model.parameters(), lr=0.1))
        with pytest.raises(ConfigError, match="AdaLomo"):
            acc.prepare(model, AdaLomo(model.parameters(), lr=0.1))
        assert not acc._optimizers and torch_shard.engine_of(model) is None


# -- what scripts do with prepared models -----------------------------------------------------------------------------
@ranks(2)
def test_local_sgd_is_refused_before_it_begins():
    with accelerator() as acc:
        model = acc.prepare(net())
        with pytest.raises(ConfigError, match=r"LocalSGD.*enabled=False"), LocalSGD(acc, model, 2):
            raise AssertionError
        with LocalSGD(acc, model, 2, enabled=False) as local:
            local.step()
    with accelerator(STOCK) as acc:  # which goes on working
        model = acc.prepare(net())
        with LocalSGD(acc, model, 1) as local:
            local.step()


# -- what the engine says --------------------------------------------------------------------------------------------------
@ranks(2)
def test_what_has_to_be_gathered_is_gathered_in_the_scripts_words():
    with accelerator() as acc:
        model = acc.prepare(net())
        weight = next(model.parameters())
        handle = r"torch_shard\.engine_of\(accelerator\.unwrap_model\(model\)\)"
        with pytest.raises(NeedsGatherError, match=rf"`with {handle}\.gathered\(parameter\):`"):
            weight.data_ptr()
        with torch_shard.engine_of(acc.unwrap_model(model)).gathered(weight):
            assert weight.data_ptr()
