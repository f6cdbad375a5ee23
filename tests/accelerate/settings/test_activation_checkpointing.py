"""Activation checkpointing and offload by class of layer: the numbers and names of DDP, and which layers are chosen."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_shard import ShardPlugin
from tests.accelerate.support.accelerators import OURS, STOCK, accelerator, engine_of
from tests.accelerate.support.models import HIDDEN, Layer, loss_of, net
from tests.accelerate.support.training import assert_same, train
from tests.support import hf_models
from tests.support.logs import captured_log
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard.activation_checkpointing import offload_of
from torch_shard.activation_offload import MIN_BYTES
from torch_shard.errors import ConfigError

RECOMPUTED: list[dict[str, Any]] = [
    {"activation_checkpointing": True},
    {"activation_checkpointing": True, "layer_classes": ("Layer",)},
    {"activation_checkpointing": True, "units": ("layers.*",), "strategy": "shard_grad_op"},
    {"activation_checkpointing": (Layer,)},
    {"activation_checkpointing": ("Layer",), "strategy": "no_shard"},
]
OFFLOADED: list[dict[str, Any]] = [
    {"activation_offload": True, "layer_classes": ("Layer",)},
    {"activation_offload": True},
    {"activation_offload": (Layer,), "activation_checkpointing": True, "layer_classes": ("Layer",)},
    {"activation_offload": True, "activation_checkpointing": ("Layer",), "strategy": "no_shard"},
]
ROWS = MIN_BYTES // 4 // HIDDEN


@pytest.mark.parametrize("settings", quick(RECOMPUTED, [RECOMPUTED[2]]), ids=str)
@ranks(2)
def test_layers_are_computed_again_in_backward_with_the_numbers_and_names_of_ddp(settings: dict[str, Any]) -> None:
    calls: list[int] = []

    def counting(model: nn.Module, batch: Any) -> torch.Tensor:
        assert list(model.state_dict()) == list(net().state_dict())
        assert [type(layer) for layer in model.layers] == [Layer, Layer]
        if not calls:
            model.layers[0].linear.register_forward_hook(lambda *_: calls.append(1))
            calls.append(0)
        return loss_of(model, batch)

    found = train(OURS, shard_plugin=ShardPlugin(**settings), loss=counting)
    assert sum(calls) == 2 * len(found.losses)
    assert_same(found, train(STOCK))


@pytest.mark.parametrize("settings", [OFFLOADED[0], *exhaustive(*OFFLOADED[1:])], ids=str)
@ranks(2)
def test_inputs_of_layers_are_in_host_memory_until_backward_with_the_numbers_of_ddp(settings: dict[str, Any]) -> None:
    moved = []

    def noting(model: nn.Module, batch: Any) -> torch.Tensor:
        value = loss_of(model, batch)
        moved.append(offload_of(model).copied_out)
        return value

    sizes: dict[str, Any] = {"batch_size": ROWS, "size": 4 * ROWS}
    assert_same(train(OURS, shard_plugin=ShardPlugin(**settings), loss=noting, **sizes), train(STOCK, **sizes))
    assert moved == [2 * MIN_BYTES * (step + 1) for step in range(len(moved))]


@pytest.mark.parametrize("name", ["gpt2", *exhaustive("llama", "t5")])
@ranks(2)
def test_transformers_layers_are_found_and_caches_are_left_out(name: str) -> None:
    losses = {}
    for chosen in (False, True):
        model, inputs, loss_of = hf_models.build(name)
        model.config.use_cache = True
        own = set(model._no_split_modules)
        calls: Counter[str] = Counter()
        for module_name, module in model.named_modules():
            if type(module).__name__ in own:
                module.register_forward_hook(lambda *_, n=module_name, calls=calls: calls.update([n]))
        with accelerator(OURS, shard_plugin=ShardPlugin(activation_checkpointing=chosen)) as acc, captured_log():
            model = acc.prepare(model)
            for _ in range(2):
                loss = loss_of(model(**inputs))
                acc.backward(loss)
            losses[chosen] = (loss.item(), acc.clip_grad_norm_(model.parameters(), 1.0).item())
            recomputed = [m for m in model.modules() if type(m).__name__ in own and "forward" in m.__dict__]
            assert len(recomputed) == (len(calls) if chosen else 0)
            # By hooks the layers ran once in each forward: they are outside of what is computed again.
            assert set(calls.values()) == {2}
    assert losses[True] == pytest.approx(losses[False], rel=1e-6)


@ranks(2)
def test_layers_on_which_the_user_has_switched_it_on_are_computed_twice_and_not_offloaded() -> None:
    model, inputs, loss_of = hf_models.build("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: calls.append(1))
    said = "activation_offload: LlamaDecoderLayer has the model's own gradient_checkpointing"
    with (
        accelerator(OURS, shard_plugin=ShardPlugin(activation_offload=True)) as acc,
        pytest.raises(ConfigError, match=said),
    ):
        acc.prepare(model)
    assert offload_of(model) is None
    with accelerator(OURS, shard_plugin=ShardPlugin(activation_checkpointing=True)) as acc:
        model = acc.prepare(model)
        acc.backward(loss_of(model(**inputs)))
    assert len(calls) == 2


@ranks(2)
def test_bad_choices_are_refused_and_the_model_stays_as_it_was() -> None:
    with accelerator(OURS) as acc:
        for settings, said in (
            ({"layer_classes": ("Leyer",)}, "layer_classes.*'Leyer'.*There is Layer"),
            ({"activation_checkpointing": ("Block",)}, "activation_checkpointing.*'Block'"),
            ({"activation_checkpointing": (nn.Conv2d,)}, "Conv2d"),
            ({"activation_checkpointing": True, "units": ("nowhere.*",)}, "units"),
            ({"activation_offload": ("Block",)}, "activation_offload.*'Block'"),
            ({"activation_offload": (nn.ModuleList,)}, "activation_offload: ModuleList has no forward"),
        ):
            acc.shard_plugin = ShardPlugin(**settings)  # type: ignore[arg-type]
            model = net()
            with pytest.raises(ConfigError, match=said):
                acc.prepare(model)
            assert not any("forward" in module.__dict__ for module in model.modules())
        acc.shard_plugin = ShardPlugin(activation_checkpointing=True)
        with pytest.raises(ConfigError, match="can't be seen"):
            acc.prepare(nn.Linear(2, 2))


@ranks(2)
def test_units_are_the_layers_of_the_named_classes() -> None:
    with accelerator(OURS, shard_plugin=ShardPlugin(layer_classes=("Layer",))) as acc:
        plan = engine_of(acc.prepare(net())).plan
    assert [unit.name for unit in plan.units if "layers" in unit.name] == ["layers.0", "layers.1"]
