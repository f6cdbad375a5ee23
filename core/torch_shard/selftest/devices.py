"""What a report says about a device: its name, its memory, and how fast its data sheet says it is."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch

from ..versions import __version__

# Dense bf16 with fp32 accumulation, in TFLOP/s, as the makers' data sheets have it. The first entry that a name contains counts.
_PEAK_TFLOPS = (
    ("B200", 2250.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("GH200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L4", 121.0),
    ("MI300X", 1307.0),
)


def count() -> int:
    """Return the number of GPUs that torch can use. This does not initialise them."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def make_current(device: torch.device) -> None:
    """Make a GPU the current one of this process."""
    torch.cuda.set_device(device)


def name_of(device: torch.device) -> str:
    """Return the name of a GPU or of this machine's processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def peak_flops(device: torch.device, given_tflops: float | None) -> float | None:
    """Return the floating-point operations a second that a device can do in bf16; None if that is not known."""
    if given_tflops is not None:
        return given_tflops * 1e12
    if device.type != "cuda":
        return None
    name = name_of(device)
    return next((tflops * 1e12 for part, tflops in _PEAK_TFLOPS if re.search(rf"\b{part}\b", name)), None)


def total_memory(device: torch.device) -> int:
    """Return the bytes of a GPU's memory."""
    return torch.cuda.get_device_properties(device).total_memory


def reset_peak_memory(device: torch.device) -> int:
    """Let the peak of a GPU's allocated memory begin anew, and return the bytes that are allocated now."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that were allocated on a GPU at any moment since :func:`reset_peak_memory`."""
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def stall(device: torch.device) -> None:
    """Keep the current stream of a GPU busy for some milliseconds. The host goes on."""
    with torch.cuda.device(device):
        torch.cuda._sleep(20_000_000)  # cycles


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions and names for a report, none of which names the machine or its user."""
    found: dict[str, Any] = {
        "torch_shard": __version__,
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "system": f"{platform.system()} {platform.machine()}",
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": None,
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["memory"] = total_memory(device)
    return found
