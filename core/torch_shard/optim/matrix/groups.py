"""What an optimizer finds in place of its groups and its state while it steps on full matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..group_options import Snapshot, copied_options, put
from ..optimizer_proxy import StateView
from .exchange import Part


class OwnerState(StateView):
    """The optimizer's own state, with the full parameters of the current group as keys in place of the user's parameters."""

    def __init__(self, own: Any) -> None:
        self.own = own
        self._params: dict[int, tuple[Any, Any]] = {}  # by id of a full parameter: it, and the user's parameter

    def show(self, full: Any, param: Any) -> None:
        """Make `full` the key of the state of `param`."""
        self._params[id(full)] = full, param

    def hide(self) -> None:
        """Undo all calls of :meth:`show`."""
        self._params = {}

    def _key(self, key: Any) -> Any:
        return self._params[id(key)][1] if id(key) in self._params else key

    def __getitem__(self, key: Any) -> Any:
        return self.own[self._key(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.own[self._key(key)] = value

    def __delitem__(self, key: Any) -> None:
        del self.own[self._key(key)]

    def __contains__(self, key: object) -> bool:
        return self._key(key) in self.own

    def __iter__(self) -> Iterator[Any]:
        fulls = {id(param): full for full, param in self._params.values()}
        return (fulls.get(id(key), key) for key in list(self.own))


class _Outside(list[Any]):
    """The parameters of a group outside the loop's body, where every access is an error."""

    def __init__(self, misuse: Callable[[str], Exception]) -> None:
        super().__init__()
        self._misuse = misuse

    def _refuse(self, *_: Any) -> Any:
        raise self._misuse("asked for parameters outside its loop over the groups")

    __iter__ = __len__ = __getitem__ = __contains__ = _refuse


class PartGroup:
    """One group of a step: the parameters that one part has of one of the user's groups.

    Attributes:
        options: the dict that the optimizer gets as the group.
        part: the group's matrices.
    """

    def __init__(
        self,
        group: dict[str, Any],
        part: Part,
        params: list[Any],
        rest: list[Any],
        misuse: Callable[[str], Exception],
        counts: set[str],
    ) -> None:
        """Make the group that the optimizer gets for `part`.

        Args:
            group: the user's group.
            part: the group's matrices.
            params: the user's parameters in the user's order, as often as the user lists them.
            rest: parameters that are not sharded, to be stepped with these.
            misuse: returns the error for a step that works on the parameters outside the loop.
            counts: a set to which the options are added in which the step counts.
        """
        self._group, self.part, self._params, self._rest = group, part, params, rest
        self._outside, self._counts = _Outside(misuse), counts
        # Copies, so that what a step changes in place (`group["k"] += 1` of a tensor) starts from the same for each part.
        self.options = {**copied_options(group), "params": self._outside}
        self._given = Snapshot(self.options)
        names = group.get("param_names")
        self._names = None if names is None else {id(p): n for p, n in zip(group["params"], names, strict=True)}

    def show(self, fulls: Mapping[int, Any]) -> None:
        """Give the optimizer the group's parameters; `fulls` has the full parameters by id of the user's."""
        here = [p for p in self._params if id(p) in fulls]
        self.options["params"] = [fulls[id(p)] for p in here] + self._rest
        if self._names is not None:
            self.options["param_names"] = [self._names[id(p)] for p in here + self._rest]

    def hide(self) -> None:
        """Take the parameters away: the optimizer has gone on to the next group."""
        self.options["params"] = self._outside

    def write_back(self) -> None:
        """Put the options that the optimizer has changed into the user's group."""
        for key, value in self._given.changes().items():
            put(self._group, key, value)
            if type(value) is int:
                self._counts.add(key)
