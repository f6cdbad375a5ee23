"""The devices and links for which settings are searched."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ..config.checks import check_int
from ..errors import ConfigError
from .devices import DEVICES, LINKS, Device, Link

OUTSIDE = 1 << 30
"""Bytes of a device that no tensor takes: the CUDA context, and what NCCL's communicators keep. An assumption."""


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The hardware that a step is to fit: the ranks, their devices, and the links between them.

    Attributes:
        budget: the bytes of one device that a step may take.
        ranks, ranks_per_node: the number of ranks, and of those of a node.
        device: the figures of the device.
        on: the type of the device.
        intra, inter: the links within a node and between nodes.
    """

    budget: int
    ranks: int
    ranks_per_node: int
    device: Device
    on: Literal["cpu", "cuda"]
    intra: Link
    inter: Link

    @staticmethod
    def of(
        memory: int,
        ranks: int,
        ranks_per_node: int | None = None,
        *,
        device: Device | None = None,
        on: Literal["cpu", "cuda"] = "cuda",
        intra: Link | None = None,
        inter: Link | None = None,
        margin: float = 0.05,
    ) -> Hardware:
        """Return what the arguments of :func:`torch_shard.plan.search` say. Raises ConfigError."""
        for name, value in (("memory", memory), ("ranks", ranks), ("ranks_per_node", ranks_per_node)):
            if value is not None:
                check_int(name, value, 1)
        if not 0 <= margin < 1:
            raise ConfigError(f"margin must be at least 0 and less than 1, not {margin!r}.")
        on_cpu = on == "cpu"
        return Hardware(
            int(memory * (1 - margin)) - (0 if on_cpu else OUTSIDE),
            ranks,
            ranks if ranks_per_node is None else min(ranks_per_node, ranks),
            DEVICES["cpu" if on_cpu else "h100"] if device is None else device,
            on,
            LINKS["gloo-local" if on_cpu else "nvlink4"] if intra is None else intra,
            LINKS["gloo-local" if on_cpu else "ib-ndr400"] if inter is None else inter,
        )
