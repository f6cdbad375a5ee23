"""The checks before anything is changed: of the model, and of whether all ranks have the same one and the same settings."""

from __future__ import annotations

import weakref
import zlib
from typing import Any

import torch
from torch import nn

from ..comm.collectives import Collectives
from ..config.shard_config import ShardConfig
from ..errors import ConfigError, SetupError
from ..layout.dtensor_placement import is_dtensor, local_of, placed_of
from ..plan.plan import Plan
from ..shard_tensor.tensor import ShardTensor
from .lazy_param import Waiting
from .lazy_values import described

__all__ = ["SETUP", "agree", "by_name_of", "check_model", "fail_together"]

_PARAMETER_TYPES = (nn.Parameter, torch.Tensor, Waiting)


def check_model(model: nn.Module, plan: Plan, device: torch.device, rank: int) -> None:
    """Raise for a parameter that would make sharding fail half-way. Not collective."""
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
    rnn_refs = {
        id(r) for m in model.modules() if isinstance(m, nn.RNNBase) for r in getattr(m, "_flat_weight_refs", []) if r
    }
    storages: dict[int, list[tuple[int, int, str]]] = {}
    for info in plan.params:
        name = info.name
        given = by_name[name]
        p: torch.Tensor = given
        if isinstance(p, ShardTensor):
            raise SetupError(
                f"rank {rank}: {name} is already sharded; close() its engine before sharding it again. Where it "
                "belongs to two models, put both into one nn.Module, and shard (prepare) that."
            )
        where = f"rank {rank}: parameter {name}"
        if is_dtensor(p):
            placed_of(p, name)
            p = local_of(p)
        elif type(p) not in _PARAMETER_TYPES:
            raise SetupError(
                f"{where} is a {type(p).__name__}, a class that can't be sharded; leave it out with ShardConfig(ignore=[...])."
            )
        if p.layout is not torch.strided:
            raise SetupError(f"{where} has layout {p.layout}; only dense parameters can be sharded. Use ignore=.")
        if p.device.type not in ("cpu", "meta") and p.device != device:
            raise SetupError(f"{where} is on {p.device}, but this rank shards on {device}; move the model there first.")
        if not given.is_leaf:
            raise SetupError(f"{where} is the result of an operation, not a leaf; detach it before sharding.")
        refs = [r for r in weakref.getweakrefs(given) if id(r) not in rnn_refs]
        if refs:
            raise SetupError(
                f"{where} has weak references to it, which sharding would break; drop them or use ignore=."
            )
        if given._use_count() > 1:  # type: ignore[attr-defined]
            raise SetupError(
                f"{where} is still held by an autograd graph or by C++ code; drop old losses and outputs (del loss) "
                "before sharding."
            )
        if p.device.type != "meta" and p.numel():
            start = p.data_ptr()
            span = sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True)) + 1
            storages.setdefault(p.untyped_storage().data_ptr(), []).append(
                (start, start + span * p.element_size(), name)
            )
    for pieces in storages.values():
        pieces.sort()
        for (_, stop, first), (start, _, second) in zip(pieces, pieces[1:], strict=False):
            if start < stop:
                raise SetupError(
                    f"rank {rank}: parameters {first} and {second} are views of the same memory; tie them by assigning one "
                    "nn.Parameter to both modules instead."
                )
    devices = {p.device.type for p in by_name.values() if p.device.type not in ("meta", "cpu")}
    if devices and any(by_name[i.name].device.type == "cpu" for i in plan.params) and len(plan.params) > 0:
        cpu = next(i.name for i in plan.params if by_name[i.name].device.type == "cpu")
        raise SetupError(
            f"rank {rank}: parameter {cpu} is on cpu while others are on {device}; put them on one device."
        )


def by_name_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by the names of the plan. A class of the user's may give others (torch's checkpoint wrapper does)."""
    return dict(nn.Module.named_parameters(model))


def _drop_derived(model: nn.Module) -> None:
    """Detach the weight of the last forward, which torch.nn.utils' weight_norm, spectral_norm and prune keep with its graph."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            name: Any = getattr(hook, "name", None) or getattr(hook, "_tensor_name", None)  # the latter of prune's
            kept = module.__dict__.get(name) if isinstance(name, str) else None
            if isinstance(kept, torch.Tensor) and kept.grad_fn is not None:
                module.__dict__[name] = kept.detach()


# -- all ranks, or none -------------------------------------------------------------------------------------------------

SETUP = "the set-up of a sharded model (shard)"  # the operation, for messages


def fail_together(c: Collectives, error: Exception | None) -> None:
    """Raise on every rank if `error` is given on one: there that error, elsewhere one that names the rank. Collective."""
    _compare(c, error, 0)


def agree(c: Collectives, model: nn.Module, plan: Plan | None, config: ShardConfig, error: Exception | None) -> None:
    """Raise on every rank if `error` is given on one, or if models or settings differ between the ranks. Collective.

    The message names the first difference. `plan` may be None where there is an `error`.
    """
    if c.world == 1:
        return fail_together(c, error)
    settings = _settings(c, model, config)
    digest = zlib.crc32("\n".join(settings.values()).encode()) ^ (plan.digest() if plan is not None else 0)
    if _compare(c, error, digest):
        return
    # Parameters come in the model's own order first: what the plan makes of a difference may show at another place.
    lines = dict.fromkeys(plan.lines() if plan is not None else [], "it")
    everyone = c.watchdog.exchange(SETUP, [settings, _parameters(model), lines])
    for section in zip(*everyone, strict=True):
        for what in dict.fromkeys(what for said in section for what in said):
            first, *others = (said.get(what, "nothing") for said in section)
            for rank, other in enumerate(others, 1):
                if other != first:
                    raise _difference(what, first, rank, other)


def _compare(c: Collectives, error: Exception | None, digest: int) -> bool:
    """Return whether `digest`, of 63 bits, is the same on all ranks. Raise as :func:`fail_together` does. Collective."""
    if c.world == 1:
        if error is not None:
            raise error
        return True
    own = list(digest.to_bytes(8, "little"))
    vector = torch.tensor([*own, *(255 - b for b in own), error is not None], dtype=torch.uint8, device="cpu")
    c.maximum(vector, SETUP)
    answer = vector.tolist()
    if answer[16]:
        said = None if error is None else f"{type(error).__name__}: {error}"
        everyone = c.watchdog.exchange(SETUP, said, listen=error is None)
        if error is not None:
            raise error
        told = "; ".join(f"rank {r}: {e}" for r, e in enumerate(everyone) if e is not None)
        raise SetupError(f"sharding failed on another rank: {told}")
    return all(a + b == 255 for a, b in zip(answer[:8], answer[8:16], strict=True))


# Settings that decide which collectives a rank issues. `units` and `ignore` count by the plan that follows from them;
# single_communicator is compared where the ranks meet; timeout, debug and init_fn are a rank's own affair. Of the mesh counts
# what follows from it.
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
_COPIES = "which ranks share a copy (shard_size, mesh)"
_DEVICE = "the kind of device"
_FILES = "what is read from files"


def _settings(c: Collectives, model: nn.Module, config: ShardConfig) -> dict[str, str]:
    """What must be equal on all ranks besides the plan, in words that are equal where it is."""
    found = {field: f"{field} is {getattr(config, field)!r}" for field in _EQUAL}
    return found | {_COPIES: f"{c.topology}", _DEVICE: f"the model is on {c.device.type}", _FILES: described(model)}


def _parameters(model: nn.Module) -> dict[str, str]:
    return {
        f"parameter {name!r}": f"shape {tuple(p.shape)}, stride {p.stride()}, {p.dtype}, requires_grad {p.requires_grad}"
        for name, p in model.named_parameters()
        if not nn.parameter.is_lazy(p)
    }


def _difference(what: str, first: str, rank: int, other: str) -> Exception:
    """Return the error for ranks 0 and `rank`, of which one has `first` and the other `other`."""
    text = f"{what} differs between the ranks: on rank 0 {first}; on rank {rank} {other}"
    if what in (*_EQUAL, _COPIES):
        return ConfigError(f"{text}. Pass equal settings to shard() on every rank.")
    if what in (_FILES, _DEVICE):
        return SetupError(f"{text}. Build the model from equal files, and on the same kind of device, on every rank.")
    return SetupError(
        f"the ranks hold different models; the first difference is {what}: rank 0 has {first}; rank {rank} has {other}. Build "
        "the same model on every rank."
    )
