"""``DistributedDataParallelKwargs`` for a sharded model: what is translated, and warnings about the rest."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from torch_shard import Engine, ShardConfig
from torch_shard.errors import ConfigError
from torch_shard.frontend import compress_gradients
from torch_shard.log import logger

# Settings of DDP's reducer, which don't change results. There is no such reducer here.
_WITHOUT_MEANING = ("bucket_cap_mb", "check_reduction", "gradient_as_bucket_view", "static_graph", "comm_state_option")


def config_with(handler: Any, config: ShardConfig) -> ShardConfig:
    """Return `config` with what a ``DistributedDataParallelKwargs`` says; None says nothing. Not collective.

    Raises:
        ConfigError: a communication hook that compresses with a state of its own kind.
    """
    if handler is None:
        return config
    if handler.dim != 0:
        raise ConfigError(f"DistributedDataParallelKwargs.dim={handler.dim!r}: batches are not scattered here.")
    _hook_dtype(handler)
    stock = type(handler)()
    changed = [name for name in _WITHOUT_MEANING if getattr(handler, name, None) != getattr(stock, name, None)]
    if changed:
        logger.warning("DistributedDataParallelKwargs: %s without a meaning for sharded models.", ", ".join(changed))
    return dataclasses.replace(config, broadcast_buffers=config.broadcast_buffers and handler.broadcast_buffers)


def register_hook(handler: Any, engine: Engine) -> None:
    """Make the engine send gradients in the dtype that the handler's communication hook compresses to. Collective."""
    dtype = _hook_dtype(handler) if handler is not None else None
    if dtype is not None:
        compress_gradients(engine, dtype)


def _hook_dtype(handler: Any) -> torch.dtype | None:
    hook, wrapper = (str(getattr(kind, "value", kind)) for kind in (handler.comm_hook, handler.comm_wrapper))
    kinds = {hook, wrapper} - {"no"} if hook != "no" else set()  # without a hook there is nothing to wrap
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}
    unknown = sorted(kinds - set(dtypes))
    if unknown or len(kinds) > 1:
        raise ConfigError(
            f"DistributedDataParallelKwargs: the communication hook {' with '.join(sorted(kinds))} is made for DDP's buckets. "
            "The fp16 and bf16 hooks are supported; for another one give engine.register_comm_hook a hook with FSDP's signature, "
            "or see ShardConfig.quantized."
        )
    return dtypes[kinds.pop()] if kinds else None
