"""What makes scripts of Accelerate and transformers shard in ``torch-shard plan``, which runs them on the CPU."""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType
from typing import Any

_ARGUMENTS = "transformers.training_args"


def prepare() -> None:
    """Make scripts that are run in this process from now on shard, and need no device. Not collective."""
    if importlib.util.find_spec("accelerate") is None:
        return
    from .enable import Finder, enable

    os.environ["ACCELERATE_USE_CPU"] = "true"
    Finder(_ARGUMENTS, _train_on_cpu).install()
    enable()


def _train_on_cpu(module: ModuleType) -> None:
    """Make ``TrainingArguments`` find training on the CPU, where they allow ``bf16`` without a GPU."""
    kind: Any = vars(module)["TrainingArguments"]
    check = kind.__post_init__

    def on_cpu(self: Any) -> None:
        self.use_cpu = True
        check(self)

    kind.__post_init__ = on_cpu
