"""FSDP's auto-wrap policies as :attr:`ShardConfig.units`: which modules are units."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_shard.errors import ConfigError

__all__ = ["WholeModel", "Wrapped", "size_based", "units_of_policy"]


@dataclass(frozen=True)
class WholeModel:
    """``NO_WRAP``: everything is gathered at once."""

    def __call__(self, name: str, module: nn.Module) -> bool:
        return name == ""


@dataclass(frozen=True)
class Wrapped:
    """Units where a policy of torch's FSDP, ``(module, recurse, nonwrapped_numel) -> bool``, would wrap a module.

    As FSDP asks it: children first, and with the number of parameters that no child took.
    """

    policy: Callable[..., Any]

    def __call__(self, name: str, module: nn.Module) -> bool:
        # The root is a unit anyway, of what remains in it.
        return name != "" and self._walk(module)[0]

    def _walk(self, module: nn.Module) -> tuple[bool, int]:
        """Return True if `module` is a unit, and how many parameters the units in it, or it itself, hold."""
        total = sum(param.numel() for param in module.parameters())
        if not self.policy(module=module, recurse=True, nonwrapped_numel=total):
            return False, 0
        taken = sum(self._walk(child)[1] for child in module.children())
        if self.policy(module=module, recurse=False, nonwrapped_numel=total - taken):
            return True, total
        return False, taken


def size_based(min_num_params: int) -> Wrapped | None:
    """Return ``SIZE_BASED_WRAP`` as units; None, the automatic plan, for 0, with which Accelerate wraps nothing."""
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    if min_num_params <= 0:
        return None
    return Wrapped(functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params))


def units_of_policy(policy: Any, name: str) -> Any:
    """Return `policy` as ``ShardConfig.units``.

    Args:
        name: the user's name of the setting, for errors.

    Raises:
        ConfigError: `policy` can't be asked about one module.
    """
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    if isinstance(policy, ModuleWrapPolicy):
        return Wrapped(policy)
    if not callable(policy):
        raise ConfigError(
            f"{name}: a {type(policy).__name__} has settings for each module. Give "
            "shard_plugin=ShardPlugin(units=...): module classes, patterns of module names, or a callable (name, module) -> bool."
        )
    return Wrapped(policy)
