"""The settings of the launch, which hold for every model that a script shards under the runner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..comm.process_groups import group_timeout
from ..config.shard_config import ShardConfig
from ..frontend.launch import FLAG_FORM, SETTINGS, Setting, flag

RUNNER_SETTINGS = (
    *SETTINGS,
    Setting("defer_gradient_sync", flag, FLAG_FORM),
    Setting("fsdp", flag, FLAG_FORM),
)
"""The settings that the runner reads: fields of ``ShardConfig``; ``defer_gradient_sync``, on by default, by which ``no_sync()``
reduces once, at its end; and ``fsdp``, off by default, by which torch's FSDP is replaced, too."""


class Overrides:
    """Settings that replace those of a script's own arguments.

    Args:
        settings: values of fields of :data:`RUNNER_SETTINGS`, by field.
        on_host: True if models compute on the CPU, whatever device a script names.

    Raises:
        ConfigError: a value is not allowed.
    """

    def __init__(self, settings: Mapping[str, Any], on_host: bool = False) -> None:
        config = dict(settings)
        self.on_host = on_host
        self.defer_gradient_sync: bool = config.pop("defer_gradient_sync", True)
        self.fsdp: bool = config.pop("fsdp", False)
        self._config = config
        ShardConfig(**{field: value for field, value in config.items() if value is not None})

    def for_model(self, model: nn.Module, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields of ``ShardConfig`` for a model, where `own` are those of the script's arguments. Not collective.

        The process group must exist.
        """
        # Ignored parameters may have other values on each rank, so that none may be sharded: the launch only adds to them.
        found = {**own, **self._config, "ignore": (*own["ignore"], *self._config.get("ignore", ()))}
        if found.get("timeout") is None:
            # The ranks may be as far apart as under DDP, where rank 0 may evaluate or save alone, for long, while others wait.
            found["timeout"] = group_timeout(next((p.device for p in model.parameters()), torch.device("cpu")))
        return found
