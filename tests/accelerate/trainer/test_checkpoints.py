"""Checkpoints of a Trainer: the Trainer's own files, that either Trainer resumes from."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, Trainer

from accelerate_shard import from_pretrained
from tests.accelerate.support.peft_models import adapted, lora
from tests.accelerate.support.trainers import Ours, Tokens, assert_same_logs, trained, trainer
from tests.checkpoint.test_damaged_full import flip
from tests.support.hf_models import VOCAB, build
from tests.support.marks import exhaustive
from tests.support.ranks import ranks, run
from torch_shard.errors import CheckpointError, SetupError

EVERY_3 = {
    "save_strategy": "steps",
    "save_steps": 3,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-4,
}


@pytest.mark.parametrize(
    ("writer", "reader", "optim"),
    [
        (Ours, Ours, "adamw_torch"),
        *exhaustive(
            (Ours, Trainer, "adamw_torch"),
            (Trainer, Ours, "adamw_torch"),
            (Ours, Trainer, "adamw_torch_8bit"),
            (Trainer, Ours, "adamw_torch_8bit"),
            (Ours, Ours, "adamw_torch_4bit"),
        ),
    ],
)
@ranks(2)
def test_resuming_goes_on_as_if_nothing_had_happened(writer, reader, optim, tmp_path):
    if optim.endswith("bit"):
        pytest.importorskip("torchao")
    options = {**EVERY_3, "optim": optim}
    whole = trained(writer, tmp_path, **options)
    with trainer(reader, tmp_path, **options) as own:
        own.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert_same_logs(own.steps.logs[:-1], whole[3:-1])  # but for the mean loss of the run
        kinds = {type(value).__name__ for state in own.optimizer.state.values() for value in state.values()}
        assert any("bit" in kind for kind in kinds) == optim.endswith("bit")


@ranks(2)
def test_a_flipped_bit_in_the_optimizers_file_is_refused_on_all_ranks(rank, tmp_path):
    trained(Ours, tmp_path, **EVERY_3)
    dist.barrier()
    path = tmp_path / "checkpoint-3" / "optimizer.pt"
    if rank == 0:
        with zipfile.ZipFile(path) as archive:
            member = max(archive.infolist(), key=lambda info: info.file_size).filename
        flip(path, member)
    dist.barrier()
    with trainer(Ours, tmp_path, **EVERY_3) as own, pytest.raises(CheckpointError, match=r"optimizer\.pt is damaged"):
        own.train(resume_from_checkpoint=str(path.parent))


@pytest.mark.parametrize("alone", [False, *exhaustive(True)])
@ranks(2)
def test_checkpoints_have_the_files_that_the_stock_trainer_writes(alone, tmp_path):
    for kind, name in ((Ours, "ours"), (Trainer, "stock")):
        trained(kind, tmp_path / name, max_steps=3, save_only_model=alone, **EVERY_3)
    dist.barrier()
    ours, stock = (tmp_path / name / "checkpoint-3" for name in ("ours", "stock"))
    assert sorted(os.listdir(ours)) == sorted(os.listdir(stock))
    models = [GPT2LMHeadModel.from_pretrained(folder).state_dict() for folder in (ours, stock)]
    torch.testing.assert_close(*models, rtol=1e-5, atol=1e-6)
    assert (ours / "optimizer.pt").exists() is not alone
    if not alone:
        optimizers = [torch.load(folder / "optimizer.pt", weights_only=True) for folder in (ours, stock)]
        torch.testing.assert_close(*(found["state"] for found in optimizers), rtol=1e-5, atol=1e-7)
        assert optimizers[0]["param_groups"] == optimizers[1]["param_groups"]
    dist.barrier()


@ranks(2)
def test_a_model_that_was_compiled_before_has_the_names_in_its_checkpoints_that_the_stock_trainer_writes(tmp_path):
    def saved(kind: type[Trainer], folder: Path) -> dict[str, torch.Tensor]:
        model = torch.compile(build("gpt2")[0], backend="eager")
        # Its forward names no arguments, so that the Trainer would remove all columns.
        options = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "remove_unused_columns": False}
        # The names are those of a compiled model, also where nothing is compiled.
        with torch.compiler.set_stance("force_eager"), trainer(kind, folder, model, **options) as own:
            own.train()
        dist.barrier()
        return load_file(folder / "checkpoint-1" / "model.safetensors")

    torch.testing.assert_close(saved(Ours, tmp_path / "ours"), saved(Trainer, tmp_path / "stock"), rtol=1e-5, atol=1e-6)
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
@pytest.mark.parametrize("model", ["sharded", "on meta"])
@ranks(2)
def test_a_model_that_is_sharded_or_has_no_values_yet_resumes_from_the_checkpoint(rank, model, tmp_path):
    whole = trained(Ours, tmp_path, **EVERY_3)
    if rank == 0:
        build("gpt2", seed=7)[0].save_pretrained(tmp_path / "first")
    dist.barrier()
    given = build("gpt2")[0] if model == "sharded" else from_pretrained(GPT2LMHeadModel, tmp_path / "first").train()
    with trainer(Ours, tmp_path, given, **EVERY_3) as own:
        if model == "sharded":
            own.evaluate()
            own.steps.logs.clear()
        own.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert_same_logs(own.steps.logs[:-1], whole[3:-1])


def _run(rank: int, world_size: int, folder: Path, resume: str | None) -> list[dict[str, float]]:
    # Four rows a step on any number of ranks, in the same order.
    with trainer(Ours, folder, per_device_train_batch_size=4 // world_size, **EVERY_3) as own:
        own.train(resume_from_checkpoint=resume)
        return own.steps.logs


@pytest.mark.parametrize(("before", "after"), [(2, 1), *exhaustive((2, 4))])
def test_training_goes_on_on_another_number_of_ranks(before, after, tmp_path):
    whole = run(before, _run, tmp_path, None)[0]
    found = run(after, _run, tmp_path, str(tmp_path / "checkpoint-3"))[0]
    assert_same_logs(found[:-1], whole[3:-1])


@pytest.mark.exhaustive
@ranks(2)
def test_adapters_are_saved_loaded_as_best_and_resumed(tmp_path):
    options = {
        **EVERY_3, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True,
        "gradient_checkpointing": True,
    }  # fmt: skip

    def outcome(kind: type[Trainer], folder: Path) -> tuple[Any, ...]:
        with trainer(kind, folder, adapted()[0], **options) as own:
            own.train()
            own.evaluate()
            logs = own.steps.logs
            dist.barrier()
        files = {path.name: path.stat().st_size for path in (folder / "checkpoint-4").glob("adapter*")}
        with trainer(kind, folder, adapted()[0], **options) as own:
            own.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
            return logs, own.steps.logs, files

    logs, resumed, files = outcome(Ours, tmp_path / "ours")
    stock_logs, stock_resumed, stock_files = outcome(Trainer, tmp_path / "stock")
    assert_same_logs(logs, stock_logs)
    assert_same_logs(resumed, stock_resumed)
    assert files.keys() == stock_files.keys()
    assert files["adapter_model.safetensors"] == stock_files["adapter_model.safetensors"]


# -- trainer.model is not what was sharded: a part of it, or a model that has no values yet ---------------------------
@pytest.mark.exhaustive
@ranks(2)
def test_a_merged_model_is_saved_and_evaluated_in_place_of_the_one_with_adapters(tmp_path):
    def outcome(kind: type[Trainer], folder: Path) -> tuple[list[str], list[Any]]:
        model = adapted("llama", lora(modules_to_save=["lm_head"]))[0]
        with trainer(kind, folder, model, max_steps=2, save_strategy="no") as own:
            own.train()
            own.model = own.model.merge_and_unload()
            own.save_model(str(folder / "merged"))
            loss = own.evaluate()["eval_loss"]
            predictions = own.predict(Tokens(4, seed=9)).predictions
        dist.barrier()
        weights = load_file(folder / "merged" / "model.safetensors")
        return sorted(os.listdir(folder / "merged")), [weights, loss, predictions]

    (files, found), (stock_files, wanted) = outcome(Ours, tmp_path / "ours"), outcome(Trainer, tmp_path / "stock")
    assert files == stock_files
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@ranks(2)
def test_of_a_model_of_from_pretrained_adapters_alone_are_saved_before_training(rank, tmp_path):
    if rank == 0:
        build("llama")[0].save_pretrained(tmp_path / "model")
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
    model = from_pretrained(AutoModelForCausalLM, tmp_path / "model")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with trainer(Ours, tmp_path / "run", model) as own:
        own.save_model(str(tmp_path / "adapters"))
    dist.barrier()
    assert len(load_file(tmp_path / "adapters" / "adapter_model.safetensors")) == 6
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


def with_own_head(kind: type[Trainer]) -> type[Trainer]:
    """A Trainer whose loss has a parameter of its own, which the model lacks and each rank trains by itself."""

    class WithHead(kind):  # type: ignore[valid-type, misc]
        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                self.scale = torch.nn.Parameter(torch.ones(VOCAB))
                self.optimizer = torch.optim.AdamW([*self.model.parameters(), self.scale], lr=1e-2)
            return self.optimizer

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return (model(input_ids=inputs["input_ids"]).logits * self.scale).square().mean()

    return WithHead


@pytest.mark.exhaustive
@ranks(2)
def test_the_optimizer_of_a_loss_with_parameters_is_saved_and_resumed(rank, tmp_path):
    found = {}
    for kind in (Trainer, Ours):
        folder = tmp_path / kind.__name__
        whole = trained(with_own_head(kind), folder, **EVERY_3)
        dist.barrier()
        saved = torch.load(folder / "checkpoint-3/optimizer.pt", weights_only=True)["state"]
        with trainer(with_own_head(kind), folder, **EVERY_3) as own:
            own.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
            found[kind] = whole, own.steps.logs, dict(saved)
        dist.barrier()
    assert_same_logs(found[Ours][0], found[Trainer][0])
    assert_same_logs(found[Ours][1], found[Trainer][1])
    torch.testing.assert_close(found[Ours][2], found[Trainer][2], rtol=1e-4, atol=1e-6)
