"""The settings of offload: what lies in host memory and on disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .checks import check_bools

IN_FLIGHT = 1
"""The number of units whose gradients are being copied to host memory when those of the next unit take device memory."""
STAGED = 3
"""The number of buffers in host memory for gradients that arrive narrower than ``.grad``, until the host thread widens them."""
BEHIND = 2
"""The number of units that are being written to disk."""
PAGED = BEHIND + 2
"""The number of units on disk that are in memory at a time: those being written, one that is stepped, and one read ahead."""
MIN_ACTIVATION_BYTES = 16 << 10
"""Smaller activations stay on the device: starting a copy of them takes longer than the copy."""


@dataclass(frozen=True)
class Offload:
    """The settings of offload to host memory (ZeRO-Offload, arXiv 2101.06840).

    The optimizer steps where its parameters are: in host memory, on a thread of its own, unit by unit in the order of forward.
    The next forward waits for a unit's update when it comes to that unit, and so do all other readers of parameters, gradients
    and optimizer state. (ZenFlow, arXiv 2505.12242, also steps beside the next forward, but not exactly.)

    Attributes:
        params: keep parameters in host memory alone. Whenever a unit is gathered, its shards are copied to the device, in the
            dtype in which modules compute. With ``False`` each rank also keeps its shards on the device, in that dtype, so that
            nothing is copied between two steps.
        optimizer: step in host memory, where the optimizer's state is then. ``False`` is refused, because the step works where
            the parameters are.
        pin_memory: take page-locked memory, without which copies hold up compute. ``False`` is for systems that don't give
            enough of it.
        nvme: a directory on a local disk in which optimizer state is kept, in files without names. It is read ahead of each
            unit's update and written behind it, so that no more than four units' state is in memory. The system frees the space
            when the process ends, however it ends. Linux only.
        nvme_params: keep the parameters that the optimizer steps on disk, too; copies that cross to the device stay in memory.

    Raises:
        ConfigError: a value is of the wrong type, or the fields contradict each other.
    """

    params: bool = True
    optimizer: bool = True
    pin_memory: bool = True
    nvme: str | os.PathLike[str] | None = None
    nvme_params: bool = False

    def __post_init__(self) -> None:
        check_bools(self, "params", "optimizer", "pin_memory", "nvme_params", prefix="offload.")
        if not self.optimizer:
            why = "the step works where the parameters are" if self.params else "nothing is left to offload"
            raise ConfigError(f"offload.optimizer: False with params={self.params}: {why}. Set it to True.")
        if self.nvme is not None:
            if not isinstance(self.nvme, (str, os.PathLike)) or not os.fspath(self.nvme):
                raise ConfigError(f"offload.nvme must be None or the path of a directory, not {self.nvme!r}.")
            object.__setattr__(self, "nvme", os.fspath(self.nvme))  # equal on ranks that mean the same
        elif self.nvme_params:
            raise ConfigError("offload.nvme_params needs a directory: set nvme, or leave it out.")


def offload_of(value: Any) -> Offload | None:
    """Return the Offload that a value of ``ShardConfig.offload`` stands for, or None.

    Raises:
        ConfigError: `value` is neither None, ``"cpu"`` nor an :class:`Offload`.
    """
    if value is None or isinstance(value, Offload):
        return value
    if value == "cpu" and isinstance(value, str):
        return Offload()
    raise ConfigError(f"offload must be None, 'cpu' or a torch_shard.Offload, not {value!r}.")
