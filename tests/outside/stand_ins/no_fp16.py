"""fp32 in place of ``fp16=True``, which Accelerate takes on GPUs alone."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

AFTER = "transformers.training_args"


def apply(module: ModuleType) -> None:
    begin = module.TrainingArguments.__post_init__

    @functools.wraps(begin)
    def __post_init__(self: Any) -> None:
        self.fp16 = False
        begin(self)

    module.TrainingArguments.__post_init__ = __post_init__
