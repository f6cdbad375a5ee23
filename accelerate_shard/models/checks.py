"""Checks in ``prepare``, before anything has changed, for models that something else has wrapped, placed or sharded."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

import torch_shard
from torch_shard.errors import ConfigError
from torch_shard.frontend import refusal_of

from .._private import compiled_inner
from .unwrap import engine_of

_PLACES_ELSEWHERE = ("cpu", "disk", "meta")


def check_model(model: nn.Module, device: torch.device) -> None:
    """Raise where `model` is not a plain one that this front end can shard on `device`. Not collective.

    Raises:
        ConfigError: names what was found, and the remedy.
    """
    plain = compiled_inner(model)
    _refuse_wrappers(plain)
    if torch_shard.engine_of(plain) is None:
        for name, module in plain.named_modules():
            if module is not plain and torch_shard.engine_of(module) is not None:
                raise ConfigError(
                    f"prepare: {name or type(plain).__name__} is sharded already, and the model around it is not. Prepare the "
                    "outer model alone; its layers are sharded with it."
                )
    for name, module in plain.named_modules():
        where = f"prepare: {type(plain).__name__}{'.' if name else ''}{name}"
        _refuse_device_map(module, where, device)


def check_optimizer(optimizer: Any) -> None:
    """Raise where steps of `optimizer` can't be right with sharded models. Not collective.

    Raises:
        ConfigError: LOMO's optimizers, which update weights from inside backward, and those of bitsandbytes.
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    kinds = [kind for kind in type(optimizer).__mro__ if kind.__module__.split(".")[0] == "lomo_optim"]
    if kinds:
        raise ConfigError(
            f"prepare: {kinds[0].__name__} updates full weights from hooks inside backward, which sharded models lack then. "
            "Use a torch optimizer; engine.step_in_backward(optimizer) frees gradients during backward as LOMO does."
        )
    why = refusal_of(optimizer)
    if why is not None:
        raise ConfigError(
            f"prepare: {why} With a transformers.Trainer: optim='adamw_torch', or 'adamw_torch_8bit', which is torchao's. "
            "Nothing was changed."
        )


def not_for_local_sgd(model: nn.Module) -> None:
    """Raise for a sharded model: each rank would have to train full parameters of its own. Not collective.

    Raises:
        ConfigError: names the remedy.
    """
    if engine_of(model) is not None:
        raise ConfigError(
            "LocalSGD: each rank trains a copy of its own between two averages, and a sharded model is one copy for all. Use "
            "LocalSGD(enabled=False); accelerator.accumulate(model) with ShardPlugin(defer_gradient_sync=True) sends as seldom."
        )


def _refuse_wrappers(model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel, FSDPModule)
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            kind = "FSDP (fully_shard)" if isinstance(module, FSDPModule) else type(module).__name__
            raise ConfigError(
                f"prepare: {f'module {name!r} of the model' if name else 'the model'} is wrapped in {kind} already. Give "
                "prepare() the plain model: it shards parameters and reduces gradients itself."
            )


def _refuse_device_map(module: nn.Module, where: str, device: torch.device) -> None:
    found = module.__dict__.get("hf_device_map")
    if not found or os.environ.get("ACCELERATE_BYPASS_DEVICE_MAP", "false") == "true":
        return
    places = {str(place) for place in found.values()}
    if len(found) > 1 or (device.type != "cpu" and places & set(_PLACES_ELSEWHERE)) or "disk" in places:
        raise ConfigError(
            f"{where} was loaded with a device_map that spreads it over {', '.join(sorted(places))}. Load it without device_map: "
            "sharding spreads it over the ranks, and accelerate_shard.from_pretrained reads only each rank's part."
        )
