"""``ShardedGradScaler``. torch's GradScaler is enough here, because all ranks find an infinity on any of them."""

from __future__ import annotations

from typing import Any

import torch

from .translate_settings import unused

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` with the arguments of torch's ShardedGradScaler. All ranks skip the same steps.

    Args:
        device, init_scale, backoff_factor, growth_factor, growth_interval, enabled: the arguments
            of ``torch.amp.GradScaler``.
        process_group: has no effect, since the model's process group is used.

    Not collective.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        if process_group is not None:
            unused("ShardedGradScaler", process_group="the model's process group is used")
