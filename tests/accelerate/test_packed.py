"""Weights in integer and packed formats, as quantized base models have them: gathered bit for bit, and never cast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accelerate_shard import Precision, ShardPlugin
from tests.accelerate.helpers import BOTH, OURS, STOCK, accelerator, engine_of
from tests.accelerate.peft_models import lora
from tests.accelerate.peft_models import train as peft_train
from tests.hf_models import build
from tests.marks import exhaustive
from tests.ranks import ranks
from torch_shard.errors import SetupError

WIDTH, GROUP = 24, 8


class PackedLinear(nn.Module):
    """A frozen linear layer in 4 bits: two weights in a byte, and a scale for each group of a row; dequantized in forward."""

    def __init__(self, linear: nn.Linear, buffers: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        grouped = linear.weight.detach().view(self.out_features, -1, GROUP)
        scale = grouped.abs().amax(-1, keepdim=True) / 7
        codes = (grouped / scale).round().to(torch.int8) + 8
        codes = codes.view(self.out_features, -1).to(torch.uint8)
        self.hold("packed", codes[:, ::2] | codes[:, 1::2] << 4, buffers)
        self.hold("scale", scale.squeeze(-1).to(torch.float16), buffers)
        self.hold("zero", torch.full((self.out_features,), 8, dtype=torch.int8), buffers)
        self.seen: list[torch.Tensor] = []

    def hold(self, name: str, value: torch.Tensor, buffers: bool) -> None:
        if buffers:
            self.register_buffer(name, value)
        else:
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    @property
    def weight(self) -> torch.Tensor:
        packed: Any = self.packed
        self.seen = [value.detach().clone() for value in (packed, self.scale, self.zero)]
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).to(torch.int8) - self.zero[:, None]
        return (codes.view(self.out_features, -1, GROUP) * self.scale.float()[..., None]).flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype))


class LoraOnPacked(nn.Module):
    """A packed layer with a trainable update of low rank, as PEFT's layers for quantized ones compute it."""

    def __init__(self, base: PackedLinear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype)))


class Layer(nn.Module):
    def __init__(self, buffers: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.update = LoraOnPacked(PackedLinear(nn.Linear(WIDTH, WIDTH, bias=False), buffers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.update(self.norm(x)))


def packed_model(buffers: bool = False) -> nn.Sequential:
    """Norms frozen, in fp32; embeddings frozen, in bf16; updates of low rank train, in fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, WIDTH), Layer(buffers), Layer(buffers), nn.Linear(WIDTH, 3))
    for name, p in model.named_parameters():
        p.requires_grad_("lora" in name)
    return model


def train(kind: Any, buffers: bool = False, **options: Any) -> tuple[list[float], list[float], nn.Module]:
    with accelerator(kind, **options) as acc:
        model = packed_model(buffers)
        before = {key: value.clone() for key, value in model.state_dict().items() if "packed" in key or "zero" in key}
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
        model, optimizer = acc.prepare(model, optimizer)
        generator = torch.Generator().manual_seed(acc.process_index)
        losses, norms = [], []
        for _ in range(4):
            x = torch.randn(5, 6, generator=generator)
            loss = model(x).float().pow(2).mean()
            acc.backward(loss)
            norms.append(float(acc.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        plain = acc.unwrap_model(model)
        for name, module in plain.named_modules():
            if isinstance(module, PackedLinear):
                packed, scale, zero = module.seen  # what forward computed with
                assert packed.dtype == torch.uint8 and scale.dtype == torch.float16 and zero.dtype == torch.int8
                assert torch.equal(packed, before[f"{name}.packed"]) and torch.equal(zero, before[f"{name}.zero"])
        after = acc.get_state_dict(model) if kind is STOCK else engine_of(model).state_dict(rank0_only=False)
        assert all(torch.equal(after[key], value) and after[key].dtype == value.dtype for key, value in before.items())
        return losses, norms, plain


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "no_shard")])
@ranks(2)
def test_packed_parameters_train_as_under_ddp_and_keep_every_bit(strategy: str) -> None:
    wanted, ours = train(STOCK), train(OURS, shard_plugin=ShardPlugin(strategy=strategy))
    for found, expected in zip(ours[:2], wanted[:2], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@ranks(2)
def test_packed_buffers_train_as_under_ddp_and_keep_every_bit() -> None:
    wanted, ours = train(STOCK, buffers=True), train(OURS, buffers=True)
    for found, expected in zip(ours[:2], wanted[:2], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("precision", [None, *exhaustive(Precision())], ids=["gathered in bf16", "autocast alone"])
@ranks(2)
def test_packed_parameters_are_not_cast_under_bf16(precision: Any) -> None:
    wanted = train(STOCK, mixed_precision="bf16")
    ours = train(OURS, mixed_precision="bf16", shard_plugin=ShardPlugin(precision=precision))
    for found, expected in zip(ours[:2], wanted[:2], strict=True):
        torch.testing.assert_close(found, expected, rtol=3e-2, atol=0)


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
def test_packed_parameters_are_cut_among_the_ranks_and_have_no_gradients() -> None:
    with accelerator(OURS) as acc:
        model = packed_model()
        total = sum(p.numel() * p.element_size() for p in model.parameters())
        trainable = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        model = acc.prepare(model)
        acc.backward(model(torch.randn(5, 6)).sum())
        found = engine_of(model).memory_summary()
        count = len(list(model.parameters()))
        assert found["parameters"] <= total / 2 + 32 * count
        assert found["gradients"] <= trainable / 2 + 32 * count
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


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


@ranks(2)
def test_a_subclass_that_is_left_out_trains() -> None:
    def losses(kind: Any) -> list[float]:
        torch.manual_seed(0)
        model = with_foreign("subclass")
        model[1].bias.requires_grad_(False)
        with accelerator(kind, shard_plugin=ShardPlugin(ignore=["1.*"])) as acc:
            optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
            model, optimizer = acc.prepare(model, optimizer)
            found = []
            for _ in range(3):
                loss = model(torch.ones(2, 4) * (acc.process_index + 1)).pow(2).mean()
                acc.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            return found

    torch.testing.assert_close(losses(OURS), losses(STOCK), rtol=1e-5, atol=0)
