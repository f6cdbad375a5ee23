"""What an optimizer's step is refused for, and what is put right before one."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from .errors import NeedsGatherError, ShardError, UnitStateError
from .leaf import own_grad
from .optim import is_torchs
from .shard_tensor import ShardTensor

if TYPE_CHECKING:
    from .runtime import Runtime
    from .unit import Unit

__all__ = ["Trial", "check_class", "check_units", "own_units", "refuse_unreduced", "shard_state"]

# By the beginning of the module's name; and what a class's name contains.
_REFUSED = (
    (
        "bitsandbytes",
        "8bit",
        "quantises its state in blocks and decides by a tensor's size whether to; both would depend on the number of ranks. "
        "Use torch.optim's class of the same name",
    ),
    (
        "bitsandbytes",
        "",
        "passes the addresses of whole parameters to its kernels. Use torch.optim's class of the same name",
    ),
)

_COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})  # 0-dim state of torch.optim's classes


def check_class(optimizer: Any, rank: int) -> None:
    """Refuse what can't be right on slices.

    Raises:
        ShardError: an optimizer that needs all parameters at once or the addresses of whole ones, or `differentiable`.
    """
    cls = type(optimizer)
    name = f"rank {rank}: {cls.__module__}.{cls.__qualname__}"
    if isinstance(optimizer, torch.optim.LBFGS):
        raise NeedsGatherError(
            f"{name} works on all parameters as one vector, which no rank has. Use another optimizer; an update of your own from "
            "whole parameters and gradients goes inside `with engine.gathered(write=True, grads=True):`. Nothing was changed."
        )
    for module, part, why in _REFUSED:
        if cls.__module__.split(".")[0] == module and part in cls.__qualname__:
            raise ShardError(f"{name} {why}. Nothing was changed.")
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ShardError(
                f"{name}: parameter group {number} has differentiable=True, but a sharded parameter's update can't be "
                "recorded by autograd. Set it to False. Nothing was changed."
            )


def own_units(optimizer: Any, runtime: Runtime) -> list[Unit]:
    """The units whose parameters the optimizer holds.

    Raises:
        ShardError: it holds another engine's parameters, too.
    """
    found: dict[int, Unit] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            unit = p._unit_ref() if isinstance(p, ShardTensor) and p._unit_ref is not None else None
            if unit is None:
                continue
            if unit.runtime is not runtime:
                raise several_engines(optimizer, p, runtime)
            found[unit.index] = unit
    return list(found.values())


def several_engines(optimizer: Any, param: Any, runtime: Runtime) -> ShardError:
    """Make the error for an optimizer over the parameters of two engines, of which one is `param`."""
    return ShardError(
        f"rank {runtime.collectives.world_rank}: {type(optimizer).__name__} holds parameters of two engines, {param._spec.name} "
        "among them. Make an optimizer for each sharded model, or put the models into one nn.Module and shard that. Nothing was "
        "changed."
    )


def check_units(optimizer: Any, units: Iterable[Unit]) -> None:
    """Refuse a step inside ``engine.gathered``.

    Raises:
        UnitStateError: a unit is gathered there, so that what leaves it would overwrite the step.
    """
    for unit in units:
        if unit.is_summoned:
            raise UnitStateError(
                f"rank {unit.collectives.world_rank}: {type(optimizer).__name__}.step() inside engine.gathered() of unit "
                f"{unit.name!r}, where parameters are whole and slices out of date; step outside. Nothing was changed."
            )


def refuse_unreduced(optimizer: Any, runtime: Runtime) -> None:
    """Each rank would step its slice with a gradient of its own.

    Raises:
        ShardError: a gradient waits for its reduction.
    """
    if not runtime.holds_gradients():
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not isinstance(p, ShardTensor):
                continue
            with torch._C.DisableTorchFunctionSubclass():
                grad: Any = own_grad(p)
            unreduced = getattr(grad, "_unreduced", False)
            unit = p._unit_ref() if unreduced and p._unit_ref is not None else None
            if unit is not None and unit.runtime is runtime and grad._local.count_nonzero():
                raise ShardError(
                    f"rank {p._spec.rank}: optimizer.step() with a gradient of {p._spec.name} that is not reduced, because every "
                    "backward since zero_grad() ran under no_sync(). Run the last backward, with its forward, outside."
                )


def shard_state(optimizer: Any, runtime: Runtime) -> None:
    """Replace whole plain tensors in the state of this runtime's parameters, from before sharding or from a plain
    checkpoint, by this rank's slices of them. Not collective."""
    state = getattr(optimizer, "state", None)
    if not state:
        return
    scalars: list[tuple[ShardTensor, Any, str]] = []
    known = is_torchs(type(optimizer))
    for group in optimizer.param_groups:
        for p in group["params"]:
            own = state.get(p) if isinstance(p, ShardTensor) else None
            if not isinstance(own, dict):
                continue
            for key, value in own.items():
                # Counters are whole on every rank.
                if type(value) is not torch.Tensor or key in _COUNTERS or value.shape != p._spec.shape:
                    continue
                unit = p._unit_ref() if p._unit_ref is not None else None
                if unit is None or unit.runtime is not runtime or unit.is_summoned:
                    break
                if value.dim() or known:
                    own[key] = _slice(value, p)  # the key stays, so the dict may be gone through
                else:
                    scalars.append((p, own, key))
    if scalars:
        # Next to a 0-dim parameter its own moments look like counters. Where others have slices under that name, so has it
        # (torch's own counters are known by name).
        dicts = [own for own in state.values() if isinstance(own, dict)]
        sliced = {k for own in dicts for k, v in own.items() if type(v) is ShardTensor and v._spec.shape}
        for p, own, key in scalars:
            if key in sliced:
                own[key] = _slice(own[key], p)


def _slice(value: torch.Tensor, param: ShardTensor) -> ShardTensor:
    return ShardTensor.from_full(value.to(param._local.device), param._spec)


class Trial:
    """The first steps of an optimizer that the engine does not know. An operation that slices can't do, a matrix product for
    example, may come after others have changed something already; so what there was is kept, and put back then.

    There are two such steps, because the first one may do no more than to make the state. Later ones are not undone, which
    would take the memory of a second copy all the time.
    """

    _STEPS = 2

    def __init__(self, optimizer: Any) -> None:
        self._optimizer: Any = weakref.ref(optimizer)  # by which this is found
        self._frame = 0
        self._ended = 0
        self._undone = False
        self.values: list[tuple[ShardTensor, torch.Tensor]] = []
        self.state: dict[int, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {}

    @property
    def _keeps(self) -> bool:
        return self._ended < self._STEPS

    def begin(self, frame: Any) -> None:
        """A step begins, in `frame`."""
        # Whether it still runs is seen on the stack: an exception in it tells nobody that it has ended. (The frame itself
        # would keep the optimizer.)
        self._frame, self._undone = id(frame), False
        self._drop()
        if self._keeps:
            optimizer = self._optimizer()
            params = [p for group in optimizer.param_groups for p in group["params"] if type(p) is ShardTensor]
            self.values = [(p, p._local.clone()) for p in params]
            for p in params:
                entries = optimizer.state.get(p)
                if entries:
                    self.state[id(p)] = dict(entries), _copied(entries)

    def end(self, frame: Any) -> bool:
        """A step has ended in `frame`, by no exception; returns whether it was this one.

        Raises:
            ShardError: it has caught the error of an operation that was refused, and has been undone.
        """
        if id(frame) != self._frame:
            return False
        self._ended += 1
        self._frame = 0
        self._drop()
        if self._undone:
            self._undone = False
            raise ShardError(
                f"{type(self._optimizer()).__qualname__}.step() went on after an operation that sharded parameters can't do; the "
                "parameters had been put back by then, so the step is lost. Don't catch that error, or declare the class: "
                "torch_shard.optim.register."
            )
        return True

    def _drop(self) -> None:
        self.values, self.state = [], {}

    def runs(self, frame: Any) -> bool:
        """Whether `frame` is that step's, or inside it."""
        while frame is not None and (id(frame) != self._frame or not self._is_in(frame)):
            frame = frame.f_back
        return frame is not None

    def _is_in(self, frame: Any) -> bool:
        # Under these names torch's wrapper and that of `attach` have the optimizer. Ids of frames are used again.
        optimizer = self._optimizer()
        return any(frame.f_locals.get(name) is optimizer for name in ("self", "this"))

    def refuse(self, message: str) -> str:
        """An operation was refused: undo the step, and say whose it was."""
        if not self.runs(sys._getframe(1)):
            return message
        name = type(self._optimizer()).__qualname__
        if self._keeps:
            self._restore()
            self._undone = True
        return (
            f"{message} It was called by {name}.step(), an optimizer that the engine does not know"
            f"{'; the step is undone' if self._keeps else ', which may have changed some parameters before'}. If it updates "
            f"each parameter by itself, declare it: torch_shard.optim.register({name}, kind='matrix')."
        )

    def _restore(self) -> None:
        states = self._optimizer().state
        with torch.no_grad():
            for p, value in self.values:
                p._local.copy_(value)
                own = states.get(p)
                if own is None:
                    continue
                entries, values = self.state.get(id(p), ({}, {}))
                for key, kept in values.items():
                    held: Any = entries[key]
                    getattr(held, "_local", held).copy_(kept)
                own.clear()
                own.update(entries)
                if not entries:
                    del states[p]


def _copied(entries: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {
        key: getattr(value, "_local", value) for key, value in entries.items() if isinstance(value, torch.Tensor)
    }
    return {key: value.clone() for key, value in tensors.items()}
