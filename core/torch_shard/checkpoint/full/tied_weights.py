"""Which name of tied weights is kept by a format that has one name for each tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import nn


def chosen_names(model: nn.Module, groups: Iterable[Sequence[str]]) -> list[str]:
    """Return, for each group of names of one tensor, the name that is kept. Not collective.

    Modules of transformers list the names that are dropped in ``_tied_weights_keys``: names or patterns, relative to the module,
    in a list or as the keys of a dict. If that drops none or all of a group, the first name is kept.
    """
    patterns = []
    for prefix, module in model.named_modules():
        keys = getattr(module, "_tied_weights_keys", None)
        for key in keys if isinstance(keys, (list, tuple, set, dict)) else ():
            patterns.append((f"{prefix}." if prefix else "", re.compile(str(key))))

    def is_dropped(name: str) -> bool:
        return any(name.startswith(prefix) and found.search(name[len(prefix) :]) for prefix, found in patterns)

    return [next((name for name in names if not is_dropped(name)), names[0]) for names in groups]
