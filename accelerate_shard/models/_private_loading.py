"""Undocumented parts of transformers and PEFT that are used for models which are filled when they are sharded.

The rest is in :mod:`._private`, which has the versions that are tested.

- ``PreTrainedModel._load_pretrained_model``: the step of ``from_pretrained`` that reads weight files. With a dict in place of
  files it takes the dict's entries, and reads each with ``entry[...]``;
- ``PreTrainedModel.all_tied_weights_keys``: names that are tied, as targets and sources;
- ``<parameter>._is_hf_initialized``: it has been loaded and is not to be initialised;
- ``_BaseAutoModelClass``: the base of the Auto classes;
- ``BaseTunerLayer._get_base_layer_device_and_dtype``: where PEFT moves a new adapter to;
- ``<model>.hf_device_map``: where ``PreTrainedModel.load_adapter`` puts the adapter's values;
- ``ModulesToSaveWrapper.update(adapter)`` copies ``original_module`` to ``modules_to_save[adapter]``;
- ``BaseTuner._replace_module`` and ``LoraModel._replace_module``: put a layer with adapters in a layer's place, and move them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from torch_shard.errors import ConfigError

_T = TypeVar("_T", bound=torch.Tensor)
# Held while `weights_from` has replaced a method of transformers for the whole process, so that threads take turns.
_loading = threading.RLock()


def is_pretrained_class(cls: Any) -> bool:
    """Return True if `cls` is a class of transformers' models, or one of the Auto classes that choose one."""
    from transformers import PreTrainedModel
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    return isinstance(cls, type) and issubclass(cls, (PreTrainedModel, _BaseAutoModelClass))


def quantization_of(path: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Return how the weights at `path` are quantized, by their configuration; None if they are not, or it is not there."""
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
        except OSError:  # from_pretrained will raise a better error
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
    """Make ``from_pretrained`` of this thread take what `entries` makes of the weight files, and then call `settle`.

    Gives the models that were loaded so.

    Raises:
        ConfigError: by ``from_pretrained``, where weights are quantized or are those of an adapter.
    """
    from transformers import PreTrainedModel

    here, method = threading.get_ident(), "_load_pretrained_model"
    models: list[nn.Module] = []
    with _loading:
        stock = PreTrainedModel.__dict__[method]

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
                    "from_pretrained: the weights are quantized, and how they are unpacked on shards is not known. Load them "
                    "with the class's own from_pretrained, and prepare that model."
                )
            result = stock.__func__(model, entries(checkpoint_files), None, load_config)
            settle(model)
            models.append(model)
            return result

        setattr(PreTrainedModel, method, staticmethod(load))
        try:
            yield models
        finally:
            setattr(PreTrainedModel, method, stock)


def as_loaded(tensor: _T) -> _T:
    """Return `tensor`, marked as one that transformers does not initialise."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    return tensor


def untied_pairs(model: Any) -> list[tuple[str, str]]:
    """Return the names that the configuration ties, but that are two parameters, since the files have both."""
    return [
        (target, source)
        for target, source in getattr(model, "all_tied_weights_keys", {}).items()
        if model.get_parameter_or_buffer(target) is not model.get_parameter_or_buffer(source)
    ]


def forget_tie(model: Any, target: str) -> None:
    """Make `target` count as not tied, whatever the configuration says."""
    model.all_tied_weights_keys.pop(target, None)


def keep_adapters_off_meta(
    waits: Callable[[torch.Tensor], object], values_of: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    """Make PEFT leave adapters on the CPU where the layer's own parameters wait for values: on meta they would lose their own.

    PEFT then also gives the copies that it makes of modules memory, with the values that `values_of` returns.
    """
    if importlib.util.find_spec("peft") is None:
        return
    from peft.tuners.lora import LoraModel
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    # If a release has no such method, adapters are put on meta, and are refused when the model is sharded.
    _wrap(BaseTunerLayer, "_get_base_layer_device_and_dtype", functools.partial(_off_meta, waits))
    for tuner in (BaseTuner, LoraModel):
        _wrap(tuner, "_replace_module", functools.partial(_put_back, waits))
    _wrap(ModulesToSaveWrapper, "update", functools.partial(_copy_filled, values_of))


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replace a method, once, by a call of `around` with the stock method and then the method's own arguments."""
    stock = owner.__dict__.get(name)
    if stock is None or hasattr(stock, "_torch_shard"):
        return

    @functools.wraps(stock)
    def method(*args: Any, **kwargs: Any) -> Any:
        return around(stock, *args, **kwargs)

    method._torch_shard = True  # type: ignore[attr-defined]
    setattr(owner, name, method)


def _off_meta(waits: Callable[[torch.Tensor], object], stock: Any, layer: Any, base_layer: nn.Module) -> Any:
    device, dtype = stock(layer, base_layer)
    if device is not None and device.type == "meta" and any(map(waits, base_layer.parameters())):
        device = torch.device("cpu")
    return device, dtype


def _copy_filled(
    values_of: Callable[[torch.Tensor], torch.Tensor | None],
    stock: Any,
    wrapper: Any,
    adapter: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Give memory and values at once to the copies that are trained in place of the model's own modules."""
    if adapter in wrapper.modules_to_save:
        return stock(wrapper, adapter, *args, **kwargs)
    result = stock(wrapper, adapter, *args, **kwargs)
    copied = wrapper.modules_to_save[adapter]
    for name, own in wrapper.original_module.named_parameters():
        values = values_of(own)
        parent, _, key = name.rpartition(".")
        place = copied.get_submodule(parent)._parameters
        if values is not None and place[key].device.type == "meta":
            place[key] = nn.Parameter(values, requires_grad=place[key].requires_grad)
    return result


@contextlib.contextmanager
def adapters_on_cpu(model: nn.Module) -> Iterator[None]:
    """Make transformers' ``model.load_adapter`` read adapters to the CPU inside, whatever device the model is on."""
    missing = object()
    before = model.__dict__.get("hf_device_map", missing)
    model.__dict__["hf_device_map"] = {"": torch.device("cpu")}
    try:
        yield
    finally:
        if before is missing:
            del model.__dict__["hf_device_map"]
        else:
            model.__dict__["hf_device_map"] = before


def _put_back(
    waits: Callable[[torch.Tensor], object],
    stock: Any,
    tuner: Any,
    parent: Any,
    name: str,
    new: nn.Module,
    old: nn.Module,
) -> None:
    held: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    if any(map(waits, old.parameters())):
        owners = [own for module in new.modules() for own in (module._parameters, module._buffers)]
        held = [(own, key, t) for own in owners for key, t in own.items() if t is not None and t.device.type != "meta"]
    stock(tuner, parent, name, new, old)
    for own, key, tensor in held:
        if own[key] is not None and own[key].device.type == "meta":
            own[key] = tensor
