"""Everything of Accelerate, transformers and PEFT that their documentation does not promise, in one place.

When a new release of one of them breaks something, this is the file to look at. Tested with :data:`TESTED`.
For loading models there is more, in :mod:`._private_loading`.

Attributes of Accelerate's own objects that the front end reads or writes, and why:

- ``Accelerator._models``, ``_optimizers``, ``_schedulers``, ``_dataloaders``, ``_custom_objects``: what was prepared;
- ``Accelerator.prepare_model`` skips DistributedDataParallel with ``evaluation_mode=True`` and moves nothing with
  ``device_placement=False``;
- ``Accelerator._save_model_state_pre_hook`` and ``_load_model_state_pre_hook``: hooks of ``save_state`` and ``load_state``;
- ``accelerate.checkpointing``: writes and reads everything of a checkpoint but models and optimizers;
- ``<object>._is_accelerate_prepared``: set by ``prepare`` on what it returns, and true where it need not be prepared again;
- ``LocalSGD.__enter__``: asks the model for ``no_sync``, which a plain module has not, and the Accelerator for nothing that
  could refuse; see :func:`refuse_local_sgd`;
- ``PeftModel.peft_config`` by adapter, ``prompt_encoder`` of prompt learning, and that ``merge_and_unload`` and its like are
  methods of the tuner within, to which ``PeftModel`` passes them on;
- ``GenerationMixin.generate`` runs under ``no_grad`` and takes ``synced_gpus``.

Of transformers' Trainer, besides the names of the methods in :data:`accelerate_shard.trainer.mixin.STEPS`:

- ``transformers.trainer.Accelerator``: the global name that ``create_accelerator_and_postprocess`` calls;
- ``Trainer._save`` is called on all ranks by ``save_model``, writes where ``args.should_save`` is true, and takes a state dict;
- ``Trainer._save_optimizer_and_scheduler`` asks of ``self.optimizer`` only ``state_dict()``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

TESTED = {"accelerate": ("1.15.0",), "transformers": ("5.23.0", "5.24.0"), "peft": ("0.21.2",)}

PREPARED_LISTS = ("_models", "_optimizers", "_schedulers", "_dataloaders")
"""Attributes of the Accelerator: lists of what was prepared."""


def compiled_inner(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` has wrapped, or whose regions Accelerate has compiled; else `model` itself."""
    # torch keeps the module as a submodule, Accelerate's compile_regions as an attribute of a copy that shares everything.
    inner: Any = model.__dict__.get("_modules", {}).get("_orig_mod") or model.__dict__.get("_orig_mod")
    return inner if inner is not None else model


def plain_optimizer(optimizer: Any) -> Any:
    """Return the user's own optimizer within Accelerate's wrapper, or `optimizer` itself."""
    from accelerate.optimizer import AcceleratedOptimizer

    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def shared_state() -> dict[str, Any]:
    """Return what all Accelerators of this process share; it is empty before the first and after ``_reset_state``."""
    from accelerate.state import AcceleratorState

    shared: dict[str, Any] = AcceleratorState._shared_state
    return shared


def refuse_local_sgd(check: Callable[[nn.Module], None]) -> None:
    """Make ``LocalSGD`` call `check`, which may raise, with its model before it begins. Later calls have no effect."""
    from accelerate.local_sgd import LocalSGD

    kind: Any = LocalSGD
    begin = kind.__enter__
    if hasattr(begin, "__wrapped__"):
        return

    @functools.wraps(begin)
    def checked(self: Any) -> Any:
        if self.enabled:
            check(self.model)
        return begin(self)

    kind.__enter__ = checked


@contextlib.contextmanager
def accelerator_of_trainers(kind: Callable[..., Any]) -> Iterator[None]:
    """Make a Trainer that makes its Accelerator inside call `kind`."""
    module: Any = importlib.import_module("transformers.trainer")
    before = module.Accelerator
    module.Accelerator = kind
    try:
        yield
    finally:
        module.Accelerator = before


def _is_a(module: nn.Module, path: str, name: str) -> bool:
    """Return True if `module` is of a class of a library, which is not imported for it."""
    kind = getattr(sys.modules.get(path), name, None)
    return isinstance(kind, type) and isinstance(module, kind)


def generates(module: nn.Module) -> bool:
    """Return True if `module` has transformers' ``generate``, or PEFT's around it."""
    return _is_a(module, "transformers.generation.utils", "GenerationMixin") or is_peft_model(module)


def is_peft_model(module: nn.Module) -> bool:
    """Return True if `module` is a ``PeftModel`` or a ``PeftMixedModel``."""
    return _is_a(module, "peft.peft_model", "PeftModel") or _is_a(module, "peft.mixed_model", "PeftMixedModel")


def takes_adapters(module: nn.Module) -> bool:
    """Return True if adapters can be added to `module`: a ``PeftModel``, or a transformers model with PEFT's methods."""
    return is_peft_model(module) or _is_a(module, "transformers.integrations.peft", "PeftAdapterMixin")


def is_tuner(module: nn.Module) -> bool:
    """Return True if `module` merges adapters into weights, as a ``LoraModel`` within a ``PeftModel`` does."""
    return _is_a(module, "peft.tuners.tuners_utils", "BaseTuner")


def prompt_encoders(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose output ``PeftModel.save_pretrained`` computes and saves under prompt learning."""
    encoders = getattr(module, "prompt_encoder", None) if is_peft_model(module) else None
    return list(encoders.values()) if encoders is not None else []


def saved_adapters(module: nn.Module, arguments: dict[str, Any]) -> list[str] | None:
    """Return the adapters that ``save_pretrained(**arguments)`` writes; None if it writes the model."""
    if is_peft_model(module):
        return list(arguments.get("selected_adapters") or module.peft_config)  # type: ignore[arg-type]
    if getattr(module, "_hf_peft_config_loaded", False):
        return list(module.active_adapters())  # type: ignore[operator]
    return None


def adapter_state(module: nn.Module, found: dict[str, Any], name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of the state dict `found` that PEFT saves for an adapter, by PEFT's own names."""
    import peft

    embeddings = arguments.get("save_embedding_layers", "auto")
    state: dict[str, Any] = peft.get_peft_model_state_dict(
        module, state_dict=found, adapter_name=name, save_embedding_layers=embeddings
    )
    return state
