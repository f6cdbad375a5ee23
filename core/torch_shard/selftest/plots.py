"""Plots of a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..utils.svg import TEXT, has_plots, svg
from .results import Result

_BLUE, _GREY = "#3b82c4", "#8a94a0"  # readable on light and on dark


def plots_of(results: Sequence[Result]) -> dict[str, str] | None:
    """Return a plot for each part that has numbers to show, as an SVG element; None where matplotlib is not installed."""
    if not has_plots():
        return None
    makers: dict[str, Callable[[Any, list[Result]], None]] = {
        "correctness": _errors,
        "streams": _errors,
        "memory": _pairs,
        "speed": _times,
        "offload": _times,
    }
    found = {}
    for part, draw in makers.items():
        own = [r for r in results if r.part == part and r.measured is not None]
        if own:
            found[part] = svg(partial(_upside_down, draw, own), 0.8 + 0.24 * len(own))
    return found


def _upside_down(draw: Callable[[Any, list[Result]], None], results: list[Result], axes: Any) -> None:
    draw(axes, results)
    axes.invert_yaxis()  # the first result stands at the top


def _errors(axes: Any, results: list[Result]) -> None:
    """Draw each error as a part of its tolerance; the check fails above 1."""
    shares = [(r.measured or 0.0) / (r.tolerance or 1.0) for r in results]
    shares = [min(max(share, 1e-7), 1e7) if math.isfinite(share) else 1e7 for share in shares]
    axes.barh([r.name for r in results], shares, color=_BLUE)
    axes.set_xscale("log")
    axes.axvline(1.0, color=TEXT, linestyle="--")
    axes.set_xlabel("error, as a part of the tolerance (dashed)")


def _pairs(axes: Any, results: list[Result]) -> None:
    names = [r.name for r in results]
    places = range(len(names))
    axes.barh([p - 0.2 for p in places], [(r.measured or 0) / 1e6 for r in results], 0.4, color=_BLUE, label="measured")
    axes.barh(
        [p + 0.2 for p in places], [(r.expected or 0) / 1e6 for r in results], 0.4, color=_GREY, label="predicted"
    )
    axes.set_yticks(list(places), names)
    axes.set_xlabel("MB on a rank")
    axes.legend(frameon=False)


def _times(axes: Any, results: list[Result]) -> None:
    times = [1000 * r.figures["step"] for r in results]
    axes.barh([r.name.partition(": ")[2] for r in results], times, color=_BLUE)
    axes.set_xlabel("a step in ms, median")
