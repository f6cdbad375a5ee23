"""The section ``zero_optimization`` of a DeepSpeed configuration as settings of this engine, for front ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config.offload import Offload
from ..config.shard_config import Strategy
from ..errors import ConfigError

__all__ = ["OFFLOADS", "read_config", "settings_of_zero"]

OFFLOADS = ("offload_optimizer", "offload_param")
"""The parts of the section about offload, each with ``device``, ``nvme_path`` and ``pin_memory``."""
_STRATEGIES: dict[str, Strategy] = {"0": "no_shard", "1": "shard_optim", "2": "shard_grad_op", "3": "full_shard"}
_DEVICES = ("none", "cpu", "nvme")


def read_config(path: Any, name: str) -> Mapping[str, Any]:
    """Return the contents of a configuration file of DeepSpeed's own. Not collective.

    Raises:
        ConfigError: the file can't be read, or holds no mapping; the message starts with `name`.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{name}: {path} can't be read: {error}.") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name}: {path} must hold a mapping.")
    return found


def settings_of_zero(zero: Mapping[str, Any], name: Callable[[str], str]) -> tuple[Strategy, Offload | None, list[str]]:
    """Return ``ShardConfig.strategy`` and ``ShardConfig.offload`` for a section, and the keys without effect. Not collective.

    Args:
        zero: the section. Values that are None or ``"auto"`` count as not given.
        name: a function from the place of a key, such as ``offload_param.device``, to the user's name for it.

    Raises:
        ConfigError: a value is none of DeepSpeed's, or a disk is chosen without a directory; the message names the key.
    """
    stage = str(_given(zero).get("stage", 0))
    if stage not in _STRATEGIES:
        raise ConfigError(f"{name('stage')} must be 0, 1, 2 or 3, not {stage!r}.")
    parts = {part: _given(zero.get(part)) for part in OFFLOADS}
    devices = {part: _device(given, name(f"{part}.device")) for part, given in parts.items()}
    used = [part for part in OFFLOADS if devices[part] != "none"]
    if not used:
        return _STRATEGIES[stage], None, []
    settings: dict[str, Any] = {"params": "offload_param" in used, "nvme_params": devices["offload_param"] == "nvme"}
    unused = []
    for part in used:
        if devices[part] != "nvme":
            continue
        place = f"{part}.nvme_path"
        path = str(parts[part].get("nvme_path", "none"))
        if path.lower() in ("none", ""):
            raise ConfigError(f"{name(f'{part}.device')} is nvme, and {name(place)} names no directory.")
        # There is only one directory: the optimizer's, if that has one.
        if settings.setdefault("nvme", path) != path:
            unused.append(f"{name(place)}={path!r}")
    pinned = [bool(parts[part]["pin_memory"]) for part in used if "pin_memory" in parts[part]]
    if pinned:
        settings["pin_memory"] = all(pinned)
    return _STRATEGIES[stage], Offload(**settings), unused


def _given(section: Any) -> dict[str, Any]:
    values = section if isinstance(section, Mapping) else {}
    return {key: value for key, value in values.items() if value is not None and value != "auto"}


def _device(given: Mapping[str, Any], name: str) -> str:
    # DeepSpeed's documentation gives "cpu" as the default of a part that is there.
    device = str(given.get("device", "cpu" if given else "none")).lower()
    if device not in _DEVICES:
        raise ConfigError(f"{name} must be none, cpu or nvme, not {device!r}.")
    return device
