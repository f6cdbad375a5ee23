"""Host memory in which gradients arrive that are narrower than ``.grad``: a few buffers, which all units use in turn."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from ..config.offload import STAGED

if TYPE_CHECKING:
    from .host import Host
    from .host_thread import Task

__all__ = ["Staged", "Staging"]


class Staged:
    """One of the buffers.

    Attributes:
        task: the host thread's, which reads what was put there last.
    """

    __slots__ = ("_memory", "task")

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.task: Task | None = None

    def like(self, values: torch.Tensor) -> torch.Tensor | None:
        """Of their length and dtype, 1-D; None where it has fewer bytes."""
        return self._memory[: values.nbytes].view(values.dtype) if values.nbytes <= self._memory.numel() else None


class Staging:
    """Of one :class:`~torch_shard.offload.host.Host`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._buffers: list[Staged] = []  # the one that was taken the longest ago first

    def reserve(self, nbytes: int) -> None:
        """Take memory for so many bytes at a time; none for 0.

        Raises:
            HostMemoryError: there is none.
        """
        self._buffers = [self._made(nbytes) for _ in range(STAGED)] if nbytes else []

    def _made(self, nbytes: int) -> Staged:
        return Staged(self._host.empty(nbytes, torch.uint8))

    def take(self, values: torch.Tensor) -> tuple[Staged, torch.Tensor]:
        """A buffer for a copy of `values`, and its part of their length and dtype; whoever takes it sets its `task`. Waits until
        the host thread is through with what was there, so that it is never further behind than there are buffers.

        Raises:
            HostMemoryError: there is no memory for more than was reserved.
            HostStepError: the task has failed.
        """
        if len(self._buffers) < STAGED:
            self._buffers.append(self._made(values.nbytes))
        else:
            self._buffers.append(self._buffers.pop(0))
        task, self._buffers[-1].task = self._buffers[-1].task, None  # one that has failed says so once
        if task is not None and not task.has_ended():
            begun = time.perf_counter()
            try:
                task.wait()
            finally:
                self._host.waits.seconds += time.perf_counter() - begun
        part = self._buffers[-1].like(values)
        if part is None:
            self._buffers[-1] = self._made(values.nbytes)
            part = self._buffers[-1].like(values)
            assert part is not None
        return self._buffers[-1], part
