"""``transformers.Trainer`` logs the numbers that it logs with DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Trainer

import torch_shard
from accelerate_shard import ShardPlugin
from tests.accelerate.support.trainers import Ours, assert_same_logs, trained, trainer
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks

ADAMW = {"learning_rate": 1e-3, "adam_epsilon": 1e-4, "weight_decay": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "adamw_torch": {"optim": "adamw_torch", **ADAMW},
    "adamw_torch_fused": {"optim": "adamw_torch_fused", **ADAMW},
    "adafactor": {"optim": "adafactor", "learning_rate": 1e-3},
    "no clipping": {"max_grad_norm": 0.0},
    "accumulation": {"gradient_accumulation_steps": 4},
    "accumulation, tokens counted by each rank": {
        "gradient_accumulation_steps": 2,
        "average_tokens_across_devices": False,
    },
    "label smoothing": {"label_smoothing_factor": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "torch.compile": {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 3},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "evaluation before the first step": {"eval_on_start": True, "eval_strategy": "epoch"},
    "tokens counted": {"include_num_input_tokens_seen": "all"},
    "noise on embeddings": {"neftune_noise_alpha": 5.0},
}


@pytest.mark.parametrize("name", ["gpt2", *exhaustive("llama")])
@ranks(2, exhaustive=(1, 3))
def test_training_logs_what_the_stock_trainer_logs(name, tmp_path):
    options = {"model": name, "max_grad_norm": 0.5, "eval_strategy": "steps", "eval_steps": 3}
    assert_same_logs(trained(Ours, tmp_path, **options), trained(Trainer, tmp_path, **options))


@pytest.mark.parametrize("case", quick(CASES, ["accumulation"]))
@ranks(2)
def test_an_argument_changes_training_as_it_does_in_the_stock_trainer(case, tmp_path):
    assert_same_logs(trained(Ours, tmp_path, **CASES[case]), trained(Trainer, tmp_path, **CASES[case]))


@pytest.mark.parametrize("strategy", exhaustive("shard_grad_op", "shard_optim", "no_shard"))
@ranks(2)
def test_every_strategy_trains_alike(strategy, tmp_path):
    options = {"options": {"shard_plugin": ShardPlugin(strategy=strategy)}, "gradient_accumulation_steps": 2}
    wanted = trained(Trainer, tmp_path, gradient_accumulation_steps=2)
    assert_same_logs(trained(Ours, tmp_path, **options), wanted)


@pytest.mark.exhaustive
@ranks(2)
def test_bf16_is_as_close_as_rounding_allows(tmp_path):
    assert_same_logs(trained(Ours, tmp_path, bf16=True), trained(Trainer, tmp_path, bf16=True), rtol=3e-2)


@ranks(2)
def test_the_model_stays_the_object_that_was_given_and_is_sharded(tmp_path):
    with trainer(Ours, tmp_path, max_steps=1) as own:
        model = own.model
        own.train()
        assert own.model is own.model_wrapped is model is own.accelerator.unwrap_model(own.model)
        engine = torch_shard.engine_of(model)
        assert engine is not None and len(engine.units) > len(model.transformer.h)


def _without_memory(kind: type[Trainer], folder: Any) -> list[dict[str, float]]:
    class Large(kind):  # type: ignore[misc,valid-type]
        """Has no memory for four rows, which it notices in the second step."""

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            if self.state.global_step == 1 and len(inputs["input_ids"]) > 3:
                model(**inputs)
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, num_items_in_batch)

    return trained(Large, folder, auto_find_batch_size=True, per_device_train_batch_size=4)


@pytest.mark.exhaustive
@ranks(2)
def test_a_batch_size_that_fits_is_found(tmp_path):
    assert_same_logs(_without_memory(Ours, tmp_path), _without_memory(Trainer, tmp_path))
