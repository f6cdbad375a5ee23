"""The Trainer takes models of from_pretrained, which get their values when it prepares them."""

from __future__ import annotations

import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer

from accelerate_shard import from_pretrained
from tests.accelerate.support.trainers import Ours, assert_same_logs, trained
from tests.support.hf_models import build
from tests.support.ranks import ranks


@ranks(2)
def test_a_model_of_from_pretrained_trains_as_the_stock_one_does(rank, tmp_path):
    if rank == 0:
        build("gpt2")[0].save_pretrained(tmp_path / "model")
    dist.barrier()
    wanted = trained(Trainer, tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path / "model"), max_steps=3)
    model = from_pretrained(AutoModelForCausalLM, tmp_path / "model")
    assert all(p.device.type == "meta" for p in model.parameters())
    assert_same_logs(trained(Ours, tmp_path, model, max_steps=3), wanted)
