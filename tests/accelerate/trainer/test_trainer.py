"""``transformers.Trainer`` logs the numbers that it logs with DistributedDataParallel."""

from __future__ import annotations

import pytest
from transformers import Trainer

import torch_shard
from tests.accelerate.trainer.helpers import Ours, assert_same_logs, trained, trainer
from tests.ranks import ranks


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@ranks(2, exhaustive=(1, 3))
def test_training_logs_what_the_stock_trainer_logs(name, tmp_path):
    options = {"model": name, "max_grad_norm": 0.5, "eval_strategy": "steps", "eval_steps": 3}
    assert_same_logs(trained(Ours, tmp_path, **options), trained(Trainer, tmp_path, **options))


@ranks(2)
def test_the_model_stays_the_object_that_was_given_and_is_sharded(tmp_path):
    with trainer(Ours, tmp_path, max_steps=1) as own:
        model = own.model
        own.train()
        assert own.model is own.model_wrapped is model is own.accelerator.unwrap_model(own.model)
        engine = torch_shard.engine_of(model)
        assert engine is not None and len(engine.units) > len(model.transformer.h)
