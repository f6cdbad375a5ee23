"""Reading a checkpoint as nested dicts, for callers whose users edit these before they are loaded."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...comm.collective_steps import broadcast, each
from ...errors import StateDictError
from ...state.param_names import names_by_group
from ..ports import EnginePort
from .checkpoint_dir import Checkpoint, Unpickle
from .entries import EXTRA, EXTRA_SHARDS, MODEL, MODELS, OPTIMIZER, Source, param_names, sources_of
from .entry_tree import (
    SavedOptimizer,
    Stored,
    StoredObject,
    is_optimizer,
    leaves,
    map_leaves,
    new_tensor,
    optimizer_at,
    tree_of,
    unwrapped,
)
from .saved_model import SavedModel


@dataclass
class Contents:
    """The contents of a checkpoint.

    Attributes:
        model: the state dict, of ShardTensors with this rank's shards where the live model has one of that name and shape, and
            else of full plain tensors on the CPU.
        optimizers: a dict for each saved optimizer: ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``,
            with ShardTensors as in `model`. If the checkpoint has numbers, these take the place of names.
        extra: the object that was saved beside the models and optimizers, or None.
        models: state dicts of further models, by name.
        sources: the live models as the checkpoint knows them, after which parameters in `optimizers` are named.
        extra_shards: the ShardTensors that were saved within `extra`, by number; they are read as entries of `model` are.
        with_state: True if the optimizers' state was read.
    """

    model: dict[str, Any]
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    extra: Any = None
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: Sequence[Source] = ()
    extra_shards: dict[str, torch.Tensor] = field(default_factory=dict)
    with_state: bool = True


def read_contents(
    engine: EnginePort,
    path: str | os.PathLike[str],
    optimizers: Sequence[Any] = (),
    *,
    named_state: bool = False,
    models: Mapping[str, Any] | None = None,
    unpickle: Unpickle | None = None,
) -> Contents:
    """Read a checkpoint of any layout that :meth:`torch_shard.Engine.load` reads, or one of Lightning's. Collective.

    Each rank reads its own shards, verified by their checksums where the checkpoint has them.

    Args:
        engine: the engine whose model tells which shards are this rank's.
        path: the checkpoint's directory.
        optimizers: the live optimizers, in the order of the saved ones. Without any, the saved optimizers' groups are read, but
            not their state.
        named_state: without `optimizers`, read the state, too, if all of it is saved by parameters' names.
        models: engines by the names of the checkpoint's further models. The engine whose name is not among these is the first
            model. With None `engine` is the first model, and there are no others.
        unpickle: the unpickler of objects; by default torch's loader, which runs no code.

    Raises:
        CheckpointError: on all ranks: there is no checkpoint, or it is damaged, or holds objects that are refused.
        StateDictError: on all ranks: several of `models` are not in it by name, or `optimizers` hold parameters of others.
    """
    runtime, what = engine._runtime, "reading a checkpoint"

    def prepare() -> _Reading:
        checkpoint = Checkpoint.open(path)
        return _Reading(checkpoint, _sources(checkpoint, engine, models), optimizers, named_state, unpickle)

    work = each(runtime, what, prepare, key=lambda found: found.checkpoint.fingerprint)
    nonce = broadcast(runtime, secrets.token_hex(8), what)
    return each(runtime, what, work.read, nonce=f"{nonce}/read")


class _Reading:
    """One reading, on one rank."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        sources: Sequence[Source],
        optimizers: Sequence[Any],
        named_state: bool,
        unpickle: Unpickle | None,
    ) -> None:
        self.checkpoint, self.sources, self.unpickle = checkpoint, sources, unpickle
        self.tree = tree_of(checkpoint)
        # Prefixes of wrappers may be part of the names that a hook has given.
        self.models = [SavedModel(checkpoint, self.tree, source, own_prefixes=False) for source in sources]
        self.params: dict[str, Any] = {}
        for source in reversed(sources):  # the first of equal names counts, as in what they were saved from
            self.params.update(source.params())
        saved = (optimizer_at(self.tree, where, self.params) for where in _paths(self.tree))
        self.optimizers = [_Optimizer(found) for found in saved if found is not None]
        self.with_state = bool(optimizers) or (named_state and all(own.is_named for own in self.optimizers))
        for own in self.optimizers if self.with_state else ():
            own.names = [list(self.params)]
        for own, optimizer in zip(self.optimizers, optimizers, strict=False):
            own.names = names_by_group(optimizer, param_names(sources, optimizer))

    def read(self) -> Contents:
        """Read the contents."""
        with torch.inference_mode(False):
            known = self._read([(leaf, None) for own in self.optimizers for leaf in own.saved.small()])
            wanted: list[tuple[Any, Any]] = []
            for model in self.models:
                for key, value in model.saved.items():
                    wanted += [(leaf, model.live.get(key)) for _, leaf in leaves(value)]
            for own in self.optimizers if self.with_state else ():
                for name, entries in own.state(known).items():
                    like = self.params.get(name)
                    wanted += [(leaf, None if path[-1] == "step" else like) for path, leaf in leaves(entries)]
            extra_shards = self._extra_shards()
            wanted += extra_shards.values()
            extra = self.tree.get(EXTRA)
            wanted += [(extra, None)] if isinstance(extra, StoredObject) else []
            known |= self._read(wanted)
        built = {model.source.path: model.state_dict(known) for model in self.models}
        further = {path[1]: state for path, state in built.items() if path != (MODEL,)}
        states = [own.build(known, self.with_state) for own in self.optimizers]
        of_number = {number: known[leaf.name] for number, (leaf, _) in extra_shards.items()}
        state = built.get((MODEL,), {})
        return Contents(state, states, known.get(EXTRA), further, self.sources, of_number, self.with_state)

    def _read(self, wanted: Sequence[tuple[Stored | StoredObject, Any]]) -> dict[str, Any]:
        """Return the values of entries by name. Each entry comes with the live tensor that tells this rank's shard, or None."""
        tensors = {leaf.name: new_tensor(leaf, like) for leaf, like in wanted if isinstance(leaf, Stored)}
        objects = [leaf.name for leaf, _ in wanted if isinstance(leaf, StoredObject)]
        return {**self.checkpoint.read(tensors, objects, self.unpickle), **tensors}

    def _extra_shards(self) -> dict[str, tuple[Stored | StoredObject, Any]]:
        """Return the entries of :data:`EXTRA_SHARDS` by number, with the live parameters that they are cut as, or None."""
        found = self.tree.get(EXTRA_SHARDS)
        return {
            number: (leaf, self.params.get(unwrapped(name, self.params)))
            for number, own in (found if isinstance(found, dict) else {}).items()
            for name, leaf in own.items()
        }


@dataclass
class _Optimizer:
    """One saved optimizer, and the names of the live optimizer's parameters by group."""

    saved: SavedOptimizer
    names: list[list[str]] = field(default_factory=list)

    @property
    def is_named(self) -> bool:
        """True if groups and state name their parameters."""
        return not self.saved.is_numbered and bool(self.saved.groups)

    def state(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of the state, by the live parameters' names."""
        saved = self.saved.as_saved(self.names, known)
        listed = [p for group in saved["param_groups"] for p in group["params"]]
        live = [name for names in self.names for name in names]
        name_of = dict(zip(listed, live, strict=True)) if len(listed) == len(live) else {}
        return {name_of.get(key, str(key)) if isinstance(key, int) else key: own for key, own in saved["state"].items()}

    def build(self, known: Mapping[str, Any], with_state: bool) -> dict[str, Any]:
        """Return the optimizer's state dict."""
        result = self.saved.as_saved(self.names, known)
        if not with_state:
            return {**result, "state": {}}
        result["state"] = map_leaves(result["state"], known)
        for group in result["param_groups"]:
            for p in group["params"]:  # the checkpoint decides: no state there is no state here
                if not isinstance(p, int):
                    result["state"].setdefault(p, {})
        if self.saved.other is not None:
            others = {key: entries for _, key, entries in known[self.saved.other.name]}
            result["state"].update(others)
            result["other_state"] = list(others)
        return result


def _paths(tree: dict[Any, Any]) -> list[tuple[str, ...]]:
    """Return the paths of the optimizers: by name below ``optimizer``, ``optimizer_<number>`` (Lightning), or the only one."""
    found: list[tuple[str, ...]] = [
        (key,) for key in tree if isinstance(key, str) and re.fullmatch(r"optimizer_\d+", key)
    ]
    named = tree.get(OPTIMIZER)
    if isinstance(named, dict):
        found += [(OPTIMIZER, name) for name, own in named.items() if is_optimizer(own)]
    return sorted(found, key=_sort_key) or [(OPTIMIZER,)]


def _sort_key(path: tuple[str, ...]) -> tuple[int, str]:
    number = re.search(r"(\d+)$", path[-1])
    return (int(number[1]) if number else 0, path[-1])


def _sources(checkpoint: Checkpoint, engine: EnginePort, models: Mapping[str, Any] | None) -> list[Source]:
    """Return the live models, each with its place in the checkpoint."""
    if models is None:
        return sources_of(engine, None)
    saved = checkpoint.metadata.state_dict_metadata
    further = {name: own for name, own in models.items() if any(key.startswith(f"{MODELS}.{name}.") for key in saved)}
    rest = {name: own for name, own in models.items() if name not in further}
    if len(rest) > 1:
        raise StateDictError(
            f"rank {engine._runtime.collectives.world_rank}: the checkpoint has no models of the names "
            f"{', '.join(map(repr, rest))}, of which one could be its first; load them one by one, or under the names that they "
            "were saved by."
        )
    first = [source for own in rest.values() for source in sources_of(own, None)]
    return first + (sources_of(engine, further)[1:] if further else [])
