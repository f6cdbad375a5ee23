"""A parameter on the meta device whose values are read later, and what may be done to it until then.

Nothing can be written on meta, so an in-place edit would be silently lost. The parameter's version counter shows edits, but not
those through ``.data``, which has a counter of its own. So the parameter has a class whose ``.data`` shares its counter. The
class also follows conversions to other dtypes: their results wait for the same values, rounded. Results of other functions have
no values, and can't become the parameter's ``.data``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import SetupError, ShardPicklingError

_ATTRIBUTE = "_shard_deferred"

_T: Any = torch.Tensor
_GET_DATA, _SET_DATA = _T.data.__get__, _T.data.__set__
_SAME_VALUES = {
    _GET_DATA, _T.detach, _T.clone, torch.clone, _T.contiguous,
    _T.to, _T.type, _T.type_as, _T.float, _T.double, _T.half, _T.bfloat16,
}  # fmt: skip


class Deferred(NamedTuple):
    """Values that are read when the parameter is sharded.

    Attributes:
        full: a function that returns all values; a view of a mapped file if nothing has to be computed.
        origin: a text that says what the values are and where they come from; equal on all ranks that read the same values.
        casts: dtypes to which the values are rounded, one after the other, before the parameter's own.
        filled: a function that is called when all parameters have their values, once even if several parameters have it.
    """

    full: Callable[[], torch.Tensor]
    origin: str
    casts: tuple[torch.dtype, ...] = ()
    filled: Callable[[], None] | None = None

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`, some or all of them, after the casts."""
        for dtype in self.casts:
            values = values.to(dtype)
        return values


class _Note(NamedTuple):
    """The values that a parameter waits for, and its shape and version when it began to wait."""

    values: Deferred
    shape: torch.Size
    version: int


class Waiting(torch.Tensor):
    """The class of a parameter that waits for values, of its ``.data``, and of its copies, in other dtypes too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        source = args[0] if args and isinstance(args[0], Waiting) else None
        with torch._C.DisableTorchFunctionSubclass():
            if source is not None and func == _SET_DATA:
                return _assign(source, args[1])
            # Unlike torch's own `.data`, a detached tensor shares the version counter.
            result = source.detach() if source is not None and func == _GET_DATA else func(*args, **(kwargs or {}))
            # transformers calls pad() on a tied head's bias, nearly always with zero elements.
            same = func in _SAME_VALUES or (func is nn.functional.pad and not any((*args, *(kwargs or {}).values())[1]))
            return _waiting_too(source, result) if source is not None and same else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy that has lost its values; :func:`has_lost_values` recognises it by its class."""
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
    """Let `param`, which is on the meta device, be filled with `values` when it is sharded. Not collective."""
    if type(param) is nn.Parameter:
        _make_waiting(param)
    _note(param, values)


def deferred_of(param: torch.Tensor) -> Deferred | None:
    """Return the values that `param` waits for, or None. Not collective."""
    found = param.__dict__.get(_ATTRIBUTE)
    return found.values if isinstance(found, _Note) and param.device.type == "meta" else None


def has_lost_values(param: torch.Tensor) -> bool:
    """Return True if `param` is a copy of a parameter that waits, and will get no values itself."""
    return isinstance(param, Waiting) and _ATTRIBUTE not in param.__dict__ and param.device.type == "meta"


def is_altered(param: torch.Tensor) -> bool:
    """Return True if `param`, which waits for values, was edited in place or resized since."""
    note: _Note = param.__dict__[_ATTRIBUTE]
    return param.shape != note.shape or param._version != note.version


def attributes_of(param: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that the user has given to `param`, without those by which it waits."""
    return {key: value for key, value in param.__dict__.items() if key not in (_ATTRIBUTE, "_is_param")}


def forget(param: torch.Tensor) -> None:
    """Make `param` wait for nothing any more."""
    param.__dict__.pop(_ATTRIBUTE, None)


def _make_waiting(param: nn.Parameter) -> None:
    param.__class__ = Waiting  # type: ignore[assignment]
    param._is_param = True  # type: ignore[attr-defined]  # torch recognises parameters of other classes by this attribute


def _note(tensor: torch.Tensor, values: Deferred) -> None:
    tensor.__dict__[_ATTRIBUTE] = _Note(values, tensor.shape, tensor._version)


def _waiting_too(source: Waiting, result: Any) -> Any:
    """Return `result`, a copy or a conversion of `source`, as a tensor that waits for the same values if `source` does."""
    if type(result) is not torch.Tensor or result.device.type != "meta":
        return result
    waiting = result.as_subclass(Waiting)
    values = deferred_of(source)
    if values is not None and not is_altered(source):
        # A conversion back to a wider dtype does not undo a rounding.
        casts = values.casts if result.dtype == source.dtype else (*values.casts, result.dtype)
        _note(waiting, values._replace(casts=casts))
    return waiting


def _assign(param: Waiting, value: Any) -> None:
    """Assign ``param.data = value``.

    Raises:
        SetupError: `value` waits for no values, or for others. Nothing has changed.
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
