"""A full checkpoint on the disk: written under a hidden name beside its target, and put in its place in one step.

::

    c.pt, c.safetensors        .c.pt.saving-0123abcd/c.pt                      renamed over the target
    c/ (safetensors)           .c.saving-0123abcd/model-00001-of-....          exchanged with the target

As with sharded checkpoints (:mod:`..format.atomic_directory`), a process that is killed leaves the old checkpoint or the new
one, and a hidden directory that the next save removes. Nothing here is collective.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ..format.atomic_directory import Saving, commit, swap
from ..format.dcp_metadata import METADATA
from ..format.manifest import MANIFEST
from ..format.safetensors import WEIGHTS, SafetensorsWriter
from ..format.torch_file import TorchFileWriter

_OTHER_WEIGHTS = re.compile(r"pytorch_model.*\.bin(\.index\.json)?|tf_model.*\.h5|flax_model.*\.msgpack")
"""Names of weights that are not safetensors, of which a directory should not have both."""


@dataclass(frozen=True)
class Output:
    """A full checkpoint that is being written.

    Attributes:
        write: a function of a tensor's key, which is its slot in a torch file or its name in safetensors, and of the tensor.
        commit: a function that completes the files, makes them durable and puts them in their place.
    """

    write: Callable[[Any, torch.Tensor], None]
    commit: Callable[[], None]


@contextlib.contextmanager
def torch_output(target: Path, nonce: str, structure: Any) -> Iterator[Output]:
    """Give the output for one torch file; see :class:`~..format.torch_file.TorchFileWriter`.

    Raises:
        CheckpointError: `target` is a directory, or `structure` holds objects that could not be loaded again.
    """
    with contextlib.closing(Saving.begin(target, nonce, _refuse_directory)) as saving:
        writer = TorchFileWriter(saving.path / target.name, structure)

        def finish() -> None:
            writer.close()
            swap(saving.path / target.name, target)

        try:
            yield Output(writer.write, finish)
        finally:
            writer.abandon()


@contextlib.contextmanager
def safetensors_output(
    target: Path,
    nonce: str,
    entries: Mapping[str, tuple[torch.Size, torch.dtype]],
    tied: Mapping[str, str],
    max_shard_size: int,
) -> Iterator[Output]:
    """Give the output for one file, where `target` ends in ``.safetensors``, or else for a directory of such files.

    The other arguments are those of :class:`~..format.safetensors.SafetensorsWriter`.

    Raises:
        CheckpointError: something at `target` would be lost, or the format can't hold a dtype or a name.
        UnavailableError: the safetensors library is not installed.
    """
    single = target.name if target.suffix == ".safetensors" else None
    refuse = _refuse_to_lose if single is None else _refuse_directory
    with contextlib.closing(Saving.begin(target, nonce, refuse)) as saving:
        writer = SafetensorsWriter(saving.path, entries, tied=tied, max_shard_size=max_shard_size, single=single)

        def finish() -> None:
            writer.finish()
            if single is not None:
                swap(saving.path / single, target)
            else:
                commit(saving, target, _keep_others)
                saving.close()  # here, while the other ranks wait

        yield Output(writer.write, finish)


# -- what is at the target --------------------------------------------------------------------------------------------


def _refuse_directory(target: Path) -> None:
    """Raise if a file would replace a directory."""
    if target.is_dir():
        raise CheckpointError(f"{target} is a directory; give the name of a file in it.")


def _refuse_to_lose(target: Path) -> None:
    """Raise if a directory of safetensors would replace more than a model and the files beside it."""
    if os.path.lexists(target) and not target.is_dir():
        raise CheckpointError(
            f"{target} is a file, and the safetensors form is a directory. Give another path, one that ends in .safetensors, or "
            'format="torch".'
        )
    names = sorted(os.listdir(target)) if target.is_dir() else []
    if MANIFEST in names or METADATA in names:
        raise CheckpointError(f"{target} holds a sharded checkpoint, which would be lost. Give another path.")
    below = [name for name in names if (target / name).is_dir() and not (target / name).is_symlink()]
    if below:
        raise CheckpointError(
            f"{target} has directories in it ({', '.join(below[:3])}), and a save replaces it as a whole. Give another path."
        )
    other = [name for name in names if _OTHER_WEIGHTS.fullmatch(name)]
    if other:
        raise CheckpointError(
            f"{target} holds other weights ({', '.join(other[:3])}), so that it would not be clear which ones count. Delete "
            "them, or give another path."
        )


def _keep_others(old: Path, new: Path) -> None:
    """Put the files beside the weights (a configuration, a tokenizer) into the new directory, too.

    If `old` is a link, to a download cache say, its target stays as it is, and the new directory shares nothing with it.
    """
    for name in sorted(os.listdir(old)):
        if WEIGHTS.fullmatch(name) or os.path.lexists(new / name):
            continue
        if not old.is_symlink():
            try:
                os.link(old / name, new / name, follow_symlinks=False)
            except OSError:  # a file system without links
                shutil.copy2(old / name, new / name, follow_symlinks=False)
        elif (old / name).is_file():
            shutil.copy2(old / name, new / name)
        else:  # a link to a directory or to nothing, which may be relative to where it is
            os.symlink(os.path.realpath(old / name), new / name)
