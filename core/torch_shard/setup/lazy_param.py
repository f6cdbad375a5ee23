"""A parameter on the meta device whose values wait, and what may be done to it until they come.

On meta nothing can be written, so what is done to the values in place would be lost without a word. The parameter's version
counter tells of it, but not where it was done through ``.data``, which has a counter of its own. Therefore the parameter is of a
class whose ``.data`` counts as the parameter itself, and which follows conversions to other dtypes: those wait for the same
values, rounded. All else that is computed from it has no values, and can't become its ``.data``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import SetupError, ShardPicklingError

__all__ = ["Deferred", "Waiting", "attributes_of", "defer", "deferred_of", "forget", "has_lost_values", "is_altered"]

_ATTRIBUTE = "_shard_deferred"

_T: Any = torch.Tensor
_GET_DATA, _SET_DATA = _T.data.__get__, _T.data.__set__
_SAME_VALUES = {
    _GET_DATA, _T.detach, _T.clone, torch.clone, _T.contiguous,
    _T.to, _T.type, _T.type_as, _T.float, _T.double, _T.half, _T.bfloat16,
}  # fmt: skip


@dataclass(frozen=True)
class Deferred:
    """Values that are read when the parameter is sharded.

    Attributes:
        whole: gives all of them; a view of a mapped file where nothing has to be computed.
        origin: what they are and where they come from: equal on all ranks that read the same.
        casts: dtypes that they are rounded to, one after the other, before the parameter's own.
        filled: called once the parameters of the model have their values; once where several parameters have the same.
    """

    whole: Callable[[], torch.Tensor]
    origin: str
    casts: tuple[torch.dtype, ...] = field(default=())
    filled: Callable[[], None] | None = None

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, some or all of them, after the casts."""
        for dtype in self.casts:
            values = values.to(dtype)
        return values


@dataclass(frozen=True)
class _Note:
    """On a parameter: what it waits for, and what it was like."""

    values: Deferred
    shape: torch.Size
    version: int


class Waiting(torch.Tensor):
    """The class of such a parameter, of its ``.data``, and of copies of it, to other dtypes, too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        source = args[0] if args and isinstance(args[0], Waiting) else None
        with torch._C.DisableTorchFunctionSubclass():
            if source is not None and func == _SET_DATA:
                return _assign(source, args[1])
            # Of one version counter with it, which that of C++ is not.
            result = source.detach() if source is not None and func == _GET_DATA else func(*args, **(kwargs or {}))
            # transformers pads the bias of a tied head by nothing, as a rule.
            same = func in _SAME_VALUES or (func is nn.functional.pad and not any((*args, *(kwargs or {}).values())[1]))
            return _waiting_too(source, result) if source is not None and same else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Without values, of which the class still tells: see :func:`has_lost_values`."""
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                copied: torch.Tensor = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
                if isinstance(self, nn.Parameter):
                    copied = nn.Parameter(copied, self.requires_grad)
                    _make_waiting(copied)
                memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        note: _Note | None = self.__dict__.get(_ATTRIBUTE)
        what = "a parameter" if note is None else note.values.origin
        raise ShardPicklingError(
            f"{what} has no values yet: they are read when the model is sharded. Save the model after shard() or "
            "accelerator.prepare()."
        )


def defer(param: nn.Parameter, values: Deferred) -> None:
    """Have `param`, which is on the meta device, filled with `values` when it is sharded. Not collective."""
    if type(param) is nn.Parameter:
        _make_waiting(param)
    _note(param, values)


def deferred_of(param: torch.Tensor) -> Deferred | None:
    """What `param` waits for, or None. Not collective."""
    found = param.__dict__.get(_ATTRIBUTE)
    return found.values if isinstance(found, _Note) and param.device.type == "meta" else None


def has_lost_values(param: torch.Tensor) -> bool:
    """Whether `param` is a copy of one that waits: without values, and without any to come."""
    return isinstance(param, Waiting) and _ATTRIBUTE not in param.__dict__ and param.device.type == "meta"


def is_altered(param: torch.Tensor) -> bool:
    """Whether `param`, which waits for values, was changed in place or resized since."""
    note: _Note = param.__dict__[_ATTRIBUTE]
    return param.shape != note.shape or param._version != note.version


def attributes_of(param: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that the user has given to `param`, without what makes it wait."""
    return {key: value for key, value in param.__dict__.items() if key not in (_ATTRIBUTE, "_is_param")}


def forget(param: torch.Tensor) -> None:
    """`param` waits for nothing any more."""
    param.__dict__.pop(_ATTRIBUTE, None)


def _make_waiting(param: nn.Parameter) -> None:
    param.__class__ = Waiting  # type: ignore[assignment]
    param._is_param = True  # type: ignore[attr-defined]  # by which torch knows parameters of other classes


def _note(tensor: torch.Tensor, values: Deferred) -> None:
    tensor.__dict__[_ATTRIBUTE] = _Note(values, tensor.shape, tensor._version)


def _waiting_too(source: Waiting, result: Any) -> Any:
    """`result`, a copy or a conversion of `source`, as one that waits for the same values, if `source` still has those."""
    if type(result) is not torch.Tensor or result.device.type != "meta":
        return result
    waiting = result.as_subclass(Waiting)
    values = deferred_of(source)
    if values is not None and not is_altered(source):
        # After a rounding the way back matters, too.
        casts = values.casts if result.dtype == source.dtype else (*values.casts, result.dtype)
        _note(waiting, dataclasses.replace(values, casts=casts))
    return waiting


def _assign(param: Waiting, value: Any) -> None:
    """``param.data = value``.

    Raises:
        SetupError: `value` has no values to wait for, or others; nothing has changed.
    """
    own = deferred_of(param)
    if own is None:
        _SET_DATA(param, value)
        return
    other = deferred_of(value) if isinstance(value, Waiting) else None
    if other is None or other.origin != own.origin or is_altered(value) or is_altered(param):
        raise SetupError(
            f"{own.origin} is read when the model is sharded, so nothing can be computed from it, nor put in its place as "
            "param.data. Do it afterwards, inside engine.gathered(write=True); or put a new parameter with memory and values "
            "into the module; or load the model on the CPU."
        )
    _SET_DATA(param, value)
    _note(param, other)
