"""Numbers of bytes as text."""

from __future__ import annotations

import re

from ..errors import ConfigError

BYTES_FORM = "a number of bytes such as 80GiB or 24GB"
_BYTES = re.compile(r"([\d.]+) *([kKMGT]?)(i?)B", re.ASCII)
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def read_bytes(field: str, text: str) -> int:
    """Return the bytes of a text such as ``80GiB`` or ``24 GB``. Raises ConfigError, whose message starts with `field`."""
    match = _BYTES.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        return int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]])
    except ValueError:
        raise ConfigError(f"{field} must be {BYTES_FORM}, not {text!r}.") from None
