"""What a sharding Trainer can't do is refused by name, on all ranks, before anything has changed."""

from __future__ import annotations

import pytest
from transformers import Trainer

from accelerate_shard import ShardPlugin
from accelerate_shard.trainer.mixin import ShardTrainerMixin
from tests.accelerate.support.trainers import Ours, trainer
from tests.support.hf_models import build
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError, DivergenceError, MissingRankError, StateDictError


@ranks(2)
def test_saving_on_one_rank_only_is_an_error_on_both(tmp_path, rank):
    with trainer(Ours, tmp_path, max_steps=1) as own:
        own.train()
        with pytest.raises(
            DivergenceError, match=r"is called on all ranks, not under `if trainer.is_world_process_zero"
        ):
            own.save_model() if rank == 0 else own.evaluate()


@pytest.mark.exhaustive
@ranks(2, fresh=True)
def test_saving_on_one_rank_only_is_an_error_where_the_other_does_nothing(tmp_path, rank):
    with trainer(Ours, tmp_path, max_steps=1, options={"shard_plugin": ShardPlugin(timeout=2.0)}) as own:
        own.train()
        if rank == 0:
            with pytest.raises(MissingRankError, match=r"trainer.save_model\(\) is called on all ranks"):
                own.save_model()


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
        ({"parallelism_config": object()}, "TrainingArguments.parallelism_config"),
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


def test_a_model_that_was_distributed_when_it_was_loaded_is_refused(tmp_path):
    model = build("gpt2")[0]
    model._tp_size = 2
    with pytest.raises(ConfigError, match="tp_plan"), trainer(Ours, tmp_path, model):
        pass


def test_the_mixin_comes_first():
    with pytest.raises(ConfigError, match="class MyTrainer"):
        type("Wrong", (Trainer, ShardTrainerMixin), {})


def test_the_mixin_needs_a_trainer():
    with pytest.raises(ConfigError, match=r"before a transformers\.Trainer"):
        ShardTrainerMixin()
