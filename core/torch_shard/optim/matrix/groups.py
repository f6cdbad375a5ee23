"""What an optimizer finds in place of its groups and its state while it steps on whole matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from .exchange import Part, Whole

__all__ = ["Given", "OwnState", "Working"]


class OwnState(MutableMapping[Any, Any]):
    """The optimizer's own state, under what the step works on in place of the user's parameters."""

    def __init__(self, own: Any) -> None:
        self.own = own
        self._shown: dict[int, tuple[Any, Any]] = {}  # by id of a whole tensor: it, and the user's parameter

    def show(self, whole: Any, param: Any) -> None:
        self._shown[id(whole)] = whole, param

    def hide(self) -> None:
        self._shown = {}

    def _key(self, key: Any) -> Any:
        return self._shown[id(key)][1] if id(key) in self._shown else key

    def __getitem__(self, key: Any) -> Any:
        return self.own[self._key(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.own[self._key(key)] = value

    def __delitem__(self, key: Any) -> None:
        del self.own[self._key(key)]

    def __contains__(self, key: object) -> bool:
        return self._key(key) in self.own

    # Those that the abstract class makes of `__getitem__` would make an entry in a defaultdict.
    def get(self, key: Any, default: Any = None) -> Any:
        return self.own.get(self._key(key), default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return self.own.setdefault(self._key(key), default)

    def pop(self, key: Any, *default: Any) -> Any:
        return self.own.pop(self._key(key), *default)

    def __iter__(self) -> Iterator[Any]:
        wholes = {id(param): whole for whole, param in self._shown.values()}
        return (wholes.get(id(key), key) for key in list(self.own))

    def __len__(self) -> int:
        return len(self.own)


class _Outside(list[Any]):
    """A group's parameters outside the loop's body, where there are none."""

    def __init__(self, refuse: Callable[[str], Exception]) -> None:
        super().__init__()
        self._error = refuse

    def _refuse(self, *_: Any) -> Any:
        raise self._error("asked for parameters outside its loop over the groups")

    __iter__ = __len__ = __getitem__ = __contains__ = _refuse


class Working:
    """One group of a step: what one of the user's groups has in one part.

    Attributes:
        options: what the optimizer gets as the group.
        part: its matrices.
    """

    def __init__(
        self,
        group: dict[str, Any],
        part: Part,
        params: list[Any],
        rest: list[Any],
        refuse: Callable[[str], Exception],
    ) -> None:
        self.group, self.part, self._rest, self._outside = group, part, rest, _Outside(refuse)
        self._listed = params  # the user's, in the user's order; more than once where they are so there
        # Copies, so that what a step changes in place (`group["k"] += 1` of a tensor) starts from the same for each part.
        self._given = {key: _own(value) for key, value in group.items() if key not in _OF_PARAMETERS}
        self._before = {key: _own(value) for key, value in self._given.items() if _is_mutable(value)}
        self.options = {**self._given, "params": self._outside}
        names = group.get("param_names")
        self._names = None if names is None else {id(p): n for p, n in zip(group["params"], names, strict=True)}

    def enter(self, wholes: Mapping[int, Any]) -> None:
        """The optimizer begins with this group; `wholes` by id of the user's parameters."""
        here = [p for p in self._listed if id(p) in wholes]
        self.options["params"] = [wholes[id(p)] for p in here] + self._rest
        if self._names is not None:
            self.options["param_names"] = [self._names[id(p)] for p in here + self._rest]

    def go_out(self) -> None:
        """It has gone on to the next."""
        self.options["params"] = self._outside

    def write_back(self) -> None:
        """Options that the optimizer has set or changed."""
        for key, value in self.options.items():
            if key in _OF_PARAMETERS:
                continue
            if key not in self._given or self._given[key] is not value:
                self.group[key] = self._given[key] = value
            elif key in self._before and not _equal(value, self._before[key]):
                if isinstance(value, torch.Tensor):
                    self.group[key].copy_(value)
                else:
                    self.group[key] = value


_OF_PARAMETERS = ("params", "param_names")  # lists with an entry for each parameter


def _is_mutable(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, list, tuple, dict, set))


def _own(value: Any) -> Any:
    """A copy, so that what is changed in place within `value` stays as it is there."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _own(child) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_own, value))
    return set(value) if type(value) is set else value


def _equal(some: Any, others: Any) -> bool:
    if type(some) is not type(others):
        return False
    if isinstance(some, torch.Tensor):
        return some.shape == others.shape and torch.equal(some, others)
    if type(some) is dict:
        return some.keys() == others.keys() and all(_equal(value, others[key]) for key, value in some.items())
    if type(some) in (list, tuple):
        return len(some) == len(others) and all(map(_equal, some, others))
    return bool(some == others)


class Given:
    """Values that have gone back, and must not change any more: what an optimizer writes to them later is lost.

    A tensor's version tells, and outlives its memory. It does not see ``.data``; so in the first steps the smallest parameter
    of each part is kept besides, and compared.
    """

    _STEPS = 2

    def __init__(self) -> None:
        self._steps = 0
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, wholes: list[Whole]) -> None:
        """The values of a part, as they are about to go."""
        moving = [whole for whole in wholes if whole.entry.moves]
        for whole in moving:
            counter = whole.value.detach()  # which has the same version counter, and keeps it with other memory
            counter.data = torch.empty(0, dtype=counter.dtype, device=counter.device)
            self._versions.append((counter, counter._version))
        if self._steps < self._STEPS and moving:
            memory = min((whole.memory for whole in moving), key=torch.Tensor.numel)
            self._kept.append((memory, memory.clone()))

    def changed(self) -> bool:
        """Whether some have changed since."""
        return any(counter._version != version for counter, version in self._versions) or any(
            not torch.equal(memory.view(torch.uint8), given.view(torch.uint8)) for memory, given in self._kept
        )

    def end(self) -> None:
        """The step has ended."""
        self._steps += bool(self._versions)
        self.drop()

    def drop(self) -> None:
        self._versions, self._kept = [], []
