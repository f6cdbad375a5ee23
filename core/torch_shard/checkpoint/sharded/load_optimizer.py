"""Loading an optimizer's state out of a sharded checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...optim.checks import state_dtype
from ...optim.engines_of_optimizer import first_runtime, params_of
from ...optim.matrix import state as matrix_state
from ...optim.registry import counters_in
from ...state import optimizer_state
from ...state.model_state import Mismatches
from ...state.param_names import names_by_group
from ..full.load import by_name, converted
from ..mismatches import wrong_dtype
from .checkpoint_dir import Checkpoint
from .entries import Source, param_names
from .entry_tree import SavedOptimizer, Stored, StoredObject, leaves, map_leaves, new_tensor, on_meta, optimizer_at


class OptimizerLoad:
    """One optimizer's share of a checkpoint.

    :func:`.load.load` calls :meth:`compare`, :meth:`destinations` and :meth:`apply`, in this order.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        sources: Sequence[Source],
        what: str,
        optimizers: Sequence[Any],
        number: int,
        names: dict[int, str],
        saved: SavedOptimizer | None,
    ) -> None:
        self.checkpoint, self.optimizer, self.number = checkpoint, optimizers[number], number
        self.runtime = first_runtime(self.optimizer) or sources[0].runtime
        self.what, self.names, self.saved = what, names, saved
        self.alone = len(optimizers) == 1
        if saved is not None and not self.alone:  # several without names are saved as one, group after group
            first = sum(len(o.param_groups) for o in optimizers[:number])
            own = saved.groups[first : first + len(self.optimizer.param_groups)]
            self.saved = dataclasses.replace(saved, groups=own)
        self.given: dict[str, Any] = {"state": {}, "param_groups": []}
        self.entries: dict[str, dict[Any, Any]] = {}
        self.elsewhere: dict[int, bool] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        tree: dict[Any, Any],
        sources: Sequence[Source],
        path: tuple[str, ...],
        optimizers: Sequence[Any],
    ) -> list[OptimizerLoad]:
        """Return one object for each optimizer that is saved at a path."""
        everyone = [param_names(sources, optimizer) for optimizer in optimizers]
        saved = optimizer_at(tree, path, {name for names in everyone for name in names.values()})
        return [
            cls(checkpoint, sources, ".".join(path), optimizers, number, names, saved)
            for number, names in enumerate(everyone)
        ]

    # -- comparing ----------------------------------------------------------------------------------------------
    def small(self) -> list[Any]:
        """Return the leaves that are read before :meth:`compare`: groups, and objects within the state."""
        if self.saved is None:
            return []
        objects = [leaf for _, leaf in leaves(self.saved.state) if not isinstance(leaf, Stored)]
        return self.saved.small() + objects

    def compare(self, known: Mapping[str, Any], dtype: torch.dtype | None, found: Mismatches) -> None:
        """Add what does not fit to `found`. `known` has the values of :meth:`small` by name."""
        if self.saved is None:
            found.missing.append(f"{self.what} (the checkpoint has no such optimizer state)")
            return
        live = names_by_group(self.optimizer, self.names)
        given = self.saved.as_saved(live, known)
        if not self.alone:  # the rest is other optimizers'
            own_keys = {*self.names.values(), *(p for group in given["param_groups"] for p in group["params"])}
            given["state"] = {key: own for key, own in given["state"].items() if key in own_keys}
        self.given = by_name(self.optimizer, self.names, given)
        self.entries = self.given["state"]

        def proxy(leaf: Stored | StoredObject) -> Any:
            return on_meta(leaf) if isinstance(leaf, Stored) else known[leaf.name]

        self.given["state"] = {name: map_leaves(own, proxy) for name, own in self.entries.items()}
        others = known[self.saved.other.name] if self.saved.other is not None else ()
        own_others = {key: entries for position, key, entries in others if position == self.number}
        self.given["state"].update(own_others)
        self.given[optimizer_state.OTHER] = list(own_others)
        own = optimizer_state.mismatches(self.runtime, self.optimizer, self.names, self.given)
        own.problems.extend([*self.saved.disagreements(live, known), *self._wrong_dtypes(dtype)])
        found.add(own, f"{self.what}: ")

    def _wrong_dtypes(self, dtype: torch.dtype | None) -> list[str]:
        problems = []
        for p in params_of(self.optimizer):
            name = self.names[id(p)]
            for key, leaf in self.entries.get(name, {}).items():
                live = self.optimizer.state.get(p, {}).get(key)
                if not isinstance(leaf, Stored) or not isinstance(live, torch.Tensor):
                    continue
                # With stochastic rounding the first step gives state the dtype that was saved. Adagrad makes its state before
                # that step, in the parameter's dtype.
                if live.dtype != p.dtype or leaf.dtype != state_dtype(p):
                    asked = None if dtype is None else live.dtype
                    problems += wrong_dtype(f"{name}: {key}", leaf.dtype, live, asked, "checkpoint")
        return problems

    # -- reading ------------------------------------------------------------------------------------------------
    def destinations(
        self, saved_dtypes: Mapping[str, torch.dtype], dtype: torch.dtype | None, in_place: bool
    ) -> dict[str, torch.Tensor]:
        """Return memory for this rank's state by the entries' names, with `in_place` the optimizer's own if it has some.

        Call it on all ranks, after they agreed.
        """
        self.elsewhere = matrix_state.owned_elsewhere(self.runtime, self.optimizer, self.names, self.given["state"])
        manifest = self.checkpoint.manifest
        unsharded = frozenset(() if manifest is None else manifest.whole)
        params = params_of(self.optimizer)
        counters = counters_in((p, self.given["state"].get(self.names[id(p)])) for p in params)
        for p in params:
            name = self.names[id(p)]
            if self.elsewhere.get(id(p), False):
                continue
            for path, leaf in leaves(self.entries.get(name, {})):
                if not isinstance(leaf, Stored):
                    continue
                kept = self._dtype(p, path, leaf.dtype, saved_dtypes.get(name), dtype)
                is_cut = (
                    leaf.name not in unsharded
                    and id(p) not in self.elsewhere
                    and optimizer_state.is_cut(p, path[-1], leaf.shape, counters)
                )
                live: Any = self.optimizer.state.get(p, {}).get(path[0]) if in_place and len(path) == 1 else None
                if not (optimizer_state.cut_like(live, p) and live.shape == leaf.shape and live.dtype == kept):
                    live = new_tensor(leaf, p if is_cut else None, kept)
                self.tensors[leaf.name] = live
        return self.tensors

    def _dtype(
        self, p: Any, path: tuple[Any, ...], saved: torch.dtype, of_param: torch.dtype | None, asked: torch.dtype | None
    ) -> torch.dtype:
        """Return the dtype that a tensor of the state gets: the saved one, unless a conversion was asked for."""
        if asked is None or not saved.is_floating_point or path[-1] == "step":
            return saved
        live = self.optimizer.state.get(p, {}).get(path[0])
        if isinstance(live, torch.Tensor) and live.dtype.is_floating_point:
            return state_dtype(p) if live.dtype == p.dtype else live.dtype
        return state_dtype(p) if saved == of_param else saved

    # -- applying -----------------------------------------------------------------------------------------------
    def apply(self, known: Mapping[str, Any]) -> None:
        """Load the state into the optimizer. Not collective."""
        values = {**known, **self.tensors}
        state: dict[Any, Any] = {key: self.given["state"][key] for key in self.given.get(optimizer_state.OTHER, ())}
        for number, p in enumerate(params_of(self.optimizer)):
            entries = self.entries.get(self.names[id(p)])
            if entries and not self.elsewhere.get(id(p), False):
                own_values = {leaf.name: _on(values[leaf.name], p.device, path) for path, leaf in leaves(entries)}
                state[number] = map_leaves(entries, own_values)
        groups = optimizer_state.groups_by_number(self.optimizer, self.names, self.given["param_groups"])
        optimizer_state.load_by_number(self.optimizer, {"state": state, "param_groups": groups})


def _on(value: Any, device: torch.device, path: tuple[Any, ...]) -> Any:
    if not isinstance(value, torch.Tensor) or path[-1] == "step" or value.device == device:
        return value
    return converted(value, device)
