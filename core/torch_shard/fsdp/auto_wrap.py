"""Which modules an ``auto_wrap_policy`` chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..errors import ConfigError
from .wrap import _Policy

__all__ = ["chosen_by", "replace"]


def chosen_by(
    policy: Any, root: nn.Module, ignored: Iterable[nn.Module | nn.Parameter], arguments: dict[str, Any]
) -> dict[nn.Module, dict[str, Any]]:
    """The modules inside `root` that are to be wrapped, inner ones first, and with which arguments.

    Args:
        policy: a policy object of torch's, or a function ``(module, recurse, nonwrapped_numel) -> bool``.
        root: is not chosen itself.
        ignored: modules and parameters that are left alone.
        arguments: those of the root, which a policy may override.

    Raises:
        ConfigError: `policy` is neither.
    """
    modules = {m for entry in ignored if isinstance(entry, nn.Module) for m in entry.modules()}
    params = {id(p) for entry in ignored for p in (entry.parameters() if isinstance(entry, nn.Module) else [entry])}
    chosen: dict[nn.Module, dict[str, Any]] = {}
    if isinstance(policy, _Policy):
        chosen = policy._run_policy(root, modules, arguments)
        chosen.pop(root, None)
        return {m: chosen[m] for m in reversed(list(root.modules())) if m in chosen}
    if not callable(policy):
        raise ConfigError(
            "FullyShardedDataParallel: auto_wrap_policy must be a policy of torch_shard.fsdp.wrap or a function (module, "
            f"recurse, nonwrapped_numel) -> bool, not {type(policy).__name__}."
        )
    _ask(policy, root, modules, params, chosen, is_root=True)
    return dict.fromkeys(chosen, arguments)


def _ask(
    policy: Callable[..., bool],
    module: nn.Module,
    ignored: set[nn.Module],
    params: set[int],
    chosen: dict[nn.Module, dict[str, Any]],
    is_root: bool = False,
) -> int:
    """The number of elements below `module` that are wrapped; the protocol of these functions is torch's."""
    numel = sum(p.numel() for p in module.parameters() if id(p) not in params)
    if module in chosen:  # registered in two places
        return numel
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    wrapped = sum(_ask(policy, child, ignored, params, chosen) for child in module.children() if child not in ignored)
    if not is_root and policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
        chosen[module] = {}
        return numel
    return wrapped


def replace(root: nn.Module, wrappers: dict[nn.Module, nn.Module]) -> None:
    """Put the wrappers where the modules are registered."""
    for module in list(root.modules()):
        for name, child in module._modules.items():
            if child in wrappers:
                module._modules[name] = wrappers[child]
