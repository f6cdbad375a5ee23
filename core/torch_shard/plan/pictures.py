"""Plots of a step, as it was planned or measured: its memory, its streams, and its units."""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ..utils.html_page import row, table
from ..utils.svg import TEXT, finish_axes, legend_beside, svg
from .memory_estimate import mib
from .plan import Plan, UnitPlan
from .roofline import Span, Timeline
from .step_trace import KINDS, StepTrace

_Value = TypeVar("_Value")

_POINTS = 400  # the number of points in the plot of memory
_LEAST = 2000  # gaps shorter than a step's length divided by this can't be seen
_SMALL = 0.004  # the part of a plot's area that a unit needs to have its name written into it
_KIND_COLOURS = {
    "parameter": "#4e79a7",
    "gathered": "#76b7b2",
    "buffer": "#9c755f",
    "gradient": "#f28e2b",
    "reduction": "#edc948",
    "optimizer state": "#b07aa1",
    "activation": "#59a14f",
    "temporary": "#8a94a0",
}
_WAIT_COLOUR = "#ff3b30"  # more vivid than any unit's
_WAITS = {
    "all_gather": "for the gather of",
    "reduce_scatter": "for the reduction of",
    "all_reduce": "for the sum between replicas of",
    "to_device": "for the copy to the device of",
    "to_host": "for the copy to the host of",
}
_SENT = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "to_device": "copy to the device",
    "to_host": "copy to the host",
}
_STREAM_NAMES = {"compute": "compute", "gather": "gathers", "reduce": "reductions"}


def memory_plot(
    step: StepTrace, clock: Sequence[float], budget: int, measured: Sequence[tuple[float, int]] = ()
) -> str:
    """Return a plot of the bytes on the device by kind over a step, as an SVG element.

    Args:
        step: a replayed step.
        clock: the second of each of its events; see :func:`torch_shard.plan.step_timeline.timeline_of`.
        budget: the bytes of a line in the plot. If it is so high that nothing else could be seen, only the legend has it.
        measured: the seconds and bytes of the same step as it ran, which are another line.
    """
    times, levels = highest_moments(step, clock)
    shown = [kind for kind in KINDS if any(level[kind] for level in levels)]
    unit, name = _unit_for(max(sum(level.values()) for level in levels))

    def draw(axes: Any) -> None:
        areas = [[level[kind] / unit for level in levels] for kind in shown]
        colours = [_KIND_COLOURS.get(kind, "#bab0ac") for kind in shown]
        axes.stackplot(times, areas, labels=shown, colors=colours, step="post")
        _add_measured(axes, measured, unit)
        highest = axes.get_ylim()[1]
        axes.axhline(budget / unit, color=TEXT, linestyle="--", label=f"budget, {budget / unit:,.1f} {name}")
        finish_axes(axes, 0, max(times[-1], 1e-9), "ms", name)
        axes.set_ylim(0, min(axes.get_ylim()[1], 4 * highest))

    return svg(draw, 3.6)


def measured_memory_plot(measured: Sequence[tuple[float, int]]) -> str:
    """Return a plot of the measured bytes of a step, given with their seconds, as an SVG element."""
    unit, name = _unit_for(max(nbytes for _, nbytes in measured))

    def draw(axes: Any) -> None:
        _add_measured(axes, measured, unit)
        finish_axes(axes, 0, max(1000 * measured[-1][0], 1e-9), "ms", name)

    return svg(draw, 3.0)


def _unit_for(most: int) -> tuple[int, str]:
    return (1 << 30, "GiB") if most >= 1 << 30 else (1 << 20, "MiB")


def _add_measured(axes: Any, measured: Sequence[tuple[float, int]], unit: int) -> None:
    from matplotlib.patheffects import withStroke

    if measured:
        highest = _highest_of_pieces([(second, nbytes, nbytes) for second, nbytes in measured])
        times, levels = [1000 * second for second, _ in highest], [nbytes / unit for _, nbytes in highest]
        edge = [withStroke(linewidth=3, foreground="#ffffff")]  # it shows on areas of any colour, and on a dark page
        axes.plot(
            times, levels, color="#101418", linewidth=1.2, drawstyle="steps-post", label="measured", path_effects=edge
        )


def highest_moments(step: StepTrace, clock: Sequence[float]) -> tuple[list[float], list[dict[Any, int]]]:
    """Return the milliseconds and the bytes by kind of the highest moment of each piece of a step."""
    found = _highest_of_pieces([(clock[index], sum(level.values()), level) for index, level in step.memory()])
    return [1000 * second for second, _ in found], [level for _, level in found]


def _highest_of_pieces(moments: Sequence[tuple[float, int, _Value]]) -> list[tuple[float, _Value]]:
    """Return the second and the value of the highest moment of each of the pieces that a plot can show.

    A moment is its second, its height and the value; the latest one comes last.
    """
    whole = max(moments[-1][0], 1e-9)
    found: dict[int, tuple[float, int, _Value]] = {}
    for moment in moments:
        piece = int(_POINTS * moment[0] / whole)
        if piece not in found or moment[1] > found[piece][1]:
            found[piece] = moment
    return [(second, value) for second, _, value in found.values()]


def streams_plot(timeline: Timeline, plan: Plan, waits: Sequence[Span]) -> str:
    """Return a plot of what runs on each stream in a step, in the colours of the units, as an SVG element.

    `waits` are those of computing, as :func:`waits_in` returns them.
    """
    colours = _colours(plan)
    unit_of = _units_of_modules(plan)
    rows = list(dict.fromkeys(span.stream for span in timeline.spans))

    def draw(axes: Any) -> None:
        for number, stream in enumerate(rows):
            for (unit, _), spans in _runs(timeline, stream, unit_of):
                bars = [(1000 * begin, 1000 * max(end - begin, 0.0)) for begin, end in spans]
                axes.broken_barh(bars, (number - 0.4, 0.8), color=colours.get(unit, "#bab0ac"), linewidth=0)
            seen = [w for w in waits if w.stream == stream and w.end - w.start >= timeline.total / _LEAST]
            if seen:
                bars = [(1000 * wait.start, 1000 * (wait.end - wait.start)) for wait in seen]
                axes.broken_barh(bars, (number - 0.4, 0.8), color=_WAIT_COLOUR, linewidth=0, label="waits")
                legend_beside(axes)
        axes.set_yticks(range(len(rows)), [_STREAM_NAMES.get(stream, stream) for stream in rows])
        axes.set_xlim(0, max(1000 * timeline.total, 1e-9))
        axes.set_xlabel("ms")
        axes.invert_yaxis()

    return svg(draw, 0.8 + 0.5 * len(rows))


def _runs(
    timeline: Timeline, stream: str, unit_of: Callable[[str], str]
) -> Iterator[tuple[tuple[str, str], list[tuple[float, float]]]]:
    """Yield units and kinds of work with the seconds of its beginnings and ends; what follows without a gap is one piece."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    gap = timeline.total / _LEAST
    latest: tuple[str, str] | None = None
    for span in timeline.spans:
        if span.stream == stream:
            key = (unit_of(span.name), span.kind)
            pieces = found.setdefault(key, [])
            if key == latest and pieces and span.start - pieces[-1][1] < gap:
                pieces[-1] = (pieces[-1][0], max(pieces[-1][1], span.end))  # pieces of one collective may overlap
            else:
                pieces.append((span.start, span.end))
            latest = key
    yield from found.items()


def waits_in(timeline: Timeline) -> list[Span]:
    """Return the waits of the compute stream in a step.

    Their kind and name are those of the collective or copy that is waited for; kind ``"host"`` where the host issues too slowly.
    """
    ends: dict[float, Span] = {span.end: span for span in timeline.spans if span.stream != "compute"}
    found = []
    before = 0.0
    for span in timeline.spans:
        if span.stream == "compute":
            if span.start > before:
                cause = ends.get(span.start)
                name, kind = ("", "host") if cause is None else (cause.name, cause.kind)
                found.append(Span("compute", before, span.start, name, kind))
            before = span.end
    return found


def waits_table(waits: Sequence[Span], total: float) -> str:
    """Return a table of the longest waits, in sum by what is waited for, as HTML, or a sentence where there are none.

    `total` is the seconds of the step.
    """
    if not waits:
        return "<p>Computing waits for nothing.</p>"
    lost: Counter[str] = Counter()
    for wait in waits:
        lost[f"{_WAITS.get(wait.kind, 'for the host')} {wait.name}"] += wait.end - wait.start  # type: ignore[assignment]
    rows = [row((f"{1000 * spent:.2f}", f"{spent / total:.1%}", cause)) for cause, spent in lost.most_common(5)]
    return table(("ms", "of the step", "computing waits"), rows)


def sent_table(timeline: Timeline) -> str:
    """Return a table of the bytes that a rank sends in a predicted step, by kind and link, as HTML."""
    sent = [(kind, link, nbytes) for (kind, link), nbytes in timeline.sent.items() if nbytes]
    if not sent:
        return "<p>Nothing is sent.</p>"
    return table(("", "link", "MiB"), [row((_SENT[kind], link, mib(nbytes))) for kind, link, nbytes in sent])


def units_plot(plan: Plan) -> str:
    """Return a plot of the units, each with an area as its bytes, as HTML with a caption."""
    colours = _colours(plan)
    units = sorted(plan.units, key=lambda unit: unit.nbytes, reverse=True)
    whole = sum(unit.nbytes for unit in units) or 1
    over = f"{plan.strategy} over {plan.world_size} rank{'s' * (plan.world_size > 1)}"
    caption = (
        f"<p>{over}, each of which holds {mib(plan.predicted.parameters)} of {mib(whole)} MiB between steps.</p>\n"
    )

    def draw(axes: Any) -> None:
        from matplotlib.patches import Rectangle

        for unit, x, y, width, height in tiles(units, 0.0, 0.0, 1.0, 1.0):
            axes.add_patch(Rectangle((x, y), width, height, facecolor=colours[unit.name], edgecolor="#ffffff80"))
            if unit.nbytes >= _SMALL * whole:
                dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in unit.dtypes)
                text = f"{unit.name or '(model)'}\n{unit.nbytes / 2**20:,.1f} MiB\n{dtypes}"
                axes.text(
                    x + width / 2, y + height / 2, text, ha="center", va="center", color="#ffffff", size=7, clip_on=True
                )
        axes.set_axis_off()
        axes.set_xlim(0, 1)
        axes.set_ylim(1, 0)

    return caption + svg(draw, 4.0)


def tiles(
    units: Sequence[UnitPlan], x: float, y: float, width: float, height: float
) -> Iterator[tuple[UnitPlan, float, float, float, float]]:
    """Yield units with rectangles that fill a given one: halves of about equal bytes, across its longer side, and so on."""
    if len(units) == 1:
        yield units[0], x, y, width, height
        return
    whole, first, count = sum(unit.nbytes for unit in units), 0, 0
    while count < len(units) - 1 and (count == 0 or first + units[count].nbytes / 2 <= whole / 2):
        first, count = first + units[count].nbytes, count + 1
    part = first / whole if whole else count / len(units)
    if width >= height:
        yield from tiles(units[:count], x, y, width * part, height)
        yield from tiles(units[count:], x + width * part, y, width * (1 - part), height)
    else:
        yield from tiles(units[:count], x, y, width, height * part)
        yield from tiles(units[count:], x, y + height * part, width, height * (1 - part))


def _colours(plan: Plan) -> dict[str, str]:
    """Return a colour for each unit, readable under white text; neighbours differ."""
    found = {}
    for number, unit in enumerate(plan.units):
        red, green, blue = colorsys.hls_to_rgb((0.58 + 0.381966 * number) % 1.0, 0.42, 0.42)
        found[unit.name] = f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"
    return found


def _units_of_modules(plan: Plan) -> Callable[[str], str]:
    """Return a function that gives the name of the unit of a module or a unit; "" for what belongs to none."""
    own = {name: unit.name for unit in plan.units for name in (unit.name, *unit.triggers)}

    def unit_of(name: str) -> str:
        while name and name not in own:
            name = name.rpartition(".")[0]
        return own.get(name, "")

    return unit_of
