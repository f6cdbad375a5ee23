"""Arguments of Lightning's other strategies that these have not, and what says the same here. For messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["REMEDIES", "advice"]

_LEAVE = "leave it out: there is nothing to choose here"
_GROUP = "leave it out: the group is that of all ranks; shard_size divides it for the hybrid strategies"
_OFFLOAD = "offload='cpu', or offload=torch_shard.Offload(...) for a part of it, or a disk"
_STREAMS = (
    "leave it out: files are read ahead of each unit's update and written behind it, and there is nothing to choose"
)
_SCALER = "give Trainer or Fabric a plugin with a scaler of that setting, MixedPrecision('16-mixed', 'cuda', scaler)"
_HOOK = (
    "register it when training starts: trainer.strategy.engine.register_comm_hook(state, hook), with FSDP's signature"
)
_PRECISION = "Trainer(precision=...), or config=ShardConfig(precision=Precision(...))"
_BUCKETS = "unit_bytes is the size of what is gathered and reduced together"
_LAYERS = "activation_checkpointing takes classes of layers, or their names"

REMEDIES = {
    # DDPStrategy
    "ddp_comm_state": _HOOK,
    "ddp_comm_hook": _HOOK,
    "ddp_comm_wrapper": _HOOK,
    "model_averaging_period": "leave it out: gradients are averaged in each step",
    # DistributedDataParallel
    "device_ids": "Trainer(devices=...)",
    "output_device": _LEAVE,
    "dim": _LEAVE,
    "init_sync": "sync_module_states",
    "process_group": _GROUP,
    "bucket_cap_mb": _BUCKETS,
    "bucket_cap_mb_list": _BUCKETS,
    "find_unused_parameters": "leave it out: parameters may stay unused, on all ranks or on some",
    "check_reduction": _LEAVE,
    "gradient_as_bucket_view": "leave it out: gradients are views of what is reduced",
    "static_graph": "leave it out: the graph may change from step to step, and be checkpointed",
    "delay_all_reduce_named_params": "ignore=[names] leaves parameters out of sharding and reduction",
    "param_to_hook_all_reduce": "ignore=[names] leaves parameters out of sharding and reduction",
    "skip_all_reduce_unused_params": _LEAVE,
    "batched_grad_copy": _LEAVE,
    "forward_sync_buffers": "broadcast_buffers",
    # FSDPStrategy and FullyShardedDataParallel
    "cpu_offload": _OFFLOAD,
    "mixed_precision": _PRECISION,
    "auto_wrap_policy": "units=[classes of layers], or nothing: units are planned automatically",
    "activation_checkpointing_policy": _LAYERS,
    "sharding_strategy": "strategy='full_shard', 'shard_grad_op', 'no_shard', 'hybrid_shard' or 'hybrid_shard_zero2'",
    "device_mesh": "strategy='hybrid_shard' and shard_size=(ranks that share a copy)",
    "backward_prefetch": "prefetch=(units)",
    "forward_prefetch": "prefetch=(units)",
    "ignored_modules": "ignore=[modules, parameters or patterns of names]",
    "ignored_states": "ignore=[modules, parameters or patterns of names]",
    "param_init_fn": "init_fn, which is called when a module on meta has memory, and fills it",
    "device_id": "Trainer(devices=...)",
    "limit_all_gathers": "leave it out: prefetch limits what is gathered ahead",
    "use_orig_params": "leave it out: optimizers always see the module's own parameters",
    # DeepSpeedStrategy
    "zero_optimization": "strategy='no_shard' is without ZeRO",
    "stage": "strategy='shard_optim' is stage 1, 'shard_grad_op' stage 2, 'full_shard' stage 3",
    "remote_device": "create the model in configure_model, or under Trainer.init_module(empty_init=True): it gets slices only",
    "offload_optimizer": "offload=torch_shard.Offload(params=False); offload='cpu' is for parameters, too",
    "offload_parameters": "offload='cpu', which is for optimizer state, too",
    "offload_params_device": "offload='cpu', or offload=torch_shard.Offload(nvme=directory, nvme_params=True) for a disk",
    "offload_optimizer_device": "offload='cpu', or offload=torch_shard.Offload(nvme=directory) for a disk",
    "nvme_path": "offload=torch_shard.Offload(nvme=directory)",
    "pin_memory": "offload=torch_shard.Offload(pin_memory=False); memory is page-locked by default",
    "params_buffer_count": "prefetch=(units) is how many are ahead of compute",
    "params_buffer_size": _BUCKETS,
    "max_in_cpu": "leave it out: what is on a disk leaves no more than some units in memory",
    "sub_group_size": "unit_bytes; the optimizer steps unit by unit",
    **dict.fromkeys(
        ("optimizer_buffer_count", "block_size", "queue_depth", "single_submit", "overlap_events", "thread_count"),
        _STREAMS,
    ),
    "cpu_checkpointing": "activation_offload takes classes of layers, or their names",
    "contiguous_gradients": _LEAVE,
    "overlap_comm": "prefetch=0 is without overlap in gathers",
    "allgather_partitions": _LEAVE,
    "reduce_scatter": _LEAVE,
    "allgather_bucket_size": _BUCKETS,
    "reduce_bucket_size": _BUCKETS,
    "zero_allow_untested_optimizer": "leave it out: any optimizer of PyTorch; torch_shard.optim.register for your own",
    "logging_batch_size_per_gpu": _LEAVE,
    "logging_level": "logging.getLogger('torch_shard').setLevel(...)",
    "loss_scale": _SCALER,
    "initial_scale_power": _SCALER,
    "loss_scale_window": _SCALER,
    "hysteresis": _SCALER,
    "min_loss_scale": _SCALER,
    "partition_activations": _LAYERS,
    "contiguous_memory_optimization": _LAYERS,
    "synchronize_checkpoint_boundary": _LAYERS,
    "load_full_weights": "leave it out: whole files and folders are loaded alike",
    "exclude_frozen_parameters": "drop entries in LightningModule.on_save_checkpoint, and set strict_loading=False",
}
"""By the argument's name."""


def advice(name: str, known: Iterable[str]) -> str:
    """What to do in place of an argument that is not `known`; "" where nobody knows."""
    if name in REMEDIES:
        return f" Another strategy has it; here: {REMEDIES[name]}."
    close = difflib.get_close_matches(name, list(known), 1)
    return f" Did you mean {close[0]}?" if close else ""
