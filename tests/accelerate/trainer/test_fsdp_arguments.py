"""``TrainingArguments(fsdp=..., fsdp_config=...)`` of existing scripts is translated."""

from __future__ import annotations

import pytest
from transformers import Trainer

import torch_shard
from accelerate_shard import ShardPlugin
from tests.accelerate.support.trainers import Ours, assert_same_logs, trained, trainer
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError

VERSION_1 = {
    "version": 1, "reshard_after_forward": "shard_grad_op", "transformer_layer_cls_to_wrap": ["GPT2Block"],
    "sync_module_states": False,  # with which Accelerate's plugin asks for a GPU
}  # fmt: skip


@pytest.mark.parametrize(
    ("fsdp", "config", "strategy"),
    [
        (True, {"transformer_layer_cls_to_wrap": "GPT2Block"}, "full_shard"),
        *exhaustive(
            (True, {"reshard_after_forward": False}, "shard_grad_op"),
            (
                True,
                VERSION_1,
                "full_shard",
            ),  # as Accelerate has it: its plugin fills in a sharding_strategy, which counts
            ("full_shard auto_wrap", None, "full_shard"),
        ),
    ],
)
@ranks(2)
def test_settings_of_fsdp_shard_alike(fsdp, config, strategy, tmp_path):
    with trainer(Ours, tmp_path, fsdp=fsdp, fsdp_config=config, save_strategy="epoch", save_only_model=True) as own:
        own.train()
        logs, engine = own.steps.logs, torch_shard.engine_of(own.model)
        assert engine is not None and engine.config.strategy == strategy
        assert not own.is_fsdp_enabled
    assert_same_logs(logs, trained(Trainer, tmp_path))


@ranks(2)
def test_settings_of_both_are_refused(tmp_path):
    options = {"options": {"shard_plugin": ShardPlugin()}, "fsdp": True}
    with pytest.raises(ConfigError, match="shard_plugin and fsdp_plugin"), trainer(Ours, tmp_path, **options):
        pass
