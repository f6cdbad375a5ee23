"""What a search has found as one HTML page: the settings, and pictures of a step with the best of them."""

from __future__ import annotations

import html
from collections.abc import Mapping

from ..utils.html_page import page, row, table
from ..utils.svg import WITHOUT_PLOTS, has_plots
from .memory_estimate import mib
from .paste import PLACES
from .pictures import memory_plot, sent_table, streams_plot, units_plot, waits_in, waits_table
from .search_results import Search


def report(found: Search, title: str, lines: Mapping[str, str]) -> str:
    """Return an HTML page about what a search has found, which needs no network.

    Args:
        found: the result of :func:`torch_shard.plan.search`.
        title: the heading.
        lines: what to paste, of :func:`torch_shard.plan.paste.lines_for`; empty where nothing fits.
    """
    first = found.estimates[0]
    state = "passed" if first.fits else "failed"
    lack = "" if first.fits else f", which is {mib(first.lacks)} MiB too much"
    verdict = f"{'fits' if first.fits else 'nothing fits; nearest'}: {first.candidate}\n"
    verdict += f"{mib(first.nbytes)} of {mib(found.budget)} MiB on each rank{lack}; {first.seconds:.3f} s a step"
    sections = [f'<pre class="{state}">{html.escape(verdict)}</pre>', _pictures(found)]
    part = "the last micro-batch" if first.candidate.accumulation > 1 else "a step"
    sections += [f"<h2>sent by a rank in {part}</h2>", sent_table(found.replay.timeline)]
    sections += ["<h2>settings</h2>", _candidates(found)]
    if lines:
        sections.append("<h2>to paste</h2>")
        sections += [f"<h3>{PLACES[kind]}</h3><pre>{html.escape(text)}</pre>" for kind, text in lines.items()]
    sections.append('<p class="note">Seconds are for ranking, by the figures of data sheets.</p>')
    return page(title, "\n".join(sections))


def _pictures(found: Search) -> str:
    if not has_plots():
        return WITHOUT_PLOTS
    replay, waits = found.replay, waits_in(found.replay.timeline)
    return "\n".join(
        [
            "<h2>memory of a step</h2>",
            "<p>Tensors only: the allocator takes more, in blocks.</p>",
            memory_plot(replay.step, replay.clock, found.budget),
            "<h2>streams of a step</h2>",
            "<p>In the colours of the units; what belongs to none, such as the optimizer, is grey.</p>",
            streams_plot(replay.timeline, replay.plan, waits),
            waits_table(waits, replay.timeline.total),
            "<h2>units, by the bytes of their parameters</h2>",
            units_plot(replay.plan),
        ]
    )


def _candidates(found: Search) -> str:
    rows = []
    for each in found.estimates:
        lack = "" if each.fits else mib(each.lacks)
        host = mib(each.host_nbytes) if each.host_nbytes else ""
        state = "passed" if each.fits else "skipped"
        rows.append(row((each.candidate, mib(each.nbytes), lack, host, f"{each.seconds:.3f}"), state))
    return table(("settings", "MiB", "lacks", "MiB of host memory", "seconds"), rows)
