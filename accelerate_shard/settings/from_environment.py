"""The settings of the launch: ``SHARD_*`` variables, ``shard_*`` keys of the YAML, and FSDP's settings, in this order.

An argument to ``Accelerator(...)`` replaces all of them. :func:`take_over_launch` also changes the environment so that Accelerate
does not set FSDP up itself.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from torch_shard.errors import ConfigError
from torch_shard.frontend import Strategy
from torch_shard.log import logger

from .config_file import FILE_VARIABLE, launch_file, read_launch_file
from .from_fsdp import KEYS, from_fsdp_environment
from .offload_text import FORM as OFFLOAD
from .offload_text import offload_of_fields, read_offload
from .plugin import ShardPlugin, StateDictType

__all__ = ["PREFIX", "SETTINGS", "Setting", "launch_plugin", "own_names", "take_over_launch"]

PREFIX = "SHARD_"
_TAKEN = "SHARD_FSDP_TAKEN_OVER"
"""Stands for ``ACCELERATE_USE_FSDP``, which Accelerate and transformers must not find: the next Accelerator() and processes that
are started from this one still see that the launch has chosen FSDP."""
_OWN = (FILE_VARIABLE, _TAKEN)
_USE_FSDP = "ACCELERATE_USE_FSDP"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "fp16": torch.float16, "float16": torch.float16,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp64": torch.float64, "float64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A field of :class:`ShardPlugin` that the environment and a YAML can set.

    Attributes:
        field: the plugin's field.
        read: a function from text to the value, which may raise ValueError.
        form: a description of the text, for errors and questions.
    """

    field: str
    read: Callable[[str], Any]
    form: str

    @property
    def variable(self) -> str:
        return PREFIX + self.field.removeprefix("shard_").upper()

    @property
    def yaml(self) -> str:
        return self.variable.lower()


def _flag(text: str) -> bool:
    if text.lower() in _TRUE or text.lower() in _FALSE:
        return text.lower() in _TRUE
    raise ValueError


def _seconds(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _units(text: str) -> Any:
    return None if text.lower() == "auto" else _names(text)


def _one_of(*known: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.lower() not in known:
            raise ValueError
        return text.lower()

    return read


def _layers(text: str) -> Any:
    return text.lower() in _TRUE if text.lower() in (*_TRUE, *_FALSE) else _names(text)


def _dtype(text: str) -> torch.dtype:
    if text.lower() not in _DTYPES:
        raise ValueError
    return _DTYPES[text.lower()]


_FLAG = "true or false"
SETTINGS = (
    Setting("strategy", _one_of(*get_args(Strategy)), "one of " + ", ".join(get_args(Strategy))),
    Setting("layer_classes", _names, "names of classes, separated by commas"),
    Setting("units", _units, "patterns of module names, separated by commas, or auto"),
    Setting("unit_bytes", int, "a number of bytes"),
    Setting("prefetch", int, "a number of units"),
    Setting("shard_size", int, "a number of ranks"),
    Setting("reshard_after_forward", int, "a number of ranks"),
    Setting("offload", read_offload, OFFLOAD),
    Setting("precision", _dtype, "fp32, bf16 or fp16: in which dtype parameters are gathered and computed with"),
    Setting("fp32_masters", _flag, _FLAG),
    Setting("activation_checkpointing", _layers, f"{_FLAG}, or names of classes, separated by commas"),
    Setting("activation_offload", _layers, f"{_FLAG}, or names of classes, separated by commas"),
    Setting("state_dict_type", _one_of(*get_args(StateDictType)), "sharded or full"),
    Setting("async_save", _flag, _FLAG),
    Setting("weights_only", _flag, _FLAG),
    Setting("defer_gradient_sync", _flag, _FLAG),
    Setting("ignore", _names, "patterns of parameter names, separated by commas"),
    Setting("sync_module_states", _flag, _FLAG),
    Setting("broadcast_buffers", _flag, _FLAG),
    Setting("timeout", _seconds, "a number of seconds, or none: as long as the process group waits"),
    Setting("alone", _one_of("read", "error"), "read or error"),
    Setting("alone_after", float, "a number of seconds"),
    Setting("debug", _flag, _FLAG),
    Setting("single_communicator", _flag, _FLAG),
)

_BY_VARIABLE = {setting.variable: setting for setting in SETTINGS}
_BY_YAML = {setting.yaml: setting for setting in SETTINGS}
_FSDP_KEYS = {key.yaml for key in KEYS if key.yaml}


def take_over_launch() -> None:
    """Make the launch ours: before ``Accelerator()``, and before a script that loads models. Not collective.

    Accelerate would set FSDP up where ``ACCELERATE_USE_FSDP`` is, and transformers would load weights on one rank only. On CPUs
    its launcher starts the processes of an FSDP configuration without telling them to find each other.
    """
    if os.environ.get(_USE_FSDP, "").lower() in _TRUE:
        os.environ[_TAKEN] = "true"
    os.environ.pop(_USE_FSDP, None)
    launched = "LOCAL_RANK" in os.environ and "ACCELERATE_USE_CPU" not in os.environ
    if launched and (_file_settings()[1] or not _has_accelerator()):
        os.environ["ACCELERATE_USE_CPU"] = "true"


def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def launch_plugin() -> ShardPlugin | None:
    """Return the settings that the launch has chosen; None if it has chosen none. Not collective.

    Raises:
        ConfigError: names the variable or key, and a close one where it is unknown.
    """
    own = {**_file_settings()[0], **_own_variables()}
    fsdp = os.environ.get(_TAKEN) == "true" or os.environ.get(_USE_FSDP, "").lower() in _TRUE
    if not own and not fsdp:
        return None
    base = from_fsdp_environment(os.environ) if fsdp else ShardPlugin()
    changes = {name: value for name, (_, value) in own.items()}
    moved = "units" in changes or "layer_classes" in changes
    if moved and base.activation_checkpointing is True and base.layer_classes:
        changes.setdefault(
            "activation_checkpointing", base.layer_classes
        )  # the layers stay the same, whatever the units are
    # units and layer_classes are one choice: setting one drops the other.
    if "units" in changes and "layer_classes" not in changes:
        changes["layer_classes"] = ()
    elif "layer_classes" in changes and "units" not in changes:
        changes["units"] = None
    try:
        return replace(base, **changes)
    except ConfigError as error:
        names = ", ".join(name for name, _ in own.values())
        raise ConfigError(f"{error} (settings of the launch: {names})") from None


def own_names() -> list[str]:
    """Return the names of the ``SHARD_*`` and ``shard_*`` settings that the launch has chosen. Not collective."""
    return [name for name, _ in {**_file_settings()[0], **_own_variables()}.values()]


def _own_variables() -> dict[str, tuple[str, Any]]:
    """Return the values of ``SHARD_*`` variables by field, each with the variable's name."""
    found, unknown = {}, []
    for name, text in sorted(os.environ.items()):
        if not name.startswith(PREFIX) or name in _OWN:
            continue
        setting = _BY_VARIABLE.get(name)
        if setting is None:
            close = _close(name, _BY_VARIABLE)
            if close is not None:
                raise ConfigError(f"{name} is no setting of this package. Did you mean {close}?")
            unknown.append(name)  # another program's, such as SHARD_INDEX of CI systems
        elif text.strip():
            found[setting.field] = (name, _value(setting, name, text))
    if unknown:
        logger.warning("Environment variables that are no settings of this package: %s.", ", ".join(unknown))
    return found


def _file_settings() -> tuple[dict[str, tuple[str, Any]], bool]:
    """Return the values of the YAML's ``shard_*`` keys by field, each with its key, and the YAML's ``use_cpu``."""
    path = launch_file()
    if path is None:
        return {}, False
    contents = read_launch_file(path)
    section = contents.get("fsdp_config")
    found, unknown = {}, []
    for key, value in (section if isinstance(section, Mapping) else {}).items():
        setting = _BY_YAML.get(key)
        if setting is not None:
            found[setting.field] = (key, _value(setting, f"{path}: {key}", value))
        elif str(key).startswith(PREFIX.lower()):
            close = _close(key, _BY_YAML)
            hint = f" Did you mean {close}?" if close else ""
            raise ConfigError(f"{path}: fsdp_config has the key {key}, which is no setting of this package.{hint}")
        elif key not in _FSDP_KEYS and f"fsdp_{key}" not in _FSDP_KEYS:
            close = _close(key, _FSDP_KEYS)
            unknown.append(f"{key} (did you mean {close}?)" if close else str(key))
    if unknown:
        logger.warning("%s: fsdp_config has keys that nothing reads: %s.", path, ", ".join(unknown))
    return found, contents.get("use_cpu") is True


def _close(name: str, known: Any) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)), None)


def _value(setting: Setting, name: str, value: Any) -> Any:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    try:
        if setting.field == "offload" and isinstance(value, Mapping):
            return offload_of_fields(value)
        return setting.read(text.strip())
    except ValueError as error:
        # Offload has several fields, and its error says which of them is wrong.
        why = f" ({error})" if setting.field == "offload" else ""
        raise ConfigError(f"{name} must be {setting.form}, not {text!r}{why}.") from None
