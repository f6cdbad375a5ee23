"""Saving a sharded checkpoint: each rank writes its shards, and then the checkpoint appears in one step."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from ...comm.collective_steps import broadcast, each, heartbeat_barrier, uncollected
from ...comm.collectives import Collectives
from ...comm.heartbeat_barrier import HeartbeatBarrier
from ...errors import CheckpointError, ConfigError
from ...log import logger
from ...runtime.runtime import Runtime
from ...shard_tensor.tensor import ShardTensor
from ...state import model_state
from ...utils.patterns import without_wrappers
from ..format.atomic_directory import Saving, check_shared, commit, hidden, prune, sibling_pattern, target_of
from ..format.dcp_metadata import METADATA
from ..format.manifest import SAVE_ID, FileRecord, Manifest, parameter_row, versions_of
from ..ports import EnginePort
from .async_save import PendingSave
from .entries import EXTRA, OPTIMIZER, Optimizers, Source, optimizer_state, optimizers_of, sources_of
from .entry_tree import leaves, place
from .host_snapshot import SnapshotMemory
from .save_plan import SavePlanner, decide, propose
from .writer import write_file, write_manifest, write_metadata


class _Part(NamedTuple):
    """The part of a checkpoint that one rank has written.

    Attributes:
        file: the name of the rank's file.
        record: what the manifest says of the file; None if there was nothing to write.
        results: what DCP's metadata says of the entries in the file.
        unsharded: the rank's entries of optimizer state that have their parameter's shape, but are not sharded.
    """

    file: str
    record: FileRecord | None
    results: list[WriteResult]
    unsharded: tuple[str, ...]


def save(
    engine: EnginePort,
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
        contents = _contents(sources, optimizers_of(optimizer))
        if extra is not None:
            contents[EXTRA] = extra
        return sources, contents

    return _save(engine, path, prepare, keep, asynchronous)


def save_contents(
    engine: EnginePort,
    path: str | os.PathLike[str],
    contents: Mapping[str, Any],
    *,
    sources: Sequence[Source] | None,
    asynchronous: bool = False,
) -> PendingSave | None:
    """Write a checkpoint of given contents, as :func:`save` does. Collective; for front ends.

    Args:
        engine: the engine whose ranks write.
        sources: the models that the manifest describes; None for the engine's.
        path, asynchronous: the arguments of :meth:`torch_shard.Engine.save`.
        contents: tensors, ShardTensors and objects by the names of :mod:`.entries`, the same on all ranks. Rank 0's ``extra``
            is saved.
    """

    def prepare() -> tuple[list[Source], dict[str, Any]]:
        return sources_of(engine, None) if sources is None else list(sources), dict(contents)

    return _save(engine, path, prepare, None, asynchronous)


def _save(
    engine: EnginePort,
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
        target, contents, _ = found
        return str(target), keep, asynchronous, sorted(contents.keys() - {EXTRA})

    with uncollected():
        target, contents, facts = each(runtime, what, begin, key=settings)
    nonce = broadcast(runtime, secrets.token_hex(8), what)
    work = _Save(target, nonce, keep, facts, runtime.collectives)
    pending: PendingSave | None = None
    try:
        each(runtime, what, work.begin, nonce=f"{nonce}/begin")
        each(runtime, what, lambda: check_shared(work.beside, work.rank))
        with uncollected():
            work.proposal = propose(runtime, what, work.planner, contents)
        barrier = heartbeat_barrier(runtime, f"{nonce}/parts", own_connection=asynchronous)
        if asynchronous:
            staging = engine._staging = engine._staging or SnapshotMemory()
            each(runtime, what, lambda: work.stage(staging), nonce=f"{nonce}/stage")
            pending = engine._pending = _start(runtime, what, work, barrier)
        else:
            with uncollected():
                each(runtime, what, lambda: _carry_out(work, barrier))
    finally:
        if pending is None:
            work.close()
    return pending


def _carry_out(work: _Save, barrier: HeartbeatBarrier | None) -> None:
    with _alive(barrier):
        error = work.carry_out(barrier)
    if error is not None:
        raise error


def _start(runtime: Runtime, what: str, work: _Save, barrier: HeartbeatBarrier | None) -> PendingSave:
    """Start a thread on each rank, in which the save is carried out. Collective."""
    made: list[PendingSave] = []

    def start() -> None:
        made.append(PendingSave(work.target, lambda: work.carry_out(barrier), _alive(barrier)))

    try:
        each(runtime, what, start)
    except BaseException:
        for started in made:
            started.cancel()
        raise
    made[0].begin()
    return made[0]


def _alive(barrier: HeartbeatBarrier | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if barrier is None else barrier.heartbeat()


class _Save:
    """One save on one rank, from its snapshot of the state or from the live state.

    No method is collective except :meth:`carry_out`, and only rank 0 makes a checkpoint of the parts.
    """

    def __init__(
        self, target: Path, nonce: str, keep: int | None, facts: dict[str, Any], collectives: Collectives
    ) -> None:
        self.target, self.nonce, self.keep, self.facts = target, nonce, keep, facts
        self.rank, self.world = collectives.world_rank, collectives.world
        self.beside = hidden(target, nonce)
        self.planner, self.save_id = SavePlanner(), SAVE_ID + nonce
        self.proposal = SavePlan([])
        self.resolve: Callable[[WriteItem], Any] = self.planner.resolve_data
        self.saving: Saving | None = None

    def begin(self) -> None:
        """Make the directory, on rank 0."""
        if self.rank == 0:
            siblings = None if self.keep is None else sibling_pattern(self.target.name)
            self.saving = Saving.begin(self.target, self.nonce, siblings=siblings)

    def stage(self, staging: SnapshotMemory) -> None:
        """Copy what this rank has proposed, and write the copy from now on."""
        data = [self.resolve(item) for item in self.proposal.items]
        copies = iter(staging.snapshot([value for value in data if isinstance(value, torch.Tensor)]))
        # By index, because the items of the final plan are other objects, which rank 0 sends.
        held = {
            item.index: next(copies) if isinstance(value, torch.Tensor) else value
            for item, value in zip(self.proposal.items, data, strict=True)
        }
        self.resolve = lambda item: held[item.index]

    def carry_out(self, barrier: HeartbeatBarrier | None) -> CheckpointError | None:
        """Write all parts and put them together; return what went wrong on any rank. Collective, through the store alone.

        Args:
            barrier: the barrier of the ranks, on which this rank's heartbeat is sent; None if there is one rank.
        """
        try:
            problem = self._lead(barrier) if barrier is None or barrier.rank == 0 else self._follow(barrier)
        except Exception as error:  # the store is gone, or a rank
            problem = _text(error)
        self.close()
        if problem is None:
            return None
        return CheckpointError(
            f"the save to {self.target} failed: {problem} Nothing in training was changed, and if there is a checkpoint at that "
            "path, it is complete. Save again."
        )

    def _lead(self, barrier: HeartbeatBarrier | None) -> str | None:
        """Decide who writes what, write rank 0's part, and make the checkpoint of all parts."""
        others = range(1, self.world)

        def answers(what: str) -> list[Any]:
            return [] if barrier is None else [pickle.loads(barrier.read(what, rank)) for rank in others]

        plans: list[Any] = [None] * self.world
        problem: str | None = None
        try:
            plans, metadata = decide(self.planner, [self.proposal, *answers("proposal")])
        except Exception as error:
            problem = _text(error)
        if barrier is not None:
            for rank in others:
                barrier.post(f"plan of rank {rank}", pickle.dumps(plans[rank]))
        if problem is None:
            try:
                written = [self._written(plans[0]), *answers("written")]
                problem = "; ".join(text for text, _ in written if text is not None) or None
                if problem is None:
                    self.finish(metadata, [part for _, part in written])
            except Exception as error:
                problem = _text(error)
        if barrier is not None:
            barrier.post("outcome", pickle.dumps(problem))
            with contextlib.suppress(Exception):  # wait, because the store may end with this process
                barrier.wait("heard", list(others))
                barrier.forget("proposal", "written", "heard")
        return problem

    def _follow(self, barrier: HeartbeatBarrier) -> str | None:
        """Write this rank's part, and learn from rank 0 what became of the save."""
        barrier.post("proposal", pickle.dumps(self.proposal))
        plan = pickle.loads(barrier.read(f"plan of rank {self.rank}", 0))
        if plan is not None:
            barrier.post("written", pickle.dumps(self._written(plan)))
        problem: str | None = pickle.loads(barrier.read("outcome", 0))
        barrier.forget()
        barrier.post("heard")
        return problem

    def _written(self, plan: SavePlan) -> tuple[str | None, _Part | None]:
        """Write this rank's part; return what went wrong, and the part."""
        try:
            return None, self.write(plan)
        except Exception as error:
            return f"rank {self.rank}: {_text(error)}", None

    def write(self, plan: SavePlan) -> _Part:
        """Write this rank's file."""
        record, results = write_file(self.beside, plan, self.resolve)
        return _Part(str(plan.storage_data), record, results, self.facts["whole"])

    def finish(self, metadata: Metadata, parts: list[_Part]) -> None:
        """Write metadata and manifest, put the directory in its place, and delete the siblings beyond `keep`. On rank 0."""
        assert self.saving is not None
        files = {part.file: part.record for part in parts if part.record is not None}
        files[METADATA] = write_metadata(self.beside, metadata, [part.results for part in parts], self.save_id)
        # Ranks need not have the same state: of optimizers that step on full matrices each has that of some parameters.
        unsharded = tuple(dict.fromkeys(name for part in parts for name in part.unsharded))
        write_manifest(self.beside, Manifest(id=self.save_id, files=files, **{**self.facts, "whole": unsharded}))
        commit(self.saving, self.target)
        # The new checkpoint is in place: a failure to delete an older one is only logged.
        self.saving.close()
        if self.keep is not None:
            try:
                prune(self.target, self.keep)
            except OSError as error:
                logger.warning("older checkpoints beside %s could not be removed: %s", self.target, error)

    def close(self) -> None:
        """Delete the incomplete checkpoint, if the save has failed."""
        if self.saving is not None:
            self.saving.close()


def _text(error: Exception) -> str:
    text = str(error) if isinstance(error, (CheckpointError, OSError)) else f"{type(error).__name__}: {error}"
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _target(path: str | os.PathLike[str], keep: int | None) -> Path:
    target = target_of(path)
    if keep is not None:
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ConfigError(f"keep must be a number of checkpoints, at least 1, not {keep!r}.")
        if sibling_pattern(target.name) is None:
            raise ConfigError(
                f"keep: {target.name!r} has no number, so that no other checkpoint is its sibling; use step-100 or so."
            )
    return target


def _contents(sources: list[Source], optimizers: Optimizers) -> dict[str, Any]:
    contents: dict[str, Any] = {}
    for source in sources:
        place(contents, source.path, model_state.own_state_dict(source.model, source.runtime))
    for where, held in optimizers:
        place(contents, where, optimizer_state(sources, held))
    return contents


def _facts(engine: EnginePort, sources: list[Source], contents: dict[str, Any]) -> dict[str, Any]:
    """Return what the manifest says of the model and its engine, as they are now."""
    return {
        "world_size": engine._runtime.collectives.world,
        "strategy": engine.config.strategy,
        "units": tuple(
            {"name": s.prefix + u.name, "parameters": [s.prefix + without_wrappers(n) for n in u.names]}
            for s in sources
            for u in s.runtime.units
        ),
        "parameters": tuple(row for source in sources for row in _table(source, _entry(contents, source.path))),
        "whole": tuple(_unsharded_state(sources, contents)),
        "module_versions": {".".join(source.path): versions_of(_entry(contents, source.path)) for source in sources},
    }


def _unsharded_state(sources: list[Source], contents: dict[str, Any]) -> Iterator[str]:
    """Yield the names of optimizer state that has its parameter's shape, but is not sharded: each rank has all of it."""
    params = (item for source in sources for item in source.params().items())
    shapes = {name: p.shape for name, p in params if isinstance(p, ShardTensor)}

    optimizer = contents.get(OPTIMIZER, {})
    several = {} if "param_groups" in optimizer else optimizer
    for base, own in (several or {"": optimizer}).items():
        for name, entries in own.get("state", {}).items():
            for path, value in leaves(entries) if name in shapes else ():
                is_full = isinstance(value, torch.Tensor) and not isinstance(value, ShardTensor)
                if is_full and value.shape == shapes[name]:
                    yield ".".join(filter(None, (OPTIMIZER, base, "state", name, *map(str, path))))


def _entry(contents: dict[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        contents = contents.get(key, {})
    return contents


def _table(source: Source, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what the manifest says of the parameters that are saved. Hooks and filters may leave out or convert some."""
    trainable = {without_wrappers(name): p.requires_grad for name, p in source.model.named_parameters()}
    return [
        parameter_row(
            source.prefix + name,
            value.shape,
            value._local.dtype if isinstance(value, ShardTensor) else value.dtype,
            trainable[name],
        )
        for name, value in saved.items()
        if name in trainable and isinstance(value, torch.Tensor)
    ]
