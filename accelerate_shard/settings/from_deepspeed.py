"""The settings of DeepSpeed that have a counterpart here, for ``accelerate-shard config --deepspeed``.

A launch for DeepSpeed is refused and not translated, because DeepSpeed itself clips, accumulates and makes optimizers as its
configuration says, where here the script does: the same script would train otherwise. docs/accelerate.md has a table of all keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_shard import Offload
from torch_shard.errors import ConfigError

__all__ = ["fields_of", "of_yaml"]

_STRATEGIES = {0: "no_shard", 1: "shard_optim", 2: "shard_grad_op", 3: "full_shard"}
_DEVICES = ("none", "cpu", "nvme")
# The keys of a YAML of Accelerate's, and their places in DeepSpeed's own file.
_IN_JSON = {
    "zero_stage": ("stage",),
    "offload_optimizer_device": ("offload_optimizer", "device"),
    "offload_optimizer_nvme_path": ("offload_optimizer", "nvme_path"),
    "offload_param_device": ("offload_param", "device"),
    "offload_param_nvme_path": ("offload_param", "nvme_path"),
}


def of_yaml(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``deepspeed_config`` of a YAML, with what the file of DeepSpeed's that it names says. Not collective.

    Raises:
        ConfigError: that file can't be read.
    """
    section = contents.get("deepspeed_config") or {}
    given = {key: value for key, value in section.items() if value is not None}
    if "deepspeed_config_file" in given:  # then Accelerate allows none of that file's keys beside it
        path = Path(given["deepspeed_config_file"])
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"deepspeed_config_file: {path} can't be read: {error}.") from error
        for key, places in _IN_JSON.items():
            value = config
            for place in ("zero_optimization", *places):
                value = value.get(place) if isinstance(value, Mapping) else None
            if value is not None and value != "auto":
                given[key] = value
    return given


def fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of :class:`ShardPlugin` that stand for the keys of a ``deepspeed_config``. Not collective.

    Raises:
        ConfigError: a value that DeepSpeed does not have, or a disk without a directory; names the key.
    """
    stage = str(given.get("zero_stage", 2))  # Accelerate's default
    if stage not in map(str, _STRATEGIES):
        raise ConfigError(f"zero_stage must be 0, 1, 2 or 3, not {stage!r}.")
    return {"strategy": _STRATEGIES[int(stage)], "offload": _offload(given)}


def _offload(given: Mapping[str, Any]) -> Offload | None:
    optimizer, param = (_device(given, f"offload_{of}_device") for of in ("optimizer", "param"))
    if optimizer == param == "none":
        return None
    found: dict[str, Any] = {"params": param != "none"}
    for of, device in (("param", param), ("optimizer", optimizer)):
        if device == "nvme":
            path = str(given.get(f"offload_{of}_nvme_path", "none"))
            if path.lower() in ("none", ""):
                raise ConfigError(f"offload_{of}_device is nvme, and offload_{of}_nvme_path names no directory.")
            found["nvme"] = path
    if param == "nvme":
        found["nvme_params"] = True
    return Offload(**found)


def _device(given: Mapping[str, Any], key: str) -> str:
    value = str(given.get(key, "none")).lower()
    if value not in _DEVICES:
        raise ConfigError(f"{key} must be none, cpu or nvme, not {value!r}.")
    return value
