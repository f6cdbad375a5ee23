"""Whether what an engine's ranks have computed is what the plain run has."""

from __future__ import annotations

import pickle
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .case import Case
from .ranks import Outcome

__all__ = ["Verdict", "judge"]

NOT_APPLICABLE = "\N{EN DASH}"
TOLERANCES = {torch.float64: (1e-9, 1e-10), torch.float32: (1e-4, 1e-5)}
"""Relative and absolute, by the dtype of the computation."""


@dataclass(frozen=True)
class Verdict:
    """A cell of the table.

    Attributes:
        letter: "P" the same as plain, "E" an error, "W" wrong without an error, "H" it hangs, or a dash: not applicable.
        why: what was raised, or what differs.
    """

    letter: str
    why: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def judge(case: Case, outcome: Outcome, plain: Outcome, dtype: torch.dtype) -> Verdict:
    """Compare the outcome of an engine's ranks with that of the plain run."""
    if outcome.kind != "done":
        return Verdict({"error": "E", "hang": "H", "none": NOT_APPLICABLE}[outcome.kind], outcome.text)
    rtol, atol = case.tolerance or TOLERANCES[case.dtype or dtype]
    expected = pickle.loads(plain.results[0])
    results = [pickle.loads(result) for result in outcome.results]
    for rank, result in enumerate(results):
        why = _difference(result["models"], expected["models"], rtol, atol, "parameters")
        # A rank may have noted less than the plain run, under `if job.rank == 0`.
        for name, value in result["seen"].items():
            why = why or _difference(value, expected["seen"].get(name), rtol, atol, name)
        if why:
            return Verdict("W", f"rank {rank}: {why}")
    unseen = expected["seen"].keys() - {name for result in results for name in result["seen"]}
    return Verdict("W", f"no rank has {', '.join(sorted(unseen))}") if unseen else Verdict("P")


def _difference(found: Any, expected: Any, rtol: float, atol: float, where: str) -> str:
    """Say in what two values differ; nothing if they agree."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if list(found) != list(expected):
            return f"{where}: {', '.join(map(str, found))} and not {', '.join(map(str, expected))}"
        parts = [(found[key], expected[key], f"{where}, {key}") for key in expected]
    elif isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(found) != len(expected):
            return f"{where}: {len(found)} and not {len(expected)}"
        parts = [(a, b, f"{where}, {i}") for i, (a, b) in enumerate(zip(found, expected, strict=True))]
    elif isinstance(expected, Tensor) and isinstance(found, Tensor):
        return _between_tensors(found, expected, rtol, atol, where)
    elif isinstance(expected, float) and isinstance(found, float):
        return "" if abs(found - expected) <= atol + rtol * abs(expected) else f"{where} is {found}, not {expected}"
    else:
        return "" if found == expected else f"{where} is {found}, not {expected}"
    return next(filter(None, (_difference(a, b, rtol, atol, at) for a, b, at in parts)), "")


def _between_tensors(found: Tensor, expected: Tensor, rtol: float, atol: float, where: str) -> str:
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"{where}: {tuple(found.shape)}, {found.dtype} and not {tuple(expected.shape)}, {expected.dtype}"
    if torch.allclose(found.double(), expected.double(), rtol=rtol, atol=atol):
        return ""
    return f"{where} differs by {(found.double() - expected.double()).abs().max().item():.2g}"
