"""FlatLayout: every element of every parameter has one owner and one place."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_shard.errors import LayoutError
from torch_shard.layout.flat_layout import ALIGNMENT, FlatLayout, ParamMeta, contiguous_stride

ITEMSIZES = (1, 2, 4, 8, 16)
FEW = settings(max_examples=100, deadline=None)


def dense_stride(shape, order):
    """Strides of a tensor whose memory runs through `order`, its last dimension fastest."""
    stride = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


@st.composite
def metas(draw, least=0, most=6):
    found = []
    for i in range(draw(st.integers(least, most))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=5)))
        order = draw(st.permutations(range(len(shape))))
        found.append(ParamMeta(f"p{i}", shape, dense_stride(shape, order)))
    return found


worlds = st.one_of(st.integers(1, 9), st.integers(1, 4096))


@given(metas(), st.sampled_from(ITEMSIZES), worlds)
@FEW
def test_every_element_is_owned_exactly_once(params, itemsize, world_size):
    layout = FlatLayout.build(params, itemsize, world_size)
    for index, slot in enumerate(layout.slots):
        owners = layout.owners(index)
        end = 0
        for rank in owners:
            start, stop = layout.owned(index, rank)
            assert start == end and stop > start
            end = stop
            # The place in the shard, carried into the flat buffer, is the parameter's own place.
            first, last = layout.local_range(index, rank)
            assert first >= 0 and last <= layout.shard_numel and last - first == stop - start
            assert layout.rank_range(rank)[0] + first == slot.offset + start
        assert end == slot.numel
        for rank in {0, world_size - 1, owners.start - 1, owners.stop} & set(range(world_size)) - set(owners):
            assert layout.owned(index, rank) == layout.local_range(index, rank) == (0, 0)


@given(metas(), st.sampled_from(ITEMSIZES), worlds)
@FEW
def test_parameters_are_aligned_do_not_overlap_and_padding_is_small(params, itemsize, world_size):
    layout = FlatLayout.build(params, itemsize, world_size)
    end = 0
    for meta, slot in zip(params, layout.slots, strict=True):
        assert (slot.name, slot.shape, slot.stride) == (meta.name, meta.shape, meta.stride)
        assert slot.offset * itemsize % ALIGNMENT == 0 and slot.offset >= end
        end = slot.stop
    assert layout.numel == layout.shard_numel * world_size >= end
    assert layout.shard_numel * itemsize % ALIGNMENT == 0
    padding = (layout.numel - sum(slot.numel for slot in layout.slots)) * itemsize
    assert padding <= ALIGNMENT * world_size + (ALIGNMENT - 1) * len(params)


@given(metas(), st.sampled_from(ITEMSIZES), worlds, st.data())
@FEW
def test_pieces_split_a_shard_into_the_slices_and_gaps_are_what_is_left(params, itemsize, world_size, data):
    layout = FlatLayout.build(params, itemsize, world_size)
    rank = data.draw(st.integers(0, world_size - 1))
    sizes, number = layout.pieces(rank)
    starts = [0, *itertools.accumulate(sizes)]
    assert starts[-1] == layout.shard_numel and sizes[-1] == 0
    for index, piece in enumerate(number):
        start, stop = layout.local_range(index, rank)
        assert sizes[piece] == stop - start
        assert start == stop or starts[piece] == start
    assert sum(stop - start for start, stop in layout.gaps()) == layout.numel - sum(s.numel for s in layout.slots)
    for start, stop in layout.gaps():
        assert start < stop and not any(s.numel and s.offset < stop and start < s.stop for s in layout.slots)


@given(metas(least=1, most=1), st.data())
@FEW
def test_boxes_tile_a_slice_exactly_in_memory_order(params, data):
    layout = FlatLayout.build(params, 4, 1)
    slot = layout.slots[0]
    start = data.draw(st.integers(0, slot.numel))
    stop = data.draw(st.integers(start, slot.numel))
    boxes = layout.boxes(0, start, stop)
    # Each element holds its own position in memory.
    positions = torch.arange(slot.numel).as_strided(slot.shape, slot.stride)
    read = [torch.empty(0, dtype=torch.int64)]
    for box in boxes:
        part = positions
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        assert part.numel() == box.numel == math.prod(box.sizes) > 0
        read.append(part.permute(slot.order).reshape(-1))
    assert torch.cat(read).tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(slot.shape) - 1)


@given(metas(least=1), st.sampled_from(ITEMSIZES), worlds)
@FEW
def test_memory_order_is_the_row_major_order_of_the_permuted_shape(params, itemsize, world_size):
    for slot in FlatLayout.build(params, itemsize, world_size).slots:
        assert sorted(slot.order) == list(range(len(slot.shape)))
        positions = torch.arange(slot.numel).as_strided(slot.shape, slot.stride)
        assert positions.permute(slot.order).reshape(-1).tolist() == list(range(slot.numel))


def test_large_parameters_on_many_ranks():
    layout = FlatLayout.build([ParamMeta("w", (50257, 12288), (12288, 1)), ParamMeta("b", (7,), (1,))], 2, 4096)
    assert layout.owners(0) == range(4096)
    assert len(layout.boxes(0, *layout.owned(0, 4095))) == 2
    assert sum(layout.owned(0, rank)[1] - layout.owned(0, rank)[0] for rank in range(4096)) == 50257 * 12288
    assert layout.owned(1, 4095) == (0, 7)


def test_an_empty_unit_is_legal():
    layout = FlatLayout.build([], 4, 3)
    assert layout.numel == layout.shard_numel == 0


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1)])
def test_contiguous_stride_is_that_of_torch(shape):
    assert contiguous_stride(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((4, 4), (0, 1)), ((4, 4), (8, 1)), ((4,), (2,)), ((3, 3), (1, 1)), ((4, 4), (4,))],
)
def test_memory_with_gaps_or_overlaps_is_an_error_that_names_the_parameter(shape, stride):
    with pytest.raises(LayoutError, match=r"head\.weight"):
        FlatLayout.build([ParamMeta("head.weight", shape, stride)], 4, 2)


def test_numbers_that_contradict_each_other_are_an_error():
    layout = FlatLayout.build([ParamMeta("w", (5,), (1,))], 4, 2)
    with pytest.raises(LayoutError):
        FlatLayout(layout.slots, 4, 2, layout.numel + 4, layout.shard_numel)
    with pytest.raises(LayoutError):
        FlatLayout(layout.slots, 4, 2, 0, 0)
    with pytest.raises(LayoutError):
        FlatLayout.build([], 4, 0)
    with pytest.raises(LayoutError, match="rank 2"):
        layout.owned(0, 2)
    with pytest.raises(LayoutError, match="elements"):
        layout.boxes(0, 3, 6)
