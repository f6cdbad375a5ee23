"""Everything of Accelerate, transformers and PEFT that their documentation does not promise, in one place.

When a new release of one of them breaks something, this is the file to look at. Tested with :data:`TESTED`.

Attributes of Accelerate's own objects that the front end reads or writes, and why:

- ``Accelerator._models``, ``_optimizers``, ``_schedulers``, ``_dataloaders``, ``_custom_objects``: what was prepared;
- ``Accelerator.prepare_model`` skips DistributedDataParallel with ``evaluation_mode=True`` and moves nothing with
  ``device_placement=False``;
- ``<object>._is_accelerate_prepared``: set by ``prepare`` on what it returns.

Of transformers' Trainer, besides the names of the methods in :data:`accelerate_shard.trainer.STEPS`:

- ``transformers.trainer.Accelerator``: the global name that ``create_accelerator_and_postprocess`` calls;
- ``Trainer._save`` is called on all ranks by ``save_model``, writes where ``args.should_save`` is true, and takes a state dict;
- ``Trainer._save_optimizer_and_scheduler`` asks of ``self.optimizer`` only ``state_dict()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

__all__ = ["TESTED", "accelerator_of_trainers", "compiled_inner"]

TESTED = {"accelerate": ("1.15.0",), "transformers": ("5.23.0",), "peft": ("0.21.2",)}


def compiled_inner(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` has wrapped, or `model` itself."""
    inner: Any = model.__dict__.get("_modules", {}).get("_orig_mod")
    return inner if inner is not None else model


@contextlib.contextmanager
def accelerator_of_trainers(kind: Callable[..., Any]) -> Iterator[None]:
    """Inside, a Trainer that makes its Accelerator calls `kind`."""
    import transformers.trainer

    before = transformers.trainer.Accelerator
    transformers.trainer.Accelerator = kind  # type: ignore[attr-defined]
    try:
        yield
    finally:
        transformers.trainer.Accelerator = before  # type: ignore[attr-defined]
