"""The result of a check, and how an error is reduced to what a report may show."""

from __future__ import annotations

import contextlib
import getpass
import math
import re
import socket
import traceback
from dataclasses import dataclass, field
from typing import Any, Literal

PARTS = ("correctness", "streams", "memory", "speed", "offload")
"""The parts of a self-test, in the order in which they run."""

NO_BF16 = "the device has no bfloat16"
"""Why a check in mixed precision is skipped."""


@dataclass(frozen=True)
class Result:
    """The result of one check, over all ranks.

    Attributes:
        part: the part of the self-test that it belongs to, one of :data:`PARTS`.
        name: the name of the case, and of what was checked in it; unique within the part.
        status: whether it passed. A check that was skipped says nothing about the engine.
        measured: the number that was found, on the rank where it was worst; None if the check gives none.
        expected: what should have been found.
        tolerance: the largest difference between the two with which the check passes; None if `expected` is an upper limit.
        unit: the unit of the three numbers; empty for a relative error.
        reason: why it failed or was skipped; else a remark, or nothing.
        figures: further numbers, by what they are; times are in seconds.
    """

    part: str
    name: str
    status: Literal["passed", "failed", "skipped"]
    measured: float | None = None
    expected: float | None = None
    tolerance: float | None = None
    unit: str = ""
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


def within(
    part: str, name: str, measured: float, expected: float, tolerance: float, unit: str = "", **figures: Any
) -> Result:
    """Return a result that passes if `measured` is a number no further than `tolerance` from `expected`."""
    good = math.isfinite(measured) and abs(measured - expected) <= tolerance
    reason = "" if good else f"measured {measured:.6g}, expected {expected:.6g} with a tolerance of {tolerance:.3g}"
    return Result(
        part, name, "passed" if good else "failed", measured, expected, tolerance, unit, reason, dict(figures)
    )


def at_most(part: str, name: str, measured: float, limit: float, unit: str = "", **figures: Any) -> Result:
    """Return a result that passes if `measured` is no more than `limit`."""
    good = measured <= limit
    reason = "" if good else f"measured {measured:.6g}, expected at most {limit:.6g}"
    return Result(part, name, "passed" if good else "failed", measured, limit, None, unit, reason, dict(figures))


def skipped(part: str, name: str, reason: str) -> Result:
    """Return the result of a check that can't be made here."""
    return Result(part, name, "skipped", reason=reason)


# Quoted paths may have spaces in them. A slash within a word ("tokens/s") or of a URL's "//" begins no path.
# A compiler's options (-I/usr/include) and file:// URLs have paths.
_PATHS = re.compile(
    r"""(?P<quote>['"])~?/[^'"\n]*(?P=quote)|((?<![\w/])~?|(?<=\s-[A-Z])|(?<=file:/)/)/(?!/)[^\s'"()\[\]<>,;]+"""
)
_ADDRESSES = re.compile(r"\b\d{1,3}(\.\d{1,3}){3}\b|(?<![\w:])([0-9a-f]{0,4}:){3,7}[0-9a-f]{0,4}(?![\w:])")


def scrubbed(text: str) -> str:
    """Return a text without file-system paths, addresses, and the names of the machine and its user."""
    text = _ADDRESSES.sub("<address>", _PATHS.sub("<path>", text))
    host = socket.gethostname()
    names = {host: "<host>", host.partition(".")[0]: "<host>"}
    with contextlib.suppress(OSError, KeyError):  # a container's user need not have a name
        names[getpass.getuser()] = "<user>"
    for name, shown in names.items():
        if name not in ("", "root", "localhost"):  # these name nobody, and "(root)" is a unit of the plan
            text = re.sub(rf"(?<!\w){re.escape(name)}(\.[\w-]+)*(?!\w)", shown, text)
    return text


def error_text(error: BaseException) -> str:
    """Return an error's class and message, and the lines that raised it as module:line, without any path."""
    frames = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        frames.append(f"{frame.f_globals.get('__name__', '?')}:{line}")
    where = f" (at {' > '.join(frames[-4:])})" if frames else ""
    return scrubbed(f"{type(error).__name__}: {error}{where}")
