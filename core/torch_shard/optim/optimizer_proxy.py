"""What an optimizer's ``step`` gets as ``self`` while it works on other tensors than the user's.

torch's step hooks may replace the arguments, ``self`` included; the last of the optimizer's own pre-hooks runs right before
the class's ``step``. So the optimizer that the user has, its groups and its state are never exchanged: closures, hooks,
schedulers and exceptions find it as it always is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Groups", "OptimizerProxy", "Work", "proxy_of"]


class Work:
    """What a step works on.

    Attributes:
        runtimes: of the engines whose parameters the optimizer holds.
        state: stands for the optimizer's ``state``.
    """

    runtimes: list[Any]
    state: Any

    def open(self) -> None:
        """Take parameters, gradients, options and state as they are now; called when ``step`` first asks for them, and
        again after each closure."""
        raise NotImplementedError

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups to go through."""
        raise NotImplementedError

    def before(self, number: int) -> None:
        """Prepare a group, which is about to be worked on."""

    def after(self, number: int) -> None:
        """Take what a group has come to."""

    def leave(self, number: int) -> None:
        """Note that the optimizer has left its loop in this group, by an exception or otherwise. Must not raise."""

    def through(self) -> None:
        """Note that a loop over the groups has come to its end."""

    def pause(self) -> None:
        """Show what the step has done so far: a closure is about to run, or a step of another optimizer."""

    def zero_grad(self, given: Callable[[], None], users: Callable[[], None]) -> None:
        """Clear gradients, as the step has asked: `given` clears those in :meth:`groups`, `users` the user's."""
        given()

    def forget(self) -> None:
        """Let go of what was kept for the next step: state has been loaded, or the engine is closed."""

    def close(self) -> None:
        """End the step, which no exception has ended: bring the user's view up to date."""


class OptimizerProxy:
    """Shares the optimizer's attributes, but for the groups and the state."""

    __slots__ = ("_session",)
    _session: Session

    @property
    def param_groups(self) -> Any:
        return self._session.groups()

    @property
    def state(self) -> Any:
        return self._session.state()

    def _accelerator_graph_capture_health_check(self) -> None:
        # torch's check reads the options, ahead of the closure.
        self._session.health_check()


class Session:
    """One step."""

    def __init__(self, optimizer: Any, work: Work) -> None:
        self._optimizer: Any = weakref.ref(optimizer)  # by which this is found
        self.work = work
        self.fresh: Groups | None = None
        self.ended = False

    def groups(self) -> Any:
        if self.ended:  # post-hooks of the user have the proxy among the step's arguments
            return self._optimizer().param_groups
        if self.fresh is None:
            self.work.open()
            self.fresh = Groups(self.work)
        return self.fresh

    def state(self) -> Any:
        if self.ended:
            return self._optimizer().state
        self.groups()
        return self.work.state

    def pause(self) -> None:
        """Show what was done so far: something else runs, behind which everything is looked at anew."""
        if self.fresh is not None and not self.ended:
            self.work.pause()
            self.fresh = None

    def end(self) -> None:
        """End the step."""
        self.work.close()
        self.ended, self.fresh = True, None

    def zero_grad(self, given: Callable[[], None], users: Callable[[], None]) -> None:
        if self.ended:
            users()
        else:
            self.work.zero_grad(given, users)

    def health_check(self) -> None:
        optimizer = self._optimizer()
        check = getattr(type(optimizer), "_accelerator_graph_capture_health_check", None)
        if check is not None:
            check(optimizer)

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure, with the user's view brought up to date before it."""

        def run() -> Any:
            self.pause()
            return closure()

        return run


class Groups(list[dict[str, Any]]):
    """The groups that a step goes through."""

    def __init__(self, work: Work) -> None:
        super().__init__(work.groups())
        self.work = work

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, group in enumerate(super().__iter__()):
            self.work.before(number)
            try:
                yield group
            except GeneratorExit:  # the loop has dropped its iterator
                self.work.leave(number)
                raise
            self.work.after(number)
        self.work.through()


def _zero_grad(self: OptimizerProxy, cls: Any, *args: Any, **kwargs: Any) -> None:
    users = functools.partial(self._session._optimizer().zero_grad, *args, **kwargs)
    self._session.zero_grad(functools.partial(cls.zero_grad, self, *args, **kwargs), users)


def proxy_of(optimizer: Any, work: Work, kinds: dict[type, type]) -> tuple[Any, Session]:
    """Make the object that takes `optimizer`'s place in its ``step``; `kinds`: the classes of such objects, kept by class of
    optimizer (a new one for each step would be a class to collect, and a call of the user's ``__init_subclass__``)."""
    cls = type(optimizer)
    kind = kinds.get(cls)
    if kind is None:
        names: dict[str, Any] = {"__slots__": (), "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        if hasattr(cls, "zero_grad"):
            names["zero_grad"] = functools.partialmethod(_zero_grad, cls)
        kind = kinds[cls] = type(cls.__name__, (OptimizerProxy, cls), names)
    other: Any = object.__new__(kind)
    object.__setattr__(other, "__dict__", optimizer.__dict__)  # past a __setattr__ of its own
    session = Session(optimizer, work)
    object.__setattr__(other, "_session", session)
    return other, session
