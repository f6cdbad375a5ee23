"""What front ends need of checkpoints: sharded and full ones, the files and folders they are made of, and their steps."""

from __future__ import annotations

from ..checkpoint import PendingSave, load_contents, phases, save_contents
from ..checkpoint.contents import (
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
from ..checkpoint.files import make_durable
from ..checkpoint.folder import Saving, commit, discard, exchange, find, hidden, sees, sync, tidy
from ..checkpoint.full_files import open_full
from ..checkpoint.full_load import FullLoad, by_name
from ..checkpoint.others import all_parameters, plain_source
from ..checkpoint.phases import broadcast, each, gather
from ..checkpoint.read_contents import Contents, read_contents
from ..checkpoint.safetensors_files import size_of
from ..checkpoint.sliced import joined, mapped, split

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
