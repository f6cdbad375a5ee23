"""Gradient clipping through the engine.

Lightning clips in its precision plugin, where no strategy is asked. The strategy therefore gives each plugin it
receives a subclass of the plugin's own class, which clips through the engine: one collective for all parameters of the
optimizer, tied ones counted once.
"""

from __future__ import annotations

import functools
from typing import Any

_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")


class ShardedClipping:
    """Clips gradients through the engine, unless the user's plugin clips in its own way.

    It is mixed into the class of each plugin, whose name stays.
    """

    _plain_class: Any
    _shard_strategy: Any = None

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Scale this optimizer's gradients to a global norm of at most `clip_val`. Collective."""
        engine = self._engine()
        if engine is None or self._is_users("clip_grad_by_norm"):
            super().clip_grad_by_norm(optimizer, clip_val)  # type: ignore[misc]
        else:
            engine.clip_grad_norm_(float(clip_val), parameters=list(self.main_params(optimizer)))  # type: ignore[attr-defined]

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Limit each element of this optimizer's gradients to ``[-clip_val, clip_val]``."""
        engine = self._engine()
        if engine is None or self._is_users("clip_grad_by_value"):
            super().clip_grad_by_value(optimizer, clip_val)  # type: ignore[misc]
        else:
            engine.clip_grad_value_(float(clip_val), parameters=list(self.main_params(optimizer)))  # type: ignore[attr-defined]

    def _is_users(self, method: str) -> bool:
        """Return True if a method of the plugin's own class is not Lightning's: then it clips, as under DDP."""
        package = getattr(getattr(self._plain_class, method), "__module__", "").partition(".")[0]
        return package not in _LIGHTNING

    def _engine(self) -> Any:
        return None if self._shard_strategy is None else self._shard_strategy.engine_or_none

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, so a spawned process must make it anew.
        return _rebuild, (self._plain_class,), self.__dict__


def with_sharded_clipping(plugin: Any, strategy: Any) -> Any:
    """Give `plugin` a class that clips through `strategy`'s engine, in place, and return it."""
    if not isinstance(plugin, ShardedClipping):
        plain: Any = type(plugin)
        plugin.__class__ = _clipping_class(plain)
    plugin._shard_strategy = strategy
    return plugin


@functools.cache
def _clipping_class(plain: Any) -> Any:
    # The qualified name is a key in checkpoints (the scaler's state), so it must stay what it is.
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    return type(plain.__name__, (ShardedClipping, plain), {**names, "_plain_class": plain})


def _rebuild(plain: Any) -> Any:
    made = _clipping_class(plain)
    return made.__new__(made)
