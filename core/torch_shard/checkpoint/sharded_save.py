"""Saving: every rank its slices, then one step that makes the checkpoint appear."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from .. import full_state
from ..errors import CheckpointError, ConfigError
from ..log import logger
from ..runtime import Runtime
from ..shard_tensor import ShardTensor
from .contents import EXTRA, MODEL, MODELS, OPTIMIZER, Optimizers, Source, optimizer_state, sources_of
from .dcp import METADATA
from .folder import Saving, commit, discard, hidden, pattern, prune, sees
from .manifest import MANIFEST, SAVE_ID, FileRecord, Manifest
from .phases import broadcast, each, gather, scatter
from .writer import ShardWriter, checksum_of

__all__ = ["save"]


def save(
    engine: Any,
    path: str | os.PathLike[str],
    optimizer: Any = None,
    *,
    extra: Any = None,
    models: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> None:
    """Write a checkpoint of `engine`'s model; see :meth:`torch_shard.Engine.save`. Collective."""
    runtime, what = engine._runtime, "engine.save"
    me = runtime.collectives.world_rank

    def prepare() -> tuple[Path, list[Source], dict[str, Any]]:
        target = _target(path, keep)
        sources = sources_of(engine, models)
        for source in sources:
            full_state.refuse_inside(source.runtime, what)
        contents = _contents(sources, Optimizers.of(optimizer))
        if extra is not None and me == 0:
            contents[EXTRA] = extra
        return target, sources, contents

    def settings(found: tuple[Path, list[Source], dict[str, Any]]) -> object:
        return str(found[0]), keep, sorted(found[2].keys() - {EXTRA})

    target, sources, contents = each(runtime, what, prepare, key=settings)
    versions = {".".join(source.path): _versions(_entry(contents, source.path)) for source in sources}
    nonce = broadcast(runtime, secrets.token_hex(8), what)
    beside = hidden(target, nonce)
    held: list[Saving] = []  # on rank 0
    done = False
    try:
        begin = functools.partial(Saving.begin, target, nonce)
        each(runtime, what, lambda: held.append(begin()) if me == 0 else None, nonce=f"{nonce}/begin")
        each(runtime, what, lambda: _check_shared(beside, nonce, me))
        planner, writer = _Planner(), ShardWriter(beside, save_id=SAVE_ID + nonce)
        plan, metadata = _plan(runtime, what, planner, writer, contents)
        results = each(runtime, what, lambda: _write(planner, writer, plan), nonce=f"{nonce}/write")
        everything = gather(runtime, (writer.name, writer.record, results), what)

        def finish() -> None:
            if everything is not None and metadata is not None:
                _finish(engine, sources, versions, beside, writer, metadata, everything)
                commit(held[0], target)

        each(runtime, what, finish, nonce=f"{nonce}/finish")
        done = True
        each(runtime, what, functools.partial(_tidy, runtime, target, nonce, keep), nonce=f"{nonce}/tidy")
    finally:
        for saving in held:
            saving.close(remove=not done)


def _target(path: str | os.PathLike[str], keep: int | None) -> Path:
    target = Path(os.path.abspath(os.fspath(path)))
    if not target.name:
        raise ConfigError(f"path: {path!r} is no place for a checkpoint; give a directory of its own.")
    if keep is not None:
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ConfigError(f"keep must be a number of checkpoints, at least 1, not {keep!r}.")
        if pattern(target.name) is None:
            raise ConfigError(
                f"keep: {target.name!r} has no number, so that no other checkpoint is its sibling; use step-100 or so."
            )
    return target


def _contents(sources: list[Source], optimizers: Optimizers) -> dict[str, Any]:
    contents: dict[str, Any] = {MODEL: full_state.own_state_dict(sources[0].model, sources[0].runtime)}
    for source in sources[1:]:
        own = full_state.own_state_dict(source.model, source.runtime)
        contents.setdefault(MODELS, {})[source.path[-1]] = own
    for where, held in optimizers.entries:
        found = optimizer_state(sources, held)
        if len(where) == 1:
            contents[OPTIMIZER] = found
        else:
            contents.setdefault(OPTIMIZER, {})[where[-1]] = found
    return contents


def _check_shared(folder: Path, nonce: str, rank: int) -> None:
    if not sees(folder, nonce):
        raise CheckpointError(
            f"rank {rank} does not see {folder}, which rank 0 has just made: the ranks don't share this path. Save to a file "
            "system that all nodes mount at the same place. Nothing was saved."
        )


# -- who writes what --------------------------------------------------------------------------------------------------


class _Planner(DefaultSavePlanner):
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


def _plan(
    runtime: Runtime, what: str, planner: _Planner, writer: ShardWriter, contents: dict[str, Any]
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


def _write(planner: _Planner, writer: ShardWriter, plan: SavePlan) -> list[WriteResult]:
    done: list[WriteResult] = writer.write_data(plan, planner).wait()
    return done


def _finish(
    engine: Any,
    sources: list[Source],
    versions: dict[str, dict[str, Any]],
    beside: Path,
    writer: ShardWriter,
    metadata: Metadata,
    everything: list[tuple[str, FileRecord | None, list[WriteResult]]],
) -> None:
    """Rank 0: metadata and manifest."""
    writer.finish(metadata, [results for _, _, results in everything])
    files = {name: record for name, record, _ in everything if record is not None}
    files[METADATA] = checksum_of(beside / METADATA)
    manifest = Manifest(
        id=str(writer.save_id),
        world_size=engine.world_size,
        strategy=engine.config.strategy,
        units=tuple(
            {"name": s.prefix + u.name, "parameters": [s.prefix + n for n in u.names]}
            for s in sources
            for u in s.runtime.units
        ),
        parameters=tuple(row for source in sources for row in _table(source)),
        module_versions=versions,
        files=files,
    )
    with open(beside / MANIFEST, "w", encoding="utf-8") as file:
        file.write(manifest.to_text())
        file.flush()
        os.fsync(file.fileno())


def _tidy(runtime: Runtime, target: Path, nonce: str, keep: int | None) -> None:
    """Delete what is not needed any more. The new checkpoint is there, so that failing here is no reason to fail."""
    rank = runtime.collectives.world_rank
    discard(target, nonce, rank, runtime.collectives.world)
    if keep is not None and rank == 0:
        try:
            prune(target, keep)
        except OSError as error:
            logger.warning("older checkpoints beside %s could not be removed: %s", target, error)


def _entry(contents: dict[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        contents = contents[key]
    return contents


def _versions(state: Any) -> dict[str, Any]:
    """The versions of the modules' own formats, which ``Module.load_state_dict`` asks for."""
    metadata = getattr(state, "_metadata", {})
    return {name: {"version": own["version"]} for name, own in metadata.items() if isinstance(own.get("version"), int)}


def _table(source: Source) -> list[dict[str, Any]]:
    return [
        {
            "name": source.prefix + name,
            "shape": list(p.shape),
            "dtype": str(p._local.dtype if isinstance(p, ShardTensor) else p.dtype).removeprefix("torch."),
            "trainable": p.requires_grad,
        }
        for name, p in source.model.named_parameters()
    ]
