"""The structure of a checkpoint in one file of torch.save, with a slot for each tensor.

A checkpoint becomes ``{"model", "optimizer", "extra"}``, the optimizer as ``optimizer.state_dict()`` has it. A checkpoint of
Lightning becomes what a Trainer on one device writes, and a model alone its state dict.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointError
from ..format.torch_file import Slot
from ..sharded.entries import EXTRA, MODEL, MODELS, OPTIMIZER
from ..sharded.entry_tree import SavedOptimizer, Stored, map_leaves
from .classify import Parts


class Slots:
    """Slots for stored tensors; tied tensors share a slot.

    Attributes:
        of: the slots, each with the tensor that has to be written, in order, by the tensor's place.
    """

    def __init__(self) -> None:
        self.of: dict[Any, tuple[Slot, Stored]] = {}

    def fill(self, tree: Any) -> Any:
        """Return nested values with slots in place of tensors."""

        def slot(leaf: Any) -> Any:
            if not isinstance(leaf, Stored):
                return leaf
            found, _ = self.of.setdefault(leaf.place, (Slot(leaf.shape, leaf.dtype), leaf))
            return found

        return map_leaves(tree, slot)


def torch_structure(parts: Parts, slots: Slots, versions: Mapping[str, Any]) -> Any:
    """Return the structure of a torch file.

    Args:
        parts: the checkpoint's contents.
        slots: the object to which a slot is added for each tensor.
        versions: the versions of the model's modules, for ``load_state_dict``.
    """
    model = _state_dict(parts.model, slots, versions)
    models = {name: _state_dict(own, slots, {}) for name, own in parts.models.items()}
    if not (parts.optimizers or parts.extra is not None or parts.other):
        return {MODEL: model, MODELS: models} if models else model
    optimizers = {name: slots.fill(state_by_number(own)) for name, own in parts.optimizers.items()}
    found: dict[Any, Any] = {}
    if parts.lightning:
        found = {**slots.fill(parts.other), **slots.fill(parts.extra), "state_dict": model}
        if models:
            found[MODELS] = models
        if optimizers:
            found["optimizer_states"] = list(optimizers.values())
        return found
    if model:
        found[_free(MODEL, parts.model_key or "state_dict", parts)] = model
    if models:
        found[_free(MODELS, MODELS, parts)] = models
    if optimizers:
        together = list(optimizers.values()) if parts.listed else optimizers.get("", optimizers)
        found[_free(OPTIMIZER, parts.optimizer_key or "optimizer_state_dict", parts)] = together
    if parts.extra is not None:
        found[EXTRA] = slots.fill(parts.extra)
    return {**found, **{key: slots.fill(value) for key, value in parts.other.items()}}


def _free(key: str, given: str, parts: Parts) -> str:
    """Return the usual key, or the checkpoint's own if another entry has that: {"model": "resnet50", "state_dict": ...}."""
    if key not in parts.other:
        return key
    if given in parts.other:
        raise CheckpointError(
            f"the checkpoint has entries {key!r} and {given!r} beside its {key}, which leaves no key for that. Rename one of "
            "them, or pass --model-only."
        )
    return given


def _state_dict(model: Mapping[str, Any], slots: Slots, versions: Mapping[str, Any]) -> dict[str, Any]:
    found = collections.OrderedDict((name, slots.fill(value)) for name, value in model.items())
    if versions:
        found._metadata = collections.OrderedDict(versions)  # type: ignore[attr-defined]
    return found


def state_by_number(optimizer: SavedOptimizer) -> dict[str, Any]:
    """Return an optimizer's state as ``optimizer.state_dict()`` has it, where numbers are positions in the groups."""
    state: dict[Any, Any] = {}
    groups = []
    numbers: dict[str, int] = {}
    for group in optimizer.groups:
        listed = [str(p) for p in group.get("params", ())]
        for name in listed:
            numbers.setdefault(name, int(name) if optimizer.is_numbered else len(numbers))
        groups.append({**group, "params": [numbers[name] for name in listed]})
    for name, own in optimizer.state.items():
        state[numbers.get(name, int(name) if optimizer.is_numbered else name)] = own
    ordered = {key: state[key] for key in sorted(state, key=lambda key: (isinstance(key, str), key))}
    for position, key, value in optimizer.other or ():
        if key in ordered:
            raise CheckpointError(
                f"the state of several optimizers has {key!r} (the second time in number {position}), which one file can't "
                "hold. Save them by name, optimizer={name: optimizer}, or pass --model-only."
            )
        ordered[key] = value
    return {"state": ordered, "param_groups": groups}
