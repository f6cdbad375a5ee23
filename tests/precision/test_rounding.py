"""Stochastic rounding itself: right on average, NaN and infinities kept, random numbers a function of key and place."""

from __future__ import annotations

import pytest
import torch

from tests.precision.rounding_harness import BF16, FP32, neighbours
from tests.support.marks import exhaustive
from torch_shard.numerics.stochastic_rounding import Rounding, noise, round_to


def rounded(exact: torch.Tensor, start: int = 0, count: int = 0) -> torch.Tensor:
    rounding = Rounding(1, (0, 0))
    for _ in range(count):
        rounding.begin()
    values = torch.empty(exact.numel(), dtype=BF16, device=exact.device)
    round_to([values], exact, [rounding.at(start)])
    return values


@pytest.mark.parametrize("fraction", [2**-16, 0.01, 0.5, *exhaustive(0.25, 0.9, 1 - 2**-16)])
@pytest.mark.parametrize("base", [1.0, -1.5e20, 2**-130, *exhaustive(-1.0, 3.0e-5)])
def test_the_mean_of_many_roundings_is_the_value(base: float, fraction: float, device: str):
    n = 1 << 20
    low = torch.tensor(base).bfloat16().float()
    bits = int(fraction * 65536)
    value = (low.view(torch.int32) + bits).view(FP32)
    down, up = neighbours(value)
    found = rounded(value.expand(n).contiguous().to(device)).cpu().float()
    assert ((found == down) | (found == up)).all()
    p = bits / 65536
    share = (found == up).double().mean().item()
    assert abs(share - p) < 5 * (p * (1 - p) / n) ** 0.5


def test_what_bf16_has_is_kept(device: str):
    """Every finite value, subnormal ones and both zeros among them, and the infinities."""
    every = torch.arange(1 << 16, dtype=torch.int32, device=device).to(torch.int16).view(BF16)
    every = every[~every.isnan()]
    for count in range(3):
        assert torch.equal(rounded(every.float(), count=count).view(torch.int16), every.view(torch.int16))


def test_nan_stays_nan_whatever_its_bits_are(device: str):
    bits = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001 - (1 << 32), -1]
    nans = torch.tensor(bits, dtype=torch.int32).repeat(1000).view(FP32).to(device)
    assert rounded(nans).isnan().all()


def test_nothing_becomes_infinite_that_rounding_to_nearest_leaves_finite(device: str):
    largest = torch.finfo(BF16).max
    top = torch.tensor([largest]).view(torch.int32)
    # Below the largest value, at it, and beyond it on both sides of the middle to the next power of two.
    offsets = torch.tensor([-0x8000, -1, 0, 1, 0x7FFF, 0x8000, 0xFFFF], dtype=torch.int32)
    values = (top + offsets).view(FP32).repeat_interleave(2000).to(device)
    for sign in (1, -1):
        found, nearest = rounded(sign * values), (sign * values).to(BF16)
        assert torch.equal(found.isinf(), nearest.isinf())
        beyond = values > largest
        assert torch.equal(found[beyond], nearest[beyond])
    assert (values.to(BF16).isinf()).any() and (values > largest).any()


def test_random_numbers_are_a_function_of_key_and_place(device: str):
    rounding, cuda_or_cpu = Rounding(7, (2, 1)), torch.device(device)
    all_of_them = noise([(rounding.at(0), 3000)], cuda_or_cpu)
    assert torch.equal(all_of_them.cpu(), noise([(rounding.at(0), 3000)], torch.device("cpu")))
    parts = [(3, 100), (1000, 7), (17, 0), (1001, 6), (2000, 1000)]
    found = noise([(rounding.at(start), length) for start, length in parts], cuda_or_cpu)
    assert torch.equal(found, torch.cat([all_of_them[start : start + length] for start, length in parts]))
    for other in (Rounding(8, (2, 1)), Rounding(7, (1, 1)), Rounding(7, (2, 0))):
        assert (noise([(other.at(0), 3000)], cuda_or_cpu) == all_of_them).float().mean() < 0.01
    rounding.begin()
    assert (noise([(rounding.at(0), 3000)], cuda_or_cpu) == all_of_them).float().mean() < 0.01


def test_neighbours_and_steps_are_not_correlated():
    n, rounding = 1 << 18, Rounding(0, (0, 0))
    steps = []
    for _ in range(3):
        steps.append(noise([(rounding.at(0), n)], torch.device("cpu")).double() / 2**15)
        rounding.begin()
    limit = 5 / n**0.5 / 3  # of the mean of a product of two, whose variances are 1/3
    for x in steps:
        assert abs(x.mean()) < 5 / (3 * n) ** 0.5 and abs(x.pow(2).mean() - 1 / 3) < 5 * (4 / 45 / n) ** 0.5
        for lag in (1, 2, 3, 4, 5, 64, 1024):
            assert abs((x[lag:] * x[:-lag]).mean()) < limit * 1.1
    assert abs((steps[0] * steps[1]).mean()) < limit and abs((steps[1] * steps[2]).mean()) < limit
