"""``trainer.model`` is not what was sharded: a part of it, or a model that has no values yet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer

from accelerate_shard import from_pretrained
from tests.accelerate.support.trainers import Ours, Tokens, trainer
from tests.support.hf_models import build
from tests.support.ranks import ranks
from torch_shard.errors import SetupError


def _lora() -> torch.nn.Module:
    model = build("llama")[0]
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=["lm_head"])
    return peft.get_peft_model(model, config)


@pytest.mark.exhaustive
@ranks(2)
def test_a_merged_model_is_saved_and_evaluated_in_place_of_the_one_with_adapters(tmp_path):
    def outcome(kind: type[Trainer], folder: Path) -> tuple[Any, ...]:
        with trainer(kind, folder, _lora(), max_steps=2, save_strategy="no") as own:
            own.train()
            own.model = own.model.merge_and_unload()
            own.save_model(str(folder / "merged"))
            loss = own.evaluate()["eval_loss"]
            predictions = own.predict(Tokens(4, seed=9)).predictions
        dist.barrier()
        return (
            sorted(os.listdir(folder / "merged")),
            load_file(folder / "merged" / "model.safetensors"),
            loss,
            predictions,
        )

    files, weights, loss, predictions = outcome(Ours, tmp_path / "ours")
    stock_files, stock_weights, stock_loss, stock_predictions = outcome(Trainer, tmp_path / "stock")
    assert files == stock_files
    torch.testing.assert_close(weights, stock_weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss, stock_loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(predictions, stock_predictions, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@ranks(2)
def test_saving_a_model_of_from_pretrained_before_training_is_an_error_on_all_ranks(rank, tmp_path):
    if rank == 0:
        build("gpt2")[0].save_pretrained(tmp_path / "model")
    dist.barrier()
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    with trainer(Ours, tmp_path / "run", from_pretrained(AutoModelForCausalLM, tmp_path / "model")) as own:
        with pytest.raises(SetupError, match=r"trainer\.save_model\(\): .*trainer\.train\(\)"):
            own.save_model(str(tmp_path / "early"))
        assert not (tmp_path / "early").exists()
        own.accelerator.prepare_model(own.model)  # the remedy
        own.save_model(str(tmp_path / "saved"))
        dist.barrier()
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        dist.barrier()


@ranks(2)
def test_the_adapters_of_a_model_of_from_pretrained_are_saved_before_training(rank, tmp_path):
    if rank == 0:
        build("llama")[0].save_pretrained(tmp_path / "model")
    dist.barrier()
    model = from_pretrained(AutoModelForCausalLM, tmp_path / "model")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with trainer(Ours, tmp_path / "run", model) as own:
        own.save_model(str(tmp_path / "saved"))
    dist.barrier()
    assert len(load_file(tmp_path / "saved" / "adapter_model.safetensors")) == 6
    dist.barrier()


class Twice(torch.optim.Optimizer):
    """A wrapper of the user's: it has the plain optimizer in `optimizer`, and state of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["slow"] = self.state[p].get("slow", torch.zeros_like(p)) + p.detach()


@ranks(2)
def test_the_state_of_an_optimizer_around_another_is_saved_and_loaded(tmp_path):
    def optimizer(model: Any) -> Any:
        return Twice(torch.optim.SGD(model.parameters(), lr=0.05))

    def outcome(kind: type[Trainer], folder: Path) -> dict[str, Any]:
        model = build("gpt2")[0]
        # A constant rate: after Accelerate has loaded its state, the stock wrapper's groups are not the inner optimizer's.
        saving = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
        given = {"optimizers": (optimizer(model), None)}
        with trainer(kind, folder, model, options=given, **saving) as own:
            own.train()
        dist.barrier()
        return torch.load(folder / "checkpoint-2" / "optimizer.pt", weights_only=True)["state"]

    ours, stock = outcome(Ours, tmp_path / "ours"), outcome(Trainer, tmp_path / "stock")
    assert all("slow" in entries for entries in stock.values())
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
    dist.barrier()
