"""The figures of devices and links that :mod:`torch_shard.plan.roofline` computes with: built in, or from a file or a text."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.checks import check_number
from ..errors import ConfigError

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
"""The number formats in which matrix products are computed. As in data sheets, tf32 is a mode of computing, no dtype of torch."""

# Only decimal multiples, as data sheets have, and bits spelled out: "Gb" is either, depending on who writes it.
_BANDWIDTH = re.compile(r"([\d.]+(?:e[+-]?\d+)?) *([kMGT]?)(B|bit)/s", re.ASCII)
_LATENCY = re.compile(r"([\d.]+(?:e[+-]?\d+)?) *(s|ms|us|ns)", re.ASCII)
_MULTIPLES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def _check_fraction(field: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
        raise ConfigError(f"{field} must be a number above 0 and at most 1, not {value!r}.")


def _check_name(field: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{field} must be a name, not {value!r}.")


@dataclass(frozen=True)
class Link:
    """A link between ranks, or between a device and its host, as one rank has it.

    Attributes:
        name: what it is called, for reports.
        bandwidth: bytes per second of one rank in one direction. (Data sheets often add both directions up.)
        latency: seconds from a rank to its neighbour, of a message without bytes. A collective takes several such steps.
        fraction: how much of `bandwidth` large messages reach, above 0 and at most 1.

    Raises:
        ConfigError: a figure is no number, or not in its range. The message starts with ``Link.`` and the attribute's name.
    """

    name: str
    bandwidth: float
    latency: float
    fraction: float = 1.0

    def __post_init__(self) -> None:
        _check_name("Link.name", self.name)
        check_number("Link.bandwidth", self.bandwidth, "bytes per second")
        check_number("Link.latency", self.latency, "seconds", positive=False)
        _check_fraction("Link.fraction", self.fraction)

    @property
    def rate(self) -> float:
        """The bytes per second of one rank in one direction that large messages reach."""
        return self.bandwidth * self.fraction


# Bandwidths are of one direction. NVLink: H100, A100 and DGX B200 data sheets, which have twice that (900, 600 and 1,800 GB/s);
# the fractions are what NCCL computes with: 20.6 of 25, 20.0 of 25 and 40.1 of 50 GB/s a link (SM90_NVLINK_BW and so on in its
# src/graph/topo.h). Infinity Fabric: MI300X data sheet, 7 links to the others of a node, 128 GB/s in both directions each. PCIe
# x16: 16 or 32 GT/s a lane in the 128b/130b code. InfiniBand and Ethernet: the rate in the name. Fractions of these are
# assumptions: what headers of packets, and for PCIe flow control, usually leave. Latencies: NCCL's own for a step of a ring
# under the protocol for large messages ("hwLat", Simple, in src/graph/tuning.cc): 3.4 us NVLink, 5.7 us PCIe, 14 us network.
# That of sockets is an assumption, and `gloo-local`, processes of one machine over its loopback device, is one altogether.
_NVLINK, _PCIE, _NETWORK, _SOCKET = 3.4e-6, 5.7e-6, 14e-6, 50e-6
LINKS: Mapping[str, Link] = {
    entry.name: entry
    for entry in (
        Link("nvlink3", 300e9, _NVLINK, 0.80),
        Link("nvlink4", 450e9, _NVLINK, 0.82),
        Link("nvlink5", 900e9, _NVLINK, 0.80),
        Link("infinity-fabric", 448e9, _NVLINK, 0.80),
        Link("pcie4", 31.5e9, _PCIE, 0.80),
        Link("pcie5", 63e9, _PCIE, 0.80),
        Link("ib-hdr200", 25e9, _NETWORK, 0.90),
        Link("ib-ndr400", 50e9, _NETWORK, 0.90),
        Link("ethernet-25g", 3.125e9, _SOCKET, 0.90),
        Link("gloo-local", 1.5e9, _SOCKET),
    )
}
"""The links that have names. Those of a network are one NIC for each rank."""
LINK_FORM = f"one of {', '.join(LINKS)}, or bandwidth and latency such as 450GB/s,5us or 400Gbit/s,14us"


def link(text: str) -> Link:
    """Return a link by its name, or of the figures in a text such as ``450GB/s,5us``.

    Args:
        text: a name of :data:`LINKS`, in any case; or the bandwidth of one rank in one direction, as bytes (``B/s``) or bits
            (``bit/s``) after ``k``, ``M``, ``G`` or ``T`` for powers of 1000, then a comma and the latency in ``s``, ``ms``,
            ``us`` or ``ns``. Figures are taken as what is reached: their fraction is 1.

    Raises:
        ConfigError: it is neither; the message lists the names.
    """
    words = text.strip() if isinstance(text, str) else ""
    if words.lower() in LINKS:
        return LINKS[words.lower()]
    first, _, second = (part.strip() for part in words.partition(","))
    bandwidth, latency = _BANDWIDTH.fullmatch(first), _LATENCY.fullmatch(second)
    try:
        if bandwidth is None or latency is None:
            raise ValueError
        rate = float(bandwidth[1]) * _MULTIPLES[bandwidth[2]] / (8 if bandwidth[3] == "bit" else 1)
        return Link(words, rate, float(latency[1]) * _SECONDS[latency[2]])
    except ValueError:  # also what Link raises: of zero, or of what is no number, such as 4.5.0
        raise ConfigError(f"link must be {LINK_FORM}; not {text!r}.") from None


@dataclass(frozen=True)
class Device:
    """A device that one rank computes with.

    Attributes:
        name: what it is called, for reports.
        peak_flops: floating-point operations per second by the names in :data:`DTYPES`, for dense matrices. A multiplication
            and an addition count as two. What is missing here the device can't compute in.
        memory_bandwidth: bytes per second between the device and its memory, reads and writes together.
        memory_bytes: the capacity of the memory.
        matmul_fraction: how much of `peak_flops` matrix products reach, above 0 and at most 1.
        memory_fraction: how much of `memory_bandwidth` a kernel reaches that waits for memory, above 0 and at most 1.
        launch_seconds: what a kernel takes on the device beside its work, until the next one of its stream can start.
        host_seconds: what the host takes to issue one operator.
        host_link: the link to the memory of the host, which offloaded parameters and gradients cross.
        host_memory_bandwidth: bytes per second, reads and writes together, that an optimizer's step reaches in the memory of the
            host, which the devices of a node share.

    Raises:
        ConfigError: a figure is missing, no number, or not in its range. The message starts with ``Device.`` and the
            attribute's name.
    """

    name: str
    peak_flops: Mapping[str, float] = dataclasses.field(hash=False)
    memory_bandwidth: float
    memory_bytes: float
    matmul_fraction: float = 0.7
    memory_fraction: float = 0.8
    launch_seconds: float = 3e-6
    host_seconds: float = 8e-6
    host_link: Link = LINKS["pcie4"]
    host_memory_bandwidth: float = 200e9

    def __post_init__(self) -> None:
        _check_name("Device.name", self.name)
        peaks = self.peak_flops if isinstance(self.peak_flops, Mapping) else {}
        if not peaks or not set(peaks) <= set(DTYPES):
            expected = f"a mapping from some of {', '.join(DTYPES)} to operations per second"
            raise ConfigError(f"Device.peak_flops must be {expected}, not {self.peak_flops!r}.")
        for dtype, flops in peaks.items():
            check_number(f"Device.peak_flops[{dtype!r}]", flops, "operations per second")
        check_number("Device.memory_bandwidth", self.memory_bandwidth, "bytes per second")
        check_number("Device.memory_bytes", self.memory_bytes, "bytes")
        check_number("Device.host_memory_bandwidth", self.host_memory_bandwidth, "bytes per second")
        _check_fraction("Device.matmul_fraction", self.matmul_fraction)
        _check_fraction("Device.memory_fraction", self.memory_fraction)
        check_number("Device.launch_seconds", self.launch_seconds, "seconds", positive=False)
        check_number("Device.host_seconds", self.host_seconds, "seconds", positive=False)
        if not isinstance(self.host_link, Link):
            raise ConfigError(f"Device.host_link must be a Link, not {self.host_link!r}.")
        object.__setattr__(self, "peak_flops", dict(peaks))  # the caller's may change

    @classmethod
    def from_file(cls, path: str | Path) -> Device:
        """Return the device that a JSON file describes: an object whose keys are the attributes of this class.

        ``host_link`` is a text as :func:`link` reads it. What has a default may be left out.

        Args:
            path: the file.

        Raises:
            ConfigError: the file can't be read or is no JSON object, or a key is unknown, missing or has a bad value. The
                message names the file and the key, and says what was expected.
        """
        try:
            entries = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # ValueError: no JSON, or no UTF-8
            raise ConfigError(f"{path} must be a file with a JSON object, such as {_EXAMPLE}: {error}.") from error
        if not isinstance(entries, dict):
            raise ConfigError(f"{path} must have a JSON object, such as {_EXAMPLE}; not {entries!r}.")
        fields = dataclasses.fields(cls)
        known = [field.name for field in fields]
        for key in entries:
            if key not in known:
                raise ConfigError(f"{path}: {key} is no key of a device, which are {', '.join(known)}.")
        for field in fields:
            if field.default is dataclasses.MISSING and field.name not in entries:
                raise ConfigError(f"{path}: {field.name} is missing, as in {_EXAMPLE}.")
        try:
            if "host_link" in entries:
                entries["host_link"] = link(entries["host_link"])
            return cls(**entries)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


_EXAMPLE = (
    '{"name": "mine", "peak_flops": {"fp32": 67e12, "bf16": 989e12}, "memory_bandwidth": 3.35e12, "memory_bytes": 80e9}'
)


def _peaks(*tera: float) -> dict[str, float]:
    """Return operations per second by dtype, of 10^12 of these in the order of DTYPES; 0 for what the device lacks."""
    return {dtype: peak * 1e12 for dtype, peak in zip(DTYPES, tera, strict=False) if peak}


# Memory is in the data sheets' GB, taken as 10^9 bytes. Cards show up to 7 % more; that much is left to the CUDA context and
# the buffers of communication. The vendors publish no fractions. The best shapes that a search has found reach 86 % of the
# A100's peak in bf16, 80 % of the H100's and 60 % of the MI300X's (github.com/stas00/ml-engineering, "Maximum Achievable Matmul
# FLOPS"). The shapes of a model are not these, so that about a tenth is taken off. The other fractions, and launch and host
# times, are assumptions. Host memory: half of what the channels have. By default these are two sockets with 8 of DDR4-3200 each,
# as in a DGX A100; 8 of DDR5-4800 each beside a Hopper or an MI300X, of DDR5-5600 in a DGX B200; two of DDR5-5600 in a desktop.
_HOPPER = _peaks(66.9, 494.7, 989.4, 989.4, 1978.9)
DEVICES: Mapping[str, Device] = {
    entry.name: entry
    for entry in (
        # NVIDIA A100 Tensor Core GPU data sheet: A100 80GB SXM. No fp8.
        Device("a100", _peaks(19.5, 156, 312, 312), 2.039e12, 80e9, matmul_fraction=0.77),
        # NVIDIA H100 Tensor Core GPU data sheet: H100 SXM, whose Tensor Core figures are with sparsity; the dense halves to
        # four digits are of the white paper "NVIDIA H100 Tensor Core GPU Architecture".
        Device("h100", _HOPPER, 3.35e12, 80e9, host_link=LINKS["pcie5"], host_memory_bandwidth=300e9),
        # NVIDIA H200 Tensor Core GPU data sheet: H200 SXM. It computes like the H100 SXM.
        Device("h200", _HOPPER, 4.8e12, 141e9, host_link=LINKS["pcie5"], host_memory_bandwidth=300e9),
        # "NVIDIA Blackwell Architecture Technical Brief": a GPU of HGX B200. Memory: NVIDIA DGX B200 data sheet, 1,440 GB and
        # 64 TB/s for eight.
        Device(
            "b200",
            _peaks(80, 1100, 2250, 2250, 4500),
            8e12,
            180e9,
            host_link=LINKS["pcie5"],
            host_memory_bandwidth=350e9,
        ),
        # AMD Instinct MI300X accelerator data sheet.
        Device(
            "mi300x",
            _peaks(163.4, 653.7, 1307.4, 1307.4, 2614.9),
            5.3e12,
            192e9,
            0.54,
            host_link=LINKS["pcie5"],
            host_memory_bandwidth=300e9,
        ),
        # NVIDIA L40S data sheet.
        Device("l40s", _peaks(91.6, 183, 362.05, 362.05, 733), 864e9, 48e9),
        # White paper "NVIDIA Ada GPU Architecture", version 2.1, appendix A, with sums in fp32, as torch has them. Sums in fp16
        # are twice as fast on this card.
        Device("rtx4090", _peaks(82.6, 82.6, 165.2, 165.2, 330.3), 1.008e12, 24e9, host_memory_bandwidth=45e9),
        # A rank that has a whole socket, Intel Xeon Platinum 8480+, 56 cores at the base clock of 2.0 GHz, 8 channels of
        # DDR5-4800 (ark.intel.com). Operations in a cycle of a core: 64 in fp32 and 128 in fp16 (two AVX-512 units), 1024 in
        # bf16 (AMX). The memory is 8 modules of 64 GB, an assumption. The host computes itself: nothing is launched, and no
        # link is crossed.
        Device(
            "cpu",
            _peaks(7.168, 0, 114.688, 14.336),
            307.2e9,
            512e9,
            matmul_fraction=0.5,
            launch_seconds=0.0,
            host_seconds=5e-6,
            host_link=Link("memory", 307.2e9, 0.0, 0.4),  # a copy reads and writes
        ),
    )
}
"""The devices that are built in, by name."""


def device(name: str) -> Device:
    """Return a device of :data:`DEVICES` by its name, in any case.

    Raises:
        ConfigError: there is no such device; the message lists the names.
    """
    found = DEVICES.get(name.strip().lower()) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(DEVICES)
        raise ConfigError(
            f"device must be one of {known}, not {name!r}. Device.from_file(path) reads the figures of others."
        )
    return found


def device_called(name: str) -> Device | None:
    """Return the device of :data:`DEVICES` that a GPU is, by what its driver calls it ("NVIDIA A100-SXM4-80GB"), or None."""
    for key, found in DEVICES.items():
        letters, digits, rest = re.fullmatch(r"([a-z]+)(\d*)(\w*)", key).groups()  # type: ignore[union-attr]
        # "GH200" has a Grace processor beside the H200.
        if digits and re.search(rf"(?<![a-z0-9])g?{letters}[ -]?{digits}{rest}(?![a-z0-9])", name.lower()):
            return found
    return None
