"""Writing a checkpoint of any format as a sharded one, by one process that holds one tensor at a time."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ...errors import CheckpointError
from ...state.optimizer_state import OTHER
from ..format.atomic_directory import Saving, commit
from ..format.dcp_metadata import METADATA
from ..format.fileio import Progress
from ..format.manifest import SAVE_ID, FileRecord, Manifest, parameter_row
from ..sharded.entries import EXTRA, MODEL, MODELS, OPTIMIZER
from ..sharded.entry_tree import SavedOptimizer, Stored, leaves, map_leaves, on_meta
from ..sharded.save_plan import OneObject, SavePlanner, decide
from ..sharded.writer import Deferred, write_file, write_manifest, write_metadata
from .classify import Parts, merged
from .open_any import Opened


def write_sharded(opened: Opened, parts: Parts, target: Path, progress: Progress) -> None:
    """Write a sharded checkpoint of one rank, which ``engine.load`` reads. Not collective.

    Args:
        opened: the checkpoint.
        parts: its contents, as far as they are to be written.
        target: a directory. A checkpoint at this path is replaced once the new one is complete.
        progress: told the bytes of each tensor that has been read.

    Raises:
        CheckpointError: an entry is damaged, or something else than a checkpoint is at the target.
        OSError: the disk is full, for instance. Then nothing is left at the target.
    """
    nonce = secrets.token_hex(8)
    with contextlib.closing(Saving.begin(target, nonce)) as saving:
        planner = _Planner(progress)
        planner.set_up_planner(planner.contents(parts), is_coordinator=True)
        (plan,), metadata = decide(planner, [planner.create_local_plan()])
        plan = planner.finish_plan(plan)
        planner.check(plan)
        save_id = SAVE_ID + nonce
        record, results = write_file(saving.path, plan, planner.resolve_data)
        files = {str(plan.storage_data): record} if record is not None else {}
        files[METADATA] = write_metadata(saving.path, metadata, [results], save_id)
        write_manifest(saving.path, _manifest(opened, parts, save_id, files))
        commit(saving, target)


class _Planner(SavePlanner):
    """A planner that plans with proxies, and reads each tensor when it is written."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress
        self.stored: dict[int, Stored] = {}  # by the id of the proxy

    def proxy(self, stored: Stored) -> torch.Tensor:
        """Return a meta tensor that stands for a stored one."""
        made = on_meta(stored)
        self.stored[id(made)] = stored
        return made

    def check(self, plan: SavePlan) -> None:
        """Raise if a tensor is not in the plan, since a proxy within an object would be written as nothing."""
        planned = {id(self.state_dict[item.index.fqn]) for item in plan.items}
        lost = [stored.name for number, stored in self.stored.items() if number not in planned]
        if lost:
            raise CheckpointError(f"{lost[0]} has no place in a sharded checkpoint ({len(lost)} tensors in all).")

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return what is written for an item of the plan."""
        stored = self.stored.get(id(self.state_dict[write_item.index.fqn]))
        if stored is None:
            return super().resolve_data(write_item)

        def read() -> torch.Tensor:
            value = stored.read()
            self.progress(stored.nbytes)
            return value

        # Tied tensors have the same place in the other checkpoint.
        return Deferred(stored.place, read)

    def contents(self, parts: Parts) -> dict[str, Any]:
        """Return a checkpoint's contents in the form of :mod:`..sharded.entries`, with proxies for tensors."""
        found: dict[str, Any] = {MODEL: self.fill(parts.model)} if parts.model else {}
        if parts.models:
            found[MODELS] = {name: self.fill(model) for name, model in parts.models.items()}
        if parts.listed and not parts.lightning:  # as engine.save writes a list; Lightning has optimizers by number
            found[OPTIMIZER] = self.optimizer(merged(parts))
        elif parts.optimizers:
            optimizers = {name: self.optimizer(own) for name, own in parts.optimizers.items()}
            found[OPTIMIZER] = optimizers.get("", optimizers)
        extra, small = parts.extra, {}
        for key, value in parts.other.items():
            # engine.load returns `extra`, so objects belong there, unless they would replace it or a part of it. Tensors do not,
            # since they would all be in memory at once.
            has_tensors = any(isinstance(leaf, Stored) for _, leaf in leaves(value))
            if not has_tensors and (extra is None or (isinstance(extra, dict) and key not in extra)):
                small[key] = value
                continue
            if str(key) in found or str(key) == EXTRA:
                raise CheckpointError(
                    f"the checkpoint has an entry {key!r} beside its {key}, and a sharded one has one place for both. Rename it, "
                    "or pass --model-only."
                )
            found[str(key)] = self.fill(value) if has_tensors else OneObject(value)
        if small:
            extra = {**small, **(extra or {})}
        if extra is not None:
            found[EXTRA] = _read(extra)
        return found

    def fill(self, tree: Any) -> Any:
        """Return nested values with proxies for tensors."""
        if isinstance(tree, Stored):
            return self.proxy(tree)
        if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
            return {key: self.fill(value) for key, value in tree.items()}
        if isinstance(tree, list):
            return [self.fill(value) for value in tree]
        # A dict with other keys, which have no names in a checkpoint, is one object with its tensors.
        return _read(tree)

    def optimizer(self, own: SavedOptimizer) -> dict[str, Any]:
        """Return an optimizer's state dict, by name if the names are known."""
        found: dict[str, Any] = {}
        if own.of_parameter:  # torch's flattened form has no groups
            for kind, table in (("state", own.state), ("param_groups", own.of_parameter)):
                for name, entries in table.items():
                    found.update({f"{kind}.{name}.{key}": self.fill(value) for key, value in entries.items()})
            return found
        groups = [self.fill(group) for group in own.groups]
        names = _given_names(own, groups)
        for group in groups:
            group["params"] = [names.get(str(p), p) for p in group.get("params", ())]
        found["state"] = {names.get(name, name): self.fill(entries) for name, entries in own.state.items()}
        found["param_groups"] = groups
        if own.other is not None:
            found[OTHER] = own.other
        return found


def _given_names(own: SavedOptimizer, groups: list[dict[str, Any]]) -> dict[str, str]:
    """Return the parameters' names by number, if the groups have them, since the optimizer was made of named parameters."""
    if not own.is_numbered or not all(len(g.get("param_names", ())) == len(g.get("params", ())) for g in groups):
        return {}
    return {str(p): name for g in groups for p, name in zip(g["params"], g.get("param_names", ()), strict=True)}


def _read(tree: Any) -> Any:
    """Return nested values with their tensors read into memory."""
    return map_leaves(tree, lambda leaf: leaf.read().clone() if isinstance(leaf, Stored) else leaf)


def _manifest(opened: Opened, parts: Parts, save_id: str, files: dict[str, FileRecord]) -> Manifest:
    old = opened.manifest
    known = None if old is None else {row["name"]: row for row in old.parameters}
    models = {**parts.model, **{f"{m}.{name}": v for m, own in parts.models.items() for name, v in own.items()}}
    # Without a manifest the other checkpoint does not distinguish parameters from buffers.
    table = [
        parameter_row(name, value.shape, value.dtype, None if known is None else known[name]["trainable"])
        for name, value in models.items()
        if isinstance(value, Stored) and (known is None or name in known)
    ]
    names = [row["name"] for row in table]
    return Manifest(
        id=save_id,
        world_size=1,
        strategy=old.strategy if old is not None else "no_shard",
        units=old.units if old is not None else ({"name": "", "parameters": names},),
        parameters=tuple(table),
        module_versions=old.module_versions if old is not None else {MODEL: opened.module_versions},
        files=files,
    )
