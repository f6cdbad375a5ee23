"""Mixed precision: autocast as under DDP, with parameters gathered in the low dtype, and a scaler that all ranks agree on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.utils import AutocastKwargs, TorchDynamoPlugin

from accelerate_shard import Precision, ShardPlugin
from tests.accelerate.support.accelerators import BOTH, OURS, STOCK, accelerator, engine_of
from tests.accelerate.support.models import FEATURES, loader, loss_of, net, sgd
from tests.accelerate.support.training import Result, assert_same, full_parameters, prepared, steps, train
from tests.support.marks import exhaustive
from tests.support.ranks import ranks

BF16: dict[str, Any] = {"mixed_precision": "bf16", "epochs": 2}
IN_FP32 = Precision(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, keep=[torch.nn.LayerNorm], cast_inputs=False
)


def distance(a: Result, b: Result) -> float:
    """The largest difference of losses and norms, relative."""
    found, wanted = torch.tensor([*a.losses, *a.norms]), torch.tensor([*b.losses, *b.norms])
    return float(((found - wanted) / wanted).abs().max())


@ranks(2)
def test_bf16_gathers_parameters_so_and_differs_from_ddp_by_its_rounding():
    wanted, exact = train(STOCK, **BF16), train(STOCK, epochs=2)
    found = train(OURS, **BF16)
    assert 1e-4 < distance(wanted, exact) < 0.03  # what bf16 does to DDP's numbers
    assert distance(found, wanted) < 0.02
    with accelerator(mixed_precision="bf16") as acc:
        model = acc.prepare(net())
        assert "bfloat16" in engine_of(model).plan.table()
        assert all(p.dtype == torch.float32 for p in model.parameters())
        out = model(torch.randn(2, FEATURES))
        assert out.dtype == torch.float32  # as Accelerate's wrapper converts it


@pytest.mark.parametrize("precision", [*exhaustive(Precision()), IN_FP32], ids=["autocast alone", "reduced in fp32"])
@ranks(2)
def test_a_precision_of_the_plugin_overrides_and_gives_ddps_numbers_exactly(precision):
    assert_same(train(OURS, shard_plugin=ShardPlugin(precision=precision), **BF16), train(STOCK, **BF16))


@ranks(2)
def test_fp32_masters_train_a_bf16_model_in_fp32():
    def make():
        return net().to(torch.bfloat16)

    found = train(OURS, make=make, shard_plugin=ShardPlugin(fp32_masters=True), **BF16)
    assert found.parameters["head.weight"].dtype == torch.float32
    assert distance(found, train(STOCK, make=lambda: make().float(), epochs=2)) < 0.03


class Packed(torch.nn.Linear):
    """A layer whose frozen weight is int8 codes with a scale in fp16, as quantized base models have them."""

    def __init__(self) -> None:
        super().__init__(FEATURES, FEATURES, bias=False)
        codes = (self.weight.detach() * 127).round().to(torch.int8)
        self.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.scale = torch.nn.Parameter(torch.full((FEATURES, 1), 1 / 127, dtype=torch.float16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.dtype is torch.int8 and self.scale.dtype is torch.float16
        return torch.nn.functional.linear(x, (self.weight.float() * self.scale.float()).to(x.dtype))


@ranks(2)
def test_codes_and_scales_of_packed_weights_are_not_cast():
    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(Packed(), net())

    found = train(OURS, make=make, **BF16)
    assert distance(found, train(STOCK, make=make, **BF16)) < 0.03
    assert all(torch.equal(found.parameters[f"0.{name}"], p) for name, p in make()[0].named_parameters())


# -- without autocast -------------------------------------------------------------------------------------------------
@ranks(2)
def test_autocast_switched_off_by_its_handler_and_blocks_of_autocast_are_as_stock():
    results = []
    for kind in BOTH:
        with accelerator(kind, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=True)]) as acc:
            model = acc.prepare(net())
            x = torch.randn(2, FEATURES)
            with acc.autocast():
                inside = torch.nn.functional.linear(x, torch.ones(3, FEATURES))
                with acc.autocast(AutocastKwargs(enabled=False)):
                    off = torch.nn.functional.linear(x, torch.ones(3, FEATURES))
            results.append((inside.dtype, off.dtype, model(x).dtype))
    assert results[0] == results[1] == (torch.bfloat16, torch.float32, torch.float32)
    options = {"mixed_precision": "bf16", "kwargs_handlers": [AutocastKwargs(enabled=False)]}
    stock = train(STOCK, **options)
    assert_same(train(OURS, **options), stock)
    assert_same(stock, train(STOCK))


class Careful(torch.nn.Module):
    """Computes its last layer in full precision, and has an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.words = torch.nn.Embedding(4, 5)
        self.last = torch.nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x) + self.words(torch.arange(4))[0]
        with torch.autocast(x.device.type, enabled=False):
            return self.last(x.float())


def careful():
    torch.manual_seed(0)
    return Careful()


@pytest.mark.exhaustive
@ranks(2)
def test_layers_called_where_autocast_is_off_work_and_give_back_fp32():
    """As ``model.encode(x)`` and generation of encoder-decoder models do."""
    assert distance(train(OURS, make=careful, **BF16), train(STOCK, make=careful, **BF16)) < 0.03
    results = []
    for kind in BOTH:
        with accelerator(kind, mixed_precision="bf16") as acc:
            model = acc.unwrap_model(acc.prepare(careful()))
            x = torch.randn(2, FEATURES, generator=torch.Generator().manual_seed(0))
            results.append([model.net.layers[0](model.net.embed(x)), model.words(torch.arange(3)), model.net(x)])
            if kind is OURS:
                with engine_of(model).gathered():
                    inside = model.net.embed(x)
                whole = full_parameters(model)
                plain = torch.nn.functional.linear(x, whole["net.embed.weight"], whole["net.embed.bias"])
                torch.testing.assert_close(inside, plain)
                with pytest.raises(RuntimeError, match="shape"):
                    model.net.embed(x[:, :3])
                assert model.net.embed(x).dtype == torch.float32
    torch.testing.assert_close(results[1], results[0], rtol=0.02, atol=0.02)


# -- fp16 -------------------------------------------------------------------------------------------------------------
def in_fp16(acc):
    """What Accelerate does with fp16 where it takes it, on GPUs, on the CPU."""
    acc.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    acc.native_amp = True
    return acc


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard")])
@ranks(2)
def test_with_fp16_an_overflow_on_one_rank_skips_the_step_on_all_as_under_ddp(strategy, rank):
    results = []
    for kind in BOTH:
        with accelerator(kind, mixed_precision="fp16", shard_plugin=ShardPlugin(strategy=strategy)) as acc:
            model = net()
            optimizer = sgd(model.parameters())
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            model, optimizer, data, scheduler = in_fp16(acc).prepare(model, optimizer, loader(40), scheduler)
            found, skipped, rates = Result(), [], []
            for step, batch in enumerate(data):
                value = loss_of(model, batch) * (1e9 if step == 1 and rank == 1 else 1)
                acc.backward(value)
                norm = acc.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                skipped.append(acc.optimizer_step_was_skipped)
                rates.append((scheduler.get_last_lr(), acc.scaler.get_scale()))
                if not skipped[-1]:
                    found.norms.append(float(norm))
                    found.losses.append(value.item())
            assert skipped == [False, True, False, False, False]
            results.append((found, rates))
    assert results[0][1] == results[1][1]
    assert distance(results[1][0], results[0][0]) < 2e-3


@ranks(2)
def test_gradients_are_unscaled_by_hand_as_under_ddp():
    norms = []
    for kind in BOTH:
        with accelerator(kind, mixed_precision="fp16") as acc:
            model, optimizer, data = prepared(in_fp16(acc))
            acc.backward(loss_of(model, next(iter(data))))
            acc.unscale_gradients(optimizer)
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
    assert norms[1] == pytest.approx(norms[0], rel=2e-3)


# -- compiled models --------------------------------------------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("way", "mixed_precision"), [("regional", "no"), ("regional", "bf16"), ("whole", "bf16"), ("by hand", "no")]
)
@ranks(2, timeout=150)
def test_compiled_models_train_as_under_ddp(way, mixed_precision):
    wanted = train(STOCK, mixed_precision=mixed_precision)
    torch._dynamo.reset()
    options = {"mixed_precision": mixed_precision}
    if way != "by hand":
        options["dynamo_plugin"] = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=way == "regional")
    with accelerator(OURS, **options) as acc:
        model = net()
        optimizer = sgd(model.parameters())
        if way == "by hand":
            model = torch.compile(model, backend="aot_eager")
        model, optimizer, data = acc.prepare(model, optimizer, loader())
        found = steps(acc, model, optimizer, data)
        plain = acc.unwrap_model(model, keep_torch_compile=False)
        assert type(plain).__name__ == "Net" and model is not plain
        assert engine_of(model) is engine_of(acc.unwrap_model(model)) is engine_of(plain)
    if mixed_precision == "no":
        assert_same(found, wanted)
    else:
        assert distance(found, wanted) < 0.02
