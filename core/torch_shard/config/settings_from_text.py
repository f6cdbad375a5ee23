"""Settings given as text: ``SHARD_*`` variables of the environment, and the arguments and files that front ends read."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch

from ..errors import ConfigError
from ..log import logger
from .bytes_text import BYTES_FORM
from .offload_text import FORM as OFFLOAD
from .offload_text import offload_of_fields, read_offload
from .shard_config import Strategy

PREFIX = "SHARD_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "fp16": torch.float16, "float16": torch.float16,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp64": torch.float64, "float64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A field of a settings class that a text can set.

    Attributes:
        field: the name of the field.
        read: a function from text to the value, which may raise ValueError.
        form: a description of the text, for errors and questions.
    """

    field: str
    read: Callable[[str], Any]
    form: str

    @property
    def variable(self) -> str:
        """The variable of the environment."""
        return PREFIX + self.field.removeprefix("shard_").upper()

    @property
    def key(self) -> str:
        """The key in a file of settings."""
        return self.variable.lower()


def flag(text: str) -> bool:
    """Return the bool that a word such as ``true`` or ``off`` stands for; raise ValueError for another word."""
    if text.lower() in _TRUE or text.lower() in _FALSE:
        return text.lower() in _TRUE
    raise ValueError


def names(text: str) -> tuple[str, ...]:
    """Return the names that commas separate."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def one_of(*known: str) -> Callable[[str], str]:
    """Return a reader that knows these words, in any case, and raises ValueError for others."""

    def read(text: str) -> str:
        if text.lower() not in known:
            raise ValueError
        return text.lower()

    return read


def _units(text: str) -> Any:
    return None if text.lower() == "auto" else names(text)


def _seconds(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)


def _dtype(text: str) -> torch.dtype:
    if text.lower() not in _DTYPES:
        raise ValueError
    return _DTYPES[text.lower()]


FLAG_FORM = "true or false"
SETTINGS = (
    Setting("strategy", one_of(*get_args(Strategy)), "one of " + ", ".join(get_args(Strategy))),
    Setting("memory", str, BYTES_FORM),
    Setting("units", _units, "patterns of module names, separated by commas, or auto"),
    Setting("unit_bytes", int, "a number of bytes"),
    Setting("prefetch", int, "a number of units"),
    Setting("shard_size", int, "a number of ranks"),
    Setting("reshard_after_forward", int, "a number of ranks"),
    Setting("offload", read_offload, OFFLOAD),
    Setting("precision", _dtype, "fp32, bf16 or fp16: in which dtype parameters are gathered and computed with"),
    Setting("ignore", names, "patterns of parameter names, separated by commas"),
    Setting("sync_module_states", flag, FLAG_FORM),
    Setting("broadcast_buffers", flag, FLAG_FORM),
    Setting("timeout", _seconds, "a number of seconds, or none: as long as the process group waits"),
    Setting("alone", one_of("read", "error"), "read or error"),
    Setting("alone_after", float, "a number of seconds"),
    Setting("debug", flag, FLAG_FORM),
    Setting("single_communicator", flag, FLAG_FORM),
    Setting("registered_memory", flag, FLAG_FORM),
)
"""The fields of ``ShardConfig`` that a text can set. ``timeout`` may also be None, which the caller replaces by a number."""


def read_variables(
    environment: Mapping[str, str], settings: Iterable[Setting], others: Iterable[str] = ()
) -> dict[str, tuple[str, Any]]:
    """Return the values of the ``SHARD_*`` variables by field, each with the variable's name. Not collective.

    Args:
        environment: the variables; usually ``os.environ``.
        settings: the settings that are known.
        others: further names that start with ``SHARD_`` and are no mistake.

    Raises:
        ConfigError: a value is wrong, or a variable is unknown and close to a known one. Other unknown variables, which may be
            another program's, are only warned about.
    """
    known = {setting.variable: setting for setting in settings}
    found, unknown = {}, []
    for name, text in sorted(environment.items()):
        if not name.startswith(PREFIX) or name in others:
            continue
        setting = known.get(name)
        if setting is None:
            close = closest(name, known)
            if close is not None:
                raise ConfigError(f"{name} is no setting of this package. Did you mean {close}?")
            unknown.append(name)  # another program's, such as SHARD_INDEX of CI systems
        elif text.strip():
            found[setting.field] = (name, read_value(setting, name, text))
    if unknown:
        logger.warning("Environment variables that are no settings of this package: %s.", ", ".join(unknown))
    return found


def read_value(setting: Setting, name: str, value: Any) -> Any:
    """Return the value of a setting that is given as text, or in a file as a list or mapping. Not collective.

    Args:
        setting: the setting.
        name: the variable, option or key that holds the text, for the error.
        value: the text, list or mapping.

    Raises:
        ConfigError: `value` is not of the setting's form.
    """
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    try:
        if setting.field == "offload" and isinstance(value, Mapping):
            return offload_of_fields(value)
        return setting.read(text.strip())
    except ValueError as error:
        # Offload has several fields, and its error says which of them is wrong.
        why = f" ({error})" if setting.field == "offload" else ""
        raise ConfigError(f"{name} must be {setting.form}, not {text!r}{why}.") from None


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` is probably meant to be, or None."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)), None)
