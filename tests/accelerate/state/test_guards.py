"""The guards that scripts put around saving, and that their files are those of DDP.

The scripts are those of diffusers, peft and F5-TTS: what runs on the main process only, what also runs on the other ranks under
DeepSpeed, and what has code of its own for FSDP.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tests.accelerate.support.accelerators import OURS, STOCK, accelerator
from tests.accelerate.support.checkpoints import Counter, differ, plugin
from tests.accelerate.support.models import loader, loss_of, net
from tests.accelerate.support.training import full_parameters
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import DivergenceError

GUARDS = {
    "main": lambda acc: acc.is_main_process,
    "main or DeepSpeed": lambda acc: acc.is_main_process or acc.distributed_type == DistributedType.DEEPSPEED,
    "main or FSDP": lambda acc: acc.is_main_process or getattr(acc.state, "fsdp_plugin", None) is not None,
    "main or sharded": lambda acc: acc.is_main_process or acc.distributed_type in ("FSDP", "DEEPSPEED", "MEGATRON_LM"),
}


class Script:
    """A training script: two steps, something that it saves, and one step more."""

    def __init__(self, acc: Any) -> None:
        self.acc = acc
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        self.model, self.optimizer, self.schedule, self.data = acc.prepare(model, optimizer, schedule, loader())
        self.custom = Counter()
        acc.register_for_checkpointing(self.custom)
        self.batches = iter(self.data)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.acc.backward(loss_of(self.model, next(self.batches)))
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.custom.count += 1


def as_diffusers_saves_adapters(script: Script, folder: Path) -> None:
    """The end of ``train_dreambooth_lora_flux2.py``: under FSDP all ranks get the state dict, else the main process does."""
    acc = script.acc
    is_fsdp = getattr(acc.state, "fsdp_plugin", None) is not None
    state = acc.get_state_dict(script.model) if is_fsdp else None
    if acc.is_main_process:
        torch.save(state if is_fsdp else acc.unwrap_model(script.model).state_dict(), folder / "weights.bin")


def as_f5_saves(script: Script, folder: Path) -> None:
    """The ``save_checkpoint`` of F5-TTS."""
    acc = script.acc
    acc.wait_for_everyone()
    if acc.is_main_process:
        checkpoint = {
            "model_state_dict": acc.unwrap_model(script.model).state_dict(),
            "optimizer_state_dict": script.optimizer.state_dict(),
            "scheduler_state_dict": script.schedule.state_dict(),
        }
        acc.save(checkpoint, folder / "last.pt")


def files(folder: Path) -> dict[str, Any]:
    """The contents of all files in a folder but random states, which differ between runs."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and "random_states" not in name:
            found[name] = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=False)
    return found


def run(kind: Any, save: Any, folder: Path, **options: Any) -> None:
    with accelerator(kind, **options) as acc:
        script = Script(acc)
        script.train(2)
        if acc.is_main_process:
            folder.mkdir()
        acc.wait_for_everyone()
        save(script, folder)
        script.train(1)
        acc.wait_for_everyone()


@pytest.mark.parametrize("form", ["full", *exhaustive("sharded")])
@pytest.mark.parametrize("guard", GUARDS)
@ranks(2)
def test_save_state_under_a_guard_writes_the_files_of_ddp(rank, guard, form, tmp_path):
    def save(script: Script, folder: Path) -> None:
        if GUARDS[guard](script.acc):
            script.acc.save_state(folder / "checkpoint")

    run(STOCK, save, tmp_path / "ddp")
    run(OURS, save, tmp_path / "ours", shard_plugin=plugin(form))
    if rank == 0:
        found, wanted = files(tmp_path / "ours"), files(tmp_path / "ddp")
        assert len(wanted) == 4
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
        names = [{path.name for path in (tmp_path / who / "checkpoint").iterdir()} for who in ("ours", "ddp")]
        assert names[0] == names[1]


@pytest.mark.parametrize("save", [as_diffusers_saves_adapters, as_f5_saves])
@ranks(2)
def test_files_that_a_script_writes_itself_are_those_of_ddp(rank, save, tmp_path):
    run(STOCK, save, tmp_path / "ddp")
    run(OURS, save, tmp_path / "ours")
    if rank == 0:
        found, wanted = files(tmp_path / "ours"), files(tmp_path / "ddp")
        assert len(wanted) == 1
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


@ranks(2)
def test_what_the_main_process_alone_has_saved_is_loaded_by_all_ranks(rank, tmp_path):
    with accelerator(OURS) as acc:
        script = Script(acc)
        script.train(2)
        if acc.is_main_process:
            acc.save_state(tmp_path / "c")
        wanted = full_parameters(script.model)
        acc.wait_for_everyone()
        script.train(1)
        after = full_parameters(script.model)
    with accelerator(OURS) as acc:
        script = Script(acc)
        next(script.batches), next(script.batches)
        acc.load_state(tmp_path / "c")
        assert not differ(full_parameters(script.model), wanted)
        assert script.custom.count == 2
        if acc.is_main_process:  # what was loaded can be saved alone at once
            acc.save_state(tmp_path / "again")
        script.train(1)
        assert not differ(full_parameters(script.model), after)
        acc.wait_for_everyone()
    if rank == 0:
        torch.testing.assert_close(files(tmp_path / "again"), files(tmp_path / "c"), rtol=0, atol=0)


@ranks(2)
def test_hooks_of_a_lone_save_state_write_as_under_ddp(rank, tmp_path):
    """As diffusers' hooks do: weights are written by hand and taken away on the main process."""

    def save(script: Script, folder: Path) -> None:
        def hook(models: list[nn.Module], weights: list[Any], output: str) -> None:
            if script.acc.is_main_process:
                for model in models:
                    torch.save(script.acc.unwrap_model(model).state_dict(), Path(output, "by_hand.bin"))
                    weights.pop()

        script.acc.register_save_state_pre_hook(hook)
        if script.acc.is_main_process:
            script.acc.save_state(folder / "checkpoint")

    run(STOCK, save, tmp_path / "ddp")
    run(OURS, save, tmp_path / "ours")
    if rank == 0:
        found, wanted = files(tmp_path / "ours"), files(tmp_path / "ddp")
        assert "checkpoint/by_hand.bin" in wanted and "checkpoint/model.safetensors" not in wanted
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


@ranks(2)
def test_a_late_rank_that_was_left_saves_nothing_and_goes_on(rank, tmp_path):
    """It was seen waiting for other ranks, outside the engine, before it came to ``save_state``, too."""

    def save(script: Script, folder: Path) -> None:
        if rank == 1:
            exec("time.sleep(0.5)", {"__name__": "torch.distributed.another", "time": time})
        assert script.acc.save_state(folder / "checkpoint") == folder / "checkpoint"

    run(OURS, save, tmp_path / "ours")
    assert (tmp_path / "ours" / "checkpoint" / "model.safetensors").is_file()


@pytest.mark.parametrize("where", ["next step", "barrier"])
@ranks(2)
def test_save_pretrained_on_the_main_process_alone(rank, where, tmp_path):
    """A model with tied weights, which one file holds once."""
    torch.manual_seed(0)
    plain = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=2, n_head=2))
    with accelerator(OURS) as acc:
        model = acc.prepare(plain)
        wanted = acc.get_state_dict(model)
        acc.wait_for_everyone()
        if acc.is_main_process:
            acc.unwrap_model(model).save_pretrained(tmp_path / "m")
        if where == "barrier":
            acc.wait_for_everyone()
        model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        model.zero_grad()
        acc.wait_for_everyone()
        if rank == 0:
            assert not differ(GPT2LMHeadModel.from_pretrained(tmp_path / "m").state_dict(), wanted)


class SavesItself(nn.Linear):
    """A model whose ``save_pretrained`` takes no state dict, as diffusers' models have it."""

    def save_pretrained(self, folder: Path) -> None:
        torch.save({"state": self.state_dict(), "product": self.weight.detach() @ torch.ones(3)}, folder)


@ranks(2)
def test_a_model_that_writes_its_own_state_dict_on_the_main_process_alone(rank, tmp_path):
    plain = SavesItself(3, 4)
    with accelerator(OURS) as acc:
        model = acc.prepare(SavesItself(3, 4))
        acc.unwrap_model(model).load_state_dict(plain.state_dict())
        wanted = acc.get_state_dict(model)
        acc.wait_for_everyone()
        if acc.is_main_process:
            acc.unwrap_model(model).save_pretrained(tmp_path / "m")
            found = torch.load(tmp_path / "m")
            assert not differ(dict(found["state"]), wanted)
            torch.testing.assert_close(found["product"], wanted["weight"] @ torch.ones(3))
        acc.wait_for_everyone()


@ranks(2)
def test_a_lone_save_of_state_that_one_rank_cannot_read_is_an_error_on_all_ranks(rank, tmp_path):
    for options, optimizer in (({"offload": "cpu"}, torch.optim.AdamW), ({}, torch.optim.Muon)):
        with accelerator(OURS, shard_plugin=plugin(**options)) as acc:
            model = net()
            model, stepping, data = acc.prepare(model, optimizer([model.layers[0].linear.weight], lr=0.1), loader())
            for batch in data:
                acc.backward(loss_of(model, batch))
                stepping.step()
                model.zero_grad()
                break
            with pytest.raises(DivergenceError, match=r"Accelerator\.save_state concerns all ranks"):
                acc.save_state(tmp_path / "c") if rank == 0 else acc.wait_for_everyone()
            assert not (tmp_path / "c").exists()


@ranks(2)
def test_scripts_see_what_they_see_under_ddp(rank):
    with accelerator(STOCK) as acc:
        wanted = answers(acc)
    with accelerator(OURS) as acc:
        assert answers(acc) == wanted


def answers(acc: Any) -> dict[str, Any]:
    return {
        "distributed_type": acc.distributed_type,
        "state.distributed_type": acc.state.distributed_type,
        "fsdp_plugin": getattr(acc.state, "fsdp_plugin", None),
        "deepspeed_plugin": acc.state.deepspeed_plugin,
        "is_fsdp2": acc.is_fsdp2,
        "parallelism_config": acc.parallelism_config,
        "guards": {name: guard(acc) for name, guard in GUARDS.items()},
    }
