"""``torch_shard.from_files``: a model on the meta device that ``shard()`` fills from a full checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from .errors import SetupError, StateDictError
from .setup.lazy_param import Deferred, defer

__all__ = [
    "from_files",
]


# -- plain modules --------------------------------------------------------------------------------------------------


def from_files(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Have :func:`shard` fill a model that is on the meta device from a full checkpoint. Not collective.

    Each rank then reads its slices of the parameters and nothing else, so that no rank's memory ever holds more of the model
    than that. Buffers that the checkpoint has are read now. Those that it does not have (non-persistent ones) stay as they are;
    on meta they are made by ``reset_parameters`` or ``ShardConfig.init_fn``, in ``shard``. Every rank must call it with the same
    files; they must stay where they are until then.

    For models of transformers use ``accelerate_shard.from_pretrained``, which knows their names, dtypes and ties.

    Args:
        model: with its parameters on the meta device, ``with torch.device("meta"): model = MyModel()``. Values are converted to
            the floating-point dtypes that they have here.
        path: a safetensors file, a folder with ``model.safetensors`` or ``model.safetensors.index.json``, or a file of
            ``torch.save`` with a state dict; as for :meth:`Engine.load`.

    Raises:
        CheckpointError: there is no such file, or it is damaged, or it holds no state dict.
        SetupError: a parameter is not on the meta device.
        StateDictError: names are missing or unexpected, or shapes or kinds of dtypes differ; all of them are listed.
        UnavailableError: the files are safetensors, and the library is not installed.
    """
    from .checkpoint.full.load import named_values

    params = dict(model.named_parameters(remove_duplicate=False))
    real = next((name for name, p in params.items() if p.device.type != "meta"), None)
    if real is not None:
        raise SetupError(f"from_files: {real} is not on the meta device. Build the model under torch.device('meta').")
    live = model.state_dict(keep_vars=True)
    file, values = named_values(path, live)
    _refuse_misfits(file.path, live, values)
    marks = {place: f"{name} of {size} bytes, checksum {crc:08x}" for place, (name, size, crc) in file.marks().items()}
    buffers = {id(b) for b in model.buffers()}
    for name, tensor in live.items():
        found = values[name]
        if id(tensor) in buffers:
            _set_buffer(model, name, found.to(tensor.dtype, copy=True))
        elif isinstance(tensor, nn.Parameter):  # of several names the last one counts, as in load_state_dict()
            defer(tensor, Deferred(lambda found=found: found, f"{name} of {marks[file.file_of(name)]}"))  # type: ignore[misc]


def _refuse_misfits(path: Path, live: Mapping[str, torch.Tensor], values: Mapping[str, object]) -> None:
    missing = [name for name in live if name not in values]
    unexpected = [name for name in values if name not in live]
    lines = [f"missing: {', '.join(missing)}"] if missing else []
    lines += [f"unexpected: {', '.join(unexpected)}"] if unexpected else []
    for name, tensor in live.items():
        found = values.get(name)
        if found is None:
            continue
        if not isinstance(found, torch.Tensor) or not isinstance(tensor, torch.Tensor):
            lines.append(f"{name} is no tensor")
        elif found.shape != tensor.shape:
            lines.append(f"{name} has shape {tuple(found.shape)} in the file and {tuple(tensor.shape)} here")
        elif found.dtype != tensor.dtype and not (found.is_floating_point() and tensor.is_floating_point()):
            lines.append(f"{name} is {found.dtype} in the file and {tensor.dtype} here")
    if lines:
        raise StateDictError(f"{path} does not fit the model, and nothing was changed.\n  " + "\n  ".join(lines))


def _set_buffer(model: nn.Module, name: str, values: torch.Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    model.get_submodule(owner)._buffers[attribute] = values
