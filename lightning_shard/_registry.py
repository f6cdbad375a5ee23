"""The names that Lightning's registries get, and the lazy factories behind them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import Any

__all__ = ["MODULES", "NAMES", "namespace_in_use", "register", "strategy_class"]

MODULES = {"lightning": "for_lightning", "pytorch_lightning": "for_pytorch_lightning"}
"""Namespace of Lightning, and our module with the classes for it."""

NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "shard": ("Parameters, gradients and optimizer state sharded over all ranks (ZeRO-3)", {}),
    "shard_zero2": (
        "As 'shard', with parameters kept gathered from forward to the end of backward (ZeRO-2)",
        {"strategy": "shard_grad_op"},
    ),
    "shard_zero1": (
        "Optimizer state sharded, with parameters kept gathered until it changes them (ZeRO-1)",
        {"strategy": "shard_optim"},
    ),
    "shard_hybrid": (
        "As 'shard' over the ranks of each node, with a copy on each node",
        {"strategy": "hybrid_shard"},
    ),
    "shard_hybrid_zero2": (
        "As 'shard_zero2' over the ranks of each node, with a copy on each node",
        {"strategy": "hybrid_shard_zero2"},
    ),
    "shard_spawn": ("As 'shard', with processes started by spawn", {"start_method": "spawn"}),
    "shard_fork": ("As 'shard', with processes started by fork, as notebooks need it", {"start_method": "fork"}),
}
"""Name, description and arguments of `ShardStrategy`. Avoided: the substrings ddp, dp and deepspeed, which the Trainer
searches names for."""


def register(namespace: str, registry: Any) -> None:
    """Add the names to one registry. The strategy's module is imported when a name is used, not here."""
    for name, (description, arguments) in NAMES.items():
        # The arguments go into the factory: `register` has parameters of its own by the names of some of them.
        # override: a reload of Lightning's module must not fail on its second registration.
        factory = functools.partial(_make, namespace, **arguments)
        registry.register(name, factory, description=description, override=True)


def _make(namespace: str, **arguments: Any) -> Any:
    return strategy_class(namespace)(**arguments)


def strategy_class(namespace: str) -> Any:
    """`ShardStrategy` for ``"lightning"`` or ``"pytorch_lightning"``."""
    return importlib.import_module(f".{MODULES[namespace]}", __package__).ShardStrategy


def namespace_in_use() -> str:
    """The namespace that the program imported; else the one that is installed, ``lightning`` first.

    Raises:
        ImportError: neither is installed.
    """
    imported = [name for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]
    if imported:
        return imported[0].partition(".")[0]
    for namespace in MODULES:
        if importlib.util.find_spec(namespace) is not None:
            return namespace
    raise ImportError("lightning_shard needs Lightning: install torch-shard-engine[lightning] (or pytorch-lightning).")
