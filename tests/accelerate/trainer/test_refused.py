"""What a sharding Trainer can't do is refused by name, on all ranks, before anything has changed."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer

import torch_shard
from accelerate_shard import ShardPlugin
from accelerate_shard.trainer.mixin import ShardTrainerMixin
from tests.accelerate.support.trainers import Ours, trainer
from tests.support.hf_models import build
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError, DivergenceError, StateDictError


@ranks(2)
def test_saving_on_one_rank_only_is_an_error_on_both(tmp_path, rank):
    with trainer(Ours, tmp_path, max_steps=1) as own:
        own.train()
        with pytest.raises(
            DivergenceError, match=r"is called on all ranks, not under `if trainer.is_world_process_zero"
        ):
            own.save_model() if rank == 0 else own.evaluate()


@ranks(2)
def test_shards_are_not_saved(tmp_path, rank):
    with trainer(Ours, tmp_path, max_steps=1) as own:
        own.train()
        if rank == 0:
            slices = {name: value.cpu() for name, value in own.model.state_dict().items()}
            with pytest.raises(StateDictError, match=r"trainer.save_model\(\) on all ranks"):
                own._save(str(tmp_path), state_dict=slices)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "TrainingArguments.deepspeed"),
        ({"parallelism_config": object()}, "^parallelism_config: "),
        ({"fsdp": True, "fsdp_config": {"xla": True}}, "xla"),
        ({"_n_gpu": 2}, "torchrun"),
    ],
)
def test_another_engine_is_refused_with_the_remedy(changed, named, tmp_path):
    class Changed(Ours):
        def create_accelerator_and_postprocess(self) -> None:
            for name, value in changed.items():
                setattr(self.args, name, value)
            super().create_accelerator_and_postprocess()

    with pytest.raises(ConfigError, match=named), trainer(Changed, tmp_path):
        pass


@ranks(2)
def test_settings_of_both_are_refused(tmp_path):
    options = {"options": {"shard_plugin": ShardPlugin()}, "fsdp": True}
    with pytest.raises(ConfigError, match="shard_plugin and fsdp_plugin"), trainer(Ours, tmp_path, **options):
        pass


@ranks(2)
def test_checkpoints_that_each_rank_begins_by_itself_are_refused_with_the_remedy(tmp_path):
    named = r"enable_jit_checkpoint: .*save_steps"
    with pytest.raises(ConfigError, match=named), trainer(Ours, tmp_path, enable_jit_checkpoint=True):
        pass


def test_a_model_that_was_distributed_when_it_was_loaded_is_refused(tmp_path):
    model = build("gpt2")[0]
    model._tp_size = 2
    with pytest.raises(ConfigError, match="tp_plan"), trainer(Ours, tmp_path, model):
        pass


@pytest.mark.parametrize(("bits", "use"), [(8, "torch.optim.AdamW;"), (32, "an optimizer of torch.optim;")])
@ranks(2)
def test_an_optimizer_of_bitsandbytes_is_refused_before_the_first_step_with_a_remedy(bits, use, tmp_path):
    model = build("gpt2")[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kind = type("AdamW" if bits == 8 else "Lion", (torch.optim.SGD,), {"__module__": "bitsandbytes.optim.x"})
    optimizer = (kind if bits == 8 else type("Subclass", (kind,), {}))(model.parameters(), lr=0.1)
    optimizer.args = type("Args", (), {"optim_bits": bits})()
    with trainer(Ours, tmp_path, model, options={"optimizers": (optimizer, None)}) as own:
        with pytest.raises(ConfigError) as error:
            own.train()
        for part in ("addresses", use, "optim='adamw_torch'", "Nothing was changed"):
            assert part in str(error.value)
        assert torch_shard.engine_of(own.model) is None and own.state.global_step == 0
        assert all(torch.equal(value, before[name]) for name, value in own.model.state_dict().items())


def test_the_mixin_comes_first():
    with pytest.raises(ConfigError, match="class MyTrainer"):
        type("Wrong", (Trainer, ShardTrainerMixin), {})


def test_the_mixin_needs_a_trainer():
    with pytest.raises(ConfigError, match=r"before a transformers\.Trainer"):
        ShardTrainerMixin()
