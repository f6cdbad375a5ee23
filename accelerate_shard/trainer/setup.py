"""What a Trainer does differently before it trains or evaluates: its Accelerator, and where the model goes.

These are functions for :data:`.mixin.STEPS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_shard.errors import ConfigError
from torch_shard.frontend import agree, engine_holding

from .. import _private
from ..accelerator import Accelerator
from .checkpoint import all_ranks


def create_accelerator(trainer: Any, own: Callable[[], None]) -> None:
    """Make ``trainer.accelerator``, ours in place of Accelerate's. Not collective.

    Raises:
        ConfigError: the arguments select another engine than this one, or what it can't do.
    """
    _refuse_others(trainer)
    plugin = getattr(trainer, "shard_plugin", None)
    kind = Accelerator if plugin is None else functools.partial(Accelerator, shard_plugin=plugin)
    with _private.accelerator_of_trainers(kind):
        own()
    if not isinstance(trainer.accelerator, Accelerator):
        raise ConfigError(
            f"{type(trainer).__name__}.create_accelerator_and_postprocess makes a {type(trainer.accelerator).__module__}."
            f"{type(trainer.accelerator).__name__} itself; have it make an accelerate_shard.Accelerator."
        )


def _refuse_others(trainer: Any) -> None:
    args, model = trainer.args, trainer.model
    if args.deepspeed:
        raise ConfigError(
            "TrainingArguments.deepspeed: this Trainer shards the model itself and can't be combined with DeepSpeed. Leave it "
            "out; ShardPlugin(strategy=..., offload=...) has what its ZeRO stages have, and docs/accelerate.md has a table "
            "of all keys."
        )
    if (args.fsdp_config or {}).get("xla"):
        raise ConfigError(
            "TrainingArguments.fsdp_config: xla is for TPUs, where models aren't sharded by this Trainer."
        )
    if getattr(model, "is_distributed_loading_by_transformers", False) or (getattr(model, "tp_size", None) or 1) > 1:
        raise ConfigError(
            "the model was distributed when it was loaded (from_pretrained with tp_plan or distributed_config); load it without, "
            "and this Trainer shards it."
        )
    if getattr(args, "enable_jit_checkpoint", False) and args.world_size > 1:
        raise ConfigError(
            "TrainingArguments.enable_jit_checkpoint: each rank would begin its checkpoint when its own timer fires, and such a "
            "checkpoint is gathered from all ranks, in one step. Leave it out; save_strategy='steps' with a save_steps that is "
            "small enough loses little when a job is preempted."
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"this one process has {args.n_gpu} GPUs, where the Trainer would use DataParallel; start a process for each, with "
            "`torchrun --nproc_per_node N` or `accelerate launch`."
        )


def move_model(trainer: Any, own: Callable[..., None], model: Any, device: Any) -> None:
    """Leave the model where it is: sharding puts it on the device unit by unit, and the full model may not fit there."""
    if not isinstance(trainer.accelerator, Accelerator):
        own(model, device)


def evaluation_loop(trainer: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Evaluate or predict; a model that is not sharded yet is sharded. Collective: call it on all ranks.

    Args:
        own: the Trainer's own loop.
        args, kwargs: its arguments.

    Returns:
        What the Trainer's own returns.

    Raises:
        ConfigError: ``bf16_full_eval`` or ``fp16_full_eval`` of a model that is sharded in another dtype.
        MissingRankError, DivergenceError: only some ranks came; where the model is sharded already, before anything is computed.
    """
    engine = engine_holding(trainer.model)
    dtype = _full_eval_dtype(trainer)
    if dtype is not None and isinstance(trainer.accelerator, Accelerator):
        sharded = engine is not None
        if sharded and any(p.is_floating_point() and p.dtype != dtype for p in trainer.model.parameters()):
            name = "fp16_full_eval" if dtype == torch.float16 else "bf16_full_eval"
            raise ConfigError(
                f"{name} converts the model, which is sharded already, by a training or an evaluation in another dtype. Leave it "
                "out: bf16=True and fp16=True evaluate in 16 bits too. Or evaluate a model that is loaded anew."
            )
        if not sharded:
            trainer.model.to(dtype)  # now, because the Trainer would do it when the model is sharded
    if engine is not None:
        # If a rank is elsewhere, say in a trainer.save_model() of its own, all raise here and not after a timeout.
        with all_ranks("evaluation by the Trainer"):
            agree(engine, "evaluation by the Trainer")
    return own(*args, **kwargs)


def _full_eval_dtype(trainer: Any) -> torch.dtype | None:
    """Return the dtype into which ``bf16_full_eval`` or ``fp16_full_eval`` converts the model while no training runs."""
    if trainer.is_in_train:
        return None
    return torch.float16 if trainer.args.fp16_full_eval else torch.bfloat16 if trainer.args.bf16_full_eval else None
