"""What an optimizer finds in place of its groups and its state while it steps on whole matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from ..group_options import Snapshot, copied, put
from .exchange import Part

__all__ = ["OwnState", "Working"]


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
        self._group, self.part, self._rest, self._outside = group, part, rest, _Outside(refuse)
        self._listed = params  # the user's, in the user's order; more than once where they are so there
        # Copies, so that what a step changes in place (`group["k"] += 1` of a tensor) starts from the same for each part.
        self.options = {
            key: value if key == "param_names" else copied(value) for key, value in group.items() if key != "params"
        }
        self.options["params"] = self._outside
        self._given = Snapshot(self.options)
        names = group.get("param_names")
        self._names = None if names is None else {id(p): n for p, n in zip(group["params"], names, strict=True)}

    def enter(self, wholes: Mapping[int, Any]) -> None:
        """Give the optimizer this group's parameters; `wholes` by id of the user's."""
        here = [p for p in self._listed if id(p) in wholes]
        self.options["params"] = [wholes[id(p)] for p in here] + self._rest
        if self._names is not None:
            self.options["param_names"] = [self._names[id(p)] for p in here + self._rest]

    def go_out(self) -> None:
        """Take them away: the optimizer has gone on to the next group."""
        self.options["params"] = self._outside

    def write_back(self) -> None:
        """Give the user's group what the optimizer has made of the options."""
        for key, value in self._given.changes().items():
            put(self._group, key, value)
