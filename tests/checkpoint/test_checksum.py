"""The checksum of large blocks: which changes it must see, and what it is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_shard.checkpoint.format.checksum import SMALLEST, block_sum

SIZE = 3 * SMALLEST + 40  # not a multiple of a page
WORD, PAGE = 8, 4096


def some(seed: int = 0, size: int = SIZE) -> bytearray:
    return bytearray(random.Random(seed).randbytes(size))


def differs(block: bytearray, changed: bytearray) -> bool:
    return block_sum(memoryview(block)) != block_sum(memoryview(changed))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(0, 7)), min_size=1, max_size=3, unique=True))
def test_up_to_three_flipped_bits_are_seen(bits):
    block = some()
    changed = bytearray(block)
    for position, bit in bits:
        changed[position] ^= 1 << bit
    assert differs(block, changed)


@pytest.mark.parametrize("length", [WORD, PAGE])
def test_exchanged_parts_are_seen(length):
    block = some()
    for first, second in [(0, 1), (0, 2), (3, SMALLEST // length), (1, SIZE // length - 1)]:
        changed = bytearray(block)
        a, b = (slice(at * length, (at + 1) * length) for at in (first, second))
        changed[a], changed[b] = block[b], block[a]
        assert differs(block, changed)


def test_what_keeps_the_sum_of_a_column_or_of_a_row_is_seen():
    """A bit that goes up in one word and down in another one at the same place of it."""
    block = bytearray(SIZE)
    block[0] = 1
    for other in (WORD, 5 * WORD, PAGE, 7 * PAGE, 7 * PAGE + WORD):
        changed = bytearray(block)
        changed[0], changed[other] = 0, 1
        assert differs(block, changed)


def test_another_length_is_seen():
    assert differs(bytearray(SMALLEST), bytearray(SMALLEST + 1))
    assert differs(bytearray(SMALLEST), bytearray(SMALLEST + PAGE))


def test_what_it_is_stays():
    """Files on disks have it."""
    block = bytearray(i * 37 % 251 for i in range(SMALLEST + 3))
    assert block_sum(memoryview(block)) == "8ee6aaf6157ec605"
