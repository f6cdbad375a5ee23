"""Plots by matplotlib as SVG elements for HTML pages, whose colours they take. matplotlib is optional."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable
from typing import Any

TEXT = "#010203"
"""The placeholder for the colour of the page's text, which only the browser knows."""

_WIDTH = 9.0  # inches; the page shrinks what is too wide, as long as it stays readable

WITHOUT_PLOTS = '<p class="note">For plots, <code>pip install matplotlib</code> and run this again.</p>\n'


def has_plots() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def svg(draw: Callable[[Any], None], height: float) -> str:
    """Return a plot as an SVG element, in a box that scrolls where the screen is narrow.

    Args:
        draw: a function that draws on the axes that it is given.
        height: the height in inches.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot, which would choose a window system

    colours = {f"{name}.color": TEXT for name in ("text", "xtick", "ytick")}
    style: Any = {**colours, "axes.edgecolor": TEXT, "axes.labelcolor": TEXT, "svg.fonttype": "none", "font.size": 9}
    with rc_context(style):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    # Several plots are in one page, in which names of groups would be there twice. Nothing refers to them.
    text = re.sub(r' id="[\w.]*_\d+"', "", text)
    return f'<div class="wide">{text.replace(TEXT, "currentColor")}</div>\n'


def legend_beside(axes: Any) -> None:
    """Add the legend of a plot to the right of it."""
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def finish_axes(axes: Any, first: float, last: float, across: str, up: str) -> None:
    """Let a plot reach from `first` to `last` across and from 0 up, and add labels and the legend."""
    axes.set_xlim(first, last)
    axes.set_ylim(0)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    legend_beside(axes)
