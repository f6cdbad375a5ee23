"""Everything of Accelerate, transformers and PEFT that their documentation does not promise, in one place.

When a new release of one of them breaks something, this is the file to look at. Tested with :data:`TESTED`.
For loading models there is more, in :mod:`._private_loading`.

Attributes of Accelerate's own objects that the front end reads or writes, and why:

- ``Accelerator._models``, ``_optimizers``, ``_schedulers``, ``_dataloaders``, ``_custom_objects``: what was prepared;
- ``Accelerator.prepare_model`` skips DistributedDataParallel with ``evaluation_mode=True`` and moves nothing with
  ``device_placement=False``;
- ``Accelerator._save_model_state_pre_hook`` and ``_load_model_state_pre_hook``: hooks of ``save_state`` and ``load_state``;
- ``accelerate.checkpointing``: writes and reads everything of a checkpoint but models and optimizers;
- ``<object>._is_accelerate_prepared``: set by ``prepare`` on what it returns;
- ``LocalSGD.__enter__``: asks the model for ``no_sync``, which a plain module has not, and the Accelerator for nothing that
  could refuse; see :func:`refuse_local_sgd`;
- ``PeftModel.peft_config`` by adapter, ``prompt_encoder`` of prompt learning, and that ``merge_and_unload`` and its like are
  methods of the tuner within, to which ``PeftModel`` passes them on;
- ``GenerationMixin.generate`` runs under ``no_grad`` and takes ``synced_gpus``.

Of transformers' Trainer, besides the names of the methods in :data:`accelerate_shard.trainer.STEPS`:

- ``transformers.trainer.Accelerator``: the global name that ``create_accelerator_and_postprocess`` calls;
- ``Trainer._save`` is called on all ranks by ``save_model``, writes where ``args.should_save`` is true, and takes a state dict;
- ``Trainer._save_optimizer_and_scheduler`` asks of ``self.optimizer`` only ``state_dict()``.

Of transformers and PEFT, for models that are loaded when they are sharded (:mod:`.loading`):

- ``PreTrainedModel._load_pretrained_model``: the step of ``from_pretrained`` that reads weight files. With a dict in place of
  files it takes the dict's entries, and reads each with ``entry[...]``;
- ``PreTrainedModel.all_tied_weights_keys``: names that are tied, as targets and sources;
- ``<parameter>._is_hf_initialized``: it has been loaded and is not to be initialised;
- ``BaseTunerLayer._get_base_layer_device_and_dtype``: where PEFT moves a new adapter to.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from torch_shard.errors import ConfigError

__all__ = [
    "PREPARED_ATTRIBUTES",
    "PREPARED_LISTS",
    "TESTED",
    "accelerator_of_trainers",
    "adapter_state",
    "as_loaded",
    "compiled_inner",
    "forget_tie",
    "generates",
    "is_peft_model",
    "is_pretrained_class",
    "is_tuner",
    "keep_adapters_off_meta",
    "plain_optimizer",
    "prompt_encoders",
    "quantization_of",
    "refuse_local_sgd",
    "saved_adapters",
    "shared_state",
    "takes_adapters",
    "untied_pairs",
    "weights_from",
]

TESTED = {"accelerate": ("1.15.0",), "transformers": ("5.23.0",), "peft": ("0.21.2",)}

PREPARED_LISTS = ("_models", "_optimizers", "_schedulers", "_dataloaders")
"""Attributes of the Accelerator: lists of what was prepared."""

PREPARED_ATTRIBUTES = ("forward", "_original_forward", "_is_accelerate_prepared")
"""What ``prepare_model`` sets on a model: autocast around its forward, the forward as it was, and that it was here."""


def compiled_inner(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` has wrapped, or whose regions Accelerate has compiled; `model` itself otherwise."""
    # torch keeps it as a submodule; Accelerate's compile_regions among the attributes of a copy that shares everything.
    inner: Any = model.__dict__.get("_modules", {}).get("_orig_mod") or model.__dict__.get("_orig_mod")
    return inner if inner is not None else model


def plain_optimizer(optimizer: Any) -> Any:
    """The user's own optimizer within Accelerate's wrapper, or `optimizer` itself."""
    from accelerate.optimizer import AcceleratedOptimizer

    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def shared_state() -> dict[str, Any]:
    """What all Accelerators of this process share; empty before the first, and after ``AcceleratorState._reset_state``."""
    from accelerate.state import AcceleratorState

    shared: dict[str, Any] = AcceleratorState._shared_state
    return shared


def refuse_local_sgd(check: Callable[[nn.Module], None]) -> None:
    """Have ``LocalSGD`` ask `check`, which may raise, about its model before it begins. Once for a process."""
    from accelerate.local_sgd import LocalSGD

    begin = LocalSGD.__enter__
    if hasattr(begin, "__wrapped__"):
        return

    @functools.wraps(begin)
    def checked(self: Any) -> Any:
        if self.enabled:
            check(self.model)
        return begin(self)

    LocalSGD.__enter__ = checked


@contextlib.contextmanager
def accelerator_of_trainers(kind: Callable[..., Any]) -> Iterator[None]:
    """Inside, a Trainer that makes its Accelerator calls `kind`."""
    module: Any = importlib.import_module("transformers.trainer")
    before = module.Accelerator
    module.Accelerator = kind
    try:
        yield
    finally:
        module.Accelerator = before


def _is_a(module: nn.Module, package: str, path: str, name: str) -> bool:
    """Whether `module` is of a class of a library, which is imported only where it has been already."""
    if package not in sys.modules:
        return False
    home = sys.modules.get(path)
    kind = getattr(home, name, None) if home is not None else None
    return isinstance(kind, type) and isinstance(module, kind)


def generates(module: nn.Module) -> bool:
    """Whether `module` has transformers' ``generate``, or PEFT's around it."""
    return _is_a(module, "transformers", "transformers.generation.utils", "GenerationMixin") or is_peft_model(module)


def is_peft_model(module: nn.Module) -> bool:
    """Whether `module` is a ``PeftModel`` (or a ``PeftMixedModel``)."""
    return _is_a(module, "peft", "peft.peft_model", "PeftModel") or _is_a(
        module, "peft", "peft.mixed_model", "PeftMixedModel"
    )


def takes_adapters(module: nn.Module) -> bool:
    """Whether adapters can be added to `module`: a ``PeftModel``, or a transformers model with PEFT's methods."""
    return is_peft_model(module) or _is_a(module, "transformers", "transformers.integrations.peft", "PeftAdapterMixin")


def is_tuner(module: nn.Module) -> bool:
    """Whether `module` is what merges adapters into weights: ``LoraModel`` and its like, within a ``PeftModel``."""
    return _is_a(module, "peft", "peft.tuners.tuners_utils", "BaseTuner")


def prompt_encoders(module: nn.Module) -> list[nn.Module]:
    """The modules whose output ``PeftModel.save_pretrained`` computes and saves, under prompt learning."""
    encoders = getattr(module, "prompt_encoder", None) if is_peft_model(module) else None
    return list(encoders.values()) if encoders is not None else []


def saved_adapters(module: nn.Module, arguments: dict[str, Any]) -> list[str] | None:
    """The adapters that ``save_pretrained(**arguments)`` writes, in place of the model; None where it writes that."""
    if is_peft_model(module):
        return list(arguments.get("selected_adapters") or module.peft_config)  # type: ignore[arg-type]
    if getattr(module, "_hf_peft_config_loaded", False):
        return list(module.active_adapters())  # type: ignore[operator]
    return None


def adapter_state(module: nn.Module, found: dict[str, Any], name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What of a state dict PEFT saves of an adapter, by PEFT's own names."""
    import peft

    embeddings = arguments.get("save_embedding_layers", "auto")
    state: dict[str, Any] = peft.get_peft_model_state_dict(
        module, state_dict=found, adapter_name=name, save_embedding_layers=embeddings
    )
    return state


# -- loading ----------------------------------------------------------------------------------------------------------

_T = TypeVar("_T", bound=torch.Tensor)
_loading = threading.RLock()


def is_pretrained_class(cls: Any) -> bool:
    """Whether `cls` is a class of transformers' models, or one of the Auto classes that choose one."""
    from transformers import PreTrainedModel
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    return isinstance(cls, type) and issubclass(cls, (PreTrainedModel, _BaseAutoModelClass))


def quantization_of(path: Any, kwargs: Mapping[str, Any]) -> str | None:
    """How the weights at `path` are quantized, as their configuration says; None where they are not, or there is none."""
    from transformers import PreTrainedConfig

    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        found = getattr(config, "quantization_config", None)
    else:
        where = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")
        try:
            values, _ = PreTrainedConfig.get_config_dict(
                config if config is not None else path, **{key: kwargs[key] for key in where if key in kwargs}
            )
        except OSError:  # from_pretrained says what is wrong
            return None
        found = values.get("quantization_config")
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method) or "quantization_config")


@contextlib.contextmanager
def weights_from(
    entries: Callable[[Sequence[str] | None], Mapping[str, Any]], settle: Callable[[nn.Module], None]
) -> Iterator[list[nn.Module]]:
    """Inside, ``from_pretrained`` of this thread takes what `entries` makes of the weight files, and then calls `settle`.

    Gives the models that were loaded so.

    Raises:
        ConfigError: by ``from_pretrained``, where weights are quantized or are those of an adapter.
    """
    from transformers import PreTrainedModel

    here, models = threading.get_ident(), []
    with _loading:
        stock = PreTrainedModel.__dict__["_load_pretrained_model"]

        def load(
            model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None
        ) -> Any:
            if threading.get_ident() != here:
                return stock.__func__(model, state_dict, checkpoint_files, load_config, expected_keys)
            if expected_keys is not None:
                raise ConfigError(
                    "from_pretrained: the path is an adapter's. Load the model that it is for, and put the adapter on it with "
                    "PeftModel.from_pretrained(model, path)."
                )
            if load_config.is_quantized:
                raise ConfigError(
                    "from_pretrained: the weights are quantized, and how they are unpacked on slices is not known. Load them with "
                    "the class's own from_pretrained, and prepare that model."
                )
            result = stock.__func__(model, entries(checkpoint_files), None, load_config)
            settle(model)
            models.append(model)
            return result

        PreTrainedModel._load_pretrained_model = staticmethod(load)
        try:
            yield models
        finally:
            PreTrainedModel._load_pretrained_model = stock


def as_loaded(tensor: _T) -> _T:
    """`tensor`, which transformers is not to initialise."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    return tensor


def untied_pairs(model: Any) -> list[tuple[str, str]]:
    """Names that the configuration ties and that are two parameters, since the files have both."""
    return [
        (target, source)
        for target, source in getattr(model, "all_tied_weights_keys", {}).items()
        if model.get_parameter_or_buffer(target) is not model.get_parameter_or_buffer(source)
    ]


def forget_tie(model: Any, target: str) -> None:
    """`target` is not tied, whatever the configuration says."""
    model.all_tied_weights_keys.pop(target, None)


def keep_adapters_off_meta(waits: Callable[[torch.Tensor], object]) -> None:
    """Have PEFT leave adapters on the CPU where the layer's own parameters wait for their values: on meta they would lose theirs."""
    if importlib.util.find_spec("peft") is None:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    stock = getattr(BaseTunerLayer, "_get_base_layer_device_and_dtype", None)
    if stock is None or hasattr(stock, "_torch_shard"):  # adapters on meta are refused when the model is sharded
        return

    @functools.wraps(stock)
    def device_and_dtype(self: Any, base_layer: nn.Module) -> Any:
        device, dtype = stock(self, base_layer)
        if device is not None and device.type == "meta" and any(map(waits, base_layer.parameters())):
            device = torch.device("cpu")
        return device, dtype

    device_and_dtype._torch_shard = True  # type: ignore[attr-defined]
    BaseTunerLayer._get_base_layer_device_and_dtype = device_and_dtype
