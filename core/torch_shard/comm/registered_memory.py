"""Memory for collectives that NCCL has registered with its communicators, so that it can send and receive there directly.

Without it NCCL copies through buffers of its own. See "User Buffer Registration" in NCCL's documentation, and
``torch.cuda.MemPool`` in torch's. This was never run with NCCL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import ConfigError
from .streams import streams_of
from .work import Channel


def check_registers(backend: str, device: torch.device) -> None:
    """Raise a ConfigError unless a backend can register memory."""
    if backend != "nccl":
        raise ConfigError(
            f"registered_memory: only NCCL registers memory, and on {device.type} the collectives are those of {backend}; leave "
            "it out."
        )


class RegisteredMemory:
    """A pool of the device's allocator, over memory of NCCL's own allocator that communicators know.

    torch registers what the pool allocates later, too. A communicator must have had its first collective before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._streams = device, streams_of(device)
        self._pool: Any = None
        self._groups: set[Any] = set()

    def register(self, channels: Iterable[Channel]) -> None:
        """Register the pool with the communicators of `channels`. Not collective."""
        for channel in channels:
            if channel.group in self._groups:
                continue
            backend = channel.group._get_backend(self._device)
            if self._pool is None:
                self._pool = self._streams.memory_pool(backend.mem_allocator)
            backend.register_mem_pool(self._pool)
            self._groups.add(channel.group)

    def use(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this thread allocates from the pool."""
        return self._streams.allocate_from(self._pool)
