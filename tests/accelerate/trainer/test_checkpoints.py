"""Checkpoints of a Trainer: the Trainer's own files, that either Trainer resumes from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2LMHeadModel, Trainer

from tests.accelerate.trainer.helpers import Ours, assert_same_logs, trained, trainer
from tests.ranks import ranks

EVERY_3 = {
    "save_strategy": "steps",
    "save_steps": 3,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-4,
}


@pytest.mark.parametrize(("writer", "reader"), [(Ours, Ours), (Ours, Trainer), (Trainer, Ours)])
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
