"""The Lightning front end: ``Trainer(strategy="shard")`` and ``Fabric(strategy="shard")`` in both of Lightning's namespaces.

Nothing needs importing: an entry point that torch calls makes the names known (see ``registration``).
Where that is switched off (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``), ``import lightning_shard`` does the
same, and ``Trainer(strategy=lightning_shard.ShardStrategy(...))`` works in any case.

``ShardStrategy``, its callback ``ShardMonitor`` and ``ShardFabricStrategy`` are the classes for the namespace in use. Those of a
certain namespace are in ``lightning_shard.for_lightning`` and ``lightning_shard.for_pytorch_lightning``, and Fabric's in
``lightning_shard.fabric.for_lightning`` and ``lightning_shard.fabric.for_lightning_fabric``.
"""

from __future__ import annotations

from typing import Any

from .registration import autoload

__all__ = ["ShardFabricStrategy", "ShardMonitor", "ShardStrategy"]

autoload.install()


def __getattr__(name: str) -> Any:
    # Lazy, since this package is imported at the end of `import torch`: nothing heavy may follow from that.
    from .registration import registry

    if name in ("ShardStrategy", "ShardMonitor"):
        return getattr(registry.trainer_module(registry.namespace_in_use()), name)
    if name == "ShardFabricStrategy":
        return registry.strategy_class(registry.namespace_in_use(fabric=True))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
