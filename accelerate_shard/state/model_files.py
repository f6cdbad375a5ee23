"""A model by itself: its whole state dict, and the files that others read."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import accelerate
from accelerate.utils import is_compiled_module
from accelerate.utils.constants import WEIGHTS_INDEX_NAME, WEIGHTS_PATTERN_NAME
from torch import nn
from torch.utils._pytree import tree_leaves

from torch_shard import ShardTensor
from torch_shard.errors import CheckpointError
from torch_shard.frontend import refuse_inside
from torch_shard.frontend.checkpoint import size_of, sync

from ..models.full_weights_in_hooks import known
from ..models.unwrap import engine_of, inner
from .ranks import Ranks

__all__ = ["get_state_dict", "save_model", "slice_in"]

_WHOLE = re.compile(r"(model|pytorch_model)\.(safetensors|bin)")
_SHARD = re.compile(r"(model|pytorch_model)-\d{5}-of-\d{5}\.(safetensors|bin)")
_INDEX = re.compile(r"(model\.safetensors|pytorch_model\.bin)\.index\.json")


def get_state_dict(model: nn.Module, unwrap: bool) -> dict[str, Any] | None:
    """See :meth:`.mixin.StateMixin.get_state_dict`; None for a model that is not sharded. Collective."""
    engine = engine_of(model)
    if engine is None:
        return None
    in_hook = known(inner(model))
    if in_hook is not None:
        found = in_hook.state()
    else:
        ranks = Ranks([engine], "Accelerator.get_state_dict")
        ranks.each(lambda: refuse_inside(engine, ranks.what))
        found = engine.state_dict(rank0_only=True, offload_to_cpu=True)
    if unwrap or not is_compiled_module(model):
        return found
    return {f"_orig_mod.{name}": value for name, value in found.items()}


def slice_in(obj: Any) -> ShardTensor | None:
    """A slice in `obj`: in a module, or in containers; None where there is none. Not collective."""
    leaves = (list(leaf.parameters()) if isinstance(leaf, nn.Module) else [leaf] for leaf in tree_leaves(obj))
    return next((t for found in leaves for t in found if isinstance(t, ShardTensor)), None)


def save_model(model: nn.Module, folder: Any, max_shard_size: int | str, safe: bool) -> bool:
    """See :meth:`.mixin.StateMixin.save_model`. Returns False where Accelerate's own does it. Collective."""
    engine = engine_of(model)
    if engine is None:
        return False
    in_hook = known(inner(model))
    if in_hook is not None:
        # Accelerate's own way then, which asks for the state dict.
        return not in_hook.is_first
    ranks = Ranks([engine], "Accelerator.save_model")
    target = Path(os.path.abspath(os.fspath(folder)))

    def begin() -> int:
        refuse_inside(engine, ranks.what)
        if ranks.is_first and target.is_file():
            raise CheckpointError(f"Provided path ({target}) should be a directory, not a file")
        return size_of(max_shard_size)

    limit = ranks.each(begin, key=lambda size: (str(target), size, bool(safe)))
    nonce = ranks.begin()
    # Beside the folder's other files, so that putting the new ones in their place is a matter of names.
    beside = target / f".model.saving-{nonce}"
    try:
        ranks.on_first(lambda: _make(target, beside))
        if safe:
            engine.save_full(beside / "weights", format="safetensors", max_shard_size=limit)
        else:
            state = engine.state_dict(rank0_only=True, offload_to_cpu=True)
            ranks.on_first(lambda: _write_bins(state, beside / "weights", limit))
        ranks.on_first(lambda: _put(beside / "weights", target, safe))
    finally:
        if ranks.is_first:
            shutil.rmtree(beside, ignore_errors=True)
    return True


def _make(target: Path, beside: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(target):  # of saves that were killed
        if re.fullmatch(r"\.model\.saving-[0-9a-f]{16}", name):
            shutil.rmtree(target / name, ignore_errors=True)
    beside.mkdir()


def _write_bins(state: dict[str, Any], folder: Path, limit: int) -> None:
    """As stock Accelerate divides them."""
    from huggingface_hub import split_torch_state_dict_into_shards

    folder.mkdir()
    split = split_torch_state_dict_into_shards(state, filename_pattern=WEIGHTS_PATTERN_NAME, max_shard_size=limit)
    for name, entries in split.filename_to_tensors.items():
        accelerate.utils.save({entry: state[entry] for entry in entries}, str(folder / name))
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _put(new: Path, target: Path, safe: bool) -> None:
    """Move the new files to the target. In between there is no index rather than one that mixes old files and new ones."""
    suffix = ".safetensors" if safe else ".bin"
    names = sorted(os.listdir(new), key=lambda name: bool(_INDEX.fullmatch(name)))
    old = [name for name in os.listdir(target) if (_INDEX.fullmatch(name) or _SHARD.fullmatch(name)) and suffix in name]
    # The other form's whole file would be read first where both are there.
    old += [
        name for name in os.listdir(target) if _WHOLE.fullmatch(name) and name.endswith(suffix) and name not in names
    ]
    for name in sorted(old, key=lambda name: not _INDEX.fullmatch(name)):
        if _INDEX.fullmatch(name) or name not in names:
            (target / name).unlink()
    for name in names:
        os.replace(new / name, target / name)
    sync(target)
