"""What becomes of the arguments of Lightning's strategies, without processes."""

from __future__ import annotations

import functools
import inspect
import json
import re
from datetime import timedelta
from typing import Any

import lightning.fabric.strategies
import lightning.pytorch.strategies
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

from lightning_shard.for_lightning import ShardStrategy
from lightning_shard.run._private import ROOTS
from lightning_shard.run.for_lightning import ShardStrategy as StandIn
from lightning_shard.run.from_ddp import from_ddp
from lightning_shard.run.from_deepspeed import from_deepspeed
from lightning_shard.run.from_fsdp import from_fsdp
from lightning_shard.run.from_model_parallel import Noted, from_model_parallel, notable
from lightning_shard.run.settings import read_settings
from lightning_shard.run.takeover import make_stand_in
from lightning_shard.run.translation import Translation, defaults_of
from lightning_shard.strategy.settings import split_settings
from torch_shard import Offload, Precision, ShardConfig
from torch_shard.errors import ConfigError

PL, FABRIC = lightning.pytorch.strategies, lightning.fabric.strategies
TRANSLATORS = {"DDPStrategy": from_ddp, "FSDPStrategy": from_fsdp, "DeepSpeedStrategy": from_deepspeed}


def of(name: str, *, package: Any = PL, **given: Any) -> Translation:
    return TRANSLATORS[name](given, defaults_of(getattr(package, name)))


ddp = functools.partial(of, "DDPStrategy")
fsdp = functools.partial(of, "FSDPStrategy")
deepspeed = functools.partial(of, "DeepSpeedStrategy")


# -- all --------------------------------------------------------------------------------------------------------------


def arguments() -> list[Any]:
    found = []
    for name, wrapper in (
        ("DDPStrategy", DistributedDataParallel),
        ("FSDPStrategy", FullyShardedDataParallel),
        ("DeepSpeedStrategy", None),
    ):
        for kind in filter(None, (getattr(PL, name), getattr(FABRIC, name), wrapper)):
            taken = {"self", "module"} | ({"device_ids", "output_device", "dim"} if kind is wrapper else set())
            parameters = inspect.signature(kind.__init__).parameters.values()
            found += [(name, p.name) for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in taken]
    return sorted(set(found))


NOT_ANSWERED = {"delay_all_reduce_named_params", "param_to_hook_all_reduce"}  # parts of a reducer that there is not


@pytest.mark.parametrize(("name", "argument"), arguments())
def test_every_argument_has_an_answer_of_its_own(name, argument):
    unknown = r"it may change what is trained\. Leave it out"
    if argument in NOT_ANSWERED:
        with pytest.raises(ConfigError, match=rf"{argument}.*{unknown}"):
            of(name, **{argument: object()})
        return
    said = ""
    try:
        of(name, **{argument: timedelta(seconds=5) if argument == "timeout" else object()})
    except (
        ConfigError,
        AttributeError,
        TypeError,
    ) as error:  # an object is no policy, which is found out where it is used
        said = str(error)
    assert not re.search(unknown, said), said


@pytest.mark.parametrize("name", TRANSLATORS)
def test_an_argument_that_there_is_not_is_refused(name):
    with pytest.raises(ConfigError, match=rf"{name}\(surprise=\.\.\.\) has no counterpart"):
        of(name, surprise=1)


def test_what_lightning_gives_itself_and_the_process_group_stay():
    given = {"checkpoint_io": object(), "process_group_backend": "gloo", "timeout": timedelta(seconds=9)}
    found = ddp(**given, start_method="spawn")
    assert found.options == {**given, "start_method": "spawn"} and not found.unused


# -- ddp --------------------------------------------------------------------------------------------------------------


def test_what_ddp_must_be_told_needs_no_answer():
    found = ddp(find_unused_parameters=True, static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=25)
    assert found.config == {} and found.unused == ["bucket_cap_mb=25"]
    assert found.ddp_kwargs["find_unused_parameters"] is True


def test_buffers_and_first_values_are_sent_as_ddp_is_asked_to():
    assert ddp(broadcast_buffers=False, init_sync=False).config == {
        "broadcast_buffers": False,
        "sync_module_states": False,
    }


def test_hooks_that_compress_are_taken_over_and_others_are_refused():
    assert ddp(ddp_comm_hook=default_hooks.fp16_compress_hook).compress is torch.float16
    wrapped = {"ddp_comm_hook": default_hooks.allreduce_hook, "ddp_comm_wrapper": default_hooks.bf16_compress_wrapper}
    assert ddp(**wrapped).compress is torch.bfloat16
    assert ddp(ddp_comm_hook=default_hooks.allreduce_hook).compress is None
    for hook in (lambda state, bucket: None, post_localSGD_hook, powerSGD_hook):
        with pytest.raises(ConfigError, match="ddp_comm_hook"):
            ddp(ddp_comm_hook=hook)
    with pytest.raises(ConfigError, match="model_averaging_period"):
        ddp(model_averaging_period=4)


# -- fsdp -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["hybrid_shard", "HYBRID_SHARD", ShardingStrategy.HYBRID_SHARD])
def test_a_hybrid_strategy_has_the_size_of_its_mesh(given):
    assert fsdp(sharding_strategy=given, device_mesh=(2, 4)).config == {"strategy": "hybrid_shard", "shard_size": 4}


def test_a_strategy_that_fsdp_does_not_have_is_an_error():
    with pytest.raises(ConfigError, match="sharding_strategy must be one of FULL_SHARD"):
        fsdp(sharding_strategy="HALF_SHARD")
    with pytest.raises(ConfigError, match=r"device_mesh must be a pair"):
        fsdp(device_mesh=(2, 4))


def test_policies_choose_units_and_checkpointed_layers():
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    policies = (
        {nn.Linear},
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}),
        functools.partial(size_based_auto_wrap_policy, min_num_params=7),
    )
    for policy in policies:
        units = fsdp(auto_wrap_policy=policy).config["units"]
        chosen = [name for name, part in module.named_modules() if units(name, part)]
        assert chosen == (["1"] if policy is policies[2] else ["0", "1.0", "1.1"])
    for policy in policies[:2]:
        assert fsdp(activation_checkpointing_policy=policy).options["activation_checkpointing"] == (nn.Linear,)
    assert fsdp(activation_checkpointing=[nn.ReLU]).options["activation_checkpointing"] == (nn.ReLU,)
    assert "activation_checkpointing_policy" in fsdp(activation_checkpointing_policy=policies[2]).unused[0]


def test_offload_precision_and_what_is_ignored_are_translated():
    left = nn.Linear(1, 1)
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = fsdp(cpu_offload=CPUOffload(True), mixed_precision=mixed, ignored_modules=[left], backward_prefetch=None)
    precision = found.config.pop("precision")
    assert isinstance(precision, Precision) and (precision.param_dtype, precision.reduce_dtype) == (
        torch.bfloat16,
        torch.float32,
    )
    assert found.config == {"strategy": "full_shard", "offload": "cpu", "ignore": (left,), "prefetch": 0}
    assert "offload" not in fsdp(cpu_offload=CPUOffload(False)).config


def test_the_prefetch_of_less_memory_gathers_nothing_ahead():
    assert fsdp(backward_prefetch=BackwardPrefetch.BACKWARD_POST).config["prefetch"] == 0
    assert "prefetch" not in fsdp(backward_prefetch=BackwardPrefetch.BACKWARD_POST, forward_prefetch=True).config
    assert "prefetch" not in fsdp(backward_prefetch=BackwardPrefetch.BACKWARD_PRE).config


def test_checkpoints_have_the_form_that_each_of_the_two_strategies_has_by_itself():
    assert fsdp().options["state_dict_type"] == "full"
    assert fsdp(package=FABRIC).options["state_dict_type"] == "sharded"


# -- deepspeed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "strategy", "offload"),
    [
        ({}, "shard_grad_op", None),
        ({"stage": 1}, "shard_optim", None),
        ({"stage": 3}, "full_shard", None),
        ({"zero_optimization": False}, "no_shard", None),
        ({"offload_optimizer": True}, "shard_grad_op", Offload(params=False)),
        ({"stage": 3, "offload_parameters": True, "pin_memory": True}, "full_shard", Offload(pin_memory=True)),
        (
            {"stage": 3, "offload_parameters": True, "offload_params_device": "nvme", "nvme_path": "/x"},
            "full_shard",
            Offload(nvme="/x", nvme_params=True),
        ),
    ],
)
def test_stages_and_offload_are_translated(given, strategy, offload):
    config = deepspeed(**given).config
    assert (config["strategy"], config.get("offload")) == (strategy, offload)


def test_a_configuration_is_read_from_a_file_or_a_mapping(tmp_path, monkeypatch):
    file = tmp_path / "ds.json"
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True, "reduce_bucket_size": 5}
    file.write_text(json.dumps({"zero_optimization": zero, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 1}))
    for found in (deepspeed(config=file), deepspeed(config=json.loads(file.read_text()))):
        assert found.config == {"strategy": "full_shard", "offload": Offload(params=False)}
        assert [text for text in found.unused if "steps_per_print" in text or "reduce_bucket_size" in text]
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(file))
    assert deepspeed().config["strategy"] == "full_shard"


@pytest.mark.parametrize(
    "config",
    [
        {"optimizer": {"type": "Adam"}},
        {"gradient_clipping": 1.0},
        {"gradient_accumulation_steps": 2},
        {"fp16": {"enabled": True}},
        {"curriculum_learning": {}},
        {"zero_optimization": {"zero_quantized_weights": True}},
    ],
)
def test_what_deepspeed_does_itself_is_refused(config):
    with pytest.raises(ConfigError, match=next(iter(config))):
        deepspeed(config=config)


# -- model parallelism ------------------------------------------------------------------------------------------------


def parallel(devices: int, **given: Any) -> Translation:
    return from_model_parallel(given, defaults_of(FABRIC.ModelParallelStrategy), devices, 1)


def test_model_parallelism_over_the_data_alone_is_taken_over():
    found = parallel(2, parallelize_fn=len, data_parallel_size=2, tensor_parallel_size=1)
    assert found.parallelize is len and found.has_mesh and found.options["state_dict_type"] == "sharded"


def test_tensor_parallelism_is_refused_also_where_it_is_the_default():
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2 \(auto: .*tensor_parallel\.md"):
        parallel(2)
    with pytest.raises(ConfigError, match="data_parallel_size is 1, and there are 2 ranks"):
        parallel(2, data_parallel_size=1, tensor_parallel_size=1)


class Divided(lightning.pytorch.LightningModule):
    """A program's module, which divides itself in the first run only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.divided = nn.Linear(2, 2), False

    def configure_model(self) -> None:
        if not self.divided:
            divide = notable(fully_shard)
            divide(self.layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
            self.divided = True


def test_a_later_run_of_the_module_keeps_what_the_first_one_gave_to_fully_shard():
    strategy = StandIn()
    strategy.take_over(parallel(2, data_parallel_size=2, tensor_parallel_size=1))

    def precision_of_run(module: Divided) -> Any:
        strategy._lightning_module = module
        with strategy.model_sharded_context():
            module.configure_model()
        return strategy._noted.config(ShardConfig(), 2).get("precision")

    first, other = Divided(), Divided()
    other.divided = True
    assert [precision_of_run(first) for _ in range(2)] == [Precision(torch.bfloat16)] * 2
    assert precision_of_run(other) is None


def test_parameters_that_the_launch_ignores_come_beside_those_given_to_fully_shard():
    strategy, module = (
        StandIn(ShardConfig(ignore=("0.*",), timeout=9.0)),
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
    )
    strategy._noted = Noted([(module, {"ignored_params": {module[1].weight}})])
    ignore = strategy._engine_config(strategy.precision_plugin, module).ignore
    assert ignore[0] == "0.*" and ignore[1] is module[1].weight and len(ignore) == 2


def test_parameters_that_the_launch_ignores_come_beside_those_of_the_programs_strategy():
    layer = nn.Linear(2, 2)
    root = next(root for root in ROOTS.values() if root.package == "lightning.pytorch")
    assert make_stand_in(root, fsdp(ignored_modules=[layer]), {"ignore": ("head.*",)}).config.ignore == (
        layer,
        "head.*",
    )


# -- the launch -------------------------------------------------------------------------------------------------------


def test_arguments_count_for_more_than_variables():
    words = ["--shard.prefetch=3", "--shard.activation_checkpointing=Block", "train.py", "--shard.prefetch=9"]
    settings, rest = read_settings(
        words, {"SHARD_PREFETCH": "2", "SHARD_STRATEGY": "shard_optim", "SHARD_TIMEOUT": "none"}
    )
    assert settings == {"prefetch": 3, "strategy": "shard_optim", "activation_checkpointing": ("Block",)}
    assert rest == ["train.py", "--shard.prefetch=9"]


def test_a_strategy_of_the_launch_drops_the_sizes_of_the_programs_own():
    hybrid = {"strategy": "hybrid_shard", "shard_size": 2, "prefetch": 3}
    fields, _ = split_settings({"strategy": "full_shard"})
    assert ShardConfig(**{**hybrid, **fields}) == ShardConfig(strategy="full_shard", prefetch=3)
    fields, _ = split_settings({"unit_bytes": 5})
    assert {**hybrid, **fields} == {**hybrid, "unit_bytes": 5}


def test_settings_of_the_launch_change_a_strategy_that_is_ours_already():
    strategy = ShardStrategy(ShardConfig(strategy="hybrid_shard", shard_size=2, prefetch=3), state_dict_type="sharded")
    strategy.override({"strategy": "full_shard", "timeout": 7.0, "activation_checkpointing": True})
    assert (strategy.config.strategy, strategy.config.prefetch, strategy.config.timeout) == ("full_shard", 3, 7.0)
    assert strategy._settings.state_dict_type == "sharded" and strategy._settings.activation_checkpointing is True
