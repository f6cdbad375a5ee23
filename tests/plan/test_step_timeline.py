"""The time line of a step: what computes, what is gathered and reduced meanwhile, and who waits for whom."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torch_shard.plan.devices import Device, Link
from torch_shard.plan.hardware import Hardware
from torch_shard.plan.pictures import sent_table
from torch_shard.plan.step_timeline import timeline_of
from torch_shard.plan.step_trace import CollectiveStart, CollectiveWait, Event, HostUpdate, Operator, StepTrace

DEVICE = Device(
    "test", {"fp32": 1e12, "tf32": 8e12, "bf16": 16e12}, 1e12, 1e12, 1.0, 1.0, launch_seconds=0.0, host_seconds=0.0
)
LINK = Link("test", 1e9, 0.0)
HARDWARE = Hardware(0, 8, 8, DEVICE, "cuda", LINK, LINK)


def product(flops: float, dtype: torch.dtype | None = torch.float32) -> Operator:
    return Operator("aten.mm.default", "forward", False, "layer", dtype, int(flops), 1, 1, 0, (), ())


def seconds(*events: Event) -> float:
    return timeline_of(StepTrace("cuda", events), HARDWARE).total


def gather(number: int, nbytes: float, ranks: int = 2) -> CollectiveStart:
    return CollectiveStart(number, "all_gather", f"unit {number}", int(nbytes), ranks)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float32, 1.0), (torch.bfloat16, 1 / 16), (torch.float64, 1.0), (None, 1.0)]
)
def test_operators_take_the_seconds_of_their_dtype(dtype: torch.dtype | None, expected: float) -> None:
    assert seconds(product(1e12, dtype)) == pytest.approx(expected)


def test_a_gather_that_is_awaited_at_once_is_not_hidden() -> None:
    # Over two ranks half the bytes come from the other one.
    assert seconds(gather(1, 2e9), CollectiveWait(1), product(1e12)) == pytest.approx(2.0)


def test_a_gather_ahead_is_hidden_by_what_computes_meanwhile() -> None:
    assert seconds(gather(1, 2e9), product(3e12), CollectiveWait(1), product(1e12)) == pytest.approx(4.0)
    assert seconds(gather(1, 8e9), product(3e12), CollectiveWait(1), product(1e12)) == pytest.approx(5.0)


def test_a_collective_follows_what_was_computed_before() -> None:
    assert seconds(product(1e12), gather(1, 2e9), CollectiveWait(1), product(1e12)) == pytest.approx(3.0)


def test_gathers_and_reductions_have_streams_of_their_own() -> None:
    reduction = CollectiveStart(2, "reduce_scatter", "unit 2", int(4e9), 2)
    assert seconds(gather(1, 2e9), reduction) == pytest.approx(2.0)
    assert seconds(gather(1, 2e9), gather(2, 4e9)) == pytest.approx(3.0)


def test_one_rank_waits_for_nobody() -> None:
    assert seconds(gather(1, 2e9, 1), CollectiveWait(1), product(1e12)) == pytest.approx(1.0)


def test_the_sum_between_replicas_follows_that_within_and_not_the_next_one() -> None:
    # Two nodes with a replica in each: a rank sends its eighth of the sum by its own NIC.
    within = [CollectiveStart(n, "reduce_scatter", "", int(8e9), 8) for n in (1, 3)]
    between = [CollectiveStart(n, "all_reduce", "", int(1e9), 2, 8) for n in (2, 4)]
    assert seconds(within[0], between[0]) == pytest.approx(7.0 + 1.0)
    assert seconds(within[0], between[0], within[1], between[1]) == pytest.approx(7.0 + 7.0 + 1.0)


@pytest.mark.parametrize(
    ("ranks_per_node", "expected"),
    [
        (4, {("all_gather", "within a node"): 300, ("all_reduce", "within a node"): 100}),
        # In a ring over two nodes of two, every other rank sends to the other node; replicas are in different nodes.
        (
            2,
            {
                ("all_gather", "within a node"): 150,
                ("all_gather", "between nodes"): 150,
                ("all_reduce", "between nodes"): 100,
            },
        ),
        (1, {("all_gather", "between nodes"): 300, ("all_reduce", "between nodes"): 100}),
    ],
)
def test_bytes_are_counted_by_kind_and_link(ranks_per_node: int, expected: dict[tuple[str, str], int]) -> None:
    between = CollectiveStart(2, "all_reduce", "unit 2", 100, 2, 2)
    copies = [CollectiveStart(n, "to_device", f"unit {n}", 7) for n in (3, 4)]
    step = StepTrace("cuda", (gather(1, 400, 4), between, *copies))
    sent = timeline_of(step, dataclasses.replace(HARDWARE, ranks_per_node=ranks_per_node)).sent
    assert +sent == {**expected, ("to_device", "host and device"): 14}
    two_nodes = dataclasses.replace(HARDWARE, ranks_per_node=2)
    assert ">all-gather</td><td>between nodes<" in sent_table(timeline_of(step, two_nodes))


def test_spans_name_units_and_modules() -> None:
    timeline = timeline_of(StepTrace("cuda", (gather(1, 2e9), CollectiveWait(1), product(1e12))), HARDWARE)
    assert [(span.stream, span.name, span.kind) for span in timeline.spans] == [
        ("gather", "unit 1", "all_gather"),
        ("compute", "layer", "compute"),
    ]


def test_a_unit_is_copied_to_the_device_once_the_host_has_stepped_on_it() -> None:
    # The figures of the device: 200 GB/s for the eight of a node, and 25.2 over the link.
    copies = [CollectiveStart(n, "to_device", f"unit {n}", 0) for n in (1, 2)]
    updates = [HostUpdate(f"unit {n}", int(25e9)) for n in (1, 2)]
    assert seconds(*updates, copies[0], CollectiveWait(1), product(1e12)) == pytest.approx(1.0 + 1.0, rel=1e-4)
    both = (*updates, copies[0], CollectiveWait(1), product(1e12), copies[1], CollectiveWait(2), product(1e12))
    assert seconds(*both) == pytest.approx(1.0 + 1.0 + 1.0, rel=1e-4)  # beside the first computation
