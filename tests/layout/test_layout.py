"""FlatLayout where the reference is too slow, and what it refuses. All else: tests/layout/test_against_reference.py."""

import pytest
import torch

from torch_shard.errors import LayoutError
from torch_shard.layout.flat_layout import FlatLayout, ParamMeta, contiguous_stride


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
