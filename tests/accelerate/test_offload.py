"""Parameters, gradients and optimizer state in host memory: scripts, Trainers and adapters train as under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

import torch_shard
from accelerate_shard import ShardPlugin
from tests.accelerate.helpers import (
    BOTH,
    OURS,
    STOCK,
    Result,
    accelerator,
    assert_same,
    engine_of,
    loader,
    loss_of,
    net,
    sgd,
    train,
    whole_parameters,
)
from tests.accelerate.peft_models import adapted, compare
from tests.accelerate.state.helpers import Run
from tests.accelerate.state.test_resume import same
from tests.accelerate.test_precision import distance
from tests.accelerate.trainer.helpers import Ours, assert_same_logs, trained, trainer
from tests.accelerate.trainer.test_fsdp_arguments import VERSION_1
from tests.hf_models import build
from tests.marks import exhaustive
from tests.ranks import ranks, run
from torch_shard import Offload

KEEPS = Offload(params=False)
OFFLOADS = ["cpu", *exhaustive(KEEPS, Offload(pin_memory=False))]


def offloaded(offload: Any = "cpu", **settings: Any) -> ShardPlugin:
    return ShardPlugin(offload=offload, **settings)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


@pytest.mark.parametrize("offload", OFFLOADS, ids=str)
@ranks(2)
def test_training_with_clipping_is_that_of_ddp(offload: Any) -> None:
    assert_same(train(OURS, shard_plugin=offloaded(offload), epochs=2), train(STOCK, epochs=2))


@pytest.mark.parametrize(
    "settings", [{}, *exhaustive({"defer_gradient_sync": True}, {"strategy": "shard_optim"})], ids=str
)
@ranks(2)
def test_accumulation_is_that_of_ddp(settings: dict[str, Any]) -> None:
    # 24 samples in 3 batches of 4 on each rank: the last step of an epoch is of one batch alone.
    options = {"gradient_accumulation_steps": 2, "epochs": 2, "max_norm": 0.3}
    assert_same(train(OURS, shard_plugin=offloaded(**settings), **options), train(STOCK, **options))


@pytest.mark.exhaustive
@ranks(1, 3)
def test_other_numbers_of_ranks_train_as_under_ddp() -> None:
    assert_same(train(OURS, shard_plugin=offloaded(), optimizer=adamw), train(STOCK, optimizer=adamw))


@pytest.mark.exhaustive
@ranks(2)
def test_bf16_is_that_without_offload() -> None:
    options = {"mixed_precision": "bf16", "epochs": 2}
    assert_same(train(OURS, shard_plugin=offloaded(), **options), train(OURS, **options))
    assert distance(train(OURS, shard_plugin=offloaded(), **options), train(STOCK, **options)) < 0.02


def with_scaler(kind: Any, rank: int, **options: Any) -> tuple[list[float], list[bool], Result]:
    """Steps of which the third overflows on one rank."""
    with accelerator(kind, **options) as acc:
        acc.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        model = net()
        model, optimizer, data = acc.prepare(model, sgd(model.parameters()), loader())
        scales, skipped, found = [], [], Result()
        for _ in range(2):
            for index, batch in enumerate(data):
                loss = loss_of(model, batch) * (float("inf") if index == 2 and rank == 1 else 1.0)
                acc.backward(loss)
                found.losses.append(loss.item())
                found.norms.append(float(acc.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
                scales.append(acc.scaler.get_scale())
                skipped.append(acc.optimizer_step_was_skipped)
        found.parameters = whole_parameters(acc.unwrap_model(model))
        return scales, skipped, found


@ranks(2)
def test_a_scaler_skips_the_same_steps_as_under_ddp_and_what_is_clipped_is_unscaled(rank: int) -> None:
    *ours, found = with_scaler(OURS, rank, shard_plugin=offloaded())
    *stock, wanted = with_scaler(STOCK, rank)
    assert ours == stock and any(ours[1]) and not all(ours[1])
    finite = [i for i, norm in enumerate(wanted.norms) if torch.tensor(norm).isfinite()]
    assert [found.norms[i] for i in finite] == pytest.approx([wanted.norms[i] for i in finite], rel=1e-5)
    assert len(finite) < len(found.norms)
    for name, value in wanted.parameters.items():
        torch.testing.assert_close(found.parameters[name], value, rtol=1e-5, atol=1e-6)


# -- checkpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "first", "second"),
    [
        ("sharded", "cpu", "cpu"),
        *exhaustive(("full", "cpu", "cpu"), ("sharded", "cpu", None), ("sharded", None, KEEPS), ("full", None, "cpu")),
    ],
    ids=str,
)  # fmt: skip
@ranks(2)
def test_a_training_that_is_resumed_is_one_that_was_not_interrupted(
    form: Any, first: Any, second: Any, tmp_path: Any
) -> None:
    with accelerator(OURS, shard_plugin=offloaded(first, state_dict_type=form)) as acc:
        whole = Run(acc)
        whole.train(steps=2)
        acc.save_state(tmp_path / "c")
        rest = whole.train(skip=2)
        wanted = whole.state()
    with accelerator(OURS, shard_plugin=offloaded(second, state_dict_type=form)) as acc:
        again = Run(acc, seed=7)
        acc.load_state(tmp_path / "c")
        losses = again.train(skip=2)
        if first == second:
            assert losses == rest
            same(again.state(), wanted)
        else:
            torch.testing.assert_close(losses, rest, rtol=1e-5, atol=0)


def _saved(rank: int, world_size: int, folder: Any) -> Any:
    with accelerator(OURS, shard_plugin=offloaded()) as acc:
        first = Run(acc, size=48)
        first.train(steps=2)
        acc.save_state(folder)
        return first.state()


def _loaded(rank: int, world_size: int, folder: Any, wanted: Any) -> None:
    with accelerator(OURS, shard_plugin=offloaded()) as acc:
        again = Run(acc, seed=7, size=48)
        acc.load_state(folder)
        same(again.state(), wanted)
        again.train(steps=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("other", [1, 3])
def test_another_number_of_ranks_resumes(other: int, tmp_path: Any) -> None:
    run(other, _loaded, str(tmp_path / "c"), run(2, _saved, str(tmp_path / "c"))[0])


@pytest.mark.parametrize(("writer", "reader"), [*exhaustive((STOCK, OURS), (OURS, STOCK))])
@ranks(2)
def test_files_go_to_stock_accelerate_and_come_from_it(writer: Any, reader: Any, tmp_path: Any) -> None:
    plugin = offloaded(state_dict_type="full")
    with accelerator(writer, shard_plugin=plugin) as acc:
        first = Run(acc)
        first.train(steps=2)
        acc.save_state(str(tmp_path / "c"))
        rest = first.train(skip=2)
    with accelerator(reader, shard_plugin=plugin) as acc:
        again = Run(acc, seed=7)
        acc.load_state(str(tmp_path / "c"))
        torch.testing.assert_close(again.train(skip=2), rest, rtol=1e-5, atol=0)


@ranks(2)
def test_whole_weights_are_those_after_the_step_that_runs_in_the_background(rank: int, tmp_path: Any) -> None:
    states = []
    for kind in BOTH:
        with accelerator(kind, shard_plugin=offloaded()) as acc:
            model = net()
            model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
            acc.backward(model(torch.ones(2, 12)).square().mean())
            optimizer.step()
            states.append(acc.get_state_dict(model))
            acc.save_model(model, str(tmp_path / kind.__module__))
            acc.wait_for_everyone()
            written = load_file(str(tmp_path / kind.__module__ / "model.safetensors"))
            if rank == 0:
                torch.testing.assert_close(written, {k: v.cpu() for k, v in states[-1].items()})
    if rank == 0:
        torch.testing.assert_close(dict(states[1]), {k.removeprefix("module."): v for k, v in states[0].items()})


# -- transformers and PEFT ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fsdp", "config"),
    [
        ("full_shard offload", None),
        *exhaustive(
            (True, {"cpu_offload": True}),
            (True, {**VERSION_1, "cpu_offload": True}),
            ("full_shard auto_wrap offload", {"transformer_layer_cls_to_wrap": ["GPT2Block"]}),
        ),
    ],
    ids=str,
)
@ranks(2)
def test_a_trainers_fsdp_arguments_offload(fsdp: Any, config: Any, tmp_path: Any) -> None:
    with trainer(Ours, tmp_path, fsdp=fsdp, fsdp_config=config) as own:
        own.train()
        logs, engine = own.steps.logs, torch_shard.engine_of(own.model)
        assert engine is not None and engine.config.offload == Offload()
    assert_same_logs(logs, trained(Trainer, tmp_path))


@pytest.mark.exhaustive
@ranks(2)
def test_a_trainer_resumes_with_offload(tmp_path: Any) -> None:
    options = {"options": {"shard_plugin": offloaded()}, "save_strategy": "steps", "save_steps": 2}
    with trainer(Ours, tmp_path / "a", **options) as whole:
        whole.train()
        wanted = {k: v.clone() for k, v in engine_of(whole.model).state_dict(rank0_only=False).items()}
    with trainer(Ours, tmp_path / "a", **options) as again:
        again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
        found = engine_of(again.model).state_dict(rank0_only=False)
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("offload", OFFLOADS[:2], ids=str)
@ranks(2)
def test_lora_trains_as_under_ddp(offload: Any) -> None:
    compare(BOTH, lambda: adapted("llama"), shard_plugin=offloaded(offload))


@ranks(2)
def test_generation_after_a_step_is_that_of_the_plain_model(rank: int) -> None:
    model, inputs, loss_of_output = build("llama")
    texts = []
    for kind in BOTH:
        with accelerator(kind, shard_plugin=offloaded()) as acc:
            torch.manual_seed(0)
            model, inputs, loss_of_output = build("llama")
            model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
            acc.backward(loss_of_output(model(**inputs)))
            optimizer.step()
            plain = acc.unwrap_model(model)
            plain.eval()
            texts.append(plain.generate(inputs["input_ids"][:1, : 4 + rank], max_new_tokens=6, do_sample=False))
    assert torch.equal(texts[0], texts[1])
