"""What has which dtype: inside forwards, between steps, in state dicts, when gathered, on meta, copied and closed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_shard
from tests.precision.harness import MLP, Mixed, batch, loss_of, same_bits
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import Precision

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW = Precision(param_dtype=BF16)
STRATEGIES = ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")]


class Seen(nn.Module):
    """Notes what it finds inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 3)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("shift", torch.ones(5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: dict[str, Any] = {}

    def forward(self, x, scale=None, mask=None):
        note = self.seen
        note["input"], note["scale"], note["mask"] = x.dtype, None if scale is None else scale.dtype, mask
        note["child"] = self.second.weight.dtype  # not gathered yet, perhaps
        note["cast"] = x.float().to(self.second.weight).dtype
        note["type_as"] = x.float().type_as(self.second.weight).dtype
        note["first"] = next(self.parameters()).dtype
        h = self.first(x.to(self.first.weight.dtype))
        note["hidden"] = h.dtype
        h = self.norm(h)
        note["normed"] = h.dtype
        return {"out": self.second(h), "n": 3}


def seen(precision: Precision, **settings: Any) -> tuple[Seen, Any]:
    torch.manual_seed(0)
    model = Seen()
    engine = torch_shard.shard(model, unit_bytes=50, precision=precision, **settings)
    return model, engine


@ranks(2, exhaustive=(1,))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inside_a_forward_everything_has_the_dtype_of_the_computation(strategy, rank):
    model, _ = seen(LOW, strategy=strategy)
    out = model(torch.ones(2, 5), scale=torch.ones(()), mask=(torch.ones(2).bool(), [torch.ones(1)]))
    found = model.seen
    assert {found[k] for k in ("input", "scale", "child", "cast", "type_as", "first", "hidden", "normed")} == {BF16}
    assert (found["mask"][0].dtype, found["mask"][1][0].dtype) == (torch.bool, BF16)
    assert out["out"].dtype == BF16
    assert {p.dtype for p in model.parameters()} == {FP32}
    out["out"].sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {FP32}


@ranks(2)
def test_kept_modules_get_and_give_what_they_should(rank):
    model, _ = seen(Precision(param_dtype=BF16, keep=["norm"]))
    dtypes = []
    model.norm.register_forward_pre_hook(lambda m, args: dtypes.append((args[0].dtype, m.weight.dtype)))
    model(torch.ones(2, 5))
    assert dtypes == [(FP32, FP32)]
    assert model.seen["normed"] == BF16


@ranks(2)
def test_inputs_are_cast_where_it_is_asked_for(rank):
    for setting in (True, "root", False):
        model, _ = seen(Precision(param_dtype=BF16, cast_inputs=setting))
        inner = []
        model.second.register_forward_pre_hook(lambda m, args: args[0].float(), prepend=True)
        model.second.register_forward_pre_hook(lambda m, args, inner=inner: inner.append(args[0].dtype))
        with contextlib.nullcontext() if setting is True else pytest.raises(RuntimeError, match="dtype"):
            model(torch.ones(2, 5))
        assert model.seen["input"] == (BF16 if setting else FP32)
        assert inner == [BF16 if setting is True else FP32]


@ranks(2)
def test_outputs_and_buffers_are_cast_where_it_is_asked_for(rank):
    model, _ = seen(Precision(param_dtype=BF16, output_dtype=FP32, buffer_dtype=BF16))
    out = model(torch.ones(2, 5))
    assert out["out"].dtype == FP32 and out["n"] == 3
    assert (model.shift.dtype, model.count.dtype) == (BF16, torch.int64)
    out["out"].sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@ranks(2, exhaustive=(1,))
def test_gradients_in_low_precision_are_shown_gathered_and_accumulated(rank):
    pair = Mixed(MLP, Precision(param_dtype=BF16, keep_low_precision_grads=True))
    for step in range(2):
        with pair.engine.no_sync():
            loss_of(pair.model(batch(rank, step).float())).backward()
        assert {p.grad.dtype for p in pair.model.parameters()} == {BF16}
    loss_of(pair.model(batch(rank, 2).float())).backward()
    expected = {n: p.grad.full_tensor() for n, p in pair.model.named_parameters()}
    for ranks_ in (None, 0):
        with pair.engine.gathered(grads=True, write=True, ranks=ranks_):
            if ranks_ is None or rank == 0:
                for name, p in pair.model.named_parameters():
                    same_bits(p.grad, expected[name], name)
    for name, p in pair.model.named_parameters():
        same_bits(p.grad, expected[name], name)
    twin = copy.deepcopy(pair.model)
    loss_of(twin(batch(rank, 2).float())).backward()
    assert {p.grad.dtype for p in twin.parameters()} == {BF16}
    pair.engine.close()
    assert {p.grad.dtype for p in pair.model.parameters()} == {BF16}


@ranks(2)
def test_gradients_from_before_are_those_of_masters(rank):
    torch.manual_seed(0)
    model = MLP().to(BF16)
    loss_of(model(batch(0, 0).to(BF16))).backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    torch_shard.shard(model, precision=Precision(master_dtype=FP32))
    for name, p in model.named_parameters():
        same_bits(p.grad, before[name].float(), name)


@dataclasses.dataclass
class Doubles:
    x: torch.Tensor
    note: str = dataclasses.field(init=False)
    times: dataclasses.InitVar[float] = 2.0

    def __post_init__(self, times):
        self.x, self.note = self.x * times, "made"


class TakesObjects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 3)

    def forward(self, given):
        assert given.note == "made" and given.x.dtype == BF16
        return self.lin(given.x)


@ranks(2)
def test_dataclasses_are_cast_as_they_are(rank):
    model = TakesObjects()
    torch_shard.shard(model, precision=LOW)
    given = Doubles(torch.ones(2, 5))
    expected = model(Doubles(torch.ones(2, 5)))
    same_bits(model(given), expected)
    plain = 2 * model.lin.weight.detach().full_tensor().sum(1) + model.lin.bias.detach().full_tensor()
    torch.testing.assert_close(expected.float(), plain.expand(2, 3), rtol=0.02, atol=0.05)
    assert given.x.dtype == FP32


class Packed(nn.Module):
    """Integer weights, frozen ones in bf16 and fp32, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        integers = torch.randint(-128, 127, (7, 5), dtype=torch.int8, generator=generator)
        self.codes = nn.Parameter(integers, requires_grad=False)
        self.base = nn.Parameter(torch.randn(5, 5, generator=generator).to(BF16), requires_grad=False)
        self.wide = nn.Parameter(torch.randn(5, 5, generator=generator), requires_grad=False)
        self.lora = nn.Parameter(torch.randn(7, 5, generator=generator))
        self.seen: dict[str, Any] = {}

    def forward(self, x):
        self.seen = {n: p.detach().clone() for n, p in self.named_parameters()}
        x = x.to(self.lora.dtype) @ self.base.to(self.lora.dtype) @ self.wide.to(self.lora.dtype)
        return F.linear(x, self.codes.to(self.lora.dtype) * 0.01 + self.lora)


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("compute", [BF16, FP32])
def test_integers_are_gathered_bit_for_bit_and_frozen_weights_never_cast_up(compute, rank):
    model, plain = Packed(), Packed()
    torch_shard.shard(model, units=[["codes", "base", "wide", "lora"]], precision=Precision(param_dtype=compute))
    model(torch.ones(2, 5)).sum().backward()
    for name, p in plain.named_parameters():
        expected = p.detach()
        if expected.is_floating_point() and (p.requires_grad or compute.itemsize <= expected.element_size()):
            expected = expected.to(compute)
        same_bits(model.seen[name], expected, name)
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["lora"]
    for name, p in model.named_parameters():
        same_bits(p, plain.get_parameter(name), name)


@ranks(2)
def test_frozen_parameters_are_not_stored_as_masters(rank):
    model = Packed()
    model.lora.data = model.lora.data.to(BF16)
    torch_shard.shard(model, precision=Precision(master_dtype=FP32))
    assert {n: p.dtype for n, p in model.named_parameters()} == {
        "codes": torch.int8, "base": BF16, "wide": FP32, "lora": FP32
    }  # fmt: skip


@ranks(2, exhaustive=(1, 3))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gathered_gives_the_values_of_storage_and_keeps_what_is_written(strategy, rank):
    pair = Mixed(MLP, LOW, strategy=strategy)
    with pair.engine.gathered(write=True), torch.no_grad():
        for p, q in zip(pair.model.parameters(), pair.masters.parameters(), strict=True):
            same_bits(p, q)
            p.add_(1e-5)
        out = pair.model(batch(rank, 0).float())  # in the precision of storage
        assert out.dtype == FP32
    with torch.no_grad():
        for q in pair.masters.parameters():
            q.add_(1e-5)
        same_bits(out, pair.masters(batch(rank, 0).float()))
    pair.check()
    loss_of(pair.model(batch(rank, 0).float())).backward()


class Edits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 33) / 3)

    def forward(self, x, value: float | None):
        if value is not None:
            with torch.no_grad():
                self.weight.clamp_(max=value)
        return x * self.weight


@ranks(2, exhaustive=(1,))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_edit_inside_a_forward_leaves_other_elements_their_precision(strategy, rank):
    model = Edits()
    before = model.weight.detach().clone()
    torch_shard.shard(model, precision=LOW, strategy=strategy)
    model(torch.ones(33), None)
    same_bits(model.weight, before)
    model(torch.ones(33), 0.125)
    same_bits(model.weight, torch.where(before.bfloat16() > 0.125, 0.125, before))


@ranks(2, exhaustive=(1, 3))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_dicts_and_checkpoints_hold_the_values_of_storage(strategy, rank, tmp_path: Path):
    pair = Mixed(MLP, LOW, strategy=strategy)
    pair.train(rank, steps=1, same=lambda *_: None)
    values = {n: p.detach().full_tensor() for n, p in pair.model.named_parameters()}
    for key, value in pair.engine.state_dict(form="full", rank0_only=False).items():
        same_bits(value, values[key], key)
    pair.engine.save(tmp_path / "c", pair.optimizer)
    pair.engine.save_full(tmp_path / "full.pt")
    if rank == 0:
        for key, value in torch.load(tmp_path / "full.pt").items():
            same_bits(value, values[key], key)
    other = Mixed(MLP, Precision(param_dtype=FP16))
    other.engine.load(tmp_path / "c", other.optimizer)
    for name, p in other.model.named_parameters():
        same_bits(p, values[name], name)


@ranks(2, exhaustive=(1,))
def test_a_model_on_meta_is_initialised_in_the_dtype_of_storage(rank):
    torch.manual_seed(0)
    plain = MLP()
    with torch.device("meta"):
        model = MLP()
    torch.manual_seed(0)
    torch_shard.shard(model, unit_bytes=300, precision=LOW)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.dtype == FP32
        if "norm" in name:
            same_bits(p, q, name)
        else:  # values between those of bf16
            assert (p.detach().full_tensor().bfloat16().float() != p.detach().full_tensor()).any(), name
    model(batch(rank, 0).float()).sum().backward()


@ranks(2, exhaustive=(1,))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_closing_gives_the_plain_model_of_storage_back(strategy, rank):
    pair = Mixed(MLP, LOW, strategy=strategy)
    pair.train(rank, steps=1, same=lambda *_: None)
    values = {n: p.detach().full_tensor() for n, p in pair.model.named_parameters()}
    pair.engine.close(pair.optimizer)
    for name, p in pair.model.named_parameters():
        same_bits(p, values[name], name)
    out = pair.model(batch(rank, 0).float())
    assert out.dtype == FP32
    out.sum().backward()
