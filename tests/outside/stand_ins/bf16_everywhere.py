"""transformers takes ``bf16=True`` without a GPU, whose instructions CPUs compute as well, only more slowly."""

from __future__ import annotations

from types import ModuleType

AFTER = "transformers.training_args"


def apply(module: ModuleType) -> None:
    module.is_torch_bf16_gpu_available = lambda: True
