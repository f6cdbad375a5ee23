"""Loading a full checkpoint: the file is mapped and compared, and then each rank copies its own shards out of it.

Files differ in where things are: a state dict may be all of a file or one of its entries, optimizer state may be by name or by
number. :func:`_recognised` finds both, and everything is compared before anything is changed.
"""

from __future__ import annotations

import copy
import functools
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...comm.collective_steps import broadcast, each
from ...errors import CheckpointError, ConfigError, StateDictError
from ...optim.checks import state_dtype
from ...optim.engines_of_optimizer import params_of
from ...shard_tensor.tensor import ShardTensor
from ...state import model_state, optimizer_state
from ...state.param_names import names_by_group, names_of
from ..mismatches import OF_THIS, check_dtype, wrong_dtype
from ..ports import EnginePort
from ..sharded.entries import EXTRA, OPTIMIZER, Optimizers, optimizers_of
from ..sharded.entry_tree import MODEL_KEYS, OPTIMIZER_KEYS, unwrapped
from .open_files import FullFile, open_full, refuse_damaged


def load_full(
    engine: EnginePort,
    path: str | os.PathLike[str],
    optimizer: Any,
    *,
    dtype: torch.dtype | None,
    models: Mapping[str, Any] | None,
) -> Any:
    """Load into `engine`'s model; see :meth:`torch_shard.Engine.load`. Collective."""
    runtime, what = engine._runtime, "engine.load"

    def prepare() -> FullLoad:
        engine.finish_saving()
        check_dtype(dtype)
        if models:
            raise ConfigError(f"{path} is a full checkpoint, which holds one model; load it without models=.")
        model_state.refuse_inside(runtime, what)
        work = FullLoad(engine, open_full(path), optimizers_of(optimizer), dtype)
        work.compare()
        return work

    work = each(runtime, what, prepare, key=lambda found: (found.file.fingerprint(), dtype))
    nonce = broadcast(runtime, secrets.token_hex(8), what)
    each(runtime, what, work.verify, nonce=f"{nonce}/verify")
    each(runtime, what, work.load_model, nonce=f"{nonce}/model")
    runtime.versions.restart()
    runtime.parameters_loaded()
    each(runtime, what, work.load_optimizers, nonce=f"{nonce}/optimizers")
    return work.extra


def _recognised(file: FullFile, keys: Iterable[str]) -> tuple[Mapping[str, Any], Any, Any]:
    """Return a file's model, optimizer and extra; None for an optimizer or extra that it does not have.

    `keys` are the live model's, by which a state dict is recognised.
    """
    values = file.values
    if not isinstance(values, Mapping):
        raise CheckpointError(
            f"{file.path} holds {type(values).__name__}, and no state dict, so nothing was loaded. Save a state dict."
        )
    known = set(keys)
    places = [name for name in MODEL_KEYS if isinstance(values.get(name), Mapping)]
    found = max(places, key=lambda name: _matches(values[name], known), default=None)  # the first of equals
    if found is None or _matches(values, known) > _matches(values[found], known):
        return values, None, None
    # Files have other things under these keys, too, such as an optimizer's name.
    states = (values[key] for key in OPTIMIZER_KEYS if isinstance(values.get(key), (Mapping, list, tuple)))
    optimizer = next(states, None)
    return values[found], optimizer, values.get(EXTRA)


def _matches(values: Mapping[Any, Any], known: set[str]) -> int:
    """Return how many entries have known names, without the prefixes of wrappers."""
    return sum(unwrapped(str(name), known) in known for name in values)


class FullLoad:
    """The loading of a full checkpoint, on one rank; :func:`load_full` calls the methods in their order."""

    def __init__(
        self, engine: EnginePort, file: FullFile, optimizers: Optimizers, dtype: torch.dtype | None, strict: bool = True
    ) -> None:
        self.file, self.dtype, self.runtime, self.root = file, dtype, engine._runtime, engine.model
        self.strict = strict  # if True, missing and unexpected entries of the model are errors
        self.live = model_state.own_state_dict(engine.model, engine._runtime)
        given, self._saved, self._extra = _recognised(file, self.live)
        tied = [entry.names for entry in model_state.entries_of(self.runtime, self.live)]
        values = _renamed(file, given, self.live, tied)
        # Modules may keep other values as they are, so these must not hold views of the file.
        values = {n: v if isinstance(v, torch.Tensor) else self._own_memory(v, n) for n, v in values.items()}
        self.model: Any = model_state.with_metadata(values, given)
        self.optimizers: list[tuple[Any, dict[int, str], dict[str, Any]]] = []  # with names, and the state by name
        self.problems: list[str] = []
        for where, held in optimizers:
            for number, own in enumerate(held):
                state = self._state_of(where, number, held)
                if state is None:
                    label = ".".join(where) if len(held) == 1 else f"{'.'.join(where)}[{number}]"
                    self.problems.append(f"missing: {label} (the file has no such optimizer state)")
                    continue
                names = names_of(self.runtime, own, self.root)
                self.optimizers.append((own, names, by_name(own, names, state)))

    def _own_memory(self, value: Any, name: str) -> Any:
        """Return a copy of nested values, whose tensors are not views of the file."""
        try:
            return copy.deepcopy(value)
        except Exception as error:  # raised by a class of the user's, which was allowed
            raise CheckpointError(
                f"{self.file.path}: {name} can't be copied out of the file, and nothing was loaded: {type(error).__name__}: "
                f"{error}. Its class must allow copy.deepcopy."
            ) from error

    def _state_of(self, where: tuple[str, ...], number: int, held: Sequence[Any]) -> Mapping[str, Any] | None:
        """Return the saved state of the optimizer that `held` has at `number`; None if there is none."""
        saved = self._saved
        if len(where) > 1:
            saved = saved.get(where[-1]) if isinstance(saved, Mapping) else None
        elif isinstance(saved, (list, tuple)):
            saved = saved[number] if len(saved) == len(held) else None
        elif len(held) > 1:
            saved = _share(saved, number, [len(own.param_groups) for own in held])
        return saved if optimizer_state.is_complete(saved) else None

    def compare(self) -> None:
        """Raise a StateDictError that lists all mismatches, if there are any."""
        tensors = {name: value for name, value in self.model.items() if isinstance(value, torch.Tensor)}
        proxies = model_state.with_metadata(self.model, self.model)
        proxies.update({name: torch.empty_like(value, device="meta") for name, value in tensors.items()})
        found = model_state.load_on_meta(self.root, proxies, self.strict)
        for name, value in tensors.items():
            found.problems.extend(wrong_dtype(name, value.dtype, self.live.get(name), self.dtype, "file"))
        for own, names, state in self.optimizers:
            found.add(optimizer_state.mismatches(self.runtime, own, names, state), f"{OPTIMIZER}: ")
        found.problems.extend(self.problems)
        found.refuse(str(self.file.path), OF_THIS)
        self.extra = self._own_memory(self._extra, EXTRA)  # may fail, so it comes before anything is changed

    def verify(self) -> None:
        """Verify this rank's share of the file, before anything is changed."""
        refuse_damaged(self.file.path, self.runtime.collectives.world_rank, self.runtime.collectives.world)

    def load_model(self) -> None:
        """Copy this rank's shards of the model's entries, which fit, into the model."""
        try:
            with self.runtime.versions.change():  # one change, and no edits that are kept to be taken back
                self.root.load_state_dict(self.model, strict=self.strict)
        except Exception as error:  # a module's own hook, or what it keeps in get_extra_state
            raise model_state.failed_module(str(self.file.path), error) from error

    def load_optimizers(self) -> None:
        """Copy this rank's shards of optimizer state, which fits, into the optimizers."""
        for own, names, state in self.optimizers:
            change = functools.partial(self._convert, own, names)
            try:
                optimizer_state.load_by_name(self.runtime, own, names, state, change)
            except StateDictError as error:
                raise StateDictError(f"{self.file.path}: {error}") from error

    def _convert(self, optimizer: Any, names: Mapping[int, str], state: dict[Any, dict[str, Any]]) -> None:
        """Convert state, in place, that had its parameter's dtype in the file to the dtype that the parameter has here."""
        for number, p in enumerate(params_of(optimizer) if self.dtype is not None else ()):
            saved = self.model.get(names[id(p)])
            if not isinstance(saved, torch.Tensor) or saved.dtype == p.dtype:
                continue
            for key, value in state.get(number, {}).items():
                if isinstance(value, torch.Tensor) and value.dtype == saved.dtype and key != "step":
                    state[number][key] = converted(value, state_dtype(p))


def _share(saved: Any, number: int, counts: Sequence[int]) -> Mapping[str, Any] | None:
    """Return one optimizer's part of the state of several that were saved as one, group after group, by ``engine.save``.

    `counts` are the optimizers' numbers of groups. The result is None if the groups or the state can't be divided.
    """
    if not optimizer_state.is_complete(saved):
        return None
    groups, state = saved["param_groups"], saved["state"]
    listed = {key for group in groups for key in group["params"]}
    if len(groups) != sum(counts) or any(key not in listed for key in state):
        return None  # state of no parameter may belong to any of the optimizers
    first = sum(counts[:number])
    groups = groups[first : first + counts[number]]
    own = {key for group in groups for key in group["params"]}
    return {**saved, "state": {key: value for key, value in state.items() if key in own}, "param_groups": groups}


def by_name(optimizer: Any, names: Mapping[int, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return optimizer state by the live parameters' names, from state by number or by name. Tensors are not copied.

    Numbers stand for the parameters in the order of the groups, as in torch.
    """
    state, groups = given["state"], given["param_groups"]
    live = names_by_group(optimizer, names)
    listed = [key for group in groups for key in group["params"]]
    if all(isinstance(key, int) for key in listed):
        # A group that has more parameters in the file than here does not shift the groups after it.
        called: dict[Any, str] = {}
        for number, group in enumerate(groups):
            own = live[number] if number < len(live) else []
            for i, key in enumerate(group["params"]):
                called[key] = own[i] if i < len(own) else f"parameter {key}"
    else:
        known = {name for own in live for name in own}
        called = _bare_names((*listed, *state), known)
        called = {key: name for key, name in called.items() if key in set(listed) or name in known}
    # The file decides: a parameter without state in the file has none here.
    return {
        "state": {**{name: {} for name in called.values()}, **{called.get(k, k): own for k, own in state.items()}},
        "param_groups": [{**group, "params": [called[key] for key in group["params"]]} for group in groups],
        optimizer_state.OTHER: [key for key in state if key not in called],
    }


def _bare_names(names: Iterable[Any], live: Any) -> dict[Any, str]:
    """Return a dict from each name to the live one: without the prefixes of wrappers, if the model does not know the name itself.

    If two names would become the same, one keeps its prefix, and is unexpected then, rather than silently winning.
    """
    names = list(dict.fromkeys(names))
    called = {name: name for name in names if name in live}
    taken = set(called)
    for name in names:
        bare = unwrapped(str(name), live)
        if name not in called:
            called[name] = bare if bare in live and bare not in taken else name
            taken.add(called[name])
    return called


def named_values(path: str | os.PathLike[str], live: Mapping[str, Any]) -> tuple[FullFile, dict[str, Any]]:
    """Open a full checkpoint, and return it with its entries by the names of a model whose state dict is `live`. Not collective.

    Names in `live` of one object are tied; its tensors may be on any device.

    Raises:
        CheckpointError: as raised by :func:`open_full`, or the file holds no state dict.
    """
    file = open_full(path)
    tied: dict[int, list[str]] = {}
    for name, value in live.items():
        tied.setdefault(id(value), []).append(name)
    return file, _renamed(file, _recognised(file, live)[0], live, tied.values())


def _renamed(
    file: FullFile, given: Mapping[Any, Any], live: Mapping[str, Any], tied: Iterable[Sequence[str]]
) -> dict[str, Any]:
    """Return a file's state dict by the live model's names, where `tied` lists the names of each of its tensors."""
    called = _bare_names(map(str, given), live)
    values = {called[str(name)]: value for name, value in given.items()}
    if file.kind == "safetensors":  # which has one name for each piece of memory
        for names in tied:
            present = [name for name in names if name in values]
            for name in names if present else ():
                values.setdefault(name, values[present[0]])
        for name, kept in file.tied.items():  # tied in the model that was saved, and not in the live one
            if name in live and kept in values:
                values.setdefault(name, values[kept])
    return values


def converted(value: torch.Tensor, to: torch.dtype | torch.device) -> torch.Tensor:
    """Return a tensor, or a ShardTensor with this rank's shard, in a dtype or on a device. Not collective."""
    return ShardTensor(value._local.to(to), value._spec) if isinstance(value, ShardTensor) else value.to(to)
