"""Parameters, gradients and optimizer state in host memory: scripts and Trainers train as under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Trainer

import torch_shard
from accelerate_shard import ShardPlugin
from tests.accelerate.state.test_resume import same
from tests.accelerate.support.accelerators import (
    OURS,
    STOCK,
    accelerator,
    assert_same,
    train,
)
from tests.accelerate.support.checkpoints import Run
from tests.accelerate.support.trainers import Ours, assert_same_logs, trained, trainer
from tests.accelerate.trainer.test_fsdp_arguments import VERSION_1
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import Offload

KEEPS = Offload(params=False)
OFFLOADS = ["cpu", *exhaustive(KEEPS, Offload(pin_memory=False))]


def offloaded(offload: Any = "cpu", **settings: Any) -> ShardPlugin:
    return ShardPlugin(offload=offload, **settings)


@pytest.mark.parametrize("offload", OFFLOADS, ids=str)
@ranks(2)
def test_training_with_clipping_is_that_of_ddp(offload: Any) -> None:
    assert_same(train(OURS, shard_plugin=offloaded(offload), epochs=2), train(STOCK, epochs=2))


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
