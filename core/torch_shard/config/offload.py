"""What of a model's training lies in host memory: the user's choice."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .checks import check_bools

__all__ = ["BEHIND", "IN_FLIGHT", "PAGED", "STAGED", "Offload", "offload_of"]

IN_FLIGHT = 1
"""Units whose gradients are on their way to host memory when those of the next one take device memory."""
STAGED = 3
"""Buffers in host memory in which gradients arrive that are narrower than ``.grad``, until the host thread has widened them."""
BEHIND = 2
"""Units on their way to disk."""
PAGED = BEHIND + 2
"""Units in memory of those on disk: one is stepped on beside these, and one read ahead."""


@dataclass(frozen=True)
class Offload:
    """What lies in host memory, and how (ZeRO-Offload, arXiv 2101.06840; the step unit by unit beside the next forward: as
    ZenFlow, arXiv 2505.12242, has it, but exact).

    The optimizer steps where its parameters are: in host memory, on a thread of its own, unit by unit in the order of forward.
    The next forward waits for each unit's update when it comes to that unit; whatever else reads parameters, gradients or
    optimizer state in the meantime waits, too.

    Attributes:
        params: keep parameters in host memory alone: what modules compute with crosses to the device whenever a unit is
            gathered, in the dtype in which they compute. ``False``: besides the parameters that the optimizer steps on, each
            rank keeps its shards on the device, in that dtype, so that nothing crosses between two steps.
        optimizer: step in host memory, where the optimizer's state is then. ``False`` is for naming what is not offloaded; with
            `params` it is refused, since the step works where the parameters are.
        pin_memory: page-locked memory, without which copies hold up compute. ``False`` where the system does not give as much.
        nvme: a directory, on a local disk: optimizer state is kept there, in files without names, read ahead of each unit's
            update and written behind it, so that no more than four units' state is in memory. The system frees the space when
            the process ends, however it ends. Linux only.
        nvme_params: keep the parameters that the optimizer steps on there, too; what crosses to the device stays in memory.

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
