"""Plots of a report, as SVG that takes its colours from the page. matplotlib is optional."""

from __future__ import annotations

import importlib.util
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from .results import Result

__all__ = ["plots_of"]

_TEXT = "#010203"  # stands for the colour of the page's text, which only the browser knows
_BLUE, _GREY = "#3b82c4", "#8a94a0"  # readable on light and on dark


def plots_of(results: Sequence[Result]) -> dict[str, str] | None:
    """Return a plot for each part that has numbers to show, as an SVG element; None where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
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
            found[part] = _svg(draw, own)
    return found


def _errors(axes: Any, results: list[Result]) -> None:
    """Draw each error as a part of its tolerance, from which on the check fails."""
    shares = [(r.measured or 0.0) / (r.tolerance or 1.0) for r in results]
    shares = [min(max(share, 1e-7), 1e7) if math.isfinite(share) else 1e7 for share in shares]
    axes.barh([r.name for r in results], shares, color=_BLUE)
    axes.set_xscale("log")
    axes.axvline(1.0, color=_TEXT, linestyle="--")
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


def _svg(draw: Callable[[Any, list[Result]], None], results: list[Result]) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot, which would choose a window system

    colours = {f"{name}.color": _TEXT for name in ("text", "xtick", "ytick")}
    style: Any = {**colours, "axes.edgecolor": _TEXT, "axes.labelcolor": _TEXT, "svg.fonttype": "none", "font.size": 9}
    with rc_context(style):
        figure = Figure(figsize=(9, 0.8 + 0.24 * len(results)), layout="constrained")
        axes = figure.add_subplot()
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes, results)
        axes.invert_yaxis()
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    # Several plots are in one page, in which names of groups would be there twice. Nothing refers to them.
    text = re.sub(r' id="[\w.]*_\d+"', "", text)
    return text.replace(_TEXT, "currentColor")
