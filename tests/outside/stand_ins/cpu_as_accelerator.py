"""The CPU is the accelerator of ``torch.accelerator``: devices by number, and the backend of GPUs, mean the CPU's."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

AFTER = "torch"


def apply(torch: ModuleType) -> None:
    import torch.distributed as dist

    cpu = torch.device("cpu")
    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: 2
    # torch itself asks with check_available=True.
    torch.accelerator.current_accelerator = lambda check_available=False: None if check_available else cpu
    torch.accelerator.set_device_index = torch.cuda.set_device = lambda device: None

    def numbered(function: Any) -> Any:
        @functools.wraps(function)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return function(self, *(cpu if type(value) is int else value for value in args), **kwargs)

        return call

    for kind in (torch.Tensor, torch.nn.Module):
        kind.to = numbered(kind.to)
    begin = dist.init_process_group
    dist.init_process_group = lambda backend=None, *args, **kwargs: begin("gloo", *args, **kwargs)
