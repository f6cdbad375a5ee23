"""Stochastic rounding, for the optimizer's step on parameters that are stored in bf16.

bf16 has 8 bits of precision, so an update below about 1/500 of a value is lost when the result is rounded to nearest. If the
result is rounded up or down at random, with probabilities in proportion to the distances, it is right on average, and small
updates add up without a copy of the parameters in fp32 ("Revisiting BFloat16 Training", Zamirai et al., arXiv 2010.06192).

The random numbers are a function of the seed, the unit, the count of its steps, and the element's position in the unit's flat
buffer. They use no generator, so that the user's random numbers stay the same. They do not depend on how a step is divided into
tensors, nor on the number of ranks. Ranks with different shards draw different numbers, and replicas of a shard draw the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

EXACT = torch.float32
"""The dtype in which a step computes."""

_LARGEST = torch.finfo(torch.bfloat16).max
_WORD = 4  # the number of elements that share a hash of 64 bits
_CHUNK = {"cpu": 1 << 16}  # the number of elements worked on at once; on a CPU temporary values stay in its cache
_CHUNK_ELSEWHERE = 1 << 22


def _signed(value: int) -> int:
    """Return the signed 64-bit integer with the bits of `value`, because torch has no other ones."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


# SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014): a counter times an odd constant,
# then Stafford's variant 13 of MurmurHash3's finalizer.
_STRIDE = 0x9E3779B97F4A7C15
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))
_LAST = 31


class Rounding:
    """The random numbers for the steps of one flat buffer."""

    __slots__ = ("_key", "_place", "_seed", "count")

    def __init__(self, seed: int, place: tuple[int, int]) -> None:
        """Begin with the first step. `place` is the number of the unit, and the number of the flat buffer in it."""
        self._seed, self._place = seed, place
        self.count = -1
        self.begin()

    def begin(self) -> None:
        """Begin the next step, which has other random numbers."""
        self.count += 1
        text = repr((self._seed, self._place, self.count)).encode()
        self._key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def at(self, start: int) -> tuple[int, int]:
        """Return the key of this step, and `start`, an element's position in the flat buffer, for :func:`noise`."""
        return self._key, start


def noise(parts: Sequence[tuple[tuple[int, int], int]], device: torch.device) -> torch.Tensor:
    """Return random numbers for ranges of elements, one range after the other.

    Args:
        parts: the :meth:`Rounding.at` of the first element and the number of elements, for each range.

    Returns:
        A 1-D tensor of int16, uniform over all 65536 values, which is a function of the keys and the positions alone.
    """
    starts, counts, cuts = [], [], []
    position = 0
    for (key, start), length in parts:
        first, lead = divmod(start, _WORD)
        count = -(-(lead + length) // _WORD)
        starts.append(_signed(key + _STRIDE * (first - position)))
        counts.append(count)
        cuts += [lead, length, count * _WORD - lead - length]
        position += count
    words = torch.arange(position, dtype=torch.int64, device=device).mul_(_signed(_STRIDE))
    # As arguments of a kernel: the host would wait for a copy of them to the device.
    torch._foreach_add_(words.split_with_sizes(counts), starts)
    for shift, factor in _ROUNDS:  # products wrap around, as intended
        words ^= _shifted(words, shift)
        words *= factor
    words ^= _shifted(words, _LAST)
    # On a big-endian machine the four numbers of a word would only change places.
    found = words.view(torch.int16)
    own = found.split_with_sizes(cuts)[1::3]
    return own[0] if len(own) == 1 else torch.cat(own)


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    return (words >> by).bitwise_and_((1 << (64 - by)) - 1)  # torch's shift keeps the sign


def round_to(values: Sequence[torch.Tensor], exact: torch.Tensor, places: Sequence[tuple[int, int]]) -> None:
    """Write `exact` to `values`, rounded stochastically.

    A value that bf16 has is kept. Any other value becomes one of its two neighbours, which on average give the value itself. A
    value beyond the largest finite one has only one neighbour, so it is rounded to nearest, as infinities and NaN are.

    Args:
        values: 1-D tensors of bf16.
        exact: a 1-D tensor of fp32 with as many elements as `values` together.
        places: the :meth:`Rounding.at` of the first element of each of `values`.
    """
    if len(values) > 1:
        lengths = [v.numel() for v in values]
        rounded = _rounded(exact, noise(list(zip(places, lengths, strict=True)), exact.device))
        torch._foreach_copy_(list(values), rounded.split_with_sizes(lengths))
        return
    (value,), ((key, start),) = values, places
    chunk = _CHUNK.get(value.device.type, _CHUNK_ELSEWHERE)
    for at in range(0, value.numel(), chunk):
        part = exact[at : at + chunk]
        value[at : at + chunk].copy_(_rounded(part, noise([((key, start + at), part.numel())], part.device)))


def _rounded(exact: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Return the rounded values in fp32.

    The lower 16 bits of a float are its distance from the neighbour nearer to zero, in 65536ths of the way to the other one. So
    16 random bits are added, and the lower 16 bits of the sum are cut off.
    """
    bits = torch.add(exact.view(torch.int32), random).add_(1 << 15).bitwise_and_(-(1 << 16))
    return torch.where(exact.abs() <= _LARGEST, bits.view(EXACT), exact)
