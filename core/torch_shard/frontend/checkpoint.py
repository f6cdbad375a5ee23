"""What front ends need of checkpoints: sharded and full ones, the files and folders they are made of, and their steps."""

from __future__ import annotations

from ..checkpoint import PendingSave, load_contents, save_contents
from ..checkpoint.format.atomic_directory import Saving, commit, discard, exchange, find, hidden, sees, sync, tidy
from ..checkpoint.format.fileio import make_durable
from ..checkpoint.format.safetensors import size_of
from ..checkpoint.full.load import FullLoad, by_name
from ..checkpoint.full.open_files import open_full
from ..checkpoint.plain_params import all_parameters, plain_source
from ..checkpoint.sharded.entries import (
    EXTRA,
    MODEL,
    MODELS,
    OPTIMIZER,
    SLICED,
    Optimizers,
    Source,
    optimizer_state,
    param_names,
    sources_of,
)
from ..checkpoint.sharded.extra_shards import joined, mapped, split
from ..checkpoint.sharded.read_tree import Contents, read_contents
from ..comm import collective_steps as phases
from ..comm.collective_steps import broadcast, each, gather

__all__ = [
    "EXTRA",
    "MODEL",
    "MODELS",
    "OPTIMIZER",
    "SLICED",
    "Contents",
    "FullLoad",
    "Optimizers",
    "PendingSave",
    "Saving",
    "Source",
    "all_parameters",
    "broadcast",
    "by_name",
    "commit",
    "discard",
    "each",
    "exchange",
    "find",
    "gather",
    "hidden",
    "joined",
    "load_contents",
    "make_durable",
    "mapped",
    "open_full",
    "optimizer_state",
    "param_names",
    "phases",
    "plain_source",
    "read_contents",
    "save_contents",
    "sees",
    "size_of",
    "sources_of",
    "split",
    "sync",
    "tidy",
]
