"""Everything of Accelerate, transformers and PEFT that their documentation does not promise, in one place.

When a new release of one of them breaks something, this is the file to look at. Tested with :data:`TESTED`.

Attributes of Accelerate's own objects that the front end reads or writes, and why:

- ``Accelerator._models``, ``_optimizers``, ``_schedulers``, ``_dataloaders``, ``_custom_objects``: what was prepared;
- ``Accelerator.prepare_model`` skips DistributedDataParallel with ``evaluation_mode=True`` and moves nothing with
  ``device_placement=False``;
- ``Accelerator._save_model_state_pre_hook`` and ``_load_model_state_pre_hook``: hooks of ``save_state`` and ``load_state``;
- ``accelerate.checkpointing``: writes and reads everything of a checkpoint but models and optimizers;
- ``<object>._is_accelerate_prepared``: set by ``prepare`` on what it returns.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["TESTED", "compiled_inner", "plain_optimizer"]

TESTED = {"accelerate": ("1.15.0",), "transformers": ("5.23.0",), "peft": ("0.21.2",)}


def compiled_inner(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` has wrapped, or `model` itself."""
    inner: Any = model.__dict__.get("_modules", {}).get("_orig_mod")
    return inner if inner is not None else model


def plain_optimizer(optimizer: Any) -> Any:
    """The user's own optimizer within Accelerate's wrapper, or `optimizer` itself."""
    from accelerate.optimizer import AcceleratedOptimizer

    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
