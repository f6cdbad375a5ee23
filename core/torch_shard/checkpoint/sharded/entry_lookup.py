"""What a checkpoint holds, whoever wrote it: this package, FSDP2, DDP or plain torch with DCP, torchtitan.

They differ in where the model is (``model.``, ``app.model.``, at the top), in prefixes of wrappers, and in how optimizer state
is named: by parameter or by number, groups in a list or by parameter. Here all of them look alike.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from ...state.optimizer_state import OTHER
from ..format.manifest import SAVE_ID
from .entries import EXTRA, MODEL, OPTIMIZER

__all__ = [
    "WRAPPERS",
    "Entries",
    "SavedModel",
    "SavedOptimizer",
    "extra_of",
    "model_entries",
    "optimizer_entries",
    "place",
    "placed",
    "split_name",
    "unwrapped",
]

WRAPPERS = ("", "module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod.")
"""Prefixes that DDP and torch.compile give to the names of a module's entries."""

_OPTIMIZERS = (OPTIMIZER, "optim", "app.optim", "app.optimizer")

Entries = Mapping[tuple[Any, ...], str]
"""Full names of entries in the checkpoint, by path within a parameter's state, a group, or an entry that is a dict."""


@dataclass
class SavedModel:
    """Where a model's state is.

    Attributes:
        entries: full names in the checkpoint by the model's own names.
        nested: the same by path within the entry, for those that are dicts or lists (extra state).
    """

    entries: dict[str, str] = field(default_factory=dict)
    nested: dict[str, dict[tuple[Any, ...], str]] = field(default_factory=dict)


def model_entries(
    metadata: Metadata, path: tuple[str, ...], keys: Iterable[str], *, own_prefixes: bool = True
) -> SavedModel:
    """Find a model's state.

    Args:
        metadata: of the checkpoint.
        path: where this package puts it. In a checkpoint of its own the model is there, whatever its entries are called.
        keys: the live model's, by which its place in others is recognised.
        own_prefixes: drop prefixes of wrappers in this package's checkpoints, too. They may be part of the names that a hook
            has given.
    """
    saved, keys = metadata.state_dict_metadata, list(keys)
    ours = str(getattr(metadata.storage_meta, "save_id", None)).startswith(SAVE_ID)
    bases = [".".join(path) + "."]
    if path == (MODEL,) and not ours:
        bases += ["app.model.", "state_dict.", ""]
    places = [(base, wrapper) for base in bases for wrapper in (WRAPPERS if own_prefixes or not ours else ("",))]
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}

    def hits(at: tuple[str, str]) -> int:
        names = ("".join(at) + key for key in keys)
        # What lies in a dict is not at the top, even where the names are the same: "model" and "0.weight", "model.0.weight".
        return sum(name in saved and (bool(at[0]) or len(paths.get(name, ())) < 2) for name in names)

    # The first of equals.
    base, wrapper = max(places, key=hits)
    prefix = base + wrapper
    found = SavedModel()
    if not prefix:  # anything else may lie beside the model
        found.entries = {key: key for key in keys if key in saved}
        for full, parts in paths.items():
            if full in saved and len(parts) > 1 and parts[0] in keys:
                found.nested.setdefault(parts[0], {})[tuple(parts[1:])] = full
        return found
    for full in saved:
        if not full.startswith(base if ours else prefix):
            continue
        parts = paths.get(full, ())[base.count(".") :]
        name = str(parts[0]) if len(parts) > 1 else full[len(base) :]
        if ours or name.startswith(wrapper):
            name = name.removeprefix(wrapper)
        if len(parts) > 1:
            found.nested.setdefault(name, {})[tuple(parts[1:])] = full
        else:
            found.entries[name] = full
    return found


def extra_of(metadata: Metadata) -> bool:
    """Return True if there is an object that `save` was given."""
    return isinstance(metadata.state_dict_metadata.get(EXTRA), BytesStorageMetadata)


@dataclass
class SavedOptimizer:
    """Where an optimizer's state is.

    Attributes:
        state: full names in the checkpoint, by parameter and by path within its state. A parameter may be a number.
        groups: the same by the group's number and path within the group.
        of_parameter: settings where they are saved by parameter and not in groups.
        other: state of no parameter, one object.
    """

    state: dict[str, dict[tuple[Any, ...], str]] = field(default_factory=dict)
    groups: dict[int, dict[tuple[Any, ...], str]] = field(default_factory=dict)
    of_parameter: dict[str, dict[tuple[Any, ...], str]] = field(default_factory=dict)

    other: str | None = None

    @property
    def numbered(self) -> bool:
        """Whether the parameters of the state may be numbers, as in a plain ``optimizer.state_dict()``. So may names be, so what
        the groups say counts where they say it."""
        return bool(self.state) and all(name.isdecimal() for name in self.state)

    def as_saved(
        self, live: Sequence[Sequence[str]], known: Mapping[str, Any], groups: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Return the groups, and for each parameter with state the entries of it by path.

        Args:
            live: the live parameters' names, by group.
            known: values of the groups' entries, by full name.
            groups: numbers of those that are wanted; all by default.

        Returns:
            "param_groups", and "state" by name, without wrappers' prefixes, or by number where the groups have numbers.
        """
        names = {name for own in live for name in own}
        found = []
        if self.of_parameter and not self.groups:
            for own in live:
                held = [name for name in own if name in self.of_parameter]
                found.append({**placed(self.of_parameter[held[0]] if held else {}, known), "params": held})
        else:
            for number in sorted(self.groups) if groups is None else groups:
                group = {"params": [], **placed(self.groups[number], known)}
                params = [p if isinstance(p, int) else unwrapped(str(p), names) for p in group["params"]]
                found.append({**group, "params": params})
        listed = [p for group in found for p in group["params"]]
        # Names may look like numbers, so what the groups say counts where they say it.
        numbered = all(isinstance(p, int) for p in listed) if listed else self.numbered
        state = {
            int(name) if numbered and name.isdecimal() else unwrapped(name, names): own
            for name, own in self.state.items()
        }
        return {"state": state, "param_groups": found}


def optimizer_entries(metadata: Metadata, path: tuple[str, ...], names: Iterable[str]) -> SavedOptimizer | None:
    """Find an optimizer's state; None where there is none.

    Args:
        metadata: of the checkpoint.
        path: where this package puts it.
        names: of the live parameters.
    """
    bases = _OPTIMIZERS if path == (OPTIMIZER,) else (".".join(path),)
    saved = metadata.state_dict_metadata
    base = next((b for b in bases if any(n.startswith((f"{b}.state.", f"{b}.param_groups.")) for n in saved)), None)
    if base is None:
        return None
    known = set(names)
    found = SavedOptimizer()
    depth = base.count(".") + 1
    for full in saved:
        if not full.startswith(base + "."):
            continue
        parts = _parts(metadata, full, base, depth)
        if parts == (OTHER,):
            found.other = full
        if parts[0] == "state" and len(parts) > 1:
            name, rest = _split(parts[1:], known)
            found.state.setdefault(name, {})[rest] = full
        elif parts[0] == "param_groups" and len(parts) > 1:
            if isinstance(parts[1], int):
                found.groups.setdefault(parts[1], {})[tuple(parts[2:])] = full
            else:
                name, rest = _split(parts[1:], known)
                found.of_parameter.setdefault(name, {})[rest] = full
    return found


def _parts(metadata: Metadata, full: str, base: str, depth: int) -> tuple[Any, ...]:
    """Return the path within the optimizer's state dict; "state" and "param_groups" by themselves."""
    paths = metadata.planner_data
    path = paths.get(full) if isinstance(paths, Mapping) else None
    parts = tuple(path[depth:]) if path is not None and len(path) > depth else (full[len(base) + 1 :],)
    for kind in ("state", "param_groups"):  # state dicts that were flattened before: one name with dots
        if isinstance(parts[0], str) and parts[0].startswith(kind + "."):
            rest = parts[0][len(kind) + 1 :]
            head, _, tail = rest.partition(".")
            if kind == "param_groups" and head.isdecimal() and path is None:
                return (kind, int(head), *tail.split("."), *parts[1:])
            return (kind, rest, *parts[1:])
    return parts


def _split(parts: tuple[Any, ...], known: Container[str]) -> tuple[str, tuple[Any, ...]]:
    """Return a parameter's name and the path behind it, where the first part may be both."""
    name, rest = (str(parts[0]), parts[1:]) if len(parts) > 1 else split_name(str(parts[0]), known)
    return unwrapped(name, known), rest


def split_name(text: str, known: Container[str]) -> tuple[str, tuple[str, ...]]:
    """Return a parameter's name and the path behind it, where both are one text."""
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
    """Return a saved name without the prefixes of wrappers that the live ones don't have."""
    wrapper = next((w for w in ("module.", "_orig_mod.") if name.startswith(w)), None)
    return name if wrapper is None or name in known else unwrapped(name[len(wrapper) :], known)


def placed(entries: Entries, values: Mapping[str, Any]) -> dict[Any, Any]:
    """Return nested dicts and lists of values, given the entries' full names by path."""
    found: dict[Any, Any] = {}
    for path, full in entries.items():
        place(found, path, values[full])
    return found


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
