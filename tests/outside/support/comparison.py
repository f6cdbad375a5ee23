"""Compares the losses and the files of two runs."""

from __future__ import annotations

import fnmatch
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .files import Pixels, read, without_dates
from .program import Tolerance

__all__ = ["Report", "compare_files", "compare_losses", "drop_twins"]

_SHOWN = 12  # differences in a message


@dataclass
class Report:
    """What a comparison has found.

    Attributes:
        compared: how many losses, or files.
        largest: the largest absolute difference of two floating-point numbers.
        differences: what is not equal within the tolerance, one line each.
        seen: the identities of pairs of objects that were compared.
    """

    compared: int = 0
    largest: float = 0.0
    differences: list[str] = field(default_factory=list)
    seen: set[tuple[int, int]] = field(default_factory=set)

    def text(self) -> str:
        """Return the first differences, a line each."""
        more = len(self.differences) - _SHOWN
        return "\n".join(self.differences[:_SHOWN] + ([f"... and {more} more"] if more > 0 else []))


def compare_losses(
    expected: Mapping[str, list[float]], found: Mapping[str, list[float]], tolerance: Tolerance
) -> Report:
    """Compare the losses of all backwards, by rank."""
    report = Report()
    _compare(dict(expected), dict(found), "losses", tolerance, tolerance.losses, report)
    report.compared = sum(map(len, expected.values()))
    return report


def compare_files(expected: Path, found: Path, tolerance: Tolerance, left_out: Sequence[str]) -> Report:
    """Compare all files below two folders but those whose path matches a pattern in `left_out`."""
    report = Report()
    names, ours = _files(expected, left_out), _files(found, left_out)
    for name in sorted(names.keys() - ours.keys()):
        report.differences.append(f"{name}: only under DDP")
    for name in sorted(ours.keys() - names.keys()):
        report.differences.append(f"{name}: not under DDP")
    for name in sorted(names.keys() & ours.keys()):
        report.compared += 1
        _compare(read(names[name]), read(ours[name]), name, tolerance, tolerance.files, report)
    return report


def drop_twins(folder: Path) -> None:
    """Of folders whose names differ by the second alone, keep that of rank 0, which writes weights and so the most bytes."""
    twins: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and without_dates(path.name) != path.name:
            twins.setdefault(without_dates(path.relative_to(folder).as_posix()), []).append(path)
    for found in twins.values():
        for path in sorted(found, key=_nbytes)[:-1]:
            shutil.rmtree(path)


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _files(folder: Path, left_out: Sequence[str]) -> dict[str, Path]:
    """Return the files below a folder by path, without the dates, hosts and processes that names have in them."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.suffix != ".pyc" and not any(fnmatch.fnmatch(name, pattern) for pattern in left_out):
            found[without_dates(re.sub(r"(events\.out\.tfevents)[^/]*", r"\1", name))] = path
    return found


def _compare(
    expected: Any, found: Any, where: str, tolerance: Tolerance, limits: tuple[float, float], report: Report
) -> None:
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        _compare_tensors(expected, found, where, tolerance, limits, report)
    elif type(expected) is not type(found) and not (_is_number(expected) and _is_number(found)):
        report.differences.append(f"{where}: {type(expected).__name__} under DDP, {type(found).__name__} here")
    elif isinstance(expected, Mapping):
        if list(map(str, expected)) != list(map(str, found)) and set(expected) == set(found):
            report.differences.append(f"{where}: the keys are in another order")
        for key in [*expected, *(key for key in found if key not in expected)]:
            if key not in found or key not in expected:
                report.differences.append(f"{where}: {key}: only {'under DDP' if key in expected else 'here'}")
            else:
                _compare(expected[key], found[key], f"{where}: {key}", tolerance, limits, report)
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(found):
            report.differences.append(f"{where}: {len(expected)} entries under DDP, {len(found)} here")
        for number, (one, other) in enumerate(zip(expected, found, strict=False)):
            _compare(one, other, f"{where}[{number}]", tolerance, limits, report)
    elif _is_number(expected):
        _compare_tensors(torch.tensor(expected), torch.tensor(found), where, tolerance, limits, report)
    elif _is_data(expected):
        if isinstance(expected, str):
            expected, found = without_dates(expected), without_dates(found)
        if expected != found:
            report.differences.append(f"{where}: {expected!r:.80} under DDP, {found!r:.80} here")
    elif hasattr(expected, "__dict__") and (id(expected), id(found)) not in report.seen:
        report.seen.add((id(expected), id(found)))  # objects may refer to each other
        # An object that was pickled, such as the arguments of a Trainer.
        _compare(vars(expected), vars(found), where, tolerance, limits, report)


def _compare_tensors(
    expected: torch.Tensor,
    found: torch.Tensor,
    where: str,
    tolerance: Tolerance,
    limits: tuple[float, float],
    report: Report,
) -> None:
    for name, one, other in _described(expected, found):
        if one != other:
            report.differences.append(f"{where}: {name} {one} under DDP, {other} here")
            return
    limits = next(((0.0, bound) for name, bound in tolerance.noise.items() if fnmatch.fnmatch(where, name)), limits)
    if isinstance(expected, Pixels):
        limits = (0.0, float(tolerance.pixels))
    elif not (expected.is_floating_point() or expected.is_complex()):
        limits = (0.0, 0.0)
    if expected.numel() == 0:
        return
    kind = torch.complex128 if expected.is_complex() else torch.float64
    one, other = expected.detach().as_subclass(torch.Tensor).to(kind), found.detach().as_subclass(torch.Tensor).to(kind)
    apart = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, (one - other).abs())
    largest = float(apart.max())
    if limits != (0.0, 0.0) and not isinstance(expected, Pixels):
        report.largest = max(report.largest, largest if not math.isnan(largest) else math.inf)
    allowed = limits[1] + limits[0] * one.abs().nan_to_num(0.0, 0.0)  # of NaN and infinity nothing but themselves
    wrong = ~(apart <= allowed)
    if bool(wrong.any()):
        at = int(wrong.flatten().to(torch.int8).argmax())
        report.differences.append(
            f"{where}: {int(wrong.sum())} of {expected.numel()} differ, by {largest:.3g} at most; "
            f"the first: {one.flatten()[at].item():.9g} under DDP, {other.flatten()[at].item():.9g} here"
        )


def _described(expected: torch.Tensor, found: torch.Tensor) -> Iterator[tuple[str, Any, Any]]:
    yield "shape", tuple(expected.shape), tuple(found.shape)
    yield "dtype", expected.dtype, found.dtype


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_data(value: Any) -> bool:
    return value is None or isinstance(value, (str, bytes, bool, int, float, Path, torch.dtype, torch.device))
