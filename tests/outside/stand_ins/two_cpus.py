"""A Trainer whose program says ``devices=1`` gets two CPUs, and the strategy that the variable TWO_CPUS names."""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

AFTER = "lightning.pytorch.trainer.trainer"


def apply(trainer: ModuleType) -> None:
    init = trainer._AcceleratorConnector.__init__

    @functools.wraps(init)
    def __init__(self: Any, **settings: Any) -> None:
        init(self, **{**settings, "accelerator": "cpu", "devices": 2, "strategy": os.environ["TWO_CPUS"]})

    trainer._AcceleratorConnector.__init__ = __init__
