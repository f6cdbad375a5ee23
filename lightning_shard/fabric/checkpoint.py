"""What ``fabric.save`` writes and ``fabric.load`` reads: one file as ``ddp`` has it, or a folder that all ranks write."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_shard import Engine, engine_of
from torch_shard.errors import CheckpointError, ConfigError
from torch_shard.frontend import refuse_inside
from torch_shard.frontend.checkpoint import (
    EXTRA,
    MODEL,
    MODELS,
    OPTIMIZER,
    Source,
    named_parameters_of,
    sources_of,
)
from torch_shard.log import logger

from ..checkpoint import extra_shards as _extra
from ..checkpoint import files as _files
from ..checkpoint import full as _full
from ..checkpoint import sharded as _sharded
from ..checkpoint.save import SavingMixin, existing
from .forward_module import inner

_KEYS = "fabric_keys"
"""Beside the user's entries in a folder: the keys that model and optimizers had."""

Filter = Mapping[str, Callable[[str, Any], bool]]


class FabricCheckpointMixin(SavingMixin):
    """The part of Fabric's strategy that saves and loads."""

    _coordinator: Engine | None = None  # the engine whose ranks save or load now

    @contextlib.contextmanager
    def _coordinated_by(self, objects: Iterable[Any]) -> Iterator[None]:
        """Make the ranks coordinate through the engine of the first sharded module among `objects`, if there is one."""
        engines = [engine_of(inner(obj)) for obj in objects if isinstance(obj, nn.Module)]
        self._coordinator = next((engine for engine in engines if engine is not None), None)
        try:
            yield
        finally:
            self._coordinator = None

    # -- saving -------------------------------------------------------------------------------------------------------
    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Filter | None = None
    ) -> None:
        """Write modules, optimizers, other objects with a ``state_dict()``, and plain objects. Collective; all fail, or none.

        Args:
            path: the file or folder; rank 0's path counts.
            state: the objects by the user's keys. Without a sharded module they become one file in any case. ShardTensors, as in
                ``model.state_dict()``, become full tensors.
            storage_options: options for the plugin that writes single files.
            filter: functions by key that choose which entries of a state dict are saved. For a file rank 0 calls them; for a
                folder all ranks do, only for modules' entries, which are ShardTensors of global shape then.

        Raises:
            ConfigError: a folder is given a filter of an optimizer, or an optimizer of several modules without these.
            OSError, CheckpointError: on all ranks; the checkpoint can't be written, and an older one at `path` is unchanged.
        """
        with self._coordinated_by(state.values()):
            self._save(path, state, storage_options, filter or {})

    def _save(self, path: Any, state: dict[str, Any], storage_options: Any, filter: Filter) -> None:
        path, keys = self._from_rank0((path, list(state)), "fabric.save")
        plain = self._run_on_all(lambda: self._prepared(state, keys, storage_options, filter))
        if self.engine_or_none is not None:  # there may be state dicts, which the user has made
            plain = _extra.gather_shards(self.engine_or_none, plain)
        if self._settings.state_dict_type == "sharded" and self._coordinator is not None:
            self._save_folder(self._coordinator, path, state, plain, filter)
        else:
            if self._settings.state_dict_type == "sharded":
                logger.info("%s becomes one file: it holds no sharded module", path)
            self._save_file(path, state, plain, storage_options, filter)

    def _prepared(self, state: dict[str, Any], keys: list[str], storage_options: Any, filter: Filter) -> dict[str, Any]:
        """Return all but sharded modules and their optimizers, as it will be saved; raise for what can't be. Not collective."""
        if list(state) != keys:
            raise ConfigError(f"fabric.save: the state has other keys here ({list(state)}) than on rank 0 ({keys}).")
        is_folder = self._settings.state_dict_type == "sharded" and any(map(_is_sharded_module, state.values()))
        plain = {}
        for key, obj in state.items():
            engine = engine_of(inner(obj)) if isinstance(obj, nn.Module) else None
            if engine is not None:
                refuse_inside(engine, "fabric.save")
            elif isinstance(obj, torch.optim.Optimizer) and self._engines_of(obj):
                if is_folder and key in filter:
                    raise ConfigError(
                        f"fabric.save(filter=...): {key!r} is an optimizer, of which a folder takes all or nothing. "
                        "Filter the module, or use state_dict_type='full'."
                    )
            else:
                obj = inner(obj)
                plain[key] = obj.state_dict() if _is_stateful(obj) else obj
        if is_folder and storage_options is not None:
            raise ConfigError("storage_options is for plugins, which write single files; this is a folder.")
        return plain

    def _save_file(
        self, path: Any, state: dict[str, Any], plain: dict[str, Any], storage_options: Any, filter: Filter
    ) -> None:
        full: dict[str, Any] = {}
        for key, obj in state.items():
            if key in plain:
                full[key] = plain[key]
            elif isinstance(obj, nn.Module):
                full[key] = self.engine_of(obj).state_dict(rank0_only=True)
            else:
                full[key] = _full.optimizer_state(self._engines_of(obj)[0], obj, self._parameters(obj))

        def write() -> None:
            kept: dict[str, Any] = {}
            for key, value in full.items():
                _keep(key, value, filter, kept)
            self._write_file(kept, path, storage_options)

        self._run_on_rank0(f"write the checkpoint {path}", write)

    def _save_folder(
        self, engine: Engine, path: Any, state: dict[str, Any], plain: dict[str, Any], filter: Filter
    ) -> None:
        def prepare() -> tuple[Path, dict[str, Any], list[Source]]:
            target = _sharded.local_path(path)
            sources = _sources_of_modules(state)
            paths = {id(source.model): source.path for source in sources}
            kept: dict[str, Any] = {}
            states: dict[str, Any] = {}
            names: dict[str, Any] = {"module": None, "optimizers": []}
            contents: dict[str, Any] = {}
            for key, obj in state.items():
                if key in plain:
                    _keep(key, plain[key], filter, kept)
                elif isinstance(obj, nn.Module):
                    entries: dict[str, Any] = {}
                    _keep(key, _sharded.model_state(self.engine_of(obj)), filter, entries)
                    place = paths[id(inner(obj))]
                    if place == (MODEL,):
                        names["module"] = key
                        contents[MODEL] = entries.get(key, {})
                    else:
                        contents.setdefault(MODELS, {})[place[1]] = entries.get(key, {})
                else:
                    names["optimizers"].append(key)
                    own = _sources_for(key, self._engines_of(obj), sources)
                    states[str(len(states))] = _sharded.optimizer_state(engine, obj, own)
            if states:
                contents[OPTIMIZER] = states["0"] if len(states) == 1 else states
            return target, {**contents, EXTRA: {**kept, _KEYS: names}}, sources

        self._run_on_all(self._finish_saving)  # of other modules' engines, too
        target, contents, sources = self._run_on_all(prepare)
        names = [*contents[MODEL], *(f"{m}: {n}" for m, own in contents.get(MODELS, {}).items() for n in own)]
        of_first = self._from_rank0(names, "fabric.save")
        self._run_on_all(lambda: _sharded.check_names(engine.rank, names, of_first))
        self._write_folder(engine, contents, target, self._settings.async_save, sources)

    # -- loading ------------------------------------------------------------------------------------------------------
    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Restore objects from a file or a folder, with torch's safe loader unless the user asked otherwise. Collective.

        Each rank reads only its own shards of a folder or of a file that can be mapped.

        Args:
            path: a checkpoint of this strategy, ``ddp`` or another one; rank 0's path counts.
            state: a dict of objects to restore in place; a module or an optimizer, where that is all there is in the file; None
                for everything (of a file).
            strict: every key of `state` must be in the checkpoint, and each module's entries must match.
            weights_only: see :class:`FabricStrategyMixin`.

        Returns:
            What was not restored; from a folder, without state of modules and optimizers.

        Raises:
            CheckpointError: on all ranks, if there is no checkpoint, or it is damaged or holds objects that are refused. Nothing
                has changed.
            KeyError: a key is missing, with `strict`. Nothing has changed.
            StateDictError: on all ranks, if an object and its state don't fit.
        """
        weights_only = self._settings.weights_only if weights_only is None else weights_only
        wanted = state if isinstance(state, dict) else {} if state is None else {"": state}
        with self._coordinated_by(wanted.values()):
            return self._load(path, wanted, not isinstance(state, dict), strict, weights_only)

    def _load(
        self, path: Any, wanted: dict[str, Any], single: bool, strict: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        path = self._from_rank0(path, "fabric.load")
        self._run_on_all(self._finish_saving)
        path = self._run_on_all(lambda: existing(path))
        if _files.is_local(path) and Path(path).is_dir():
            found = self._read_folder(Path(path), wanted, weights_only)
        else:
            share = self.global_rank, self.world_size
            io, maps = self.checkpoint_io, self._maps() and bool(wanted)
            found, mapped = self._run_on_all(lambda: _full.read_plain(path, io, maps, weights_only, share))
            if not wanted:
                return found  # type: ignore[no-any-return]
            if single:
                found = {"": found}
            if not isinstance(found, dict):
                raise CheckpointError(f"{path} holds a {type(found).__name__}, and not a dict of states by key.")
            if mapped:  # modules and optimizers copy what they take; nothing else may keep views of the file
                own = {key for key, obj in wanted.items() if isinstance(obj, (nn.Module, torch.optim.Optimizer))}
                found = {key: value if key in own else copy.deepcopy(value) for key, value in found.items()}
        return self._restore(path, wanted, found, strict)

    def _finish_saving(self) -> None:
        for engine in self._engines():
            engine.finish_saving()

    def _read_folder(self, path: Path, wanted: dict[str, Any], weights_only: bool | None) -> dict[str, Any]:
        """Return what is in a folder by the keys that were saved or, for other programs' folders, are wanted. Collective."""
        modules = {key: self.engine_of(obj) for key, obj in wanted.items() if _is_sharded_module(obj)}
        optimizers = {
            key: obj for key, obj in wanted.items() if isinstance(obj, torch.optim.Optimizer) and self._engines_of(obj)
        }
        if not modules and not optimizers:
            raise CheckpointError(
                f"{path} is a sharded checkpoint, which is read into a sharded module: pass that as part of the state, or "
                "consolidate it to one file (torch-shard consolidate)."
            )
        engines = list(modules.values()) or self._engines_of(next(iter(optimizers.values())))
        if not modules and len(engines) > 1:
            raise ConfigError(
                f"fabric.load: {next(iter(optimizers))!r} holds parameters of {len(engines)} modules; pass these with it, under "
                "the keys that they were saved by."
            )
        parts, rest = _sharded.read_parts(
            engines[0], path, list(optimizers.values()), weights_only, models=modules or None
        )
        of_first = [source.model for source in parts.sources if source.path == (MODEL,)]
        first = next((key for key, own in modules.items() if [own.model] == of_first), None)
        names = rest.pop(_KEYS, None)
        if "" in wanted:  # one object by itself
            names = {"module": "" if modules else None, "optimizers": [""] if optimizers else []}
        elif not isinstance(names, dict):  # not written by Fabric
            names = {"module": first, "optimizers": list(optimizers)}
        found = {**rest, **parts.models}
        if first is not None and names["module"] in wanted:
            found[names["module"]] = parts.model
        for key, state in zip(names["optimizers"], parts.optimizers, strict=False):
            if key in optimizers:  # the rest was read only because this one is wanted
                engine, own = self._engines_of(optimizers[key])[0], optimizers[key]
                found[key] = _sharded.renamed(state, engine, own, parts.sources, self._parameters(own))
        return found

    def _restore(self, path: Any, wanted: dict[str, Any], found: dict[str, Any], strict: bool) -> dict[str, Any]:
        missing = [key for key in wanted if key not in found]
        if strict and missing:
            raise KeyError(
                f"The requested state contains a key {missing[0]!r} that does not exist in the checkpoint {path}, which has "
                f"{sorted(map(str, found))}. To disable strict loading, set `strict=False`."
            )
        for key, obj in list(wanted.items()):
            if key not in found:
                continue
            value = found.pop(key)
            if isinstance(obj, nn.Module):
                self.load_module_state_dict(obj, value, strict=strict)
            elif isinstance(obj, torch.optim.Optimizer):
                if self._engines_of(obj):
                    _sharded.load_optimizer(self._engines_of(obj)[0], obj, value, self._parameters(obj))
                else:
                    obj.load_state_dict(copy.deepcopy(value))
            elif _is_stateful(obj):
                obj.load_state_dict(value)
            else:
                wanted[key] = value
        return found

    # -- one module ---------------------------------------------------------------------------------------------------
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the full state dict, on the CPU of every rank. Collective for a sharded module."""
        engine = engine_of(inner(module))
        if engine is None:
            return inner(module).state_dict()  # type: ignore[no-any-return]
        return engine.state_dict(rank0_only=False)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a full or sharded state dict. Collective for a sharded module.

        Raises:
            StateDictError: on all ranks, with everything that does not fit. Nothing has changed.
        """
        engine = engine_of(inner(module))
        if engine is None:
            inner(module).load_state_dict(copy.deepcopy(state_dict), strict=strict)
        else:
            _full.load_model(engine, state_dict, strict)

    def _parameters(self, optimizer: Any) -> nn.Module:
        """Return a module that names everything that an optimizer holds, of whichever modules or of none."""
        return named_parameters_of(self._engines_of(optimizer), optimizer)


def _is_sharded_module(obj: Any) -> bool:
    return isinstance(obj, nn.Module) and engine_of(inner(obj)) is not None


def _sources_of_modules(state: Mapping[str, Any]) -> list[Source]:
    """Return the sharded modules of a state as a folder has them: the first as the model, the others by their keys.

    Raises:
        ConfigError: the key of another module can't be a name.
    """
    engines = {key: engine_of(inner(obj)) for key, obj in state.items() if _is_sharded_module(obj)}
    (_, first), *others = ((key, engine) for key, engine in engines.items() if engine is not None)
    return sources_of(first, dict(others))


def _sources_for(key: str, engines: Sequence[Engine], sources: list[Source]) -> list[Source]:
    """Return the sources after which an optimizer's parameters are named in a state with these modules.

    Raises:
        ConfigError: the optimizer has several modules, and some are not in the state.
    """
    if {id(engine.model) for engine in engines} <= {id(source.model) for source in sources}:
        return sources
    if len(engines) > 1:
        raise ConfigError(
            f"fabric.save: {key!r} holds parameters of {len(engines)} modules, and the state has not all of them. Save these "
            "with it, or one file with ShardFabricStrategy(state_dict_type='full')."
        )
    return sources_of(engines[0], None)


def _is_stateful(obj: Any) -> bool:
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def _keep(key: str, value: Any, filter: Filter, kept: dict[str, Any]) -> None:
    """Put an entry, or what the filter leaves of it, into `kept`, unless the filter leaves nothing."""
    if key not in filter or not isinstance(value, dict):
        kept[key] = value
        return
    chosen = {name: entry for name, entry in value.items() if filter[key](name, entry)}
    if chosen:
        kept[key] = chosen
