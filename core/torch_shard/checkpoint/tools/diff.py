"""Comparing two checkpoints of any formats entry by entry, with one tensor of each in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..format.fileio import Progress
from ..format.mmap_buffer import bytes_of, row_major
from ..sharded.entry_tree import SavedOptimizer, Stored
from .classify import Parts, merged, named_entries, remove_wrappers, title
from .torch_layout import state_by_number

_CHUNK = 1 << 20  # elements that are compared at a time


@dataclass(frozen=True)
class Difference:
    """An entry that differs.

    Attributes:
        name: the entry's name.
        kind: "only in A", "only in B", "shape", "dtype", "values" or "object".
        a, b: the entry's shape, dtype or value in each checkpoint; None where it is missing.
        elements: the number of elements that differ.
        total: the number of the tensor's elements.
        max_abs: the largest absolute difference.
    """

    name: str
    kind: str
    a: Any = None
    b: Any = None
    elements: int | None = None
    total: int | None = None
    max_abs: float | None = None


def aligned(a: Parts, b: Parts) -> tuple[dict[tuple[Any, ...], Any], dict[tuple[Any, ...], Any]]:
    """Return the entries of two checkpoints by path, with the same paths in both even if their formats differ.

    Optimizer state by number gets the other checkpoint's names, by position. Prefixes of wrappers are removed if only one model
    has them. Entries that are in ``extra`` of only one checkpoint are put there in the other one.
    """
    for parts, other in ((a, b), (b, a)):
        if parts.model and other.model and not parts.model.keys() & other.model.keys():
            remove_wrappers(parts)
        if parts.extra is None and isinstance(other.extra, dict):
            parts.extra = {key: parts.other.pop(key) for key in list(parts.other) if key in other.extra} or None
        if parts.listed and other.optimizers.keys() == {""}:  # as the sharded format has a list
            parts.optimizers, parts.listed = {"": merged(parts)}, False
    for name in a.optimizers.keys() & b.optimizers.keys():
        one, two = a.optimizers[name], b.optimizers[name]
        if one.is_numbered != two.is_numbered:
            given = two if one.is_numbered else one
            names = [str(p) for group in given.groups for p in group.get("params", ())]
            a.optimizers[name], b.optimizers[name] = (_renamed(state_by_number(own), names) for own in (one, two))
    return named_entries(a), named_entries(b)


def _renamed(state: dict[str, Any], names: list[str]) -> SavedOptimizer:
    """Return state by number as state by name, as far as there are names."""

    def name(number: Any) -> str:
        return names[number] if isinstance(number, int) and number < len(names) else str(number)

    groups = [{**group, "params": [name(p) for p in group["params"]]} for group in state["param_groups"]]
    return SavedOptimizer({name(key): own for key, own in state["state"].items()}, groups)


def compare(
    a: dict[tuple[Any, ...], Any],
    b: dict[tuple[Any, ...], Any],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    dtypes: bool = True,
    progress: Progress = lambda nbytes: None,
) -> Iterator[Difference]:
    """Yield the differences of two checkpoints, in the order of the first one.

    Args:
        a, b: the results of :func:`aligned`.
        rtol, atol: the tolerances of ``torch.isclose``; with both at 0 every bit counts.
        dtypes: True if another dtype alone is a difference.
        progress: told the bytes of each tensor of `a` that has been compared.

    Raises:
        CheckpointError: an entry is damaged.
    """
    for path, one in a.items():
        name = title(path)
        if path not in b:
            yield Difference(name, "only in A", a=_summary(one))
            continue
        two = b[path]
        if isinstance(one, (Stored, torch.Tensor)) and isinstance(two, (Stored, torch.Tensor)):
            for found in _tensors(name, one, two, rtol, atol):
                if dtypes or found.kind != "dtype" or found.elements:
                    yield found
        elif _canonical(one) != _canonical(two):
            yield Difference(name, "object", a=one, b=two)
        if isinstance(one, Stored):
            progress(one.nbytes)
    for path, two in b.items():
        if path not in a:
            yield Difference(title(path), "only in B", b=_summary(two))


def _summary(value: Any) -> Any:
    if isinstance(value, (Stored, torch.Tensor)):
        return {"shape": list(value.shape), "dtype": value.dtype}
    return value


def _memory(value: Any) -> Any:
    return value.read() if isinstance(value, Stored) else value


def _tensors(
    name: str, one: Stored | torch.Tensor, two: Stored | torch.Tensor, rtol: float, atol: float
) -> Iterator[Difference]:
    if one.shape != two.shape:
        yield Difference(name, "shape", a=list(one.shape), b=list(two.shape))
        return
    x, y = _memory(one), _memory(two)
    count, largest = differing(x, y, rtol, atol)
    if x.dtype != y.dtype:
        yield Difference(name, "dtype", x.dtype, y.dtype, count, x.numel(), largest)
    elif count:
        yield Difference(name, "values", None, None, count, x.numel(), largest)


def differing(x: torch.Tensor, y: torch.Tensor, rtol: float = 0.0, atol: float = 0.0) -> tuple[int, float]:
    """Return the number of elements that differ, and the largest absolute difference.

    Args:
        x, y: tensors of one shape.
        rtol, atol: the tolerances of ``torch.isclose``. With both at 0, values of one dtype are compared bit by bit: a NaN
            equals itself, and 0.0 does not equal -0.0.
    """
    count, largest = 0, 0.0
    # A conjugated view has the bits of its base.
    one, two = (t.resolve_conj().resolve_neg().contiguous().view(-1) for t in (x, y))
    for start in range(0, one.numel(), _CHUNK):
        p, q = one[start : start + _CHUNK], two[start : start + _CHUNK]
        exact = rtol == atol == 0.0
        if p.dtype == q.dtype:
            same = (p.view(torch.uint8) == q.view(torch.uint8)).view(p.numel(), -1).all(1)
            if bool(same.all()):
                continue
        wide = torch.complex128 if p.is_complex() or q.is_complex() else torch.float64
        u, v = p.to(wide), q.to(wide)
        if not exact or p.dtype != q.dtype:
            same = torch.isclose(u, v, rtol=rtol, atol=atol, equal_nan=True)
        count += int((~same).sum())
        apart = (u - v).abs()
        apart[(u == v) | (u.isnan() & v.isnan())] = 0.0
        most = float(apart.max())
        largest = most if most != most or most > largest else largest
    return count, largest


def _canonical(value: Any) -> Any:
    """Return a value that is equal for equal objects: of the same type, and with the same bits. A list equals a tuple."""
    value = _memory(value)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, bytes(bytes_of(row_major(value)))
    if isinstance(value, dict):
        return {(type(key), key): _canonical(own) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(own) for own in value]
    # The texts of -0.0 and 0.0 differ, and those of NaN are equal.
    return type(value), repr(value) if isinstance(value, (float, complex)) or value != value else value
