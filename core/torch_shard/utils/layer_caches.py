"""The caches of keys and values that layers of transformers are called with."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from ..log import logger

_CACHES = ("past_key_values", "past_key_value", "layer_past")


def without_cache(layer: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return `kwargs` without caches: recomputation would write keys and values a second time. transformers does the same."""
    # Since version 5.24 of transformers the name is "cache", which in other layers may be anything.
    names = (*_CACHES, "cache") if getattr(layer, "_can_checkpoint_with_cache", None) is False else _CACHES
    changed: dict[str, Any] = {name: None for name in names if kwargs.get(name) is not None}
    if kwargs.get("use_cache"):
        changed["use_cache"] = False
    if changed:
        _warn_of_caches()
    return {**kwargs, **changed}


@functools.cache
def _warn_of_caches() -> None:
    logger.warning("activation_checkpointing: layers do not use caches of keys and values in training.")
