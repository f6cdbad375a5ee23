"""The 8-bit code itself: block-wise symmetric quantization."""

from __future__ import annotations

import math

import pytest
import torch

from tests.quantized.harness import BF16, BLOCK, FP16, FP32, FP64, decoded
from torch_shard.numerics.block_quantizer import BlockQuantizer


@pytest.mark.parametrize("kind", ["int8", "float8"])
@pytest.mark.parametrize("dtype", [FP32, FP64, BF16, FP16])
@pytest.mark.parametrize("numel", [1, 16, 37, 4096])
def test_the_code_is_the_reference(kind, dtype, numel, device):
    code_dtype = {"int8": torch.int8, "float8": torch.float8_e4m3fn}[kind]
    code = BlockQuantizer(code_dtype, numel, BLOCK, FP64 if dtype == FP64 else FP32)
    values = torch.randn(3, numel, generator=torch.Generator().manual_seed(numel), dtype=FP64).to(device, dtype)
    values[1] *= 1e-3
    values[2] = 0
    payloads = torch.full((3, code.nbytes), 77, dtype=torch.uint8, device=device)
    code.encode(values, payloads)
    assert code.nbytes % 16 == 0 and 0 <= code.nbytes - (numel + code.wide.itemsize * math.ceil(numel / BLOCK)) < 16
    result = torch.empty_like(values)
    code.decode(payloads, result)
    expected = torch.stack([decoded(row.to(code.wide), kind) for row in values])
    assert torch.equal(result, expected.to(dtype))
    total = torch.empty(numel, dtype=dtype, device=device)
    code.decode_sum(payloads, total)
    assert torch.equal(total, (expected[0] + expected[1] + expected[2]).to(dtype))


def test_long_rows_are_worked_on_in_pieces_that_do_not_show(monkeypatch):
    numel = 1000
    code = BlockQuantizer(torch.int8, numel, BLOCK, FP32)
    values, residuals = torch.randn(2, numel), [torch.randn(2, numel).to(BF16) * 0.01] * 2
    payloads = torch.zeros(2, 2, code.nbytes, dtype=torch.uint8)
    residuals = [r.clone() for r in residuals]
    code.encode(values, payloads[0], residuals[0])
    monkeypatch.setattr("torch_shard.numerics.block_quantizer._PIECE", {"cpu": 100})
    code.encode(values, payloads[1], residuals[1])
    assert torch.equal(payloads[0], payloads[1]) and torch.equal(*residuals)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_an_error_is_at_most_half_a_step(kind):
    code = BlockQuantizer(kind, 4096, 256, FP32)
    values = torch.randn(1, 4096) * torch.logspace(-6, 6, 4096)
    payload, result = torch.empty(1, code.nbytes, dtype=torch.uint8), torch.empty(1, 4096)
    code.encode(values, payload)
    code.decode(payload, result)
    largest = values.view(-1, 256).abs().amax(dim=1, keepdim=True)
    # e4m3: three bits of mantissa; near zero its step is that of 2^-6.
    step = largest / 127 if kind == torch.int8 else (values.abs().view(-1, 256) / 8).clamp(min=largest / 448 * 2**-9)
    assert ((values - result).view(-1, 256).abs() <= step * 0.5 * (1 + 1e-5)).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_what_is_not_finite_arrives_as_such_and_leaves_the_residual_clean(bad, kind):
    code = BlockQuantizer(kind, 40, BLOCK, FP32)
    values = torch.randn(1, 40)
    values[0, 20] = bad
    payload, result = torch.empty(1, code.nbytes, dtype=torch.uint8), torch.empty(1, 40)
    residual = torch.full((1, 40), 0.01, dtype=BF16)
    code.encode(values, payload, residual)
    code.decode(payload, result)
    block = torch.arange(40) // BLOCK == 1
    assert not result[0, block].isfinite().any()
    assert result[0, ~block].isfinite().all()
    assert residual.isfinite().all() and (residual[0, block] == 0).all() and (residual[0, ~block] != 0).any()


@pytest.mark.parametrize("dtype", [FP32, FP64, BF16, FP16])
def test_the_largest_and_the_smallest_numbers_stay_finite(dtype):
    wide = FP64 if dtype == FP64 else FP32
    code = BlockQuantizer(torch.int8, 32, BLOCK, wide)
    info = torch.finfo(dtype)
    most = info.max / 2 if dtype == wide else info.max  # the last bit of the very largest may be rounded up
    values = torch.tensor([most, -most, 1.0, 0.0] * 4 + [info.smallest_normal / 4, 0.0, -0.0, 0.0] * 4, dtype=FP64).to(
        dtype
    )
    payload, result = torch.empty(1, code.nbytes, dtype=torch.uint8), torch.empty(1, 32, dtype=wide)
    residual = torch.zeros(1, 32, dtype=wide)
    code.encode(values.view(1, 32), payload, residual)
    code.decode(payload, result)
    assert result.isfinite().all() and residual.isfinite().all()
    assert dtype == FP16 or (result[0, 16:] == 0).all()  # the scale would have few bits left
    torch.testing.assert_close(result[0, :4], values[:4].to(wide), rtol=1e-6, atol=most / 254)
    torch.testing.assert_close((result + residual)[0], values.to(wide), rtol=1e-6, atol=0.0)
