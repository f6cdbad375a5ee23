"""Tied weights, in a format that has one name for each tensor: which name is kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import nn

__all__ = ["chosen_names"]


def chosen_names(model: nn.Module, groups: Iterable[Sequence[str]]) -> list[str]:
    """Return for each group of names of one tensor the name that is stored. Not collective.

    transformers' models say which names go, by ``_tied_weights_keys``: names or patterns in a list, or as the keys of a dict,
    within the module that has it. Else, or where all would go, the first name stays.
    """
    patterns = []
    for prefix, module in model.named_modules():
        keys = getattr(module, "_tied_weights_keys", None)
        for key in keys if isinstance(keys, (list, tuple, set, dict)) else ():
            patterns.append((f"{prefix}." if prefix else "", re.compile(str(key))))

    def goes(name: str) -> bool:
        return any(name.startswith(prefix) and found.search(name[len(prefix) :]) for prefix, found in patterns)

    return [next((name for name in names if not goes(name)), names[0]) for names in groups]
