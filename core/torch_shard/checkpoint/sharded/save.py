"""Saving: every rank its shards, then one step that makes the checkpoint appear."""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from ...comm.collective_steps import broadcast, each, gather, heartbeat_barrier, scatter, uncollected
from ...errors import CheckpointError, ConfigError
from ...log import logger
from ...shard_tensor.tensor import ShardTensor
from ...state import model_state
from ..format.atomic_directory import Saving, commit, discard, hidden, pattern, prune, sees
from ..format.dcp_metadata import METADATA
from ..format.manifest import SAVE_ID, FileRecord, Manifest
from .async_save import PendingSave
from .entries import EXTRA, MODEL, MODELS, OPTIMIZER, Optimizers, Source, optimizer_state, sources_of
from .host_snapshot import Staging
from .save_plan import SavePlanner, decide, propose
from .writer import write_file, write_manifest, write_metadata

__all__ = ["save", "save_contents"]

# A rank's file, what it holds, where, and which entries are not sharded.
_Part = tuple[str, FileRecord | None, list[WriteResult], tuple[str, ...]]


def save(
    engine: Any,
    path: str | os.PathLike[str],
    optimizer: Any = None,
    *,
    extra: Any = None,
    models: Mapping[str, Any] | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> PendingSave | None:
    """Write a checkpoint of `engine`'s model; see :meth:`torch_shard.Engine.save`. Collective."""

    def prepare() -> tuple[list[Source], dict[str, Any]]:
        sources = sources_of(engine, models)
        contents = _contents(sources, Optimizers.of(optimizer))
        if extra is not None:
            contents[EXTRA] = extra
        return sources, contents

    return _save(engine, path, prepare, keep, asynchronous)


def save_contents(
    engine: Any,
    path: str | os.PathLike[str],
    contents: Mapping[str, Any],
    *,
    sources: Sequence[Source] | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> PendingSave | None:
    """Write a checkpoint that holds what is given, as :func:`save` does. Collective; for front ends.

    Args:
        engine: its ranks write.
        sources: the models that the manifest describes, the engine's by default.
        path, keep, asynchronous: as for :meth:`torch_shard.Engine.save`.
        contents: by :mod:`.entries`'s names, the same on all ranks; tensors, ShardTensors and objects. ``extra`` counts on
            rank 0.
    """

    def prepare() -> tuple[list[Source], dict[str, Any]]:
        return sources_of(engine, None) if sources is None else list(sources), dict(contents)

    return _save(engine, path, prepare, keep, asynchronous)


def _save(
    engine: Any,
    path: str | os.PathLike[str],
    prepare: Callable[[], tuple[list[Source], dict[str, Any]]],
    keep: int | None,
    asynchronous: bool,
) -> PendingSave | None:
    runtime, what = engine._runtime, "engine.save"
    me = runtime.collectives.world_rank

    def begin() -> tuple[Path, dict[str, Any], dict[str, Any]]:
        engine.finish_saving()
        target = _target(path, keep)
        sources, contents = prepare()
        for source in sources:
            model_state.refuse_inside(source.runtime, what)
        if me:
            contents.pop(EXTRA, None)
        return target, contents, _facts(engine, sources, contents)

    def settings(found: tuple[Path, dict[str, Any], dict[str, Any]]) -> object:
        return str(found[0]), keep, asynchronous, sorted(found[1].keys() - {EXTRA})

    with uncollected():
        target, contents, facts = each(runtime, what, begin, key=settings)
    nonce = broadcast(runtime, secrets.token_hex(8), what)
    work = _Save(target, nonce, keep, facts, runtime.collectives)
    pending: PendingSave | None = None
    try:
        each(runtime, what, work.begin, nonce=f"{nonce}/begin")
        each(runtime, what, work.check_shared)
        with uncollected():
            work.proposal = propose(runtime, what, work.planner, contents)
        if asynchronous:
            staging = engine._staging = engine._staging or Staging()
            each(runtime, what, lambda: work.stage(staging), nonce=f"{nonce}/stage")
            pending = engine._pending = _start(runtime, what, work)
        else:
            _write(runtime, what, work)
    finally:
        if pending is None:
            work.close(work.committed)
    return pending


def _write(runtime: Any, what: str, work: _Save) -> None:
    """Do all that remains, now."""
    with uncollected():
        proposals = gather(runtime, work.proposal, what)
        plans = each(runtime, what, lambda: None if proposals is None else work.decide(proposals))
        plan = scatter(runtime, plans, what)
    own = each(runtime, what, lambda: work.write(plan), nonce=f"{work.nonce}/write")
    parts = gather(runtime, own, what)
    each(runtime, what, lambda: None if parts is None else work.finish(parts), nonce=f"{work.nonce}/finish")


def _start(runtime: Any, what: str, work: _Save) -> PendingSave:
    """Do all that remains in a thread of each rank."""
    barrier = heartbeat_barrier(runtime, f"{work.nonce}/pending", own_connection=True)
    made: list[PendingSave] = []
    try:
        each(runtime, what, lambda: made.append(PendingSave(work.target, barrier, work)))
    except BaseException:
        for started in made:
            started.cancel()
        raise
    made[0].begin()
    return made[0]


class _Save:
    """One save on one rank. Nothing here is collective, and only what rank 0 does makes a checkpoint of the parts."""

    def __init__(self, target: Path, nonce: str, keep: int | None, facts: dict[str, Any], collectives: Any) -> None:
        self.target, self.nonce, self.keep, self.facts = target, nonce, keep, facts
        self.rank, self.world = collectives.world_rank, collectives.world
        self.beside = hidden(target, nonce)
        self.planner, self.save_id = SavePlanner(), SAVE_ID + nonce
        self.proposal = SavePlan([])
        self.source: SavePlanner | _Staged = self.planner
        self.metadata: Metadata | None = None  # on rank 0
        self.saving: Saving | None = None
        self.committed = False

    def begin(self) -> None:
        """Make the directory, on rank 0."""
        if self.rank == 0:
            self.saving = Saving.begin(self.target, self.nonce)

    def check_shared(self) -> None:
        """Raise where this rank has another directory of that name, or none."""
        if not sees(self.beside, self.nonce):
            raise CheckpointError(
                f"rank {self.rank} does not see {self.beside}, which rank 0 has just made: the ranks don't share this path. Save "
                "to a file system that all nodes mount at the same place. Nothing was saved."
            )

    def stage(self, staging: Staging) -> None:
        """Go on with a copy of what this rank has proposed."""
        self.source = _Staged(staging, self.planner, self.proposal)

    def decide(self, proposals: list[SavePlan]) -> list[SavePlan]:
        """Decide on rank 0 who writes what."""
        plans, self.metadata = decide(self.planner, proposals)
        return plans

    def write(self, plan: SavePlan) -> _Part:
        """Write this rank's file."""
        record, results = write_file(self.beside, plan, self.source)
        return str(plan.storage_data), record, results, self.facts["whole"]

    def finish(self, parts: list[_Part]) -> None:
        """Write metadata and manifest, and put the directory in its place; delete what `keep` says. On rank 0."""
        assert self.saving is not None and self.metadata is not None
        files = {name: record for name, record, _, _ in parts if record is not None}
        results = [results for _, _, results, _ in parts]
        files[METADATA] = write_metadata(self.beside, self.metadata, results, self.save_id)
        # Ranks need not have the same state: of optimizers that step on whole matrices each has some parameters'.
        whole = tuple(dict.fromkeys(name for *_, names in parts for name in names))
        write_manifest(self.beside, Manifest(id=self.save_id, files=files, **{**self.facts, "whole": whole}))
        commit(self.saving, self.target)
        self.committed = True  # whatever fails now is no reason to fail
        discard(self.target, self.nonce)
        if self.keep is not None:
            try:
                prune(self.target, self.keep)
            except OSError as error:
                logger.warning("older checkpoints beside %s could not be removed: %s", self.target, error)

    def close(self, done: bool) -> None:
        """Let go; without a checkpoint delete what was written in vain."""
        if self.saving is not None:
            self.saving.close(remove=not done)


class _Staged:
    """A snapshot of what a rank has proposed to write, in place of a planner that looks at the live state."""

    def __init__(self, staging: Staging, planner: SavePlanner, proposal: SavePlan) -> None:
        data = [planner.resolve_data(item) for item in proposal.items]
        tensors = [value for value in data if isinstance(value, torch.Tensor)]
        copies = iter(staging.snapshot(tensors))
        copied = [next(copies) if isinstance(value, torch.Tensor) else value for value in data]
        # By index, which is what a planner goes by, too: rank 0 sends each rank its items anew.
        self._held = {item.index: value for item, value in zip(proposal.items, copied, strict=True)}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the copy of an item of that proposal."""
        return self._held[write_item.index]


def _target(path: str | os.PathLike[str], keep: int | None) -> Path:
    target = Path(os.path.abspath(os.fsdecode(path)))
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
    contents: dict[str, Any] = {MODEL: model_state.own_state_dict(sources[0].model, sources[0].runtime)}
    for source in sources[1:]:
        own = model_state.own_state_dict(source.model, source.runtime)
        contents.setdefault(MODELS, {})[source.path[-1]] = own
    for where, held in optimizers.entries:
        found = optimizer_state(sources, held)
        if len(where) == 1:
            contents[OPTIMIZER] = found
        else:
            contents.setdefault(OPTIMIZER, {})[where[-1]] = found
    return contents


def _facts(engine: Any, sources: list[Source], contents: dict[str, Any]) -> dict[str, Any]:
    """Return what the manifest says of the model and its engine, as they are now."""
    return {
        "world_size": engine.world_size,
        "strategy": engine.config.strategy,
        "units": tuple(
            {"name": s.prefix + u.name, "parameters": [s.prefix + n for n in u.names]}
            for s in sources
            for u in s.runtime.units
        ),
        "parameters": tuple(row for source in sources for row in _table(source)),
        "whole": tuple(_unsharded_state(sources, contents)),
        "module_versions": {".".join(source.path): _versions(_entry(contents, source.path)) for source in sources},
    }


def _unsharded_state(sources: list[Source], contents: dict[str, Any]) -> Iterator[str]:
    """Return entries of optimizer state that have their parameter's shape, but are not sharded: each rank has all of them."""
    shapes = {
        source.prefix + name: p.shape
        for source in sources
        for unit in source.runtime.units
        for name, p in zip(unit.names, unit.params, strict=True)
    }

    def within(value: Any, path: str, shape: torch.Size) -> Iterator[str]:
        if isinstance(value, torch.Tensor):
            if not isinstance(value, ShardTensor) and value.shape == shape:
                yield path
        elif isinstance(value, (dict, list)):
            for key, child in value.items() if isinstance(value, dict) else enumerate(value):
                yield from within(child, f"{path}.{key}", shape)

    optimizer = contents.get(OPTIMIZER, {})
    several = {} if "param_groups" in optimizer else optimizer
    for base, own in (several or {"": optimizer}).items():
        for name, entries in own.get("state", {}).items():
            if name in shapes:
                yield from within(entries, ".".join(filter(None, (OPTIMIZER, base, "state", name))), shapes[name])


def _entry(contents: dict[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        contents = contents.get(key, {})
    return contents


def _versions(state: Any) -> dict[str, Any]:
    """Return the versions of the modules' own formats, which ``Module.load_state_dict`` asks for."""
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
