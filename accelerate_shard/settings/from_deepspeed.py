"""The settings of DeepSpeed that have a counterpart here, for ``accelerate-shard config --deepspeed``.

A launch for DeepSpeed is refused and not translated, because DeepSpeed itself clips, accumulates and makes optimizers as its
configuration says, where here the script does: the same script would train otherwise. docs/accelerate.md has a table of all keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_shard.frontend.deepspeed_settings import OFFLOADS, read_config, settings_of_zero
from torch_shard.log import logger


def of_yaml(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``deepspeed_config`` of a YAML, with the ZeRO section of the file of DeepSpeed's that it names. Not collective.

    Raises:
        ConfigError: that file can't be read, or holds no mapping.
    """
    section = contents.get("deepspeed_config") or {}
    given = {key: value for key, value in section.items() if value is not None}
    if "deepspeed_config_file" in given:  # then Accelerate allows none of that file's keys beside it
        config = read_config(given["deepspeed_config_file"], "deepspeed_config_file")
        zero = config.get("zero_optimization")  # once a boolean
        given["zero_optimization"] = zero if isinstance(zero, Mapping) else {}
    return given


def fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of :class:`ShardPlugin` that stand for the keys of a ``deepspeed_config``. Not collective.

    Raises:
        ConfigError: a value that DeepSpeed does not have, or a disk without a directory; names the key.
    """
    if "zero_optimization" in given:  # of DeepSpeed's own file
        strategy, offload, unused = settings_of_zero(
            given["zero_optimization"], lambda place: f"zero_optimization.{place}"
        )
    else:
        zero: dict[str, Any] = {"stage": given.get("zero_stage", 2)}  # Accelerate's default
        for part in OFFLOADS:
            zero[part] = {"device": given.get(f"{part}_device", "none"), "nvme_path": given.get(f"{part}_nvme_path")}
        strategy, offload, unused = settings_of_zero(zero, _yaml_key)
    if unused:
        logger.warning("DeepSpeed's settings without effect here: %s.", ", ".join(unused))
    return {"strategy": strategy, "offload": offload}


def _yaml_key(place: str) -> str:
    return "zero_stage" if place == "stage" else place.replace(".", "_")
