"""DeepSpeedStrategy: its arguments, and the keys of a DeepSpeed configuration.

DeepSpeed clips, accumulates and makes optimizers itself where its configuration says so. Here the program does, so that such keys
are errors. docs/lightning.md has a table of all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch_shard.errors import ConfigError
from torch_shard.frontend.deepspeed_settings import OFFLOADS, read_config, settings_of_zero

from .translation import Arguments, Translation

_FILE_VARIABLE = "PL_DEEPSPEED_CONFIG_PATH"
# DeepSpeed computes in 16 bits from parameters stored in fp32, whichever of the two names is given.
_PRECISIONS = {"16-true": "16-mixed", "bf16-true": "bf16-mixed"}
# The places of keys in a configuration whose arguments have other names.
_ARGUMENTS = {"offload_optimizer.device": "offload_optimizer_device", "offload_param.device": "offload_params_device"}

_ALWAYS = (
    "allgather_partitions", "contiguous_gradients", "load_full_weights", "overlap_comm", "reduce_scatter", "remote_device",
    "zero_allow_untested_optimizer",
)  # fmt: skip
_WITHOUT_EFFECT = (
    "allgather_bucket_size", "block_size", "contiguous_memory_optimization", "cpu_checkpointing", "exclude_frozen_parameters",
    "hysteresis", "initial_scale_power", "logging_batch_size_per_gpu", "logging_level", "loss_scale", "loss_scale_window",
    "max_in_cpu", "min_loss_scale", "optimizer_buffer_count", "overlap_events", "params_buffer_count", "params_buffer_size",
    "partition_activations", "queue_depth", "reduce_bucket_size", "single_submit", "sub_group_size",
    "synchronize_checkpoint_boundary", "thread_count",
)  # fmt: skip
# Of a configuration: what the program says as well (its batches), and what only tunes or reports.
_KEYS_ALWAYS = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer"}
_KEYS_WITHOUT_EFFECT = {
    "activation_checkpointing", "aio", "checkpoint", "comms_logger", "csv_monitor", "dump_state", "flops_profiler",
    "memory_breakdown", "monitor_config", "steps_per_print", "tensorboard", "wall_clock_breakdown", "wandb",
}  # fmt: skip
_ZERO_KNOWN = {"stage", *OFFLOADS}
_ZERO_REFUSED = {"mics_shard_size", "zero_hpz_partition_size", "zero_quantized_gradients", "zero_quantized_weights"}


def from_deepspeed(given: dict[str, Any], defaults: dict[str, Any]) -> Translation:
    """Translate the arguments of DeepSpeedStrategy. Not collective.

    Raises:
        ConfigError: an argument or a key of the configuration has no counterpart, or its value is not one of DeepSpeed's.
    """
    arguments, found = Arguments("DeepSpeedStrategy", given, defaults), Translation(precisions=dict(_PRECISIONS))
    arguments.take_same(found)
    path = arguments.take("config") or os.environ.get(_FILE_VARIABLE)
    zero = _of_arguments(arguments)
    arguments.drop(*_ALWAYS)
    if path is None:
        arguments.note(found, *_WITHOUT_EFFECT)
        arguments.end()
    else:  # then Lightning uses no other arguments
        zero = _of_config(
            path if isinstance(path, Mapping) else read_config(path, "DeepSpeedStrategy(config=...)"), found
        )
    found.config["strategy"], offload, unused = settings_of_zero(zero, _argument if path is None else _key)
    if offload is not None:
        found.config["offload"] = offload
    found.unused += unused
    return found


def _of_arguments(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments in the form of a configuration's section ``zero_optimization``."""
    on, path = arguments.take("zero_optimization"), arguments.take("nvme_path")
    pin = {"pin_memory": arguments.take("pin_memory")} if arguments.is_given("pin_memory") else {}
    zero: dict[str, Any] = {"stage": arguments.take("stage") if on else 0}
    parts = (
        ("offload_optimizer", "offload_optimizer", "offload_optimizer_device"),
        ("offload_param", "offload_parameters", "offload_params_device"),
    )
    for key, wanted, device in parts:
        where = arguments.take(device)
        if arguments.take(wanted) and on:
            zero[key] = {"device": where, "nvme_path": path, **pin}
    return zero


def _of_config(config: Mapping[str, Any], found: Translation) -> dict[str, Any]:
    """Return the section ``zero_optimization`` of a configuration, and check everything beside it."""
    for key, value in config.items():
        if key in _KEYS_WITHOUT_EFFECT:
            found.unused.append(f"config[{key!r}]")
        elif key in ("fp16", "bf16", "amp"):
            if isinstance(value, Mapping) and value.get("enabled") not in (None, False, "auto"):
                raise _refused(key, 'Give precision="16-mixed" or "bf16-mixed" to the Trainer or Fabric')
        elif key == "gradient_accumulation_steps":
            if value not in (1, "auto", None):
                raise _refused(key, "Accumulate in the program: Trainer(accumulate_grad_batches=...)")
        elif key == "gradient_clipping":
            if value not in (0, "auto", None):
                raise _refused(key, "Clip in the program: Trainer(gradient_clip_val=...), fabric.clip_gradients")
        elif key not in _KEYS_ALWAYS and key != "zero_optimization":
            raise _refused(key, "It may change what is trained: do it in the program, or leave it out")
    zero = dict(config.get("zero_optimization") or {})
    for key in sorted(zero):
        if key in _ZERO_REFUSED and zero[key] not in (None, False, "auto"):
            raise _refused(f"zero_optimization.{key}", "docs/lightning.md (From deepspeed) says what replaces it")
        if key not in _ZERO_KNOWN | _ZERO_REFUSED:
            found.unused.append(f"config['zero_optimization'][{key!r}]")
    return zero


def _refused(key: str, remedy: str) -> ConfigError:
    return ConfigError(f"DeepSpeedStrategy: the key {key} of the configuration has no counterpart. {remedy}.")


def _argument(place: str) -> str:
    return f"DeepSpeedStrategy.{_ARGUMENTS.get(place, place.rpartition('.')[2])}"


def _key(place: str) -> str:
    return f"zero_optimization.{place}"
