"""One training step as ``torch.profiler`` has recorded it: its memory, what ran on which stream, and what computing waited for.

While a profiler records, the engine puts a labelled range around each collective that it starts and each wait for one
(:mod:`torch_shard.utils.profiled_ranges`). On a device a kernel belongs to the range in which the host has launched it. On the
CPU the backend's threads run the collectives of each kind in the order in which they were started.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ConfigError
from ..utils.profiled_ranges import unit_in
from .pictures import Wait
from .roofline import Span, Timeline
from .step_trace import CollectiveStart

if TYPE_CHECKING:
    from .settings_search import Replay

__all__ = ["ProfiledStep"]

_STEP = "ProfilerStep#"
_KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_STREAMS = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "between replicas"}
_ON_THE_CPU = {
    "all_gather": ("gloo:all_gather", "gloo:_allgather_base", "gloo:broadcast"),
    "reduce_scatter": ("gloo:all_to_all", "gloo:all_reduce"),
    "all_reduce": ("gloo:all_reduce",),
}


class _Range(NamedTuple):
    """A labelled range on a thread of the host, in seconds."""

    start: float
    end: float
    kind: str
    unit: str


@dataclass(frozen=True)
class ProfiledStep:
    """What was recorded of one step on one rank.

    Attributes:
        timeline: what ran on the streams ``compute``, ``gather``, ``reduce`` and ``between replicas``.
        waits: what computing has waited for, the longest first.
        memory: the second and the bytes allocated since the step began, after each change; empty without ``profile_memory=True``.
        issued: the second, the kind and the unit of each collective that was started.
    """

    timeline: Timeline
    waits: Sequence[Wait]
    memory: Sequence[tuple[float, int]]
    issued: Sequence[tuple[float, str, str]]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ProfiledStep:
        """Read the file of a profiler's ``export_chrome_trace``.

        Of several steps the last one counts. The profiler marks steps where it was given a schedule.

        Raises:
            ConfigError: there is no such file, or it is no trace, or the trace has nothing that an engine has started.
        """
        try:
            events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"profile {os.fspath(path)}: this can't be read as a trace of torch.profiler ({type(error).__name__}: {error}). "
                "Give a file of its export_chrome_trace()."
            ) from error
        return cls._from(events)

    @classmethod
    def _from(cls, events: Sequence[Mapping[str, Any]]) -> ProfiledStep:
        begin, end = _window(events)
        inside = [e for e in events if begin <= e.get("ts", -1) <= end]
        inside.sort(key=lambda e: e["ts"])
        threads: dict[Any, list[_Range]] = {}
        host_waits: list[_Range] = []
        for event in inside:
            found = unit_in(event.get("name", "")) if event.get("ph") == "X" else None
            if found is not None:
                waits, kind, unit = found
                spent = _Range(*_seconds(event, begin), kind, unit)
                (host_waits if waits else threads.setdefault(event["tid"], [])).append(spent)
        issued = sorted(each for ranges in threads.values() for each in ranges)
        if not issued:
            raise ConfigError(
                "The profile has no collective of a sharded model. Record a whole step, with ProfilerActivity.CPU among the "
                "activities."
            )
        timeline = Timeline()
        kernels = [e for e in inside if e.get("cat") in _KERNELS]
        if kernels:
            _add_kernels(timeline, kernels, inside, threads, begin)
        else:
            _add_threads(timeline, inside, issued, host_waits, begin)
        timeline.spans.sort(key=lambda span: span.start)
        timeline.total = (end - begin) / 1e6
        lost = _sums(host_waits) if not kernels else _gaps(timeline)
        return cls(timeline, lost, _memory(inside, begin), [(r.start, r.kind, r.unit) for r in issued])

    def clock_for(self, replay: Replay) -> list[float]:
        """Return for each event of a replayed step the second of this one at which the same was done.

        Both have started the same collectives, as long as their settings are the same; between two of them time passes evenly.
        Otherwise the predicted step is stretched to the length of the measured one.
        """
        clock = replay.clock
        starts = [
            (i, e.kind, e.unit)
            for i, e in enumerate(replay.step.events)
            if isinstance(e, CollectiveStart) and e.kind in _STREAMS
        ]
        known: list[tuple[int, float]] = []  # numbers of events, with their seconds in this step
        if [(kind, unit) for _, kind, unit in starts] == [(kind, unit) for _, kind, unit in self.issued]:
            known = [(i, second) for (i, *_), (second, *_) in zip(starts, self.issued, strict=True)]
        known.append((len(clock) - 1, self.timeline.total))
        found, (first, begin) = [0.0], (0, 0.0)
        for last, end in known:
            length = clock[last] - clock[first]
            speed = (end - begin) / length if length > 0 else 0.0
            found += [min(end, begin + speed * (clock[i] - clock[first])) for i in range(first + 1, last)]
            found += [end] * (last > first)
            first, begin = last, end
        return found


def _window(events: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the microseconds at which the last whole step begins and ends; those of all events where none is marked."""
    marked = [e for e in events if e.get("name", "").startswith(_STEP) and e.get("cat") == "user_annotation"]
    spans = marked[-1:] or [e for e in events if e.get("ph") == "X" and "ts" in e]
    return (
        min((e["ts"] for e in spans), default=0.0),
        max((e["ts"] + e.get("dur", 0.0) for e in spans), default=0.0),
    )


def _seconds(event: Mapping[str, Any], begin: float) -> tuple[float, float]:
    start = (event["ts"] - begin) / 1e6
    return start, start + event.get("dur", 0.0) / 1e6


def _memory(events: Sequence[Mapping[str, Any]], begin: float) -> list[tuple[float, int]]:
    """Return the seconds and the bytes allocated since `begin`, on the device where there is one."""
    changes = [e for e in events if e.get("name") == "[memory]"]
    device = max((e["args"]["Device Type"] for e in changes), default=0)  # 0 is the CPU
    level, found = 0, []
    for event in changes:
        if event["args"]["Device Type"] == device:
            level += event["args"]["Bytes"]
            found.append(((event["ts"] - begin) / 1e6, level))
    return found


def _add_threads(
    timeline: Timeline,
    events: Sequence[Mapping[str, Any]],
    issued: Sequence[_Range],
    waits: Sequence[_Range],
    begin: float,
) -> None:
    """Add what the CPU has done: the operators of the thread that computes, and the collectives of Gloo's threads."""
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    by_thread: dict[Any, float] = {}
    for event in operators:
        by_thread[event["tid"]] = by_thread.get(event["tid"], 0.0) + event.get("dur", 0.0)
    computes = max(by_thread, key=by_thread.__getitem__, default=None)
    until = 0.0
    for event in operators:
        start, end = _seconds(event, begin)
        if event["tid"] == computes and start >= until:  # else it is a part of the one before
            until = end
            for wait in waits:
                if start < wait.start < end:
                    timeline.spans.append(Span("compute", start, wait.start, "", "compute"))
                    start = max(start, min(wait.end, end))
            timeline.spans.append(Span("compute", start, end, "", "compute"))
    for kind, stream in _STREAMS.items():
        started = [each for each in issued if each.kind == kind]
        ran = [_seconds(e, begin) for e in events if e.get("name") in _ON_THE_CPU[kind] and e.get("cat") != "cpu_op"]
        each_has = len(ran) // len(started) if started and len(ran) % len(started) == 0 else 0
        for number, (start, end, _, unit) in enumerate(started):
            pieces = ran[number * each_has : (number + 1) * each_has]
            if not pieces:  # others ran such collectives, too: the wait for this one ended when it had ended, or later
                pieces = [
                    (start, next((w.end for w in waits if (w.kind, w.unit) == (kind, unit) and w.end > start), end))
                ]
            timeline.spans += [Span(stream, first, last, unit, kind) for first, last in pieces]


def _add_kernels(
    timeline: Timeline,
    kernels: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    threads: Mapping[Any, Sequence[_Range]],
    begin: float,
) -> None:
    """Add what a device has done, by the stream and by the range in which it was launched."""
    launched = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    for kernel in kernels:
        launch = launched.get(kernel["args"].get("correlation"))
        within = None
        if launch is not None:
            second = (launch["ts"] - begin) / 1e6
            within = next((r for r in threads.get(launch["tid"], ()) if r.start <= second <= r.end), None)
        stream, unit, kind = ("compute", "", "compute") if within is None else (_STREAMS[within.kind], *within[3:1:-1])
        timeline.spans.append(Span(stream, *_seconds(kernel, begin), unit, kind))


def _sums(waits: Sequence[_Range]) -> list[Wait]:
    lost: dict[tuple[str, str], float] = {}
    for start, end, kind, unit in waits:
        lost[kind, unit] = lost.get((kind, unit), 0.0) + end - start
    return sorted((Wait(seconds, kind, unit) for (kind, unit), seconds in lost.items()), reverse=True)


def _gaps(timeline: Timeline) -> list[Wait]:
    """Return the time in which no kernel computed, by the collective that ran meanwhile; by the host where none did."""
    others = [span for span in timeline.spans if span.stream != "compute"]
    until, idle = 0.0, []
    for span in timeline.spans:
        if span.stream == "compute":
            if span.start > until:
                during = [(min(o.end, span.start) - max(o.start, until), o) for o in others]
                overlap, longest = max(during, key=lambda each: each[0], default=(0.0, None))
                by = ("host", "") if longest is None or overlap <= 0 else (longest.kind, longest.name)
                idle.append(_Range(until, span.start, *by))
            until = max(until, span.end)
    return _sums(idle)
