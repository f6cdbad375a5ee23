"""Activation offload by class of layer: the numbers of DDP, and inputs of layers in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate_shard import ShardPlugin
from tests.accelerate.support.accelerators import (
    HIDDEN,
    OURS,
    STOCK,
    Layer,
    accelerator,
    assert_same,
    loss_of,
    net,
    train,
)
from tests.support import hf_models
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.activation_checkpointing import offload_of
from torch_shard.activation_offload import MIN_BYTES
from torch_shard.errors import ConfigError

ROWS = MIN_BYTES // 4 // HIDDEN

CHOICES: list[dict[str, Any]] = [
    {"activation_offload": True, "layer_classes": ("Layer",)},
    {"activation_offload": True},
    {"activation_offload": ("Layer",), "strategy": "shard_grad_op"},
    {"activation_offload": (Layer,), "activation_checkpointing": True, "layer_classes": ("Layer",)},
    {"activation_offload": True, "activation_checkpointing": ("Layer",), "strategy": "no_shard"},
]


@pytest.mark.parametrize("settings", [CHOICES[0], *exhaustive(*CHOICES[1:])], ids=str)
@ranks(2)
def test_training_is_that_of_ddp(settings: dict[str, Any]) -> None:
    moved = []

    def noting(model: nn.Module, batch: Any) -> torch.Tensor:
        value = loss_of(model, batch)
        offload = offload_of(model)
        moved.append(0 if offload is None else offload.copied_out)
        return value

    sizes: dict[str, Any] = {"batch_size": ROWS, "size": 4 * ROWS, "loss": noting}
    stock = train(STOCK, **sizes)
    steps, _ = len(moved), moved.clear()
    assert_same(train(OURS, shard_plugin=ShardPlugin(**settings), **sizes), stock)
    assert moved == [2 * MIN_BYTES * (step + 1) for step in range(steps)]


@ranks(2)
def test_layers_on_which_the_user_has_switched_checkpointing_on_are_refused() -> None:
    model, _, _ = hf_models.build("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with (
        accelerator(OURS, shard_plugin=ShardPlugin(activation_offload=True)) as acc,
        pytest.raises(
            ConfigError, match="activation_offload: LlamaDecoderLayer has the model's own gradient_checkpointing"
        ),
    ):
        acc.prepare(model)
    assert offload_of(model) is None


@ranks(2)
def test_bad_choices_are_refused_and_the_model_stays_as_it_was() -> None:
    with accelerator(OURS) as acc:
        for settings, said in (
            ({"activation_offload": ("Block",)}, "activation_offload.*'Block'"),
            ({"activation_offload": True, "layer_classes": ("Leyer",)}, "layer_classes.*'Leyer'"),
            ({"activation_offload": (nn.ModuleList,)}, "activation_offload: ModuleList has no forward"),
        ):
            acc.shard_plugin = ShardPlugin(**settings)  # type: ignore[arg-type]
            model = net()
            with pytest.raises(ConfigError, match=said):
                acc.prepare(model)
            assert not any("forward" in module.__dict__ for module in model.modules())
    with pytest.raises(ConfigError, match=r"^activation_offload must be"):
        ShardPlugin(activation_offload="Layer")
