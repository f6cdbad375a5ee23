"""The plan of a save, by torch's planner: which rank writes which entry, and the bytes of objects."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.utils._pytree import tree_leaves

from ...comm.collective_steps import broadcast, each
from ...errors import CheckpointError
from ...runtime.runtime import Runtime
from ...shard_tensor.tensor import ShardTensor
from ...shard_tensor.wrapper_subclasses import is_wrapper
from ..format.torch_file import not_loadable
from .entries import EXTRA, OPTIMIZER


class SavePlanner(DefaultSavePlanner):
    """torch's save planner, with three differences.

    Values that its names can't express are one object each, entries keep the order of the state dicts, and entries that are not
    sharded come from the lowest rank that has them, since ranks need not agree on buffers.
    """

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(_expressible(state_dict, ()), storage_meta, is_coordinator)

    def digest(self) -> bytes:
        """Return a key that is equal on ranks that have the same entries; ``extra`` is rank 0's in any case."""
        names = [(name, path) for name, path in self.mappings.items() if path[0] != EXTRA]
        return hashlib.sha256(repr(names).encode()).digest()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        writers: dict[str, int] = {}  # of what is not sharded
        plans = []
        for rank, plan in enumerate(all_plans):
            items = [
                i for i in plan.items if i.type == WriteItemType.SHARD or writers.setdefault(i.index.fqn, rank) == rank
            ]
            plans.append(dataclasses.replace(plan, items=items))
        chosen, metadata = super().create_global_plan(plans)
        # Entries in the order of the state dicts, not by who writes them: optimizers' steps may depend on that of their state.
        paths: dict[str, Any] = {}
        for plan in all_plans:
            for name, path in plan.planner_data.items():
                paths.setdefault(name, path)
        entries = metadata.state_dict_metadata
        metadata.planner_data = paths
        metadata.state_dict_metadata = {name: entries[name] for name in paths if name in entries}
        return chosen, metadata

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type != WriteItemType.BYTE_IO:
            return object
        return _object_bytes(write_item.index.fqn, object)


class OneObject:
    """A value that is written as one object, whatever torch's planner would make of it."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _expressible(value: Any, path: tuple[str, ...]) -> Any:
    """Return nested values with one object in place of each container that would come back as another one.

    torch's planner leaves out empty ones and makes strings of all keys.
    """
    if path == (EXTRA,):
        return OneObject(value)
    if isinstance(value, Mapping):
        if not value and _is_value(path):
            return OneObject({})
        if all(isinstance(key, str) for key in value):
            return {key: _expressible(child, (*path, key)) for key, child in value.items()}
        if any(isinstance(leaf, ShardTensor) for leaf in tree_leaves(value)):
            odd = next(key for key in value if not isinstance(key, str))
            raise CheckpointError(
                f"{'.'.join(path)} has the key {odd!r}, and sharded tensors: such entries are saved by name, so that their keys "
                "must be strings."
            )
        return OneObject(dict(value))
    if isinstance(value, list):
        return [_expressible(child, (*path, str(i))) for i, child in enumerate(value)] or OneObject([])
    if is_wrapper(value):
        return OneObject(value)  # it has no memory of its own that could be written
    return value


def _is_value(path: tuple[str, ...]) -> bool:
    """Return True if a dict at this place is a value, and not a level of the layout (a parameter without state, say)."""
    if len(path) < 2:
        return False
    if path[0] != OPTIMIZER:
        return True
    return "state" in path[1:-2] or "param_groups" in path[1:-2]


def _object_bytes(name: str, value: Any) -> io.BytesIO:
    """Return the bytes of an object as torch.save writes it; raise if it would not be loaded again."""
    value = value.value if isinstance(value, OneObject) else value
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        if type(value) not in (int, float, bool, str, type(None)):  # which need no proof, and are most
            torch.load(file, weights_only=True)
    except Exception as error:
        raise not_loadable(name, error) from error
    file.seek(0)
    return file


def propose(runtime: Runtime, what: str, planner: SavePlanner, contents: dict[str, Any]) -> SavePlan:
    """Return the plan of the entries that this rank has, without those that rank 0 has, too. Collective."""
    first = runtime.collectives.world_rank == 0

    def local() -> SavePlan:
        planner.set_up_planner(contents, is_coordinator=first)
        return planner.create_local_plan()

    own, digest = each(runtime, what, local), planner.digest()
    if broadcast(runtime, digest, what) != digest or first:
        return own
    # Rank 0 has the same entries, and writes all that are not sharded: without them the messages to it are short.
    items = [item for item in own.items if item.type == WriteItemType.SHARD]
    return dataclasses.replace(own, items=items, planner_data={})


def decide(planner: SavePlanner, proposals: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Return the plan of each rank, with its file's name, and the metadata of the checkpoint. On rank 0; not collective."""
    chosen, metadata = planner.create_global_plan(proposals)
    # The names of entries are the metadata's, and as long as all plans together.
    names = (f"__{rank}_0.distcp" for rank in range(len(chosen)))
    return [
        dataclasses.replace(p, planner_data=None, storage_data=n) for p, n in zip(chosen, names, strict=True)
    ], metadata
