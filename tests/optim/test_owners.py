"""Owners of whole matrices: balanced, the same on every rank, and where state is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_shard.plan.matrix_owners import Item, assign, choose, work_of

NUMBERS = st.integers(1, 9)


@st.composite
def problems(draw):
    ranks = draw(NUMBERS)
    held = st.lists(st.integers(0, 50), min_size=ranks, max_size=ranks).map(tuple)
    items = st.lists(st.builds(Item, st.integers(0, 1000), st.integers(0, 5), held), max_size=40)
    loads = draw(st.one_of(st.just([]), st.lists(st.integers(0, 500), min_size=ranks, max_size=ranks)))
    return draw(items), ranks, loads


@given(problems())
def test_every_item_has_one_owner_and_the_same_each_time(problem):
    items, ranks, loads = problem
    owners = assign(items, ranks, loads)
    assert len(owners) == len(items) and all(0 <= rank < ranks for rank in owners)
    assert owners == assign(list(items), ranks, tuple(loads))


@given(problems())
def test_no_rank_has_more_than_the_mean_and_one_item(problem):
    items, ranks, loads = problem
    total = list(loads) or [0] * ranks
    before = max(total)
    for item, rank in zip(items, assign(items, ranks, loads), strict=True):
        total[rank] += item.work
    largest = max((item.work for item in items), default=0)
    assert max(total) <= max(before, sum(total) / ranks + largest)


def block_items(ranks: int, units: int) -> list[Item]:
    """The matrices of equal transformer blocks, each of which is cut evenly."""
    shapes = [(36, 12), (12, 12), (48, 12), (12, 48)]
    sizes = [rows * columns for rows, columns in shapes]
    cut = -(-sum(sizes) // ranks)
    items = []
    for unit in range(units):
        start = 0
        for shape, size in zip(shapes, sizes, strict=True):
            cuts = [(max(start, r * cut), min(start + size, (r + 1) * cut)) for r in range(ranks)]
            items.append(Item(work_of(shape), unit, tuple(max(0, stop - first) for first, stop in cuts)))
            start += size
    return items


@pytest.mark.parametrize("ranks", [2, 3])
def test_equal_blocks_stay_where_they_are_and_ranks_are_level_on_the_way(ranks):
    items = block_items(ranks, 8)
    total, moved, share = [0] * ranks, 0, sum(item.work for item in items) / ranks
    for i, (item, rank) in enumerate(zip(items, assign(items, ranks), strict=True)):
        total[rank] += item.work
        moved += sum(item.held) - item.held[rank]
        if i % 4 == 3:
            assert max(total) - min(total) <= share / 8
    assert max(total) <= 1.02 * share
    assert moved <= sum(sum(item.held) for item in items) / 6  # one matrix is cut in the middle


@given(st.sets(st.integers(0, 3)), st.one_of(st.none(), st.integers(0, 3)))
def test_the_owner_is_one_that_has_the_state(holders, owner):
    holders = sorted(holders)
    found = choose(holders, owner, 4)
    if not holders:
        assert found == owner
    elif found is None:
        assert owner is None and len(holders) == 4
    else:
        assert found in holders and (owner not in holders or found == owner)
