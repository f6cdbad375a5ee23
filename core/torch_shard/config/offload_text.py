"""``ShardConfig.offload`` as text: for an environment variable, a command line, and a YAML file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .offload import Offload

_NOTHING, _ALL = ("none", "no", "false", "off", "0"), ("cpu", "yes", "true", "on", "1")
_VALUES = {**dict.fromkeys(_NOTHING, False), **dict.fromkeys(_ALL, True), "none": None}
_FIELDS = tuple(field.name for field in dataclasses.fields(Offload))
FORM = "none, cpu, or fields of Offload: " + ", ".join(_FIELDS) + " (params=false,nvme=DIR)"


def read_offload(text: str) -> Offload | None:
    """Return the settings that a text stands for; None where nothing is offloaded. Not collective.

    Args:
        text: ``none``, ``cpu``, or ``name=value`` pairs separated by commas, with or without ``cpu`` in front.

    Raises:
        ValueError: the text has another form; the message says why.
    """
    text = text.strip()
    if text.lower() in _NOTHING:
        return None
    if text.lower() in _ALL:
        return Offload()
    first, _, rest = text.partition(",")
    pairs = {}
    for part in (rest if rest and first.strip().lower() in _ALL else text).split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if not value:
            raise ValueError(f"{part.strip()!r} is no name=value")
        pairs[name] = value
    return offload_of_fields(pairs)


def offload_of_fields(pairs: Mapping[str, Any]) -> Offload:
    """Return the settings that a mapping stands for, such as one in a YAML file. Not collective.

    Raises:
        ValueError: there is no such field, or its value is wrong; the message says why.
    """
    unknown = [name for name in pairs if name not in _FIELDS]
    if unknown:
        raise ValueError(f"Offload has no field {unknown[0]!r}")
    try:
        return Offload(**{name: _VALUES.get(str(value).lower(), value) for name, value in pairs.items()})
    except ConfigError as error:
        raise ValueError(str(error)) from error


def text_of(offload: Offload | None) -> str:
    """Return the text that :func:`read_offload` reads as `offload`. Not collective."""
    if offload is None:
        return "none"
    changed = {name: value for name in _FIELDS if (value := getattr(offload, name)) != getattr(Offload(), name)}
    plain = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in changed.items()}
    return ",".join(f"{name}={value}" for name, value in plain.items()) or "cpu"
