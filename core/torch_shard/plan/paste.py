"""The lines of a program that use the settings that a search has found."""

from __future__ import annotations

from typing import Any

from .settings_search import Candidate

__all__ = ["PLACES", "lines_for"]

PLACES = {"lightning": "Lightning", "accelerate": "Accelerate", "yaml": "accelerate launch", "plain": "torch_shard"}
"""What the keys of :func:`lines_for` stand for."""


_LIGHTNING_PRECISION = {"bf16": "bf16-mixed", "fp16": "16-mixed"}


def lines_for(candidate: Candidate, autocast: str | None = None) -> dict[str, str]:
    """Return what to write for settings: under ``lightning``, ``accelerate``, ``yaml`` (of ``accelerate launch``) and ``plain``.

    Args:
        candidate: the settings.
        autocast: ``"bf16"`` or ``"fp16"`` where the step runs under autocast, which front ends have a setting for.
    """
    settings: dict[str, Any] = {"strategy": candidate.strategy}
    if candidate.prefetch != 1:
        settings["prefetch"] = candidate.prefetch
    for name in ("shard_size", "offload"):
        if getattr(candidate, name) is not None:
            settings[name] = getattr(candidate, name)
    shard = f"engine = torch_shard.shard(model, {_arguments(settings)})"
    if candidate.checkpointing:
        shard = f"with checkpointed_layers(model, True, units=None):\n    {shard}"
        settings["activation_checkpointing"] = True
    trainer = {"precision": _LIGHTNING_PRECISION[autocast]} if autocast is not None else {}
    accelerator: dict[str, Any] = {} if autocast is None else {"mixed_precision": autocast}
    yaml = [f"mixed_precision: {autocast}"] if autocast is not None else []
    if candidate.accumulation > 1:
        trainer["accumulate_grad_batches"] = candidate.accumulation  # type: ignore[assignment]
        accelerator["gradient_accumulation_steps"] = candidate.accumulation
    yaml += ["fsdp_config:", *(f"  shard_{name.removeprefix('shard_')}: {_yaml(v)}" for name, v in settings.items())]
    plugin = f"ShardPlugin({_arguments(settings)})"
    return {
        "lightning": f"Trainer({_arguments(trainer, first=f'strategy=ShardStrategy({_arguments(settings)})')})",
        "accelerate": f"Accelerator({_arguments(accelerator, first=f'shard_plugin={plugin}')})",
        "yaml": "\n".join(yaml),
        "plain": shard,
    }


def _arguments(values: dict[str, Any], first: str = "") -> str:
    texts = [f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in values.items()]
    return ", ".join([first] * bool(first) + texts)


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
