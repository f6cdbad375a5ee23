"""The Hugging Face Accelerate front end. ``from accelerate_shard import Accelerator`` is the only line that a script changes.

The package can be imported anywhere: Accelerate, transformers and PEFT are imported when something needs them.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "Accelerator",
    "Precision",
    "ShardConfig",
    "ShardPlugin",
    "ShardTrainerMixin",
    "disable",
    "enable",
    "from_pretrained",
]

# The module of each public name, imported on first use, since importing `accelerate` takes seconds.
_HOME = {
    "Accelerator": "accelerate_shard.accelerator",
    "Precision": "torch_shard",
    "ShardConfig": "torch_shard",
    "ShardPlugin": "accelerate_shard.settings.plugin",
    "ShardTrainerMixin": "accelerate_shard.trainer.mixin",
    "disable": "accelerate_shard.launch.enable",
    "enable": "accelerate_shard.launch.enable",
    "from_pretrained": "accelerate_shard.models.from_pretrained",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "accelerate":
            raise
        raise ImportError(
            f"accelerate_shard.{name} needs Accelerate; install it with `pip install 'torch-shard-engine[accelerate]'`."
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
