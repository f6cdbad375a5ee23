"""Objects of torch's FSDP as settings of this engine, for front ends that are given FSDP's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..config.precision import Precision
from ..config.shard_config import Strategy
from ..errors import ConfigError

__all__ = ["SHARDING_STRATEGIES", "Wrapped", "classes_of_policy", "precision_of_policy", "units_of_policy"]

SHARDING_STRATEGIES: dict[str, Strategy] = {
    "FULL_SHARD": "full_shard",
    "SHARD_GRAD_OP": "shard_grad_op",
    "NO_SHARD": "no_shard",
    "HYBRID_SHARD": "hybrid_shard",
    "HYBRID_SHARD_ZERO2": "hybrid_shard_zero2",
}
"""``ShardConfig.strategy`` by the names of ``torch.distributed.fsdp.ShardingStrategy``, without a leading underscore."""


@dataclass(frozen=True)
class Wrapped:
    """Units where a policy of torch's FSDP, ``(module, recurse, nonwrapped_numel) -> bool``, would wrap a module.

    The policy is called as FSDP does: for children first, and with the number of parameters that no child took.
    """

    policy: Callable[..., Any]

    def __call__(self, name: str, module: nn.Module) -> bool:
        # The root is a unit anyway, of the parameters in no other unit.
        return name != "" and self._walk(module)[0]

    def _walk(self, module: nn.Module) -> tuple[bool, int]:
        """Return True if `module` is a unit, and the number of elements in it, or else in the units inside it."""
        total = sum(param.numel() for param in module.parameters())
        if not self.policy(module=module, recurse=True, nonwrapped_numel=total):
            return False, 0
        taken = sum(self._walk(child)[1] for child in module.children())
        if self.policy(module=module, recurse=False, nonwrapped_numel=total - taken):
            return True, total
        return False, taken


def units_of_policy(policy: Any, name: str, remedy: str) -> Wrapped:
    """Return `policy` as ``ShardConfig.units``. Not collective.

    Args:
        policy: an ``auto_wrap_policy`` of torch's FSDP.
        name: the user's name of the setting, for errors.
        remedy: the setting to give in its place, as a part of a sentence.

    Raises:
        ConfigError: `policy` is no function of one module.
    """
    if not callable(policy):
        raise ConfigError(
            f"{name}: a {type(policy).__name__} has settings for each module. Give {remedy}: module classes, patterns of module "
            "names, or a callable (name, module) -> bool."
        )
    return Wrapped(policy)


def classes_of_policy(policy: Any) -> tuple[type[nn.Module], ...] | None:
    """Return the classes of modules that a policy chooses, by name; None if it does not choose by class. Not collective."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

    classes: Any = None
    if isinstance(policy, ModuleWrapPolicy):
        classes = policy._module_classes
    elif isinstance(policy, functools.partial) and policy.func is transformer_auto_wrap_policy:
        classes = policy.keywords.get("transformer_layer_cls")
    if classes is None:
        return None
    return tuple(sorted(classes, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}"))


def precision_of_policy(policy: Any) -> Precision:
    """Return the Precision for a ``MixedPrecision`` or ``MixedPrecisionPolicy`` of torch's FSDP. Not collective."""
    forward = getattr(policy, "cast_forward_inputs", True)
    root = getattr(policy, "cast_root_forward_inputs", False)
    return Precision(
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        buffer_dtype=getattr(policy, "buffer_dtype", None),
        output_dtype=getattr(policy, "output_dtype", None),
        cast_inputs=True if forward else "root" if root else False,
        keep=tuple(getattr(policy, "_module_classes_to_ignore", None) or ()),
        keep_low_precision_grads=getattr(policy, "keep_low_precision_grads", False),
    )
