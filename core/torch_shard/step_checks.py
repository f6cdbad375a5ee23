"""What an optimizer's step is refused for, and what is put right before one."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from .errors import NeedsGatherError, ShardError, UnitStateError
from .leaf import own_grad
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
    for group in optimizer.param_groups:
        for p in group["params"]:
            own = state.get(p) if isinstance(p, ShardTensor) else None
            if not isinstance(own, dict):
                continue
            for key, value in own.items():
                # Counters are whole on every rank.
                if type(value) is not torch.Tensor or key == "step" or value.shape != p._spec.shape:
                    continue
                unit = p._unit_ref() if p._unit_ref is not None else None
                if unit is None or unit.runtime is not runtime or unit.is_summoned:
                    break
                if value.dim():
                    own[key] = _slice(value, p)  # the key stays, so the dict may be gone through
                else:
                    scalars.append((p, own, key))
    if scalars:
        # Next to a 0-dim parameter its own moments look like counters. Where others have slices under that name, so has it.
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
        self.frame: Any = None
        self.ended = 0
        self.values: list[tuple[ShardTensor, torch.Tensor]] = []
        self.state: dict[int, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {}

    @property
    def keeps(self) -> bool:
        return self.ended < self._STEPS

    def begin(self, frame: Any) -> None:
        """A step begins, in `frame`."""
        # Whether it still runs is seen on the stack: an exception in it tells nobody that it has ended.
        self.frame = frame
        self._drop()
        if self.keeps:
            optimizer = self._optimizer()
            params = [p for group in optimizer.param_groups for p in group["params"] if type(p) is ShardTensor]
            self.values = [(p, p._local.clone()) for p in params]
            for p in params:
                entries = optimizer.state.get(p)
                if entries:
                    self.state[id(p)] = dict(entries), _copied(entries)

    def end(self) -> None:
        self.ended += 1
        self.frame = None
        self._drop()

    def _drop(self) -> None:
        self.values, self.state = [], {}

    def runs(self) -> bool:
        """Whether the caller is inside that step."""
        frame: Any = sys._getframe(1)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None

    def explain(self, message: str) -> str:
        """An operation was refused: undo the step, and say whose it was."""
        if not self.runs():
            return message
        name = type(self._optimizer()).__qualname__
        undone = self.keeps
        if undone:
            self._restore()
        return (
            f"{message} It was called by {name}.step(), an optimizer that the engine does not know"
            f"{'; the step is undone' if undone else ', which may have changed some parameters before'}. If it updates each "
            f"parameter by itself, declare it: torch_shard.optim.register({name}, kind='matrix')."
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
