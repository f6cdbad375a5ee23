"""How long operators, collectives and copies take by data sheets, and the timeline that they are put on."""

from __future__ import annotations

import dataclasses
import json
import pickle
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import quick
from torch_shard.errors import ConfigError
from torch_shard.plan.devices import DEVICES, DTYPES, LINKS, Device, Link, device, device_called, link
from torch_shard.plan.roofline import Timeline, collective_seconds, copy_seconds, operator_seconds

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
# Round figures: 100 FLOP/s in fp32 and 800 in bf16, of which half is reached; 50 B/s of memory, 20 of them reached.
SLOW = Device("slow", {"fp32": 100.0, "bf16": 800.0}, 50.0, 1e3, 0.5, 0.4, launch_seconds=1.0, host_seconds=2.0)
NEAR, FAR = Link("near", 100.0, 1.0), Link("far", 10.0, 7.0)

figures = st.floats(1e-3, 1e15)
sizes = st.floats(0, 1e13)
groups = st.tuples(st.integers(1, 300), st.integers(1, 16))
links = st.builds(Link, st.just("any"), st.floats(1e6, 1e13), st.floats(0, 1e-3), st.floats(0.01, 1))


def test_operator_by_hand():
    # 400 / (800 * 0.5) = 1 s of computing, 60 / (50 * 0.4) = 3 s of memory, 1 s of launch.
    assert operator_seconds(SLOW, 400, 60, "bf16") == pytest.approx(3 + 1)
    assert operator_seconds(SLOW, 400, 60, "fp32") == pytest.approx(8 + 1)
    assert operator_seconds(SLOW, 0, 60, "int64") == pytest.approx(3 + 1)
    assert operator_seconds(SLOW, 0, 0, "bf16") == 1


def test_matmul_of_a_layer_on_h100_waits_for_computing():
    n = 8192
    seconds = operator_seconds(device("h100"), 2 * n**3, 3 * n * n * 2, "bf16")
    assert seconds == pytest.approx(2 * 8192**3 / (989.4e12 * 0.7) + 3e-6)
    assert 1e-3 < seconds < 2e-3
    assert operator_seconds(device("a100"), 2 * n**3, 3 * n * n * 2, "bf16") > 2.5 * seconds


def test_copy_by_hand():
    assert copy_seconds(Link("half", 100.0, 1.0, 0.5), 150) == pytest.approx(1 + 3)


@pytest.mark.parametrize(
    ("kind", "ranks", "ranks_per_node", "seconds"),
    [
        # One node of 4: 3/4 of 800 bytes at 100 B/s, and 3 steps of 1 s; twice that for an all-reduce.
        ("all_gather", 4, 8, 6 + 3),
        ("reduce_scatter", 4, 4, 6 + 3),
        ("all_reduce", 4, 4, 12 + 6),
        # 2 nodes of 4, whose 4 NICs have 40 B/s: 7/8 of 800 bytes at 40 B/s. Of 7 steps one is between nodes.
        ("all_gather", 8, 4, 17.5 + 6 * 1 + 1 * 7),
        # The tree moves 1600 bytes at 40 B/s in 2 * (3 steps in the node and 1 between nodes); the ring 1400 in 2 * (6 and 1).
        ("all_reduce", 8, 4, min(35 + 2 * (6 + 7), 40 + 2 * (3 + 7))),
        # One rank in each of 4 nodes: 3/4 of 800 bytes at 10 B/s, 3 steps between nodes.
        ("reduce_scatter", 4, 1, 60 + 3 * 7),
        # 8 nodes: 7 steps twice as a ring, 3 twice as a tree.
        ("all_reduce", 8, 1, min(140 + 14 * 7, 160 + 6 * 7)),
        # Nodes of 4 and 2: the second one's 2 NICs have 20 B/s.
        ("all_gather", 6, 4, 5 / 6 * 800 / 20 + 4 * 1 + 1 * 7),
    ],
)
def test_collectives_by_hand(kind, ranks, ranks_per_node, seconds):
    assert collective_seconds(kind, 800, ranks, ranks_per_node, NEAR, FAR) == pytest.approx(seconds)


def test_slow_links_within_nodes_are_the_bottleneck_where_each_rank_has_a_fast_nic():
    # With 2 NICs of 100 B/s each, a rank sends half of the 7/8 of 800 bytes within its node at 10 B/s.
    near, far = Link("near", 10.0, 0.0), Link("far", 100.0, 0.0)
    assert collective_seconds("all_gather", 800, 8, 2, near, far) == pytest.approx(700 / 2 / 10)
    assert collective_seconds("all_gather", 800, 8, 1, near, far) == pytest.approx(700 / 100)


def test_ranks_that_share_a_nic_have_the_node_send_as_fast_as_the_nic():
    shared = collective_seconds("all_gather", 800, 16, 8, Link("near", 1e9, 0.0), Link("nic", 40.0 / 8, 0.0))
    assert shared == pytest.approx(15 / 16 * 800 / 40)


def test_groups_over_nodes_are_slower_by_their_steps_and_by_nics_that_are_shared():
    intra, inter = link("nvlink4"), link("ib-ndr400")
    share = dataclasses.replace(inter, bandwidth=inter.bandwidth / 8)
    within, over, shared = (
        collective_seconds("all_gather", 400e6, ranks, 8, intra, nic)
        for ranks, nic in ((8, inter), (64, inter), (64, share))
    )
    # 8 NICs of 45 GB/s are nearly as fast as NVLink with its 369; what is left are 56 steps in the nodes and 7 between them.
    assert within == pytest.approx(7 / 8 * 400e6 / 369e9 + 7 * 3.4e-6)
    assert over == pytest.approx(63 / 64 * 400e6 / 360e9 + 56 * 3.4e-6 + 7 * 14e-6)
    assert shared > 6 * over


def test_few_bytes_over_many_nodes_take_a_tree():
    seconds = collective_seconds("all_reduce", 8, 1024, 8, link("nvlink4"), link("ib-ndr400"))
    assert seconds == pytest.approx(2 * (7 * 3.4e-6 + 7 * 14e-6), rel=1e-3)


@quick(40)
@given(st.sampled_from(KINDS), sizes, groups, links, links, st.floats(1, 1e3))
def test_more_bandwidth_is_never_slower(kind, nbytes, group, intra, inter, factor):
    base = collective_seconds(kind, nbytes, *group, intra, inter)
    for fast_intra, fast_inter in ((factor, 1), (1, factor), (factor, factor)):
        near = dataclasses.replace(intra, bandwidth=intra.bandwidth * fast_intra)
        far = dataclasses.replace(inter, bandwidth=inter.bandwidth * fast_inter)
        assert collective_seconds(kind, nbytes, *group, near, far) <= base


@quick(40)
@given(st.sampled_from(KINDS), sizes, sizes, groups, links, links)
def test_more_bytes_are_never_faster(kind, first, second, group, intra, inter):
    few, many = (collective_seconds(kind, n, *group, intra, inter) for n in sorted((first, second)))
    assert few <= many
    assert copy_seconds(intra, min(first, second)) <= copy_seconds(intra, max(first, second))
    if group[0] > 1:
        assert many >= max(first, second) / 2 / max(intra.rate, 16 * inter.rate)


@quick(40)
@given(st.sampled_from(KINDS), sizes, st.integers(1, 16), links, links)
def test_one_rank_costs_nothing(kind, nbytes, ranks_per_node, intra, inter):
    assert collective_seconds(kind, nbytes, 1, ranks_per_node, intra, inter) == 0


@quick(40)
@given(sizes, groups, links, links)
def test_an_all_reduce_costs_no_more_than_its_halves(nbytes, group, intra, inter):
    halves = sum(collective_seconds(kind, nbytes, *group, intra, inter) for kind in ("reduce_scatter", "all_gather"))
    assert collective_seconds("all_reduce", nbytes, *group, intra, inter) <= halves * (1 + 1e-9)


@quick(40)
@given(sizes, sizes, sizes, st.sampled_from(DTYPES), figures, figures, st.floats(1, 1e3))
def test_operators_are_never_slower_on_faster_devices_and_never_faster_with_more_to_do(
    flops, nbytes, more, dtype, peak, bandwidth, factor
):
    base = Device("any", {dtype: peak}, bandwidth, 1e9)
    seconds = operator_seconds(base, flops, nbytes, dtype)
    assert seconds >= base.launch_seconds
    for faster in (
        Device("any", {dtype: peak * factor}, bandwidth, 1e9),
        Device("any", {dtype: peak}, bandwidth * factor, 1e9),
    ):
        assert operator_seconds(faster, flops, nbytes, dtype) <= seconds
    assert operator_seconds(base, flops + more, nbytes, dtype) >= seconds
    assert operator_seconds(base, flops, nbytes + more, dtype) >= seconds


def test_streams_wait_for_events_and_overlap():
    timeline = Timeline()
    first, second = timeline.run("gather", 2, name="a"), timeline.run("gather", 3, name="b", kind="all_gather")
    used = timeline.run("compute", 4, after=[first], name="a")
    timeline.run("compute", 1, after=[second, used], name="b")
    timeline.run("gather", 0.5, after=[used])
    assert [(s.stream, s.start, s.end, s.name, s.kind) for s in timeline.spans] == [
        ("gather", 0, 2, "a", ""),
        ("gather", 2, 5, "b", "all_gather"),
        ("compute", 2, 6, "a", ""),
        ("compute", 6, 7, "b", ""),
        ("gather", 6, 6.5, "", ""),
    ]
    assert (timeline.total, timeline.free) == (7, {"gather": 6.5, "compute": 7})


def test_short_kernels_are_bound_by_their_launches():
    timeline = Timeline(host_seconds=3)
    for _ in range(10):
        timeline.run("compute", 1)
    assert timeline.total == 10 * 3 + 1
    graph = Timeline(host_seconds=3)
    for index in range(10):
        graph.run("compute", 1, host_seconds=3 if index == 0 else 0)
    assert graph.total == 3 + 10


def test_long_kernels_hide_the_host_which_runs_ahead_of_all_streams():
    timeline = Timeline(host_seconds=1)
    for _ in range(5):
        timeline.run("compute", 10)
    late = timeline.run("other", 1)
    assert (timeline.total, timeline.host, late.start) == (1 + 50, 6, 6)


work = st.tuples(st.integers(0, 2), st.floats(0, 1e3), st.lists(st.integers(0, 30), max_size=3))


@quick(40)
@given(st.lists(work, max_size=30), st.sampled_from([0.0, 0.5]))
def test_total_is_between_the_busiest_stream_and_the_sum(entries, host_seconds):
    timeline = Timeline(host_seconds)
    busy = [0.0] * 3
    for stream, seconds, after in entries:
        busy[stream] += seconds
        timeline.run(str(stream), seconds, after=[timeline.spans[i] for i in after if i < len(timeline.spans)])
    assert timeline.total >= max(busy) * (1 - 1e-9)
    assert timeline.total <= (sum(busy) + host_seconds * len(entries)) * (1 + 1e-9)
    for stream in range(3):
        own = [span for span in timeline.spans if span.stream == str(stream)]
        assert all(before.end <= behind.start for before, behind in zip(own, own[1:], strict=False))


def test_a_long_timeline_takes_less_than_a_second():
    timeline = Timeline(1e-6)
    begin = time.process_time()  # other programs on the machine don't count
    last = timeline.run("gather", 1e-6)
    for _ in range(50_000):
        gathered = timeline.run("gather", 1e-6)
        last = timeline.run("compute", 2e-6, after=(gathered, last), name="layer", kind="compute")
    assert time.process_time() - begin < 1
    assert len(timeline.spans) == 100_001


def test_built_in_devices_are_sane():
    gpus = {
        "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA GH200 480GB": "h200", "NVIDIA B200": "b200",
        "NVIDIA GeForce RTX 4090": "rtx4090", "AMD Instinct MI300X": "mi300x", "NVIDIA L40S": "l40s",
    }  # fmt: skip
    assert {name: device_called(name) for name in gpus} == {name: DEVICES[key] for name, key in gpus.items()}
    assert [device_called(name) for name in ("NVIDIA RTX A1000", "NVIDIA L40", "Tesla V100", "cpu")] == [None] * 4
    assert set(DEVICES) == {"h100", "a100", "h200", "b200", "mi300x", "l40s", "rtx4090", "cpu"}
    for name, entry in DEVICES.items():
        assert device(name.upper()) is entry and entry.name == name
        assert pickle.loads(pickle.dumps(entry)) == entry and hash(entry) is not None
        peaks = entry.peak_flops
        assert peaks["fp32"] <= peaks.get("tf32", peaks["fp32"]) <= peaks["bf16"]
        # Dense figures: fp8 is twice bf16, not four times.
        if "fp8" in peaks:
            assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=0.02)
    assert "fp8" not in device("a100").peak_flops
    assert device("h200").memory_bandwidth > device("h100").memory_bandwidth


@pytest.mark.parametrize(
    ("text", "bandwidth", "latency"),
    [
        ("450GB/s,5us", 450e9, 5e-6),
        (" 1.5 TB/s , 0.7 us ", 1.5e12, 0.7e-6),
        ("400Gbit/s,14us", 50e9, 14e-6),
        ("25e3 MB/s,2e-3ms", 25e9, 2e-6),
        ("10kB/s,0s", 1e4, 0),
    ],
)
def test_links_of_figures(text, bandwidth, latency):
    found = link(text)
    assert (found.rate, found.latency) == (pytest.approx(bandwidth), pytest.approx(latency))


def test_links_by_name():
    asked = ("nvlink4", "nvlink3", "pcie4", "pcie5", "ib-ndr400", "ib-hdr200", "ethernet-25g", "gloo-local")
    assert all(link(name.upper()) is LINKS[name] for name in asked)
    assert link("nvlink4").rate == pytest.approx(18 * 20.6e9, rel=0.01)


@pytest.mark.parametrize(
    "text",
    ["nvlink9", "", "450GB/s", "450,5", "450Gb/s,5us", "450gb/s,5us", "-1GB/s,5us", "0GB/s,1us", "1.2.3GB/s,1us", 450],
)
def test_bad_links_list_the_known_ones(text):
    with pytest.raises(ConfigError, match=r"link must be one of nvlink3, .*450GB/s,5us") as raised:
        link(text)
    assert repr(text) in str(raised.value)


def test_unknown_devices_list_the_known_ones():
    with pytest.raises(ConfigError, match=r"device must be one of a100, h100, .*cpu, not 'h1000'"):
        device("h1000")


def test_errors_of_figures_and_arguments():
    for change, message in (
        ({"name": ""}, "Device.name"),
        ({"peak_flops": {}}, "Device.peak_flops must be"),
        ({"peak_flops": {"fp64": 1.0}}, "Device.peak_flops must be a mapping from some of fp32"),
        ({"peak_flops": {"fp32": 0}}, r"Device.peak_flops\['fp32'\] must be a positive"),
        ({"memory_bytes": True}, "Device.memory_bytes"),
        ({"matmul_fraction": 1.5}, "Device.matmul_fraction must be a number above 0 and at most 1, not 1.5"),
        ({"launch_seconds": -1}, "Device.launch_seconds"),
        ({"host_seconds": float("nan")}, "Device.host_seconds"),
        ({"host_link": "pcie4"}, "Device.host_link must be a Link"),
    ):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(SLOW, **change)
    with pytest.raises(ConfigError, match=r"Link\.fraction"):
        Link("x", 1.0, 0.0, 0.0)
    with pytest.raises(ConfigError, match="dtype must be one that slow has: fp32, bf16; not 'fp8'"):
        operator_seconds(SLOW, 1, 1, "fp8")


BASE = {"name": "mine", "peak_flops": {"bf16": 4e14}, "memory_bandwidth": 2e12, "memory_bytes": 48000000000}


def test_device_of_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**BASE, "host_link": "25GB/s,3us", "matmul_fraction": 0.6}))
    found = Device.from_file(str(path))
    assert found == Device("mine", {"bf16": 4e14}, 2e12, 48e9, 0.6, host_link=link("25GB/s,3us"))
    path.write_text(json.dumps(BASE))
    assert Device.from_file(path).memory_fraction == 0.8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: mine", "must be a file with a JSON object"),
        ("[1]", r"must have a JSON object, such as .*; not \[1\]"),
        (json.dumps({**BASE, "bandwidth": 1}), "bandwidth is no key of a device, which are name, peak_flops, "),
        (json.dumps({"name": "mine"}), "peak_flops is missing, as in"),
        (json.dumps({**BASE, "memory_bandwidth": "fast"}), "Device.memory_bandwidth must be a positive, .* not 'fast'"),
        (json.dumps({**BASE, "memory_bytes": float("inf")}), "Device.memory_bytes must be a positive, finite"),
        (json.dumps({**BASE, "peak_flops": [1]}), "Device.peak_flops must be a mapping"),
        (json.dumps({**BASE, "host_link": "pcie9"}), "link must be one of"),
        (json.dumps({**BASE, "host_link": 5}), "link must be one of"),
    ],
)
def test_errors_of_files_name_the_file_and_the_key(tmp_path, text, message):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        Device.from_file(path)
    assert str(path) in str(raised.value)


def test_error_of_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json must be a file"):
        Device.from_file(tmp_path / "none.json")
