"""A run as one HTML page: what a rank holds beside what was planned, what it has sent and waited for, and its units."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..comm.traffic_statistics import Statistics
from ..utils.html_page import page, row, table
from ..utils.svg import TEXT, WITHOUT_PLOTS, finish_axes, has_plots, legend_beside, svg
from .memory_estimate import mib
from .pictures import measured_memory_plot, memory_plot, sent_table, streams_plot, units_plot, waits_table
from .plan import Plan
from .profiled_step import ProfiledStep

if TYPE_CHECKING:
    from .search_results import Search

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Moment:
    """The means over some steps of a run.

    Attributes:
        step: the number of the last of these steps.
        seconds: the seconds of one step.
        gather_wait, reduce_wait, other_wait, host_wait: the seconds of these that were waited; see :class:`Statistics`.
        resident: the bytes of parameters, gradients and optimizer state at the end of the last one.
        peak_gathered: the most bytes of gathered parameters.
    """

    step: int
    seconds: float
    gather_wait: float
    reduce_wait: float
    other_wait: float
    host_wait: float
    resident: int
    peak_gathered: int


_OTHER_STEP = (
    '<p class="note">The predicted step starts other collectives than this one. It is stretched to the same length.</p>'
)
WAITS = {
    "gather_wait": ("gathers", "#76b7b2"),
    "reduce_wait": ("reductions", "#edc948"),
    "other_wait": ("other ranks", "#8a94a0"),
    "host_wait": ("the host", "#9c755f"),
}
"""What was waited for in each field of a :class:`Moment`, and the colour that it has in plots."""


def run_report(
    title: str,
    plan: Plan,
    counted: Statistics,
    held: Mapping[str, int],
    history: Sequence[Moment] = (),
    profiled: ProfiledStep | None = None,
    planned_step: Search | None = None,
) -> str:
    """Return an HTML page about a run, which needs no network.

    Args:
        title: the heading.
        plan: the plan of the model.
        counted: this rank's statistics.
        held: the bytes that this rank holds by kind, as :meth:`torch_shard.Engine.memory_summary` returns them, and under
            ``"peak_gathered"`` the most that was gathered.
        history: the course of the run, the first step first.
        profiled: one of its steps.
        planned_step: a search whose first candidate has the settings of this run.
    """
    predicted = plan.predicted
    planned = {
        "parameters": predicted.parameters,
        "gradients": predicted.gradients,
        "optimizer": predicted.optimizer,
        "peak_gathered": predicted.gathered_peak,
    }
    if history:
        held = {**held, "peak_gathered": max(moment.peak_gathered for moment in history)}
    names = {"optimizer": "optimizer state", "peak_gathered": "gathered, at most"}
    kinds = [(names.get(kind, kind), held[kind], planned[kind]) for kind in planned if kind in held]
    sections = [f"<pre>{html.escape(_summary(plan))}</pre>"]
    plots = has_plots()
    sections += [] if plots else [WITHOUT_PLOTS]
    sections += ["<h2>memory of this rank</h2>", "<p>MiB, without activations.</p>"]
    sections += [_memory_plot(kinds)] if plots else []
    sections.append(table(("", "held", "planned"), [row((name, mib(now), mib(then))) for name, now, then in kinds]))
    if history:
        sections.append("<h2>time of a step</h2>")
        sections += (
            [_time_plot(history), "<h2>memory over the run</h2>", _history_plot(history, predicted)] if plots else []
        )
        sections.append(_history_table(history))
    if profiled is not None:
        # On the CPU a step begins with what this rank holds now, between two steps.
        states = sum(held.get(kind, 0) for kind in ("parameters", "gradients", "optimizer", "gathered"))
        begun_with = states if profiled.allocated is None else profiled.allocated
        sections += _profiled(profiled, plan, begun_with, planned_step, plots)
    sections += ["<h2>sent and waited, since set-up</h2>", _counted(counted)]
    sections += ["<h2>units, by the bytes of their parameters</h2>", units_plot(plan)] if plots else []
    return page(title, "\n".join(sections))


def _profiled(profiled: ProfiledStep, plan: Plan, begun_with: int, planned: Search | None, plots: bool) -> list[str]:
    """Return pictures of a profiled step, which has begun with that many bytes, and what computing has waited for."""
    sections = []
    measured = [(second, begun_with + nbytes) for second, nbytes in profiled.memory]
    if measured and plots:
        sections.append("<h2>memory of the profiled step</h2>")
        if planned is None:
            sections.append(measured_memory_plot(measured))
        else:
            clock, aligned = profiled.clock_for(planned.replay)
            sections += [] if aligned else [_OTHER_STEP]
            sections.append(memory_plot(planned.replay.step, clock, planned.budget, measured))
    sections.append("<h2>streams of the profiled step</h2>")
    sections += [streams_plot(profiled.timeline, plan, profiled.waits)] if plots else []
    sections.append(waits_table(profiled.waits, profiled.timeline.total))
    if planned is not None:
        part = "the last micro-batch" if planned.estimates[0].candidate.accumulation > 1 else "a step"
        sections += [f"<h2>sent in {part}, as predicted</h2>", sent_table(planned.replay.timeline)]
    return sections


def _summary(plan: Plan) -> str:
    offload = " with offload" if plan.offload is not None else ""
    count = f"{len(plan.units)} units, {mib(sum(unit.nbytes for unit in plan.units))} MiB of parameters"
    return f"{plan.strategy}{offload} over {plan.world_size} ranks, prefetch {plan.prefetch}; {count}"


def _counted(counted: Statistics) -> str:
    rows = [
        ("sent", f"{mib(counted.bytes_sent)} MiB"),
        ("of that between replicas", f"{mib(counted.bytes_sent_across)} MiB"),
    ]
    rows += [(f"waited for {name}", f"{getattr(counted, field):.3f} s") for field, (name, _) in WAITS.items()]
    if counted.lone_reads:
        rows.append(("read alone", f"{counted.lone_reads} times, {mib(counted.lone_bytes)} MiB"))
    return table((), [row(cells) for cells in rows])


def _memory_plot(kinds: Sequence[tuple[str, int, int]]) -> str:
    def draw(axes: Any) -> None:
        places = range(len(kinds))
        axes.barh([p - 0.2 for p in places], [now / _MIB for _, now, _ in kinds], 0.4, color="#4e79a7", label="held")
        axes.barh([p + 0.2 for p in places], [then / _MIB for *_, then in kinds], 0.4, color="#bab0ac", label="planned")
        axes.set_yticks(places, [name for name, *_ in kinds])
        axes.invert_yaxis()
        axes.set_xlabel("MiB")
        legend_beside(axes)

    return svg(draw, 2.4)


def _time_plot(history: Sequence[Moment]) -> str:
    def draw(axes: Any) -> None:
        steps = [moment.step for moment in history]
        waits = [[1000 * getattr(moment, field) for moment in history] for field in WAITS]
        rest = [max(0.0, 1000 * m.seconds - sum(w[i] for w in waits)) for i, m in enumerate(history)]
        labels = ["computing", *(f"waits for {name}" for name, _ in WAITS.values())]
        axes.stackplot(
            steps, [rest, *waits], labels=labels, colors=["#59a14f", *(colour for _, colour in WAITS.values())]
        )
        finish_axes(axes, steps[0], max(steps[-1], steps[0] + 1), "step", "ms")

    return svg(draw, 3.0)


def _history_plot(history: Sequence[Moment], predicted: Any) -> str:
    def draw(axes: Any) -> None:
        steps = [moment.step for moment in history]
        resident = [moment.resident / _MIB for moment in history]
        gathered = [moment.peak_gathered / _MIB for moment in history]
        colours = ["#b07aa1", "#76b7b2"]
        axes.stackplot(steps, resident, gathered, labels=["resident", "gathered, at most"], colors=colours)
        planned = (predicted.total + predicted.gathered_peak) / _MIB
        axes.axhline(planned, color=TEXT, linestyle="--", label="planned")
        finish_axes(axes, steps[0], max(steps[-1], steps[0] + 1), "step", "MiB")

    return svg(draw, 3.0)


def _history_table(history: Sequence[Moment]) -> str:
    """Return the last moments; the plots have all."""
    rows = [
        row(
            (
                moment.step,
                f"{1000 * moment.seconds:.1f}",
                *(f"{1000 * getattr(moment, field):.1f}" for field in WAITS),
                mib(moment.resident),
                mib(moment.peak_gathered),
            )
        )
        for moment in history[-10:]
    ]
    waits = [f"waits for {name}" for name, _ in WAITS.values()]
    return table(("step", "ms", *waits, "MiB resident", "MiB gathered"), rows)
