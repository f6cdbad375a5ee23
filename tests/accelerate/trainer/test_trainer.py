"""``transformers.Trainer`` logs the numbers that it logs with DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer

import torch_shard
from accelerate_shard import from_pretrained
from tests.accelerate.support.trainers import Ours, Tokens, assert_same_logs, trained, trainer
from tests.support.hf_models import build
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard import Offload
from torch_shard.errors import ConfigError

ADAMW = {"learning_rate": 1e-3, "adam_epsilon": 1e-4, "weight_decay": 0.1}
CHECKPOINTING = {"gradient_checkpointing": True}
CASES: dict[str, dict[str, Any]] = {
    "adamw_torch": {"optim": "adamw_torch", **ADAMW},
    "adamw_torch_fused": {"optim": "adamw_torch_fused", **ADAMW},
    "adafactor": {"optim": "adafactor", "learning_rate": 1e-3},
    "adamw_torch_8bit": {"optim": "adamw_torch_8bit", "learning_rate": 1e-2},
    "adamw_torch_4bit": {"optim": "adamw_torch_4bit", "learning_rate": 1e-2},
    "no clipping": {"max_grad_norm": 0.0},
    "accumulation": {"gradient_accumulation_steps": 4},
    "tokens counted by each rank": {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "checkpointing": CHECKPOINTING,
    "reentrant checkpointing": {**CHECKPOINTING, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
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
    if case.endswith("bit"):
        pytest.importorskip("torchao")
    assert_same_logs(trained(Ours, tmp_path, **CASES[case]), trained(Trainer, tmp_path, **CASES[case]))


@pytest.mark.exhaustive
@ranks(2)
def test_bf16_is_as_close_as_rounding_allows(tmp_path):
    assert_same_logs(trained(Ours, tmp_path, bf16=True), trained(Trainer, tmp_path, bf16=True), rtol=3e-2)


# -- settings and models ----------------------------------------------------------------------------------------------
VERSION_1 = {
    "version": 1, "reshard_after_forward": "shard_grad_op", "transformer_layer_cls_to_wrap": ["GPT2Block"],
    "sync_module_states": False,  # with which Accelerate's plugin asks for a GPU
}  # fmt: skip
FSDP = [
    (True, {"transformer_layer_cls_to_wrap": "GPT2Block"}, "full_shard", None),
    ("full_shard offload", None, "full_shard", Offload()),
    *exhaustive(
        (True, {"reshard_after_forward": False, "cpu_offload": True}, "shard_grad_op", Offload()),
        # As Accelerate has it: its plugin fills in a sharding_strategy, which counts.
        (True, VERSION_1, "full_shard", None),
        ("full_shard auto_wrap", None, "full_shard", None),
    ),
]


@pytest.mark.parametrize(("fsdp", "config", "strategy", "offload"), FSDP, ids=str)
@ranks(2)
def test_fsdp_arguments_of_existing_scripts_are_translated(fsdp, config, strategy, offload, tmp_path):
    with trainer(Ours, tmp_path, fsdp=fsdp, fsdp_config=config, save_strategy="epoch", save_only_model=True) as own:
        own.train()
        logs, engine = own.steps.logs, torch_shard.engine_of(own.model)
        assert engine is not None and (engine.config.strategy, engine.config.offload) == (strategy, offload)
        assert not own.is_fsdp_enabled
    assert_same_logs(logs, trained(Trainer, tmp_path))


@ranks(2)
def test_a_model_of_from_pretrained_trains_as_the_stock_one_does(rank, tmp_path):
    if rank == 0:
        build("gpt2")[0].save_pretrained(tmp_path / "model")
    dist.barrier()
    wanted = trained(Trainer, tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path / "model"), max_steps=3)
    model = from_pretrained(AutoModelForCausalLM, tmp_path / "model")
    assert all(p.device.type == "meta" for p in model.parameters())
    assert_same_logs(trained(Ours, tmp_path, model, max_steps=3), wanted)


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


# -- evaluation and prediction ----------------------------------------------------------------------------------------
def _evaluated(kind: type[Trainer], folder: Any) -> list[Any]:
    with trainer(kind, folder, eval_strategy="steps", eval_steps=3) as own:
        own.train()
        found = own.predict(Tokens(5, seed=9))
        return [own.evaluate()["eval_loss"], found.predictions, found.label_ids, found.metrics["test_loss"]]


@ranks(2)
def test_evaluation_and_prediction_after_training_give_the_stock_numbers(tmp_path):
    torch.testing.assert_close(_evaluated(Ours, tmp_path), _evaluated(Trainer, tmp_path), rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
@ranks(2)
def test_a_model_that_was_evaluated_first_is_trained_all_the_same(tmp_path):
    # The stock Trainer does not wrap it any more, and its ranks drift apart, so that is no reference here.
    with trainer(Ours, tmp_path) as own, torch.no_grad():
        before = own.evaluate()["eval_loss"]
        assert own.predict(Tokens(5, seed=9)).predictions.shape[0] == 5
        with torch.enable_grad():
            own.train()
        logs = own.steps.logs[1:]
    assert_same_logs(logs, trained(Trainer, tmp_path))
    with trainer(Trainer, tmp_path) as stock:
        torch.testing.assert_close(before, stock.evaluate()["eval_loss"], rtol=1e-5, atol=0)


@pytest.mark.exhaustive
@ranks(2)
def test_evaluation_in_bf16_converts_the_model_before_it_is_sharded(tmp_path):
    def losses(kind: type[Trainer]) -> list[float]:
        with trainer(kind, tmp_path, bf16_full_eval=True) as own:
            return [own.evaluate()["eval_loss"] for _ in range(2)]

    assert losses(Ours) == losses(Trainer)
    with trainer(Ours, tmp_path, bf16_full_eval=True, max_steps=1) as own:
        own.train()
        with pytest.raises(ConfigError, match="bf16_full_eval"):
            own.evaluate()
