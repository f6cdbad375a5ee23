"""FlatLayout places and cuts every element as the reference does."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import many, quick
from tests.support.reference import Param, cut_evenly, elements, flat_buffers, lay_out
from torch_shard import ShardConfig
from torch_shard.layout.flat_layout import FlatLayout, ParamMeta
from torch_shard.plan.planner import make_plan

ITEMSIZES = (1, 2, 4, 8, 16)


@st.composite
def params(draw: st.DrawFn, most: int = 5) -> list[Param]:
    """Draw parameters that are dense in memory, in any order of dimensions; 0-d and empty ones too."""
    found = []
    for i in range(draw(st.integers(0, most))):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
        stride, step = [0] * len(shape), 1
        for dim in draw(st.permutations(range(len(shape)))):
            stride[dim] = step
            step *= max(shape[dim], 1)
        found.append(Param(f"p{i}", shape, tuple(stride)))
    return found


cases = st.tuples(params(), st.sampled_from(ITEMSIZES), st.one_of(st.integers(1, 9), st.integers(1, 70)))


def built(params: list[Param], itemsize: int, ranks: int) -> FlatLayout:
    return FlatLayout.build([ParamMeta(p.name, p.shape, p.stride) for p in params], itemsize, ranks)


def hold(params: list[Param], itemsize: int, ranks: int) -> None:
    """Assert that all that a layout says of positions is what the reference's flat buffer shows."""
    layout = built(params, itemsize, ranks)
    buffer = lay_out(params, itemsize, ranks)
    assert (layout.numel, layout.shard_numel) == (len(buffer), len(buffer) // ranks)
    assert sum(stop - start for start, stop in layout.gaps()) == buffer.count(None)
    assert all(element is None for start, stop in layout.gaps() for element in buffer[start:stop])
    memories = [elements(p.shape, p.stride) for p in params]
    for index, (p, slot, memory) in enumerate(zip(params, layout.slots, memories, strict=True)):
        assert (slot.name, slot.shape, slot.stride, slot.numel) == (p.name, p.shape, p.stride, len(memory))
        assert buffer[slot.offset : slot.stop] == [(p.name, index) for index in memory]
        # Sorted by the dimensions from the slowest to the fastest, the indices are in memory order.
        assert sorted(memory, key=lambda i: [i[dim] for dim in slot.order]) == memory
        holders = [r for r, shard in enumerate(cut_evenly(buffer, ranks)) if any(e and e[0] == p.name for e in shard)]
        assert list(layout.owners(index)) == holders
    for rank, shard in enumerate(cut_evenly(buffer, ranks)):
        start, stop = layout.rank_range(rank)
        assert buffer[start:stop] == shard
        sizes, piece_of = layout.pieces(rank)
        ends = list(itertools.accumulate(sizes))
        assert ends[-1] == len(shard) and sizes[-1] == 0
        for index, p in enumerate(params):
            own = [element for element in shard if element is not None and element[0] == p.name]
            first, last = layout.owned(index, rank)
            assert [(p.name, i) for i in memories[index][first:last]] == own
            here, there = layout.local_range(index, rank)
            assert shard[here:there] == own
            piece = piece_of[index]
            assert shard[ends[piece] - sizes[piece] : ends[piece]] == own


def hold_boxes(p: Param, start: int, stop: int) -> None:
    """Assert that the boxes of a slice, each read in memory order, are the slice, and that they are few."""
    memory = elements(p.shape, p.stride)
    boxes = built([p], 8, 1).boxes(0, start, stop)
    read: list[tuple[int, ...]] = []
    for box in boxes:
        ranges = [range(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True)]
        inside = set(itertools.product(*ranges))
        assert len(inside) == box.numel > 0
        read += [index for index in memory if index in inside]
        assert inside <= set(memory)
    assert read == memory[start:stop]
    assert len(boxes) <= max(1, 2 * len(p.shape) - 1)


@st.composite
def slices(draw: st.DrawFn) -> tuple[Param, int, int]:
    p = draw(params(most=1).filter(len))[0]
    start = draw(st.integers(0, len(elements(p.shape, p.stride))))
    return p, start, draw(st.integers(start, len(elements(p.shape, p.stride))))


def hold_plan(params: list[Param], ranks: int) -> None:
    """Assert that a plan puts parameters into the reference's flat buffers, and predicts their bytes."""
    made = torch.nn.ParameterDict()
    for p in params:
        values = torch.empty_strided(p.shape, p.stride, dtype=p.dtype, device="meta")
        made[p.name] = torch.nn.Parameter(values, requires_grad=p.trainable)
    plan = make_plan(made, ShardConfig(units=[[p.name for p in params]]), ranks)
    buffers = flat_buffers(params)
    assert [[p.name for p in flat] for flat in plan.units[0].flat_buffers] == [[p.name for p in b] for b in buffers]
    sizes = [len(lay_out(b, b[0].dtype.itemsize, ranks)) // ranks * b[0].dtype.itemsize for b in buffers]
    assert plan.units[0].shard_bytes(ranks) == plan.predicted.parameters == sum(sizes)


@st.composite
def units(draw: st.DrawFn) -> list[Param]:
    """Draw the parameters of a unit, of several dtypes and frozen or not."""
    dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
    found = draw(params().filter(len))
    return [dataclasses.replace(p, dtype=draw(dtypes), trainable=draw(st.booleans())) for p in found]


@quick(60)
@given(units(), st.integers(1, 70))
def test_a_plan_has_the_flat_buffers_of_the_reference_and_predicts_their_bytes(unit: list[Param], ranks: int) -> None:
    hold_plan(unit, ranks)


@quick(60)
@given(cases)
def test_every_element_lies_where_the_reference_puts_it(case: tuple[list[Param], int, int]) -> None:
    hold(*case)


@quick(60)
@given(slices())
def test_boxes_are_the_elements_of_the_slice_in_memory_order(case: tuple[Param, int, int]) -> None:
    hold_boxes(*case)


@many(1000)
@given(cases, slices(), units())
def test_many_layouts(case: tuple[list[Param], int, int], cut: tuple[Param, int, int], unit: list[Param]) -> None:
    hold(*case)
    hold_boxes(*cut)
    hold_plan(unit, case[2])
