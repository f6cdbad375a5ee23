"""The parameters that a strategy takes through ``**settings``, written out for what reads signatures, as LightningCLI does."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, get_type_hints

from torch_shard import ShardConfig

from .settings import StrategySettings


def show_settings(strategy: Any, **defaults: Any) -> None:
    """Replace ``**settings`` in the signature of ``strategy.__init__`` by the fields of StrategySettings and of ShardConfig.

    Fields of ShardConfig get the default None, "as in `config`", because LightningCLI passes every parameter that it shows, and
    ShardConfig's own defaults would overrule `config`. `defaults` has the defaults of StrategySettings' fields that differ for
    this strategy.
    """
    signature = inspect.signature(strategy.__init__)
    visible = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for settings in (StrategySettings, ShardConfig):
        hints = get_type_hints(settings)
        own = settings is StrategySettings
        for field in dataclasses.fields(settings):  # type: ignore[arg-type]
            # Both have a `timeout`, and `precision` is Fabric's plugin; ShardConfig's own are set in `config`.
            if any(p.name == field.name for p in visible):
                continue
            visible.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=defaults.get(field.name, field.default) if own else None,
                    annotation=hints[field.name] if own else hints[field.name] | None,
                )
            )
    strategy.__init__.__signature__ = signature.replace(parameters=visible)
