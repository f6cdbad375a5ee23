"""``ShardPlugin.offload`` as text: of an environment variable, a YAML's key, an answer to ``accelerate-shard config``.

Fields of :class:`torch_shard.Offload` are read by their annotations, whatever fields there are.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, get_type_hints

from torch_shard import Offload
from torch_shard.errors import ConfigError

__all__ = ["FIELDS", "FORM", "offload_of_fields", "read_offload", "text_of"]

_NOTHING, _ALL = ("none", "no", "false", "off", "0"), ("cpu", "yes", "true", "on", "1")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
FIELDS = tuple(field.name for field in dataclasses.fields(Offload))
FORM = "none, cpu, or fields of Offload: " + ", ".join(FIELDS) + " (params=false,nvme=DIR)"


def read_offload(text: str) -> Offload | None:
    """From ``none``, ``cpu``, or ``name=value`` separated by commas, ``cpu`` in front allowed. Not collective.

    Raises:
        ValueError: it is none of these; says why.
    """
    text = text.strip()
    if text.lower() in _NOTHING:
        return None
    if text.lower() in _ALL:
        return Offload()
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 1 and parts[0].lower() in _ALL:
        del parts[0]
    pairs = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not value.strip():
            raise ValueError(f"{part!r} is no name=value")
        if name.strip() in pairs:
            raise ValueError(f"{name.strip()} is there twice")
        pairs[name.strip()] = value.strip()
    return offload_of_fields(pairs)


def offload_of_fields(pairs: Mapping[str, Any]) -> Offload:
    """From a mapping, as a YAML may have it. Not collective.

    Raises:
        ValueError: there is no such field, or its value is bad; says why.
    """
    hints = get_type_hints(Offload)
    values = {}
    for name, value in pairs.items():
        if name not in FIELDS:
            close = difflib.get_close_matches(str(name), FIELDS, n=1)
            raise ValueError(f"Offload has no field {name!r}" + (f"; did you mean {close[0]}?" if close else ""))
        if hints[name] is bool:
            value = _flag(name, value)
        elif hints[name] is int:
            value = int(value)
        elif isinstance(value, str) and value.lower() == "none":
            value = None
        values[name] = value
    try:
        return Offload(**values)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _flag(name: str, value: Any) -> bool:
    text = str(value).strip().lower()
    if text not in (*_TRUE, *_FALSE):
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return text in _TRUE


def text_of(offload: Offload | None) -> str:
    """What :func:`read_offload` reads as `offload`. Not collective."""
    if offload is None:
        return "none"
    changed = {name: value for name in FIELDS if (value := getattr(offload, name)) != getattr(Offload(), name)}
    plain = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in changed.items()}
    return ",".join(f"{name}={value}" for name, value in plain.items()) or "cpu"
