"""The names that Lightning's registries get, and the lazy factories behind them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import Any

TRAINER = {"lightning": "lightning_shard.for_lightning", "pytorch_lightning": "lightning_shard.for_pytorch_lightning"}
FABRIC = {
    "lightning.fabric": "lightning_shard.fabric.for_lightning",
    "lightning_fabric": "lightning_shard.fabric.for_lightning_fabric",
}
"""Namespaces of Lightning, and the modules of this package with the strategies for them."""

NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "shard": ("Parameters, gradients and optimizer state sharded over all ranks (ZeRO-3)", {}),
    "shard_zero2": (
        "As 'shard', with parameters kept unsharded from forward to the end of backward (ZeRO-2)",
        {"strategy": "shard_grad_op"},
    ),
    "shard_zero1": (
        "Optimizer state sharded, with parameters kept unsharded until it changes them (ZeRO-1)",
        {"strategy": "shard_optim"},
    ),
    "shard_hybrid": (
        "As 'shard' over the ranks of each node, with a replica on each node",
        {"strategy": "hybrid_shard"},
    ),
    "shard_hybrid_zero2": (
        "As 'shard_zero2' over the ranks of each node, with a replica on each node",
        {"strategy": "hybrid_shard_zero2"},
    ),
    "shard_auto": ("The fastest of these that fits in memory, found out before training", {"strategy": "auto"}),
    "shard_offload": (
        "As 'shard', with parameters, gradients and optimizer state in the memory of the host",
        {"offload": "cpu"},
    ),
    "shard_spawn": ("As 'shard', with processes started by spawn", {"start_method": "spawn"}),
    "shard_fork": ("As 'shard', with processes started by fork, as notebooks need it", {"start_method": "fork"}),
}
"""Description and arguments of the strategy by name. Names avoid ddp, dp and deepspeed, which Lightning looks for."""


def register(namespace: str, registry: Any) -> None:
    """Add the names to one registry. A strategy's module is imported only when its name is used."""
    for name, (description, arguments) in NAMES.items():
        # The factory has the arguments, because `register` has parameters of the same names as some of them.
        # override: a reload of Lightning's module must not fail on its second registration.
        factory = functools.partial(_make, namespace, **arguments)
        registry.register(name, factory, description=description, override=True)


def _make(namespace: str, **arguments: Any) -> Any:
    return strategy_class(namespace)(**arguments)


def strategy_class(namespace: str) -> Any:
    """Return `ShardStrategy` for a namespace of :data:`TRAINER`, `ShardFabricStrategy` for one of :data:`FABRIC`."""
    if namespace in TRAINER:
        return trainer_module(namespace).ShardStrategy
    return importlib.import_module(FABRIC[namespace]).ShardFabricStrategy


def trainer_module(namespace: str) -> Any:
    """Return the module of this package for a namespace of :data:`TRAINER`."""
    return importlib.import_module(TRAINER[namespace])


def namespace_in_use(fabric: bool = False) -> str:
    """Return the namespace that the program imported, else one that is installed, ``lightning`` first.

    Raises:
        ImportError: no Lightning is installed.
    """
    packages = {"lightning": "lightning.pytorch"}  # the others are packages themselves
    for namespace in FABRIC if fabric else TRAINER:
        if packages.get(namespace, namespace) in sys.modules:
            return namespace
    for namespace in FABRIC if fabric else TRAINER:
        if importlib.util.find_spec(namespace.partition(".")[0]) is not None:
            return namespace
    raise ImportError("lightning_shard needs Lightning: install torch-shard-engine[lightning] (or pytorch-lightning).")
