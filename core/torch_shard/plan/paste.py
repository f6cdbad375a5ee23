"""The lines of a program that use the settings that a search has found."""

from __future__ import annotations

from typing import Any

from ..config.offload import Offload
from ..config.offload_text import text_of
from .search_results import Candidate

PLACES = {"lightning": "Lightning", "accelerate": "Accelerate", "yaml": "accelerate launch", "plain": "torch_shard"}
"""What the keys of :func:`lines_for` stand for."""

_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
_LIGHTNING_PRECISION = {"bf16": "bf16-mixed", "fp16": "16-mixed"}


def lines_for(candidate: Candidate, autocast: str | None) -> dict[str, str]:
    """Return what to write for settings: under ``lightning``, ``accelerate``, ``yaml`` (of ``accelerate launch``) and ``plain``.

    The Python lines run as they are, where a `model` is defined.

    Args:
        candidate: the settings.
        autocast: ``"bf16"`` or ``"fp16"`` where the step runs under autocast, which front ends have a setting for.
    """
    settings: dict[str, Any] = {"strategy": candidate.strategy}
    if candidate.prefetch != 1:
        settings["prefetch"] = candidate.prefetch
    if candidate.shard_size is not None:
        settings["shard_size"] = candidate.shard_size
    if candidate.offload is not None:
        settings["offload"] = "cpu" if candidate.offload.params else candidate.offload
    plain = _plain(candidate, dict(settings), autocast)
    if candidate.checkpointing:
        settings["activation_checkpointing"] = candidate.checkpointing
    if candidate.activation_offload:
        settings["activation_offload"] = True
    trainer = {"precision": _LIGHTNING_PRECISION[autocast]} if autocast is not None else {}
    accelerator: dict[str, Any] = {} if autocast is None else {"mixed_precision": autocast}
    yaml = [f"mixed_precision: {autocast}"] if autocast is not None else []
    if candidate.accumulation > 1:
        trainer["accumulate_grad_batches"] = candidate.accumulation  # type: ignore[assignment]
        accelerator["gradient_accumulation_steps"] = candidate.accumulation
        yaml.append(f"# In the script: Accelerator(gradient_accumulation_steps={candidate.accumulation})")
    yaml += ["fsdp_config:", *(f"  shard_{name.removeprefix('shard_')}: {_yaml(v)}" for name, v in settings.items())]
    plugin = f"ShardPlugin({_arguments(settings)})"
    offload = "import torch_shard\n" * isinstance(settings.get("offload"), Offload)
    return {
        "lightning": f"{offload}from lightning.pytorch import Trainer\nfrom lightning_shard import ShardStrategy\n"
        f"Trainer({_arguments(trainer, first=f'strategy=ShardStrategy({_arguments(settings)})')})",
        "accelerate": f"{offload}from accelerate_shard import Accelerator, ShardPlugin\n"
        f"Accelerator({_arguments(accelerator, first=f'shard_plugin={plugin}')})",
        "yaml": "\n".join(yaml),
        "plain": plain,
    }


def _plain(candidate: Candidate, settings: dict[str, Any], autocast: str | None) -> str:
    """Return the lines of a program without a framework, which has autocast and micro-batches in its own loop."""
    lines = ["import torch_shard"]
    arguments = _arguments(settings)
    if autocast is not None:
        lines.insert(0, "import torch")
        arguments += (
            f', precision=torch_shard.Precision({_DTYPES[autocast]}, cast_inputs=False, cast_params="autocast")'
        )
    shard = f"engine = torch_shard.shard(model, {arguments})"
    if candidate.checkpointing:
        lines.append("from torch_shard.activation_checkpointing import checkpointed_layers")
        offloaded = ", offloaded=True" * candidate.activation_offload
        lines.append(f"with checkpointed_layers(model, {candidate.checkpointing!r}, units=None{offloaded}):")
        shard = f"    {shard}"
    lines.append(shard)
    if candidate.accumulation > 1:
        lines.append(f"# In a step: {candidate.accumulation} micro-batches.")
    return "\n".join(lines)


def _arguments(values: dict[str, Any], first: str = "") -> str:
    return ", ".join([first] * bool(first) + [f"{name}={_python(value)}" for name, value in values.items()])


def _python(value: Any) -> str:
    if isinstance(value, Offload):
        return "torch_shard.Offload(params=False)"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _yaml(value: Any) -> str:
    if isinstance(value, Offload):
        return text_of(value)
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
