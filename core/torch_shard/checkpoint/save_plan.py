"""Who writes what: torch's planner, agreed on by all ranks, and what objects look like in a file."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ..errors import CheckpointError
from ..runtime import Runtime
from .contents import EXTRA, OPTIMIZER
from .phases import each, gather, scatter
from .writer import ShardWriter

__all__ = ["SavePlanner", "agree_on_plan"]


class SavePlanner(DefaultSavePlanner):
    """torch's planner, with three differences: `extra` is one object, entries keep the order of the state dicts, and what is
    not sharded comes from the lowest rank that has it, since ranks need not agree on buffers."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        rest = {key: value for key, value in state_dict.items() if key != EXTRA}
        super().set_up_planner(rest, storage_meta, is_coordinator)
        for path, value in _empty_in(rest, ()):
            self.state_dict.setdefault(".".join(map(str, path)), value)
            self.mappings.setdefault(".".join(map(str, path)), path)
        if EXTRA in state_dict:
            self.state_dict[EXTRA] = state_dict[EXTRA]
            self.mappings[EXTRA] = (EXTRA,)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        seen: set[str] = set()
        plans = []
        for plan in all_plans:
            mine: list[WriteItem] = []
            for item in plan.items:
                if item.type == WriteItemType.SHARD:
                    mine.append(item)
                elif item.index.fqn not in seen:
                    seen.add(item.index.fqn)
                    mine.append(item)
            plans.append(dataclasses.replace(plan, items=mine))
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


def _empty_in(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Empty dicts within values, which torch's planner leaves out."""
    if not isinstance(value, Mapping):
        return
    inside = path[0] != OPTIMIZER or "state" in path[:-2] if path else False
    if not value and inside and len(path) > 1:
        yield path, {}
    for key, child in value.items():
        yield from _empty_in(child, (*path, str(key)))


def _object_bytes(name: str, value: Any) -> io.BytesIO:
    """An object as torch.save has it; refused where it would not be loaded again."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{name} can't be saved: {_reason(error)} Checkpoints hold tensors, numbers, strings, lists, tuples and dicts, since "
            "unpickling anything else can run code. Convert it (vars(namespace), value.item()), or allow its class when saving "
            "and loading with torch.serialization.add_safe_globals([Class])."
        ) from error
    file.seek(0)
    return file


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line]
    return f"{type(error).__name__}: {(lines or [str(error).strip()])[0]}"


def agree_on_plan(
    runtime: Runtime, what: str, planner: SavePlanner, writer: ShardWriter, contents: dict[str, Any]
) -> tuple[SavePlan, Metadata | None]:
    """Agree on who writes what: this rank's plan, and on rank 0 the metadata. Collective."""
    first = runtime.collectives.world_rank == 0

    def local() -> SavePlan:
        planner.set_up_planner(contents, writer.storage_meta(), first)
        writer.set_up_storage_writer(first)
        return writer.prepare_local_plan(planner.create_local_plan())

    own = each(runtime, what, local)
    plans = gather(runtime, own, what)

    def everyone() -> tuple[list[SavePlan], Metadata] | None:
        if plans is None:
            return None
        chosen, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(chosen), metadata

    made = each(runtime, what, everyone)
    mine = scatter(
        runtime, None if made is None else [dataclasses.replace(p, planner_data=None) for p in made[0]], what
    )
    return planner.finish_plan(mine), None if made is None else made[1]
