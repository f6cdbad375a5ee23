"""Checks before anything is changed: that the model can be sharded, and that all ranks have equal models and settings."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..comm.collectives import Collectives
from ..config.shard_config import ShardConfig
from ..errors import ConfigError, SetupError
from ..layout.dtensor_placement import is_dtensor, local_of, placed_of
from ..plan.plan import Plan
from ..shard_tensor.tensor import ShardTensor
from ..unit.module_params import held_by
from .lazy_param import Waiting
from .lazy_values import described

_PARAMETER_TYPES = (nn.Parameter, torch.Tensor, Waiting)


def check_model(model: nn.Module, plan: Plan, device: torch.device, rank: int) -> None:
    """Raise for a parameter or a buffer that would make sharding fail half-way. Not collective."""
    _drop_derived(model)
    by_name = by_name_of(model)
    ignored = {n: by_name[n] for n in plan.ignored}
    for kind, found in (("buffer", dict(model.named_buffers())), ("ignored parameter", ignored)):
        for name, tensor in found.items():
            if is_dtensor(tensor):
                raise SetupError(
                    f"rank {rank}: {kind} {name} is a DTensor; of those only parameters that are sharded are supported. Leave it "
                    "out of the parallelize plan."
                )
    rnns = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    params = {info.name: by_name[info.name] for info in plan.params}
    for name, param in params.items():
        reason = _why_not(param, name, device, rnns)
        if reason is not None:
            raise SetupError(f"rank {rank}: parameter {name} {reason}")
    _refuse_overlaps(params, rank)
    on_cpu = [name for name, p in params.items() if p.device.type == "cpu"]
    if on_cpu and any(p.device.type not in ("meta", "cpu") for p in by_name.values()):
        raise SetupError(
            f"rank {rank}: parameter {on_cpu[0]} is on cpu while others are on {device}; put them on one device."
        )


def _why_not(param: nn.Parameter, name: str, device: torch.device, rnns: Sequence[nn.Module]) -> str | None:
    """Return why `param` can't be sharded, and the remedy, to be read behind its name; None if it can be."""
    if isinstance(param, ShardTensor):
        return (
            "is already sharded; close() its engine before sharding it again. Where it belongs to two models, put both into one "
            "nn.Module, and shard (prepare) that."
        )
    p = local_of(param)
    if is_dtensor(param):
        placed_of(param, name)
    elif type(param) not in _PARAMETER_TYPES:
        return (
            f"is a {type(param).__name__}, a class that can't be sharded; leave it out with ShardConfig(ignore=[...])."
        )
    if p.layout is not torch.strided:
        return f"has layout {p.layout}; only dense parameters can be sharded. Use ignore=."
    if p.device.type not in ("cpu", "meta") and p.device != device:
        return f"is on {p.device}, but this rank shards on {device}; move the model there first."
    if not param.is_leaf:
        return "is the result of an operation, not a leaf; detach it before sharding."
    return held_by(param, rnns)


def _refuse_overlaps(params: dict[str, nn.Parameter], rank: int) -> None:
    storages: dict[int, list[tuple[int, int, str]]] = {}
    for name, param in params.items():
        p = local_of(param)
        if p.device.type != "meta" and p.numel():
            start = p.data_ptr()
            span = sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True)) + 1
            place = (start, start + span * p.element_size(), name)
            storages.setdefault(p.untyped_storage().data_ptr(), []).append(place)
    for places in storages.values():
        for (_, stop, first), (start, _, second) in itertools.pairwise(sorted(places)):
            if start < stop:
                raise SetupError(
                    f"rank {rank}: parameters {first} and {second} are views of the same memory; tie them by assigning one "
                    "nn.Parameter to both modules instead."
                )


def by_name_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by the names of the plan.

    A class of the user's may override ``named_parameters`` to give other names, as torch's checkpoint wrapper does.
    """
    return dict(nn.Module.named_parameters(model))


def _drop_derived(model: nn.Module) -> None:
    """Detach the weights of the last forward, which weight_norm, spectral_norm and prune of torch.nn.utils keep with a graph."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            name: Any = getattr(hook, "name", None) or getattr(hook, "_tensor_name", None)  # the latter of prune's
            kept = module.__dict__.get(name) if isinstance(name, str) else None
            if isinstance(kept, torch.Tensor) and kept.grad_fn is not None:
                module.__dict__[name] = kept.detach()


# -- all ranks, or none -------------------------------------------------------------------------------------------------

SETUP = "the set-up of a sharded model (shard)"  # the operation, for messages


def agree(c: Collectives, model: nn.Module, plan: Plan | None, config: ShardConfig, error: Exception | None) -> None:
    """Raise on every rank if `error` is given on one, or if models or settings differ between the ranks. Collective.

    The message names the first difference. `plan` may be None where there is an `error`.
    """
    settings = _settings(c, model, config)
    digest = zlib.crc32("\n".join(settings.values()).encode()) ^ (plan.digest() if plan is not None else 0)
    if fail_together(c, error, digest):
        return
    # The model's own parameters are compared before the plan, in which a difference may show at another parameter.
    lines = dict.fromkeys(plan.lines() if plan is not None else [], "it")
    everyone = c.watchdog.exchange(SETUP, [settings, _parameters(model), lines])
    for section in zip(*everyone, strict=True):
        for what in dict.fromkeys(what for texts in section for what in texts):
            first, *others = (texts.get(what, "nothing") for texts in section)
            for rank, other in enumerate(others, 1):
                if other != first:
                    raise _difference(what, first, rank, other)


def fail_together(c: Collectives, error: Exception | None, digest: int = 0) -> bool:
    """Raise on every rank if `error` is given on one: that error there, and one that names the rank elsewhere. Collective.

    Returns:
        True if `digest`, of 63 bits, is the same on all ranks.
    """
    if c.world == 1:
        if error is not None:
            raise error
        return True
    own = list(digest.to_bytes(8, "little"))
    vector = torch.tensor([*own, *(255 - b for b in own), error is not None], dtype=torch.uint8, device="cpu")
    c.maximum(vector, SETUP)
    answer = vector.tolist()
    if answer[16]:
        text = None if error is None else f"{type(error).__name__}: {error}"
        texts = c.watchdog.exchange(SETUP, text, listen=error is None)
        if error is not None:
            raise error
        others = "; ".join(f"rank {r}: {e}" for r, e in enumerate(texts) if e is not None)
        raise SetupError(f"sharding failed on another rank: {others}")
    return all(a + b == 255 for a, b in zip(answer[:8], answer[8:16], strict=True))


# Settings that decide which collectives a rank issues. `units` and `ignore` are compared by the plan that follows from them, the
# mesh by the topology; single_communicator is compared where the groups are made; timeout, debug, init_fn and registered_memory
# may differ.
_EQUAL = (
    "strategy",
    "shard_size",
    "reshard_after_forward",
    "unit_bytes",
    "prefetch",
    "precision",
    "quantized",
    "offload",
    "sync_module_states",
    "broadcast_buffers",
)
_REPLICAS = "which ranks share a replica (shard_size, mesh)"
_DEVICE = "the kind of device"
_FILES = "what is read from files"


def _settings(c: Collectives, model: nn.Module, config: ShardConfig) -> dict[str, str]:
    """Return texts about all that must be equal on all ranks besides the plan; they are equal if the settings are."""
    found = {field: f"{field} is {getattr(config, field)!r}" for field in _EQUAL}
    return found | {_REPLICAS: f"{c.topology}", _DEVICE: f"the model is on {c.device.type}", _FILES: described(model)}


def _parameters(model: nn.Module) -> dict[str, str]:
    return {
        f"parameter {name!r}": f"shape {tuple(p.shape)}, stride {p.stride()}, {p.dtype}, requires_grad {p.requires_grad}"
        for name, p in model.named_parameters()
        if not nn.parameter.is_lazy(p)
    }


def _difference(what: str, first: str, rank: int, other: str) -> Exception:
    """Return the error for ranks 0 and `rank`, of which one has `first` and the other `other`."""
    text = f"{what} differs between the ranks: rank 0: {first}; rank {rank}: {other}"
    if what in (*_EQUAL, _REPLICAS):
        return ConfigError(f"{text}. Pass equal settings to shard() on every rank.")
    if what in (_FILES, _DEVICE):
        return SetupError(f"{text}. Build the model from equal files, and on the same kind of device, on every rank.")
    return SetupError(
        f"the ranks hold different models; the first difference is {what}: rank 0 has {first}; rank {rank} has {other}. Build "
        "the same model on every rank."
    )
