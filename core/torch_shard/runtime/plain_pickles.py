"""Pickles of a sharded module (``torch.save(model)``), which hold a plain module: full parameters, and nothing of the engine.

A sharded parameter pickles its full values, which this rank reads from the others. All other additions of the engine to a module
are left out: the engine itself, hooks, and replaced methods. A module keeps its class, so that only a method of all modules can
do that: ``nn.Module.__reduce_ex__`` is set, for the life of the process. Plain modules are pickled as ever. ``copy`` calls the
same method; copies keep the hooks.

Hooks and attributes of modules that other rooms or front ends have added have an attribute ``in_plain_module``: the object that
the plain module has in their place, or None for nothing.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

from torch import nn

from ..errors import ShardPicklingError
from .forward_hooks import is_own_hook
from .registry import ATTRIBUTE

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks")
# Attributes in which an nn.Module keeps properties of some hooks, under the hooks' keys.
_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def follow() -> None:
    """Pickle sharded modules as plain ones from now on. Not collective."""
    nn.Module.__reduce_ex__ = _reduce_ex  # type: ignore[assignment,method-assign]


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
    found = super(nn.Module, self).__reduce_ex__(protocol)
    # A class may have a `__reduce__` or `__getstate__` of its own.
    if not isinstance(found, tuple) or len(found) < 3 or not isinstance(found[2], dict):
        return found
    state = found[2]
    return found if _plain(state) is state else (*found[:2], _State(state), *found[3:])


class _State(dict[str, Any]):
    """The attributes of a sharded module: all of them for ``copy``, and those of a plain module for pickle."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(dict(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_gathered(self["_parameters"])
        # An OrderedDict, which torch.load(weights_only=True) knows how to make.
        return OrderedDict, (), None, None, iter(_plain(self).items())


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that a module would have without the engine; `state` itself, if none of these is the engine's."""
    plain = {
        key: value.in_plain_module if _is_own(value) else value for key, value in state.items() if key != ATTRIBUTE
    }
    plain = {key: value for key, value in plain.items() if value is not None or state[key] is None}
    hooks = {key: hook for name in _HOOKS for key, hook in state.get(name, {}).items()}
    gone = {key for key, hook in hooks.items() if is_own_hook(hook) or _is_own(hook)}
    if gone:
        for name in (*_HOOKS, *_FLAGS):
            if name in plain:
                plain[name] = OrderedDict((key, value) for key, value in plain[name].items() if key not in gone)
    changed = len(plain) < len(state) or any(value is not state[key] for key, value in plain.items())
    return plain if changed else state


def _refuse_gathered(params: dict[str, Any]) -> None:
    """Raise if a module holds unsharded parameters, other than those that an interrupted forward has left in `params`."""
    for key in list(params):
        place: Any = getattr(params[key], "_place", None)
        if place is None or (flat := place[0]()) is None:
            continue
        index = place[1]
        flat.unit().runtime.leave_interrupted()
        if getattr(params[key], "_place", None) is place:
            rank, name = flat.collectives.world_rank, flat.layout.slots[index].name
            raise ShardPicklingError(
                f"rank {rank}: {name} is pickled (torch.save(model)) inside a forward or engine.gathered(), where its memory "
                "is freed later. Save the model outside, where it is saved with full parameters, too."
            )


def _is_own(value: object) -> bool:
    return hasattr(type(value), "in_plain_module")  # of the class, since users' objects may have any attribute
