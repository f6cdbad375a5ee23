"""The entries of a sharded checkpoint as a tree, and where models and optimizers are in it, whichever tool wrote it.

This package, FSDP2, DDP, plain torch with DCP and torchtitan differ in where the model is (``model``, ``app.model``, at the
top), in prefixes of wrappers, and in how optimizer state is named: by parameter or by number, groups in a list or settings by
parameter. Here all of them look alike. A leaf of the tree is a :class:`Stored` tensor or a :class:`StoredObject`, which is not
read yet.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from ...shard_tensor.tensor import ShardTensor
from ...state.optimizer_state import OTHER
from ...utils.patterns import without_wrappers
from .checkpoint_dir import Checkpoint
from .entries import MODEL, MODELS, OPTIMIZER

WRAPPERS = ("", "module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod.")
"""Prefixes that DDP and torch.compile give to the names of a module's entries."""

MODEL_KEYS = (MODEL, "state_dict", "model_state_dict")
"""The keys under which tools keep a model's state dict beside other entries."""

OPTIMIZER_KEYS = (OPTIMIZER, "optimizer_states", "optimizer_state_dict", "optim", "optimizers")
"""The keys under which tools keep optimizers' state beside other entries of a file."""

LIGHTNING = "pytorch-lightning_version"
"""The key by which Lightning's checkpoints are recognised."""

# The paths of the optimizer in the checkpoints of different tools.
_OPTIMIZERS = ((OPTIMIZER,), ("optim",), ("app", "optim"), ("app", "optimizer"))


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor in a checkpoint.

    Attributes:
        name: the tensor's name in the checkpoint.
        shape, dtype: the full tensor's shape and dtype.
        place: a key that is equal for two names of one memory (tied parameters).
        files: the files that hold parts of the tensor.
        read: a function that returns the tensor on the CPU. With checksums it returns what was written or raises CheckpointError.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    place: Hashable
    files: tuple[str, ...]
    read: Callable[[], torch.Tensor] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class StoredObject:
    """An object in a sharded checkpoint; ``read`` unpickles it without running code."""

    name: str
    files: tuple[str, ...]
    read: Callable[[], Any] = field(repr=False)


# -- trees ------------------------------------------------------------------------------------------------------------


def tree_of(checkpoint: Checkpoint) -> dict[Any, Any]:
    """Return a checkpoint's entries as nested dicts and lists. Not collective."""
    paths = checkpoint.metadata.planner_data if isinstance(checkpoint.metadata.planner_data, Mapping) else {}
    entries = checkpoint.metadata.state_dict_metadata
    tree: dict[Any, Any] = {}
    # torch's planner lists entries by the rank that wrote them, and paths in the order of the state dict.
    for name in dict.fromkeys([*(name for name in paths if name in entries), *entries]):
        leaf = _leaf(checkpoint, name)
        try:
            place(tree, tuple(paths[name]) if name in paths else _path(name), leaf)
        except (AttributeError, IndexError, TypeError):  # two entries claim one place
            tree[name] = leaf
    return tree


def _path(name: str) -> tuple[str, ...]:
    """Return the path of an entry for which the metadata has none."""
    head, _, rest = name.partition(".")
    if head == MODELS and "." in rest:
        return (head, *rest.split(".", 1))
    return (head, rest) if rest and head in (MODEL, OPTIMIZER, "optim", "state_dict") else (name,)


def _leaf(checkpoint: Checkpoint, name: str) -> Stored | StoredObject:
    found, storage = checkpoint.tensor(name), checkpoint.metadata.storage_data
    if found is None:
        info = storage.get(MetadataIndex(name))
        return StoredObject(name, (info.relative_path,) if info else (), lambda: checkpoint.read({}, [name])[name])
    infos = [storage.get(MetadataIndex(name, chunk.offsets)) for chunk in found.chunks]
    files = tuple(dict.fromkeys(info.relative_path for info in infos if info is not None))
    where = tuple((i.relative_path, i.offset) for i in infos if i is not None) if found.size.numel() else ()
    complete = where if len(where) == len(found.chunks) else ()

    def read() -> torch.Tensor:
        tensor = torch.empty(found.size, dtype=found.properties.dtype, device="cpu")
        checkpoint.read({name: tensor}, ())
        return tensor

    return Stored(name, found.size, found.properties.dtype, complete or name, files, read)


def place(root: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    """Put a value into nested dicts and lists, which are made as needed: a number in a path is a place in a list."""
    holder: Any = root
    for key, after in zip(path, (*path[1:], None), strict=True):
        if isinstance(holder, list):
            holder.extend([None] * (key + 1 - len(holder)))
        if after is None:
            holder[key] = value
            return
        inner = holder[key] if isinstance(holder, list) else holder.get(key)
        if inner is None:
            inner = holder[key] = [] if isinstance(after, int) else {}
        holder = inner


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the leaves of nested dicts, lists and tuples, with their paths."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        for i, value in enumerate(tree):
            yield from leaves(value, (*path, i))
    elif tree is not None:  # None is the place of a list that nothing was saved for
        yield path, tree


def map_leaves(tree: Any, values: Callable[[Any], Any] | Mapping[str, Any]) -> Any:
    """Return nested dicts, lists and tuples with other leaves, which `values` makes of the leaves or holds by their names."""
    if isinstance(tree, dict):
        return {key: map_leaves(value, values) for key, value in tree.items()}
    if isinstance(tree, list):
        return [map_leaves(value, values) for value in tree]
    if type(tree) is tuple:
        return tuple(map_leaves(value, values) for value in tree)
    if tree is None:
        return None
    return values[tree.name] if isinstance(values, Mapping) else values(tree)


def on_meta(saved: Stored) -> torch.Tensor:
    """Return a tensor of the saved shape and dtype without memory."""
    return torch.empty(saved.shape, dtype=saved.dtype, device="meta")


def new_tensor(saved: Stored, like: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return memory on the CPU for an entry: for this rank's shard if `like` is a ShardTensor of its shape, else for all of it.

    Args:
        saved: the entry.
        like: the live tensor that the entry is loaded to, or anything else.
        dtype: the dtype of the new memory; the entry's by default.
    """
    if isinstance(like, ShardTensor) and like.shape == saved.shape:
        return ShardTensor(torch.empty(like._spec.length, dtype=dtype or saved.dtype, device="cpu"), like._spec)
    return torch.empty(saved.shape, dtype=dtype or saved.dtype, device="cpu")


# -- models -----------------------------------------------------------------------------------------------------------


def model_key(tree: Mapping[Any, Any]) -> str | None:
    """Return the key of the model's state dict in a tree of any tool; None if its entries are at the top.

    A dict without tensors is a configuration, if anything else has tensors. In Lightning's files other keys are a hook's own.
    """
    if LIGHTNING in tree and isinstance(tree.get("state_dict"), dict):
        return "state_dict"
    found = [key for key in MODEL_KEYS if isinstance(tree.get(key), dict)]
    with_tensors = (key for key in found if any(isinstance(leaf, Stored) for _, leaf in leaves(tree[key])))
    at_top = any(isinstance(value, Stored) for value in tree.values())
    return next(with_tensors, None if at_top else next(iter(found), None))


def model_at(
    tree: dict[Any, Any], path: tuple[str, ...], keys: Iterable[str], *, ours: bool, own_prefixes: bool
) -> dict[str, Any]:
    """Find a model's state dict; its values may be nested.

    Args:
        tree: the checkpoint's tree.
        path: the place at which this package puts the model. In a checkpoint of its own the model is there, whatever its entries
            are called.
        keys: the live model's keys, by which its place in other tools' checkpoints is recognised.
        ours: True if this package wrote the checkpoint.
        own_prefixes: drop prefixes of wrappers in this package's checkpoints, too. They may be part of the names that a hook
            has given.
    """
    places = [_below(tree, path)]
    if path == (MODEL,) and not ours:
        places += [_below(tree, ("app", MODEL)), _below(tree, ("state_dict",)), tree]
    wrappers = WRAPPERS if own_prefixes or not ours else ("",)
    keys = list(keys)
    choices = ((sum(wrapper + key in own for key in keys), own, wrapper) for own in places for wrapper in wrappers)
    _, entries, wrapper = max(choices, key=lambda choice: choice[0])  # the first of equals
    if entries is tree and not wrapper:  # anything else may lie beside the model
        return {key: tree[key] for key in keys if key in tree}
    return {
        str(name).removeprefix(wrapper): value
        for name, value in entries.items()
        if ours or str(name).startswith(wrapper)
    }


def _below(tree: dict[Any, Any], path: tuple[str, ...]) -> dict[Any, Any]:
    """Return the entries below a path, nested or with the path in their dotted names."""
    for key in path:
        nested, prefix = tree.get(key), f"{key}."
        flat = {n[len(prefix) :]: value for n, value in tree.items() if isinstance(n, str) and n.startswith(prefix)}
        tree = {**(nested if isinstance(nested, dict) else {}), **flat}
    return tree


def _split_name(text: str, known: Container[str]) -> tuple[str, tuple[str, ...]]:
    """Split a dotted name into a parameter's name and the path of an entry of its state or settings."""
    for wrapper in WRAPPERS:
        bare = text[len(wrapper) :]
        cut = bare.rfind(".") if text.startswith(wrapper) else -1
        while cut > 0:  # the longest first: a name may begin with another one
            if bare[:cut] in known:
                return bare[:cut], tuple(bare[cut + 1 :].split("."))
            cut = bare.rfind(".", 0, cut)
    name, _, key = text.rpartition(".")
    return name, (key,)


def unwrapped(name: str, known: Container[str]) -> str:
    """Return a saved name without the parts of wrappers that the live names don't have."""
    if name in known:
        return name
    wrapper = next((w for w in ("module.", "_orig_mod.") if name.startswith(w)), None)
    return without_wrappers(name) if wrapper is None else unwrapped(name[len(wrapper) :], known)


# -- optimizers -------------------------------------------------------------------------------------------------------


@dataclass
class SavedOptimizer:
    """The state of one optimizer in a checkpoint.

    Attributes:
        state: the state by parameter (name, or number as text) and key; values may be nested.
        groups: the groups' settings, with names or numbers in "params"; empty where a checkpoint keeps settings by parameter.
        of_parameter: the settings by parameter, where a checkpoint keeps them so; else empty.
        other: the state that belongs to no parameter, as (position of the optimizer, key, value).
        unknown: the entries of other tools' checkpoints that match no parameter, by key.
    """

    state: dict[str, dict[Any, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    of_parameter: dict[str, dict[Any, Any]] = field(default_factory=dict)
    other: Any = None
    unknown: dict[Any, Any] = field(default_factory=dict)

    @property
    def is_numbered(self) -> bool:
        """True if parameters are numbers, as in a plain ``optimizer.state_dict()``.

        Names may look like numbers, so the groups decide where they have been read.
        """
        given = (group.get("params") for group in self.groups)
        listed = [p for params in given if isinstance(params, (list, tuple)) for p in params]
        if listed:
            return all(isinstance(p, int) for p in listed)
        return bool(self.state) and all(name.isdecimal() for name in self.state)

    def small(self) -> list[Any]:
        """Return the leaves that are read before anything is compared: settings, and state of no parameter."""
        return [leaf for _, leaf in leaves([self.groups, self.of_parameter, [] if self.other is None else self.other])]

    def as_saved(self, live: Sequence[Sequence[str]], known: Mapping[str, Any]) -> dict[str, Any]:
        """Return the groups, and the state, whose leaves are not read.

        Args:
            live: the live parameters' names, by group.
            known: values of the groups' leaves, by name.

        Returns:
            "param_groups", and "state" by name, without wrappers' prefixes, or by number where the groups have numbers.
        """
        names = {name for own in live for name in own}
        found = []
        if self.of_parameter and not self.groups:
            settings = {unwrapped(name, names): own for name, own in self.of_parameter.items()}
            for own in live:
                held = [name for name in own if name in settings]
                found.append({**map_leaves(settings[held[0]] if held else {}, known), "params": held})
        for given in self.groups:
            group = {"params": [], **map_leaves(given, known)}
            params = [p if isinstance(p, int) else unwrapped(str(p), names) for p in group["params"]]
            found.append({**group, "params": params})
        numbered = SavedOptimizer(self.state, found).is_numbered
        state = {
            int(name) if numbered and name.isdecimal() else unwrapped(name, names): own
            for name, own in self.state.items()
        }
        unknown = {str(name): {str(name): leaf} for name, leaf in self.unknown.items()}  # an error, where it is loaded
        return {"state": {**state, **unknown}, "param_groups": found}

    def disagreements(self, live: Sequence[Sequence[str]], known: Mapping[str, Any]) -> list[str]:
        """Return where settings by parameter differ within one of the live groups, which has one value for all parameters.

        The arguments are those of :meth:`as_saved`.
        """
        if self.groups:
            return []
        names = {name for own in live for name in own}
        settings = {unwrapped(name, names): map_leaves(own, known) for name, own in self.of_parameter.items()}
        found: dict[tuple[int, str], str] = {}
        for number, own in enumerate(live):
            first, *rest = [name for name in own if name in settings] or [""]
            for name in rest:
                for key in (settings[first].keys() | settings[name].keys()) - {"param_names"}:
                    one, other = settings[first].get(key), settings[name].get(key)
                    if not _equal(one, other):
                        text = (
                            f"{key} is {one} for {first} and {other} for {name}, which are both in group {number} here"
                        )
                        found.setdefault((number, key), text)
        return [found[key] for key in sorted(found)]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def is_optimizer(value: Any) -> bool:
    """Return True if a part of a tree is an optimizer's state dict, nested or flattened."""
    return isinstance(value, dict) and any(
        isinstance(key, str) and (key in ("state", "param_groups") or key.startswith(("state.", "param_groups.")))
        for key in value
    )


def optimizer_at(tree: dict[Any, Any], path: tuple[str, ...], names: Container[str]) -> SavedOptimizer | None:
    """Find an optimizer's state; return None if there is none.

    Args:
        tree: the checkpoint's tree.
        path: the place at which this package puts the optimizer.
        names: the names of the live parameters.
    """
    places = (_below(tree, own) for own in (_OPTIMIZERS if path == (OPTIMIZER,) else (path,)))
    found = next(filter(is_optimizer, places), None)
    return None if found is None else optimizer_of(found, names)


def optimizer_of(tree: dict[Any, Any], names: Container[str]) -> SavedOptimizer:
    """Sort an optimizer's state dict.

    Args:
        tree: the part of a checkpoint that is an optimizer's state dict.
        names: the names of parameters.
    """
    found = SavedOptimizer(other=tree.get(OTHER))
    by_number: dict[str, dict[Any, Any]] = {}
    for key, value in tree.items():
        kind, _, rest = str(key).partition(".")
        if key == "state" and isinstance(value, dict):
            for name, own in value.items():
                parameter, path = _split_name(str(name), names)
                if isinstance(own, dict):
                    found.state[str(name)] = own
                elif parameter in names:
                    place(found.state.setdefault(parameter, {}), path, own)
                else:
                    found.unknown[name] = own
        elif key == "param_groups" and isinstance(value, dict):
            found.of_parameter = {str(name): own for name, own in value.items() if isinstance(own, dict)}
        elif key == "param_groups":
            found.groups = [{str(k): v for k, v in group.items()} for group in value or () if isinstance(group, dict)]
        elif rest and kind in ("state", "param_groups"):
            number, _, setting = rest.partition(".")
            if kind == "param_groups" and number.isdecimal() and number not in names:
                place(by_number.setdefault(number, {}), tuple(setting.split(".")), value)
                continue
            parameter, path = _split_name(rest, names)
            place((found.state if kind == "state" else found.of_parameter).setdefault(parameter, {}), path, value)
    found.groups += [by_number[number] for number in sorted(by_number, key=int)]
    return found
