"""Meta tensors that record how their values are computed, so that loading code runs on them without reading files.

transformers renames the entries of a file, converts their dtype, and fuses, splits or transposes some of them. Its own code, run
on these tensors, records from which entries each parameter is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from torch_shard.frontend import Deferred


class Entry:
    """An entry of a file, as ``safe_open(...).get_slice`` gives one: read by indexing.

    Args:
        values: mapped from the file.
        origin: name of the entry, and which file it is in.
    """

    def __init__(self, values: torch.Tensor, origin: str) -> None:
        self.values, self.origin = values, origin

    def __getitem__(self, index: Any) -> Recorded:
        full = _recorded(self.values.to("meta"), _Step(lambda: self.values, (), {}, None, self.origin))
        part: Any = full if index is Ellipsis else full[index]
        return part  # type: ignore[no-any-return]

    def get_shape(self) -> list[int]:
        """Return the sizes of the entry."""
        return list(self.values.shape)


@dataclass(frozen=True, eq=False)
class _Step:
    """How one tensor is computed: ``function(*args, **kwargs)``, or result number `index` of it if it returns several."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None
    origin: str = ""

    def inputs(self) -> Iterator[Recorded]:
        return (leaf for leaf in tree_flatten((self.args, self.kwargs))[0] if isinstance(leaf, Recorded))


class Recorded(torch.Tensor):
    """A meta tensor with the steps that compute its values. Not for gradients."""

    _step: _Step

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to:
            return _cast(args, kwargs)
        name = getattr(func, "__name__", str(func))
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            before = [leaf._version for leaf in given]
            result = func(*args, **kwargs)
            changed = before != [leaf._version for leaf in given]
        if changed or (name == "__set__" and len(given) > 1):
            raise TypeError(f"{name} changes a tensor in place, which can't be done later.")
        if any(result is leaf for leaf in given):  # such as contiguous() of a contiguous tensor, or requires_grad_()
            return result
        if any(not isinstance(leaf, Recorded) and leaf.device.type == "meta" for leaf in given):
            raise TypeError(f"{name} of a tensor on the meta device, which has no values.")
        if isinstance(result, torch.Tensor):
            return _recorded(result, _Step(func, args, kwargs, None))
        if isinstance(result, (tuple, list)) and any(isinstance(part, torch.Tensor) for part in result):
            return type(result)(  # chunk, split, unbind
                [_recorded(part, _Step(func, args, kwargs, number)) for number, part in enumerate(result)]
            )
        return result


def _recorded(meta: torch.Tensor, step: _Step) -> Recorded:
    with torch._C.DisableTorchFunctionSubclass():
        result: Recorded = meta.detach().as_subclass(Recorded)
    result._step = step
    return result


def _cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorded:
    """Record ``tensor.to(...)`` of a dtype alone; devices have no meaning here."""
    tensor: Recorded = args[0]
    given = [*args[1:], *(value for key, value in kwargs.items() if key in ("dtype", "other"))]
    dtypes = [x if isinstance(x, torch.dtype) else x.dtype for x in given if isinstance(x, (torch.dtype, torch.Tensor))]
    if not dtypes or dtypes[0] == tensor.dtype:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        result = tensor.to(dtypes[0])
    return _recorded(result, _Step(_to, (tensor, dtypes[0]), {}, None))


def _to(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype)


def deferred_from(tensor: Recorded) -> Deferred:
    """Return the values for ``torch_shard.frontend.defer``, which makes the last conversions on shards alone. Not collective."""
    casts: list[torch.dtype] = []
    step = tensor._step
    while step.function in (_to, torch.Tensor.detach):
        if step.function is _to:
            casts.insert(0, step.args[1])
        step = step.args[0]._step
    return Deferred(lambda: _values(step, {}), _origin(step), tuple(casts))


def _values(step: _Step, known: dict[int, Any]) -> torch.Tensor:
    """Return the values of a step; `known` has the values that were computed for other steps, by the tensor's id."""
    if step.function in (torch.cat, torch.stack) and isinstance(step.args[0], (list, tuple)):
        return _joined(step, known)

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, Recorded):
            return leaf
        if id(leaf) not in known:
            known[id(leaf)] = _values(leaf._step, known)
        return known[id(leaf)]

    args, kwargs = tree_map(value, (step.args, step.kwargs))
    result = step.function(*args, **kwargs)
    return result if step.index is None else result[step.index]  # type: ignore[no-any-return]


def _joined(step: _Step, known: dict[int, Any]) -> torch.Tensor:
    """Return ``cat`` or ``stack`` of inputs that are computed one after the other, so that experts are in memory once."""
    with torch._C.DisableTorchFunctionSubclass():
        like = step.function(*step.args, **step.kwargs)
    result = torch.empty(like.shape, dtype=like.dtype)
    _write(step, result, known)
    return result


def _write(step: _Step, place: torch.Tensor, known: dict[int, Any]) -> None:
    """Compute the values of a step into `place`, which has the shape and dtype of the result."""
    source = step.args[0]._step if step.function is _to else step
    if step.function not in (torch.cat, torch.stack) or not isinstance(step.args[0], (list, tuple)):
        # The copy converts, where the step does nothing else to an entry of a file.
        place.copy_(_values(source if source.origin else step, known))
        return
    dim, at = step.kwargs.get("dim", step.args[1] if len(step.args) > 1 else 0), 0
    for number, part in enumerate(step.args[0]):
        if step.function is torch.stack:
            _write(part._step, place.select(dim, number), known)
        elif part.dim() == place.dim():  # cat also takes empty vectors, which have no values
            _write(part._step, place.narrow(dim, at, part.shape[dim]), known)
            at += part.shape[dim]


def _origin(step: _Step) -> str:
    if step.origin:
        return step.origin
    name = getattr(step.function, "__name__", "function")
    place = "" if step.index is None else f"[{step.index}]"
    return f"{name}{place} of ({', '.join(_origin(leaf._step) for leaf in step.inputs())})"
