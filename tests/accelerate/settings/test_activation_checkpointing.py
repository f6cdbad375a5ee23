"""Activation checkpointing by class of layer: the same numbers, less memory, the same names."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_shard import ShardPlugin
from tests.accelerate.support.accelerators import (
    OURS,
    STOCK,
    Layer,
    Net,
    accelerator,
    assert_same,
    engine_of,
    net,
    train,
)
from tests.support import hf_models
from tests.support.logs import captured_log
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError

EVERY: list[dict[str, Any]] = [
    {"activation_checkpointing": True},
    {"activation_checkpointing": True, "layer_classes": ("Layer",)},
    {"activation_checkpointing": True, "units": ("layers.*",), "strategy": "shard_grad_op"},
    {"activation_checkpointing": (Layer,)},
    {"activation_checkpointing": ("Layer",), "strategy": "no_shard"},
]


class Counted(Layer):
    """Counts its forwards, and has dropout, whose mask must be the same when it is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


def counted() -> Net:
    model = net()
    for index, layer in enumerate(model.layers):
        new = Counted()
        new.load_state_dict(layer.state_dict())
        model.layers[index] = new
    return model


@pytest.mark.parametrize(
    "settings", quick(EVERY, [EVERY[2]]), ids=lambda s: ", ".join(f"{k}={v}" for k, v in s.items())
)
@ranks(2)
def test_training_is_that_of_ddp(settings: dict[str, Any]) -> None:
    stock = train(STOCK)
    assert_same(train(OURS, shard_plugin=ShardPlugin(**settings)), stock)


def saved_bytes(model: nn.Module, x: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Bytes of activations that a forward keeps for backward, and its output."""
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.ndim:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(x)
    return sum(sizes.values()), out


@ranks(2)
def test_layers_are_computed_again_in_backward_and_keep_less(rank: int) -> None:
    kept, grads = {}, {}
    for chosen in (False, True):
        with accelerator(
            OURS, shard_plugin=ShardPlugin(activation_checkpointing=chosen, layer_classes=("Counted",))
        ) as acc:
            model = acc.prepare(counted())
            names = list(model.state_dict())
            torch.manual_seed(rank)
            kept[chosen], out = saved_bytes(model, torch.randn(64, 12))
            acc.backward(out.square().mean())
            assert [layer.calls for layer in model.layers] == [1 + chosen] * 2
            assert names == list(net().state_dict())
            assert acc.unwrap_model(model) is model and type(model.layers[0]) is Counted
            grads[chosen] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.eval()
            model(torch.randn(2, 12))
            assert [layer.calls for layer in model.layers] == [2 + chosen] * 2
    assert kept[True] < kept[False] / 2, kept
    for a, b in zip(grads[True], grads[False], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["gpt2", *exhaustive("llama"), pytest.param("t5", marks=pytest.mark.exhaustive)])
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
            norm = acc.clip_grad_norm_(model.parameters(), 1.0)
            losses[chosen] = (loss.item(), norm.item())
            recomputed = [m for m in model.modules() if type(m).__name__ in own and "forward" in m.__dict__]
            assert len(recomputed) == (len(calls) if chosen else 0)
            # By hooks the layers ran once in each forward: they are outside of what is computed again.
            assert set(calls.values()) == {2}
    assert losses[True] == pytest.approx(losses[False], rel=1e-6)


@ranks(2)
def test_layers_on_which_the_user_has_switched_it_on_are_computed_twice_not_three_times() -> None:
    model, inputs, loss_of = hf_models.build("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    linear = model.model.layers[0].mlp.up_proj
    calls = []
    linear.register_forward_hook(lambda *_: calls.append(1))
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
            ({"activation_checkpointing": (nn.ModuleList,)}, "ModuleList has no forward"),
            ({"activation_checkpointing": True, "units": ("nowhere.*",)}, "units"),
        ):
            acc.shard_plugin = ShardPlugin(**settings)  # type: ignore[arg-type]
            model = net()
            with pytest.raises(ConfigError, match=said):
                acc.prepare(model)
            assert not any("forward" in module.__dict__ for module in model.modules())
        acc.shard_plugin = ShardPlugin(activation_checkpointing=True)
        with pytest.raises(ConfigError, match="can't be seen"):
            acc.prepare(nn.Linear(2, 2))


def test_a_copy_computes_with_its_own_weights() -> None:
    from accelerate_shard.settings.layers import checkpointed_layers

    model = net()
    plugin = ShardPlugin(activation_checkpointing=True)
    with checkpointed_layers(model, plugin, plugin.config()) as number:
        assert number == 2
    other = copy.deepcopy(model)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    x = torch.randn(3, 12)
    assert other(x).abs().max() == 0 and model(x).abs().max() > 0


@ranks(2)
def test_units_are_the_layers_of_the_named_classes() -> None:
    with accelerator(OURS, shard_plugin=ShardPlugin(layer_classes=("Layer",))) as acc:
        plan = engine_of(acc.prepare(net())).plan
    assert [unit.name for unit in plan.units if "layers" in unit.name] == ["layers.0", "layers.1"]
