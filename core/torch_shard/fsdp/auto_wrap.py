"""The modules that an ``auto_wrap_policy`` chooses, and the registration of wrappers in their places."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import _Policy, _recursive_wrap


def chosen_by(
    policy: Any, root: nn.Module, ignored: Iterable[nn.Module | nn.Parameter], arguments: dict[str, Any]
) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules inside `root` that are to be wrapped, inner ones first, and their arguments.

    Args:
        policy: a policy object of torch's, or a function ``(module, recurse, nonwrapped_numel) -> bool``.
        root: the module around them, which is not chosen itself.
        ignored: modules and parameters that are left alone.
        arguments: the arguments of `root`, which a policy may override.
    """
    modules = {m for entry in ignored if isinstance(entry, nn.Module) for m in entry.modules()}
    params = {p for entry in ignored for p in (entry.parameters() if isinstance(entry, nn.Module) else [entry])}
    chosen: dict[nn.Module, dict[str, Any]] = {}
    if isinstance(policy, _Policy):
        chosen = policy._run_policy(root, modules, arguments)
        return {m: chosen[m] for m in reversed(list(root.modules())) if m in chosen and m is not root}

    def note(module: nn.Module) -> nn.Module:
        chosen[module] = arguments
        return module

    _recursive_wrap(root, policy, note, modules, params, only_wrap_children=True)
    return chosen


def register(root: nn.Module, wrappers: Iterable[nn.Module]) -> None:
    """Put each FullyShardedDataParallel wherever its module is registered inside `root`; both objects have one ``__dict__``."""
    wrapper_of = {id(wrapper.__dict__): wrapper for wrapper in wrappers}
    for module in list(root.modules()):
        for name, child in module._modules.items():
            if child is not None and id(child.__dict__) in wrapper_of:
                module._modules[name] = wrapper_of[id(child.__dict__)]
