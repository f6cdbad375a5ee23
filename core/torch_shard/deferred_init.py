"""``torch_shard.from_files``: a model on the meta device that ``shard()`` fills from a full checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import nn

from .errors import SetupError
from .setup.lazy_param import Deferred, defer
from .state.model_state import Mismatches

__all__ = ["from_files"]


def from_files(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Make :func:`shard` fill a model that is on the meta device from a full checkpoint. Not collective.

    Each rank then reads its shards of the parameters and nothing else, so that no rank's memory ever holds more of the model
    than that. Buffers that the checkpoint has are read now. Those that it does not have (non-persistent ones) stay as they are;
    on meta they are made by ``reset_parameters`` or ``ShardConfig.init_fn``, in ``shard``. Every rank must call it with the same
    files; they must stay where they are until then.

    For models of transformers use ``accelerate_shard.from_pretrained``, which knows their names, dtypes and ties.

    Args:
        model: a model with its parameters on the meta device, ``with torch.device("meta"): model = MyModel()``. Values are
            converted to the floating-point dtypes that they have here.
        path: a safetensors file, a folder with ``model.safetensors`` or ``model.safetensors.index.json``, or a file of
            ``torch.save`` with a state dict; as for :meth:`Engine.load`.

    Raises:
        CheckpointError: there is no such file, or it is damaged, or it holds no state dict.
        SetupError: a parameter is not on the meta device.
        StateDictError: names are missing or unexpected, or shapes or kinds of dtypes differ; all of them are listed.
        UnavailableError: the files are safetensors, and the library is not installed.
    """
    from .checkpoint.full.load import named_values
    from .checkpoint.mismatches import OF_THIS

    params = dict(model.named_parameters(remove_duplicate=False))
    real = next((name for name, p in params.items() if p.device.type != "meta"), None)
    if real is not None:
        raise SetupError(f"from_files: {real} is not on the meta device. Build the model under torch.device('meta').")
    live = model.state_dict(keep_vars=True)
    file, values = named_values(path, live)
    missing, unexpected = live.keys() - values.keys(), values.keys() - live.keys()
    problems = [text for name in live.keys() & values.keys() for text in _problem(name, values[name], live[name])]
    Mismatches(sorted(missing), sorted(unexpected), sorted(problems)).refuse(str(file.path), OF_THIS)
    checksums = {
        place: f"{name} of {size} bytes, checksum {crc:08x}" for place, (name, size, crc) in file.checksums().items()
    }
    buffers = {id(b) for b in model.buffers()}
    for name, tensor in live.items():
        found = values[name]
        if id(tensor) in buffers:
            _set_buffer(model, name, found.to(tensor.dtype, copy=True))
        elif isinstance(tensor, nn.Parameter):  # of several names the last one counts, as in load_state_dict()
            defer(tensor, Deferred(lambda found=found: found, f"{name} of {checksums[file.file_of(name)]}"))  # type: ignore[misc]


def _problem(name: str, found: object, live: object) -> Iterator[str]:
    """Yield what of a file's entry does not fit the model's."""
    if not isinstance(found, torch.Tensor) or not isinstance(live, torch.Tensor):
        yield f"{name} is no tensor"
    elif found.shape != live.shape:
        yield f"{name} has shape {tuple(found.shape)} in the file and {tuple(live.shape)} here"
    elif found.dtype != live.dtype and not (found.is_floating_point() and live.is_floating_point()):
        yield f"{name} is {found.dtype} in the file and {live.dtype} here"


def _set_buffer(model: nn.Module, name: str, values: torch.Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    model.get_submodule(owner)._buffers[attribute] = values
