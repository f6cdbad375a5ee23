"""Weights in integer and packed formats, as quantized base models have them: gathered bit for bit, and never cast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.accelerate.support.accelerators import BOTH, OURS, accelerator, engine_of
from tests.accelerate.support.peft_models import lora
from tests.accelerate.support.peft_models import train as peft_train
from tests.support.hf_models import build
from tests.support.ranks import ranks
from torch_shard.errors import SetupError

WIDTH, GROUP = 24, 8


class PackedWeight(nn.Linear):
    """A linear layer whose weight is int8 codes, for PEFT, which adapts subclasses of torch's. The scale is in bf16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        scale = linear.weight.detach().abs().amax(1) / 127
        self.weight = nn.Parameter((linear.weight / scale[:, None]).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale.to(torch.float16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.dtype is torch.int8 and self.scale.dtype is torch.float16
        weight = self.weight.float() * self.scale.float()[:, None]
        return nn.functional.linear(x, weight.to(x.dtype))


@ranks(2)
def test_peft_s_lora_on_a_packed_transformer_trains_under_bf16_and_saves_its_adapter(tmp_path: Path) -> None:
    def make() -> Any:
        model, inputs, loss = build("llama")
        for layer in model.model.layers:
            for block in (layer.self_attn, layer.mlp):
                for name, child in list(block.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(block, name, PackedWeight(child))
        return peft.get_peft_model(model, lora("llama")), inputs, loss

    runs = []
    for kind in BOTH:
        with accelerator(kind, mixed_precision="bf16") as acc:
            model, run = peft_train(acc, *make())
            runs.append(run)
            if kind is OURS:
                model.save_pretrained(tmp_path)
                state = engine_of(model).state_dict(rank0_only=False)
    plain = make()[0].state_dict()
    packed = [key for key, value in plain.items() if value.dtype == torch.int8 or key.endswith("scale")]
    assert packed and all(torch.equal(state[key], plain[key]) for key in packed)
    for found, expected in ((runs[1].losses, runs[0].losses), (runs[1].norms, runs[0].norms)):
        torch.testing.assert_close(found, expected, rtol=3e-2, atol=0)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved and all(torch.equal(v, state[k.replace(".weight", ".default.weight")]) for k, v in saved.items())


@ranks(2)
def test_every_bit_pattern_survives_gathering() -> None:
    dtypes = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn]
    model = nn.Module()
    for i, dtype in enumerate(dtypes):
        bits = torch.arange(256, dtype=torch.int64).to(torch.uint8)
        value = bits > 127 if dtype == torch.bool else bits[: 256 // dtype.itemsize * dtype.itemsize].view(dtype)
        model.register_parameter(f"p{i}", nn.Parameter(value, requires_grad=False))
    model.register_parameter("trained", nn.Parameter(torch.zeros(3)))
    wanted = {key: value.clone() for key, value in model.state_dict().items()}
    with accelerator(OURS, mixed_precision="bf16") as acc:
        engine = engine_of(acc.prepare(model))
        for state in (engine.state_dict(rank0_only=False), {k: p.full_tensor() for k, p in model.named_parameters()}):
            assert_bits(state, wanted)
        with engine.gathered():
            assert_bits(dict(model.named_parameters()), wanted)
        engine.close()
        assert_bits(model.state_dict(), wanted)


def assert_bits(found: Any, wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key].detach().view(torch.uint8), value.view(torch.uint8)), key


class Quantized(torch.Tensor):
    """A tensor subclass that holds its values in another form, as torchao's do."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        plain = [a.codes.float() * 0.1 if isinstance(a, cls) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Params4bit(nn.Parameter):
    """A parameter class of another library, with what its values mean in an attribute, as bitsandbytes' are."""

    def __new__(cls, data: torch.Tensor) -> Any:
        self = torch.Tensor._make_subclass(cls, data, False)
        self.quant_state = {"absmax": torch.ones(3)}
        return self


def with_foreign(kind: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    codes = torch.randint(-8, 8, (4, 4), dtype=torch.int8)
    value = nn.Parameter(Quantized(codes), requires_grad=False) if kind == "subclass" else Params4bit(codes)
    model[1]._parameters["weight"] = value
    return model


@pytest.mark.parametrize("kind", ["subclass", "parameter class"])
@ranks(2)
def test_parameters_of_other_libraries_classes_are_refused_by_name(kind: str) -> None:
    with accelerator(OURS) as acc:
        model = with_foreign(kind)
        with pytest.raises(SetupError, match=r"1\.weight"):
            acc.prepare(model)
        assert not any(hasattr(p, "_spec") for p in model.parameters())
