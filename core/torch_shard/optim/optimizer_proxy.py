"""The object that an optimizer's ``step`` gets as ``self`` while it works on other tensors than the user's.

torch's step hooks may replace the arguments, ``self`` included; the last of the optimizer's own pre-hooks runs right before
the class's ``step``. So the optimizer that the user has, its groups and its state are never exchanged: closures, hooks,
schedulers and exceptions find it as it always is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from .failed_steps import explained


class StepBackend:
    """The groups and the state that a step works on in place of the user's; one object for each optimizer.

    Attributes:
        runtimes: the runtimes of the engines whose parameters the optimizer holds.
        state: the mapping that the step gets as the optimizer's ``state``.
    """

    runtimes: list[Any]
    state: Any

    def open(self) -> None:
        """Take parameters, gradients, options and state as they are now.

        It is called when ``step`` first asks for them, and again after each closure.
        """
        raise NotImplementedError

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups that the step goes through."""
        raise NotImplementedError

    def begin_group(self, number: int) -> None:
        """Prepare the group that the step has come to."""

    def end_group(self, number: int) -> None:
        """Take the results of the group that the step goes on from."""

    def leave_loop(self, number: int) -> None:
        """Note that the step has left its loop in this group, by an exception or otherwise. Must not raise."""

    def end_loop(self) -> None:
        """Note that a loop over the groups has come to its end."""

    def publish(self) -> None:
        """Show the user what the step has done so far: a closure is about to run, or a step of another optimizer."""

    def zero_grad(self, stepped: Callable[[], None], users: Callable[[], None]) -> None:
        """Clear gradients, as the step has asked: `stepped` clears those in :meth:`groups`, `users` those of the user."""
        stepped()

    def forget(self) -> None:
        """Drop what was kept for the next step: state has been loaded, or the engine is closed."""

    def close(self) -> None:
        """End a step that no exception has ended, and show the user what it has done."""


class StateView(MutableMapping[Any, Any]):
    """A view of an optimizer's state, whose keys are tensors that the step works on.

    get, setdefault and pop are overridden, because the abstract class's methods index the mapping, which would create entries
    in a defaultdict.
    """

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OptimizerProxy:
    """An object that shares all attributes of the optimizer but the groups and the state."""

    __slots__ = ("_session",)
    _session: Session

    @property
    def param_groups(self) -> Any:
        return self._session.groups()

    @property
    def state(self) -> Any:
        return self._session.state()

    def _accelerator_graph_capture_health_check(self) -> None:
        # torch's check reads the options before the closure has run, when the backend must not take anything.
        optimizer = self._session.optimizer()
        check = getattr(type(optimizer), "_accelerator_graph_capture_health_check", None)
        if check is not None:
            check(optimizer)


class Session:
    """One step of an optimizer."""

    def __init__(self, optimizer: Any, backend: StepBackend) -> None:
        self.optimizer: Any = weakref.ref(optimizer)  # the key under which the backend is kept
        self.backend = backend
        self._groups: ParamGroups | None = None  # None: the backend is to be opened
        self._ended = False

    def groups(self) -> Any:
        if self._ended:  # the user's post-hooks find the proxy among the step's arguments
            return self.optimizer().param_groups
        if self._groups is None:
            self.backend.open()
            self._groups = ParamGroups(self.backend)
        return self._groups

    def state(self) -> Any:
        if self._ended:
            return self.optimizer().state
        self.groups()
        return self.backend.state

    def pause(self) -> None:
        """Show the user what was done so far. Something else runs now, after which everything is taken anew."""
        if self._groups is not None and not self._ended:
            self.backend.publish()
            self._groups = None
            for runtime in self.backend.runtimes:
                runtime.versions.note_part()

    def end(self) -> None:
        """End the step."""
        self.backend.close()
        self._ended, self._groups = True, None

    def zero_grad(self, stepped: Callable[[], None], users: Callable[[], None]) -> None:
        if self._ended:
            users()
        else:
            self.backend.zero_grad(stepped, users)


class ParamGroups(list[dict[str, Any]]):
    """The groups that a step goes through, which tell the backend where the step is."""

    def __init__(self, backend: StepBackend) -> None:
        super().__init__(backend.groups())
        self._backend = backend

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, group in enumerate(super().__iter__()):
            self._backend.begin_group(number)
            try:
                yield group
            except GeneratorExit:  # the loop has dropped its iterator
                self._backend.leave_loop(number)
                raise
            self._backend.end_group(number)
        self._backend.end_loop()


def _zero_grad(self: OptimizerProxy, cls: Any, *args: Any, **kwargs: Any) -> None:
    users = functools.partial(self._session.optimizer().zero_grad, *args, **kwargs)
    self._session.zero_grad(functools.partial(cls.zero_grad, self, *args, **kwargs), users)


def _init_group(self: Any, *args: Any, **kwargs: Any) -> Any:
    with explained(self._session.optimizer()):
        return super(OptimizerProxy, self)._init_group(*args, **kwargs)


def proxy_of(optimizer: Any, backend: StepBackend, classes: dict[type, type]) -> tuple[Any, Session]:
    """Make the object that takes `optimizer`'s place in its ``step``.

    Args:
        optimizer: the user's optimizer.
        backend: the object that holds the state that the step works on.
        classes: the classes of such objects by class of optimizer, which the caller keeps. A new one for each step would be a
            class to collect, and a call of the user's ``__init_subclass__``.
    """
    cls = type(optimizer)
    found = classes.get(cls)
    if found is None:
        names: dict[str, Any] = {"__slots__": (), "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        if hasattr(cls, "zero_grad"):
            names["zero_grad"] = functools.partialmethod(_zero_grad, cls)
        if hasattr(cls, "_init_group"):  # in which torch's optimizers make their state
            names["_init_group"] = _init_group
        found = classes[cls] = type(cls.__name__, (OptimizerProxy, cls), names)
    proxy: Any = object.__new__(found)
    object.__setattr__(proxy, "__dict__", optimizer.__dict__)  # not by a __setattr__ of its own
    session = Session(optimizer, backend)
    object.__setattr__(proxy, "_session", session)
    return proxy, session
