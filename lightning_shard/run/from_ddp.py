"""DDPStrategy: nearly everything that its arguments ask for holds for a sharded model as well."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_shard import Precision

from .translation import Arguments, Translation

# What DistributedDataParallel must be told, and the engine need not.
_ALWAYS = (
    "batched_grad_copy", "check_reduction", "find_unused_parameters", "gradient_as_bucket_view", "skip_all_reduce_unused_params",
    "static_graph",
)  # fmt: skip
_BUCKETS = ("bucket_cap_mb", "bucket_cap_mb_list")
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
_DTYPES = {
    "fp16_compress_hook": torch.float16,
    "fp16_compress_wrapper": torch.float16,
    "bf16_compress_hook": torch.bfloat16,
    "bf16_compress_wrapper": torch.bfloat16,
}
_OWN = {
    "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin", "precision",
    "process_group_backend", "timeout", "start_method", "ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper",
    "model_averaging_period",
}  # fmt: skip


def from_ddp(given: dict[str, Any], defaults: dict[str, Any]) -> Translation:
    """Translate the arguments of DDPStrategy. Not collective.

    Raises:
        ConfigError: an argument changes what is trained, and has no counterpart.
    """
    arguments, found = Arguments("DDPStrategy", given, defaults, DistributedDataParallel), Translation()
    found.ddp_kwargs = {name: value for name, value in given.items() if name not in _OWN}
    arguments.take_same(found)
    found.options["start_method"] = arguments.take("start_method")
    arguments.drop(*_ALWAYS)
    arguments.note(found, *_BUCKETS)
    _hooks(arguments, found)
    for name in ("broadcast_buffers", "forward_sync_buffers"):
        value = arguments.take(name)
        if value is not None:
            found.config["broadcast_buffers"] = bool(value)
    if arguments.is_given("init_sync"):
        found.config["sync_module_states"] = bool(arguments.take("init_sync"))
    mixed = arguments.take("mixed_precision")
    if mixed is not None:
        found.config["precision"] = Precision(
            mixed.param_dtype, mixed.reduce_dtype, mixed.buffer_dtype, cast_inputs="root"
        )
    for name in ("process_group", "device_mesh"):
        if arguments.take(name) is not None:
            raise arguments.refused(name, 'all ranks train together. "hybrid_shard" with a shard_size has replicas.')
    arguments.end()
    return found


def _hooks(arguments: Arguments, found: Translation) -> None:
    if arguments.take("model_averaging_period") is not None:
        raise arguments.refused("model_averaging_period", "gradients are averaged in every step. Leave it out.")
    dtypes = set()
    for argument in ("ddp_comm_hook", "ddp_comm_wrapper"):
        hook = arguments.take(argument)
        if hook is None:
            continue
        name = getattr(hook, "__name__", type(hook).__name__)
        if getattr(hook, "__module__", None) != _HOOKS or name not in ("allreduce_hook", *_DTYPES):
            raise arguments.refused(
                argument,
                f"{name} is made for DDP's buckets. fp16_compress_hook and bf16_compress_hook are supported. Register any "
                "other hook, with the signature of FSDP's hooks, by trainer.strategy.engine.register_comm_hook in on_fit_start.",
            )
        dtypes |= {_DTYPES[name]} if name in _DTYPES else set()
    if len(dtypes) > 1:
        raise arguments.refused("ddp_comm_wrapper", "gradients are compressed once. Leave one of the two hooks out.")
    found.compress = dtypes.pop() if dtypes else None
    arguments.drop("ddp_comm_state")
