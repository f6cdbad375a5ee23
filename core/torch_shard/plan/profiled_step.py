"""One training step as ``torch.profiler`` has recorded it: its memory, what ran on which stream, and what computing waited for.

While a profiler records, the engine puts a labelled range around each collective that it starts for a unit, and around each wait
of the host for one (:mod:`torch_shard.utils.profiled_ranges`). On a device a kernel belongs to the range in which the host has
launched it. On the CPU the backend's threads run the collectives of each kind in the order in which they were started.
"""

from __future__ import annotations

import gzip
import json
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..utils.profiled_ranges import unit_in
from .roofline import Span, Timeline
from .step_timeline import STREAMS
from .step_trace import CollectiveStart

if TYPE_CHECKING:
    from .search_results import Replay

_STEP = "ProfilerStep#"
_KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})


@dataclass(frozen=True)
class ProfiledStep:
    """The record of one step on one rank.

    Attributes:
        timeline: what ran on the streams ``compute``, ``gather``, ``reduce`` and ``between replicas``, and on others by number.
        waits: the times for which computing has waited, with the kind and the unit of the collective that it has waited for; the
            kind is ``"host"`` if it has waited for none.
        memory: the second and the bytes allocated since the step began, after each change; empty without ``profile_memory=True``.
        allocated: the bytes that were allocated when it began, on a device; None on the CPU, where the profiler doesn't know.
        issued: the second, the kind and the unit of each collective that was started.
    """

    timeline: Timeline
    waits: Sequence[Span]
    memory: Sequence[tuple[float, int]]
    allocated: int | None
    issued: Sequence[tuple[float, str, str]]

    @classmethod
    def read(cls, path: str | os.PathLike[str], units: Collection[str], on_device: bool) -> ProfiledStep:
        """Read the file of a profiler's ``export_chrome_trace``.

        Of several steps the last one counts. The profiler marks steps where it was given a schedule.

        Args:
            path: the file, which may be compressed by gzip.
            units: the names of the engine's units; those of other engines are left out.
            on_device: the engine computes on a device with streams.

        Raises:
            ConfigError: there is no such file, or it is no trace; or the trace has no collective of these units, or no kernel.
        """
        try:
            content = Path(path).read_bytes()
            text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
            return cls._from_events(json.loads(text)["traceEvents"], units, on_device)
        except ConfigError:
            raise
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"profile {os.fspath(path)}: this can't be read as a trace of torch.profiler ({type(error).__name__}: {error}). "
                "Give a file of its export_chrome_trace()."
            ) from error

    @classmethod
    def _from_events(cls, events: Sequence[Mapping[str, Any]], units: Collection[str], on_device: bool) -> ProfiledStep:
        begin, end = _window(events)
        inside = sorted((e for e in events if begin <= e.get("ts", -1) <= end), key=lambda e: e["ts"])
        threads: dict[Any, list[Span]] = {}
        host_waits: list[Span] = []
        for event in inside:
            found = unit_in(event.get("name", "")) if event.get("ph") == "X" else None
            if found is not None and found[2] in units:
                waits, kind, unit = found
                spent = Span("compute", *_seconds(event, begin), unit, kind)
                (host_waits if waits else threads.setdefault(event["tid"], [])).append(spent)
        issued = sorted(each for ranges in threads.values() for each in ranges)
        if not issued:
            raise ConfigError(
                "The profile has no collective of this model. Record a whole step, with ProfilerActivity.CPU among the "
                "activities."
            )
        timeline = Timeline()
        timeline.total = (end - begin) / 1e6
        if on_device:
            _add_kernels(timeline, events, inside, threads, begin)
            if not timeline.spans:
                raise ConfigError(
                    "The profile has no kernel of the device. Record with ProfilerActivity.CUDA among the activities."
                )
            timeline.total = max(timeline.total, *(span.end for span in timeline.spans))
        else:
            _add_threads(timeline, inside, issued, host_waits, begin)
        timeline.spans.sort(key=lambda span: span.start)
        lost = _gaps(timeline) if on_device else host_waits
        memory, allocated = _memory(inside, begin, on_device)
        return cls(timeline, lost, memory, allocated, [(each.start, each.kind, each.name) for each in issued])

    def clock_for(self, replay: Replay) -> tuple[list[float], bool]:
        """Return for each event of a predicted step the second at which the same happened in this one.

        A replay has one micro-batch, which is compared with the last one of this step. Between two collectives time passes
        evenly.

        Returns:
            The seconds; True if both steps have started the same collectives in one order. If not, the predicted step is
            stretched to the length of this one.
        """
        clock = replay.clock
        starts = [
            (i, e) for i, e in enumerate(replay.step.events) if isinstance(e, CollectiveStart) and e.kind in STREAMS
        ]
        # A sum between replicas is planned right after the reduction, and waits for its turn on the CPU. Without a reduction
        # within a replica an all-reduce is the reduction itself.
        scattered = any(e.kind == "reduce_scatter" for _, e in starts)
        planned = _merged([(i, e.kind, e.unit) for i, e in starts if not (scattered and e.kind == "all_reduce")])
        measured = _merged([each for each in self.issued if each[1] != "all_reduce"])
        last = measured[len(measured) - len(planned) :]
        aligned = bool(planned) and [what for _, *what in planned] == [what for _, *what in last]
        known = [(i, second) for (i, *_), (second, *_) in zip(planned, last, strict=True)] if aligned else []
        known.append((len(clock) - 1, self.timeline.total))
        begin = measured[-len(planned) - 1][0] if aligned and len(measured) > len(planned) else 0.0
        found, first = [begin], 0
        for event, end in known:
            length = clock[event] - clock[first]
            speed = (end - begin) / length if length > 0 else 0.0
            found += [min(end, begin + speed * (clock[i] - clock[first])) for i in range(first + 1, event)]
            found += [end] * (event > first)
            first, begin = event, end
        return found, aligned


def _merged(starts: Sequence[tuple[Any, str, str]]) -> list[tuple[Any, bool, str]]:
    """Return when gathers (True) and reductions of units begin. Buffers of one unit may have several collectives."""
    groups = groupby(starts, key=lambda each: (each[1] == "all_gather", each[2]))
    return [(next(group)[0], *what) for what, group in groups]


def _window(events: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the microseconds at which the last marked step begins and ends; those of all events where none is marked."""
    marked = [e for e in events if e.get("name", "").startswith(_STEP) and e.get("cat") == "user_annotation"]
    spans = [max(marked, key=lambda e: e["ts"])] if marked else [e for e in events if e.get("ph") == "X" and "ts" in e]
    return (
        min((e["ts"] for e in spans), default=0.0),
        max((e["ts"] + e.get("dur", 0.0) for e in spans), default=0.0),
    )


def _seconds(event: Mapping[str, Any], begin: float) -> tuple[float, float]:
    start = (event["ts"] - begin) / 1e6
    return start, start + event.get("dur", 0.0) / 1e6


def _memory(
    events: Sequence[Mapping[str, Any]], begin: float, on_device: bool
) -> tuple[list[tuple[float, int]], int | None]:
    """Return the seconds and the bytes allocated since `begin`, and what was allocated before, if that is known."""
    changes = [e for e in events if e.get("name") == "[memory]" and (e["args"]["Device Type"] != 0) == on_device]
    level, found = 0, []
    for event in changes:
        level += event["args"]["Bytes"]
        found.append(((event["ts"] - begin) / 1e6, level))
    # On the CPU the profiler counts from its own beginning.
    known = on_device and bool(changes)
    return found, changes[0]["args"]["Total Allocated"] - changes[0]["args"]["Bytes"] if known else None


def _add_threads(
    timeline: Timeline,
    events: Sequence[Mapping[str, Any]],
    issued: Sequence[Span],
    waits: Sequence[Span],
    begin: float,
) -> None:
    """Add what the CPU has done: the operators of the thread that computes, and the collectives of Gloo's threads."""
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    busy: Counter[Any] = Counter()
    for event in operators:
        busy[event["tid"]] += event.get("dur", 0.0)
    computes = max(busy, key=busy.__getitem__, default=None)
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
    names = [e.get("name") for e in events]
    reduces = "gloo:all_to_all" if "gloo:all_to_all" in names else "gloo:all_reduce"
    ran_as = {
        "all_gather": ("gloo:all_gather", "gloo:_allgather_base", "gloo:broadcast"),
        "reduce_scatter": (reduces,),
        "all_reduce": ("gloo:all_reduce",),
    }
    for kind, stream in STREAMS.items():
        started = [each for each in issued if each.kind == kind]
        ran = [_seconds(e, begin) for e in events if e.get("name") in ran_as[kind] and e.get("cat") != "cpu_op"]
        each_has = len(ran) // len(started) if started and len(ran) % len(started) == 0 else 0
        for number, (_, start, end, unit, _) in enumerate(started):
            pieces = ran[number * each_has : (number + 1) * each_has]
            if not pieces or pieces[0][0] < start:
                # Others have run such collectives, too. The wait for this one ended when it had ended, or later.
                pieces = [
                    (start, next((w.end for w in waits if (w.kind, w.name) == (kind, unit) and w.end > start), end))
                ]
            timeline.spans += [Span(stream, first, last, unit, kind) for first, last in pieces]


def _add_kernels(
    timeline: Timeline,
    events: Sequence[Mapping[str, Any]],
    inside: Sequence[Mapping[str, Any]],
    threads: Mapping[Any, Sequence[Span]],
    begin: float,
) -> None:
    """Add the kernels and copies that the host has launched in the step, whenever the device has run them.

    A stream that has run a collective is that collective's, with the casts and copies that it runs as well. Of the others, the
    one that was busy longest computes.
    """
    launches = {
        e["args"]["correlation"]: e for e in inside if e.get("cat") in _LAUNCHES and "correlation" in e.get("args", {})
    }
    kernels = [e for e in events if e.get("cat") in _KERNELS and e["args"].get("correlation") in launches]
    labelled = [_range_at(launches[e["args"]["correlation"]], threads, begin) for e in kernels]
    rows: dict[Any, str] = {}
    busy: Counter[Any] = Counter()
    for kernel, within in zip(kernels, labelled, strict=True):
        if within is None:
            busy[kernel["args"].get("stream")] += kernel.get("dur", 0.0)
        else:
            rows.setdefault(kernel["args"].get("stream"), STREAMS[within.kind])
    rows.update((stream, "compute") for stream, _ in busy.most_common(1))
    for kernel, within in zip(kernels, labelled, strict=True):
        stream = kernel["args"].get("stream")
        row = rows.get(stream, f"stream {stream}") if within is None else STREAMS[within.kind]
        kind, unit = ("compute" if row == "compute" else "copy", "") if within is None else (within.kind, within.name)
        timeline.spans.append(Span(row, *_seconds(kernel, begin), unit, kind))


def _range_at(launch: Mapping[str, Any], threads: Mapping[Any, Sequence[Span]], begin: float) -> Span | None:
    """Return the range in which the host has launched a kernel, if that is one."""
    second = (launch["ts"] - begin) / 1e6
    ranges = threads.get(launch["tid"], ())
    latest = bisect_right(ranges, second, key=lambda each: each.start) - 1
    return ranges[latest] if latest >= 0 and second <= ranges[latest].end else None


def _gaps(timeline: Timeline) -> list[Span]:
    """Return the time in which no kernel computed, by the collective that ran meanwhile; by the host where none did."""
    others = [span for span in timeline.spans if span.kind in STREAMS]
    until, first, idle = 0.0, 0, []
    for span in timeline.spans:
        if span.stream != "compute":
            continue
        if span.start > until:
            while first < len(others) and others[first].end <= until:
                first += 1
            most, cause = 0.0, ("", "host")
            for other in others[first:]:
                if other.start >= span.start:
                    break
                overlap = min(other.end, span.start) - max(other.start, until)
                if overlap > most:
                    most, cause = overlap, (other.name, other.kind)
            idle.append(Span("compute", until, span.start, *cause))
        until = max(until, span.end)
    return idle
