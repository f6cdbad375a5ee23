"""Host memory in which gradients arrive that are narrower than ``.grad``: used again step after step."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..config.offload import STAGED

if TYPE_CHECKING:
    from .host import Host
    from .host_thread import Task


@dataclass(eq=False)
class Staged:
    """Memory in which a gradient arrives.

    Attributes:
        memory: 1-D, uint8.
        task: the host thread's task that reads the gradient that was put there last.
    """

    memory: torch.Tensor
    task: Task | None = None


class Staging:
    """A few buffers for gradients that arrive in a narrower dtype than that of ``.grad``. All units use them in turn."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._buffers: deque[Staged] = deque()  # in the order in which they were taken

    def reserve(self, nbytes: int) -> None:
        """Take memory for gradients of at most `nbytes` bytes each.

        Raises:
            HostMemoryError: there is none.
        """
        for _ in range(STAGED if nbytes else 0):
            self._buffers.append(Staged(self._host.empty(nbytes, torch.uint8)))

    def take(self, values: torch.Tensor) -> tuple[Staged, torch.Tensor]:
        """Return a buffer for a copy of `values`, and the part of it that has their length and dtype. The caller sets its `task`.

        This waits until the host thread has read what was there, so that the thread lags by no more tasks than there are buffers.

        Raises:
            HostMemoryError: there is no memory for more than was reserved.
            HostStepError: the task has failed.
        """
        if len(self._buffers) < STAGED:
            self._buffers.append(Staged(self._host.empty(values.nbytes, torch.uint8)))
        else:
            self._buffers.rotate(-1)
        staged = self._buffers[-1]
        task, staged.task = staged.task, None  # a task that has failed raises once
        if task is not None and not task.has_ended():
            begun = time.perf_counter()
            try:
                task.wait()
            finally:
                self._host.waited += time.perf_counter() - begun
        if staged.memory.numel() < values.nbytes:
            staged.memory = self._host.empty(values.nbytes, torch.uint8)
        return staged, staged.memory[: values.nbytes].view(values.dtype)
