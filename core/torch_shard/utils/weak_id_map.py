"""Values that belong to objects, which need not be hashable."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

__all__ = ["ByObject"]

_Value = TypeVar("_Value")


class ByObject(Generic[_Value]):
    """Values by object, as long as it lives."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[Any], _Value]] = {}

    def get(self, key: Any) -> _Value | None:
        found = self._held.get(id(key))
        return found[1] if found is not None and found[0]() is key else None  # an id may be used again

    def set(self, key: Any, value: _Value) -> None:
        held, number = self._held, id(key)

        def dropped(ref: weakref.ref[Any]) -> None:
            found = held.get(number)
            if found is not None and found[0] is ref:
                del held[number]

        held[number] = weakref.ref(key, dropped), value

    def items(self) -> Iterator[tuple[Any, _Value]]:
        for ref, value in list(self._held.values()):
            key = ref()
            if key is not None:
                yield key, value

    def values(self) -> list[_Value]:
        return [value for _, value in self.items()]

    def clear(self) -> None:
        self._held.clear()
