"""The parameters that a strategy takes through ``**overrides``, written out for what reads signatures, as LightningCLI does."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, get_type_hints

from torch_shard import ShardConfig

__all__ = ["show_config_fields"]


def show_config_fields(strategy: Any) -> None:
    """In the signature of ``strategy.__init__``, replace ``**overrides`` by the fields of ShardConfig.

    Each has the default None, "as in `config`": LightningCLI passes every parameter that it shows, and ShardConfig's own
    defaults would undo what `config` says.
    """
    signature = inspect.signature(strategy.__init__)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    hints = get_type_hints(ShardConfig)
    fields = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_or_none(hints[field.name])
        )
        for field in dataclasses.fields(ShardConfig)
        if field.name not in signature.parameters
    ]
    strategy.__init__.__signature__ = signature.replace(parameters=own + fields)


def _or_none(hint: Any) -> Any:
    return hint | None
