"""The first steps of an optimizer of an unknown class, which can be undone."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ShardError
from ..shard_tensor.tensor import ShardTensor

if TYPE_CHECKING:
    pass

__all__ = [
    "Trial",
]


class Trial:
    """The first steps of an optimizer that the engine does not know. An operation that slices can't do, a matrix product for
    example, may come after others have changed something already; so what there was is kept, and put back then: parameters,
    gradients, state, the groups' options, and plain values among the optimizer's attributes.

    There are two such steps, because the first one may do no more than to make the state. Later ones are not undone, which
    would take the memory of a second copy all the time.
    """

    _STEPS = 2

    def __init__(self, optimizer: Any) -> None:
        self._optimizer: Any = weakref.ref(optimizer)  # by which this is found
        self._begun = 0
        self._undone = False
        self._kept: _Kept | None = None

    def begin(self) -> None:
        """A step begins."""
        self._undone = False
        self._kept = _Kept(self._optimizer()) if self._begun < self._STEPS else None

    def end(self) -> None:
        """It has ended, by no exception.

        Raises:
            ShardError: it has caught the error of an operation that was refused, and has been undone.
        """
        self._begun += 1
        self._kept = None
        if self._undone:
            self._undone = False
            raise ShardError(
                f"{type(self._optimizer()).__qualname__}.step() went on after an operation that sharded parameters can't do; the "
                "parameters had been put back by then, so the step is lost. Don't catch that error, or declare the class: "
                "torch_shard.optim.register."
            )

    def undo(self) -> None:
        """An operation in it was refused."""
        if self._kept is not None:
            self._kept.restore()
            self._kept, self._undone = None, True

    def explain(self, message: str) -> str:
        """Say whose operation it was."""
        name = type(self._optimizer()).__qualname__
        return (
            f"{message} It was called by {name}.step(), an optimizer that the engine does not know"
            f"{'; the step is undone' if self._undone else ', which may have changed some parameters before'}. If it updates "
            f"each parameter by itself, declare it: torch_shard.optim.register({name}, kind='matrix')."
        )


class _Kept:
    """What an optimizer works on, as it is now."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._values = [(p, _memory(p).clone()) for p in params]
        self._grads = [(p, p.grad, None if p.grad is None else _memory(p.grad).clone()) for p in params]
        self._state = {key: _snapshot(value) for key, value in optimizer.state.items()}
        self._options = [
            {k: _snapshot(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
        self._attributes = {k: v for k, v in vars(optimizer).items() if type(v) in _PLAIN}

    def restore(self) -> None:
        optimizer: Any = self._optimizer()
        with torch.no_grad():
            for p, value in self._values:
                _memory(p).copy_(value)
            for p, grad, kept in self._grads:
                if p.grad is not grad:
                    p.grad = grad
                if kept is not None:
                    _memory(grad).copy_(kept)
            for key in [key for key in optimizer.state if key not in self._state]:
                del optimizer.state[key]
            for key, entries in self._state.items():
                optimizer.state[key] = _restored(entries)
            for group, options in zip(optimizer.param_groups, self._options, strict=False):
                for key in [key for key in group if key != "params" and key not in options]:
                    del group[key]
                group.update({key: _restored(kept) for key, kept in options.items()})
        vars(optimizer).update(self._attributes)


_PLAIN = frozenset({bool, int, float, str, type(None)})


class _Held:
    """A tensor, which others may hold too, and what is in it; or a container, and what is in that."""

    def __init__(self, found: Any, content: Any) -> None:
        self.found, self.content = found, content


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local if isinstance(tensor, ShardTensor) else tensor.detach()


def _snapshot(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Held(value, _memory(value).clone())
    if isinstance(value, dict):
        return _Held(value, {key: _snapshot(child) for key, child in value.items()})
    if type(value) is list:
        return _Held(value, [_snapshot(child) for child in value])
    return tuple(map(_snapshot, value)) if type(value) is tuple else value


def _restored(kept: Any) -> Any:
    """The same object with what it held."""
    if type(kept) is tuple:
        return tuple(map(_restored, kept))
    if not isinstance(kept, _Held):
        return kept
    found = kept.found
    if isinstance(found, torch.Tensor):
        _memory(found).copy_(kept.content)
    elif isinstance(found, dict):
        values = {key: _restored(child) for key, child in kept.content.items()}
        found.clear()
        found.update(values)
    else:
        found[:] = map(_restored, kept.content)
    return found
