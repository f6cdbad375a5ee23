"""Checkpoints of a Trainer: the Trainer's own files, that either Trainer resumes from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from transformers import GPT2LMHeadModel, Trainer

import accelerate_shard
from tests.accelerate.support.trainers import Ours, assert_same_logs, trained, trainer
from tests.support.hf_models import build
from tests.support.marks import exhaustive
from tests.support.ranks import ranks, run

EVERY_3 = {
    "save_strategy": "steps",
    "save_steps": 3,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-4,
}


@pytest.mark.parametrize(("writer", "reader"), [(Ours, Ours), *exhaustive((Ours, Trainer), (Trainer, Ours))])
@ranks(2)
def test_resuming_goes_on_as_if_nothing_had_happened(writer, reader, tmp_path):
    whole = trained(writer, tmp_path, **EVERY_3)
    with trainer(reader, tmp_path, **EVERY_3) as own:
        own.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert_same_logs(own.steps.logs[:-1], whole[3:-1])  # but for the mean loss of the run


@ranks(2)
def test_checkpoints_have_the_files_that_the_stock_trainer_writes(tmp_path):
    trained(Ours, tmp_path / "ours", max_steps=3, **EVERY_3)
    trained(Trainer, tmp_path / "stock", max_steps=3, **EVERY_3)
    dist.barrier()
    ours, stock = (Path(tmp_path, kind, "checkpoint-3") for kind in ("ours", "stock"))
    assert sorted(os.listdir(ours)) == sorted(os.listdir(stock))
    optimizers = [torch.load(folder / "optimizer.pt", weights_only=True) for folder in (ours, stock)]
    torch.testing.assert_close(*(found["state"] for found in optimizers), rtol=1e-5, atol=1e-7)
    assert optimizers[0]["param_groups"] == optimizers[1]["param_groups"]
    models = [GPT2LMHeadModel.from_pretrained(folder).state_dict() for folder in (ours, stock)]
    torch.testing.assert_close(*models, rtol=1e-5, atol=1e-6)
    dist.barrier()


@ranks(2)
def test_the_best_model_is_loaded_at_the_end_and_the_limit_kept(tmp_path):
    def outcome(kind: type[Trainer], folder: Path) -> tuple[Any, ...]:
        options = {
            "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps",
            "save_steps": 2, "save_total_limit": 1, "learning_rate": 3.0, "max_grad_norm": 0.0,
        }  # fmt: skip
        with trainer(kind, folder, **options) as own:
            own.train()
            own.evaluate()
            dist.barrier()
            assert Path(own.state.best_model_checkpoint).name == "checkpoint-4"  # not the last one
            return own.steps.logs, sorted(os.listdir(folder))

    logs, files = outcome(Ours, tmp_path / "ours")
    stock_logs, stock_files = outcome(Trainer, tmp_path / "stock")
    assert_same_logs(logs, stock_logs)
    assert files == stock_files == ["checkpoint-4"]


@pytest.mark.exhaustive
@ranks(2)
def test_the_model_alone_is_saved_where_that_is_asked_for(tmp_path):
    for kind, name in ((Ours, "ours"), (Trainer, "stock")):
        trained(kind, tmp_path / name, save_strategy="epoch", save_only_model=True)
    dist.barrier()
    ours, stock = (sorted(os.listdir(tmp_path / name / "checkpoint-6")) for name in ("ours", "stock"))
    assert ours == stock and "optimizer.pt" not in ours


@pytest.mark.exhaustive
@ranks(2)
def test_a_sharded_model_resumes_too(tmp_path):
    whole = trained(Ours, tmp_path, **EVERY_3)
    with trainer(Ours, tmp_path, **EVERY_3) as own:
        own.evaluate()  # shards it
        own.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert_same_logs(own.steps.logs[1:-1], whole[3:-1])


@pytest.mark.exhaustive
@ranks(2)
def test_a_model_on_meta_resumes_from_the_checkpoint_and_not_from_where_it_was_loaded(tmp_path):
    whole = trained(Ours, tmp_path, **EVERY_3)
    if dist.get_rank() == 0:
        build("gpt2", seed=7)[0].save_pretrained(tmp_path / "first")
    dist.barrier()
    model = accelerate_shard.from_pretrained(GPT2LMHeadModel, tmp_path / "first").train()
    assert any(p.is_meta for p in model.parameters())
    with trainer(Ours, tmp_path, model, **EVERY_3) as own:
        own.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert_same_logs(own.steps.logs[:-1], whole[3:-1])


def _first_half(rank: int, world_size: int, folder: Path) -> list[dict[str, float]]:
    # Four rows a step on any number of ranks, in the same order.
    return trained(Ours, folder, per_device_train_batch_size=4 // world_size, **EVERY_3)


def _second_half(rank: int, world_size: int, folder: Path) -> list[dict[str, float]]:
    options = {**EVERY_3, "per_device_train_batch_size": 4 // world_size, "ignore_data_skip": False}
    with trainer(Ours, folder, **options) as own:
        own.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        return own.steps.logs


@pytest.mark.parametrize(("before", "after"), [(2, 1), *exhaustive((1, 2), (2, 4))])
def test_training_goes_on_on_another_number_of_ranks(before, after, tmp_path):
    whole = run(before, _first_half, tmp_path)[0]
    found = run(after, _second_half, tmp_path)[0]
    assert_same_logs(found[:-1], whole[3:-1])


def _lora() -> torch.nn.Module:
    model = build("llama")[0]
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


@pytest.mark.exhaustive
@ranks(2)
def test_adapters_are_saved_loaded_as_best_and_resumed(tmp_path):
    options = {
        **EVERY_3, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True,
        "gradient_checkpointing": True,
    }  # fmt: skip

    def outcome(kind: type[Trainer], folder: Path) -> tuple[Any, ...]:
        with trainer(kind, folder, _lora(), **options) as own:
            own.train()
            own.evaluate()
            logs = own.steps.logs
            dist.barrier()
        files = {path.name: path.stat().st_size for path in (folder / "checkpoint-4").glob("adapter*")}
        with trainer(kind, folder, _lora(), **options) as own:
            own.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
            return logs, own.steps.logs, files

    logs, resumed, files = outcome(Ours, tmp_path / "ours")
    stock_logs, stock_resumed, stock_files = outcome(Trainer, tmp_path / "stock")
    assert_same_logs(logs, stock_logs)
    assert_same_logs(resumed, stock_resumed)
    assert files.keys() == stock_files.keys()
    assert files["adapter_model.safetensors"] == stock_files["adapter_model.safetensors"]
