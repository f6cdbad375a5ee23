"""``from_pretrained`` in the memory of a shard: the model is built on meta, and each rank reads its shards when it is sharded.

transformers resolves everything itself: which files, which dtype, which names, what is missing and how that is initialised. It is
given the entries of files without reading them (:mod:`.lazy_tensors`), and what it assigns to the model is recorded on the
parameters (``torch_shard.frontend.defer``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_shard.errors import ConfigError, UnavailableError
from torch_shard.frontend import defer, deferred_of
from torch_shard.frontend.checkpoint import open_full
from torch_shard.log import logger

from . import _private_loading as _private
from .lazy_tensors import Entry, Recorded, deferred_from
from .unfilled_params import guard

_SHARDING = "Leave it out: shard() and Accelerator.prepare put each rank's part on its device."
_OFFLOAD = "Leave it out: ShardPlugin(offload=...) keeps parameters and optimizer state in host memory or on disk."
_REFUSED = {
    "device_map": _SHARDING,
    "max_memory": _SHARDING,
    "offload_folder": _OFFLOAD,
    "offload_buffers": "Leave it out: buffers are on the device.",
    "offload_state_dict": "Leave it out: on the host there is never more than this rank's part.",
    "distributed_config": "Tensor parallelism within transformers can't be combined with sharding; leave it out.",
    "tp_plan": "Tensor parallelism within transformers can't be combined with sharding; leave it out.",
    "tp_size": "Tensor parallelism within transformers can't be combined with sharding; leave it out.",
    "device_mesh": "Give the mesh to torch_shard.shard(mesh=...) instead.",
    "quantization_config": "Weights are quantized from full ones; load with the class's own from_pretrained and prepare that.",
    "gguf_file": "Convert the file once with the class's own from_pretrained and save_pretrained.",
    "state_dict": "Values that are in memory need no other way; use the class's own from_pretrained.",
}


def from_pretrained(cls: Any, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
    """Load ``cls.from_pretrained(path, ...)`` so that each rank reads only its shards, when the model is sharded. Not collective.

    The model is built on the meta device, is in evaluation mode as transformers leaves it, and gets its values in
    ``Accelerator.prepare`` or :func:`torch_shard.shard`, in the same parameter objects: optimizers may be built before. Until
    then its ``forward``, ``generate`` and ``save_pretrained``, and a Trainer's ``save_model``, are a
    :class:`~torch_shard.errors.SetupError`, on each rank that calls them.

    Everything else is as transformers has it: names and conversions, ``dtype`` (also ``torch_dtype`` and
    ``"auto"``), tied weights, the report on missing, unexpected and mismatched entries, ``ignore_mismatched_sizes``, the
    generation configuration, ``config=``, ``attn_implementation``, ``output_loading_info``. Buffers, and what the files lack,
    have memory and values at once, initialised as transformers does; where they differ between the ranks, rank 0's count.

    On the host a rank never has more of the parameters than its shard, and beside it a single parameter that transformers
    computes from several entries (the fused weights of experts); what the files lack is full until the model is sharded.

    Adapters may be put on it: ``get_peft_model``, ``PeftModel.from_pretrained``, ``model.add_adapter`` and ``model.load_adapter``
    fill them as on any model. Modules that PEFT copies to train them (``modules_to_save``) are full on each rank until the model
    is sharded. Adapters can be saved before that. The model may be converted to other dtypes. What else changes values in place,
    through ``.data`` too, or replaces or copies parameters (``resize_token_embeddings``, ``copy.deepcopy``), is refused, at once
    or by ``prepare``: do it with the class's own ``from_pretrained``, or save the changed model once.

    Args:
        cls: a class of models of transformers, or one of its Auto classes.
        path: a folder, or the name of a repository, of which files may be in the cache. Weights must be safetensors. Every rank
            needs to see the same files, until the model is sharded.
        args, kwargs: the arguments of the class's own ``from_pretrained``.

    Returns:
        What the class's own returns.

    Raises:
        ConfigError: an argument with which values would be placed or quantized on loading, weights that are quantized or no
            safetensors, an adapter in place of a model, or `cls` is no such class. Nothing has been read.
        CheckpointError: a file is damaged.
        UnavailableError: transformers is not installed.

    Errors of transformers are raised as they are.
    """
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise UnavailableError("from_pretrained needs transformers: pip install transformers") from error
    if not _private.is_pretrained_class(cls):
        raise ConfigError(
            f"from_pretrained: {cls!r} is no class of transformers' models, such as AutoModelForCausalLM. For other modules "
            "there is torch_shard.from_files."
        )
    for name, remedy in _REFUSED.items():
        if kwargs.get(name):
            raise ConfigError(f"from_pretrained: {name}={kwargs[name]!r} is not supported. {remedy}")
    _refuse_quantized(path, kwargs)
    _private.keep_adapters_off_meta(deferred_of, _values_of)
    with _private.weights_from(_entries, _settle) as loaded:
        result = cls.from_pretrained(path, *args, **kwargs)
    model = result[0] if isinstance(result, tuple) else result
    if not loaded:
        logger.warning("%s loads its weights in a way of its own: all of them are in memory.", type(model).__name__)
    for pair in _private.untied_pairs(model):
        _tie(model, *pair)
    return result


def _refuse_quantized(path: str | os.PathLike[str], kwargs: dict[str, Any]) -> None:
    """Refuse quantized weights before transformers looks for the library that would unpack them."""
    found = _private.quantization_of(path, kwargs)
    if found is not None:
        raise ConfigError(
            f"from_pretrained: the weights at {path} are quantized ({found}), and how they are unpacked on shards is not known. "
            "Load them with the class's own from_pretrained, and prepare that model."
        )


def _entries(files: Sequence[str] | None) -> dict[str, Entry]:
    """Return the entries of the files by name, unread."""
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        raise ConfigError(
            f"from_pretrained: {', '.join(map(str, files or ['nothing']))}: only safetensors can be read in parts. Convert the "
            "weights once: load them with the class's own from_pretrained, and save_pretrained."
        )
    entries: dict[str, Entry] = {}
    for file in files:
        opened = open_full(Path(file))
        name, size, crc = next(iter(opened.checksums().values()))
        where = f"{name} of {size} bytes, checksum {crc:08x}"
        entries.update((key, Entry(values, f"{key} of {where}")) for key, values in opened.values.items())
    return entries


def _settle(model: nn.Module) -> None:
    """Put plain meta parameters in the place of recorded ones, and values into buffers."""
    plain: dict[int, nn.Parameter] = {}
    filled = guard(model)
    for module in model.modules():
        for name, param in module._parameters.items():
            if isinstance(param, Recorded):
                if id(param) not in plain:
                    plain[id(param)] = _meta_parameter(param, filled)
                module._parameters[name] = plain[id(param)]
        for name, buffer in module._buffers.items():
            if isinstance(buffer, Recorded):
                module._buffers[name] = _private.as_loaded(_full_values(buffer))


def _meta_parameter(recorded: Recorded, filled: Callable[[], None]) -> nn.Parameter:
    with torch._C.DisableTorchFunctionSubclass():
        meta = torch.empty(recorded.shape, dtype=recorded.dtype, device="meta")  # contiguous, as read from a file
        param = nn.Parameter(meta, requires_grad=recorded.requires_grad)
    defer(param, deferred_from(recorded)._replace(filled=filled))
    return _private.as_loaded(param)


def _full_values(recorded: Recorded) -> torch.Tensor:
    values = deferred_from(recorded)
    return values.rounded(values.full()).clone()


def _values_of(param: torch.Tensor) -> torch.Tensor | None:
    """Return, in memory, the values that `param` waits for; None if it waits for none."""
    values = deferred_of(param)
    return None if values is None else values.rounded(values.full()).to(param.dtype, copy=True)


def _tie(model: Any, target: str, source: str) -> None:
    """Tie two parameters that the files have both of, if they are equal, as transformers does."""
    ours, theirs = model.get_parameter(target), model.get_parameter(source)
    own, other = deferred_of(ours), deferred_of(theirs)
    if own and other and torch.equal(own.rounded(own.full()), other.rounded(other.full())):
        parent, _, name = target.rpartition(".")
        setattr(model.get_submodule(parent), name, theirs)
        return
    logger.warning(
        "%s and %s are tied by the configuration, but differ in the files: they are NOT tied. tie_word_embeddings=False in the "
        "configuration silences this.",
        target,
        source,
    )
    _private.forget_tie(model, target)
