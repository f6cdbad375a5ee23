"""FSDPStrategy of the Trainer and of Fabric."""

from __future__ import annotations

from typing import Any

from torch_shard.errors import ConfigError
from torch_shard.frontend.fsdp_settings import (
    SHARDING_STRATEGIES,
    classes_of_policy,
    precision_of_policy,
    units_of_policy,
)

from .translation import Arguments, Translation

_ALWAYS = ("device_id", "forward_prefetch", "limit_all_gathers", "use_orig_params")


def from_fsdp(given: dict[str, Any], defaults: dict[str, Any]) -> Translation:
    """Translate the arguments of FSDPStrategy. Not collective.

    Raises:
        ConfigError: an argument has no counterpart, or a value that FSDP does not know either.
    """
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel

    arguments, found = Arguments("FSDPStrategy", given, defaults, FullyShardedDataParallel), Translation()
    arguments.take_same(found)
    found.options["state_dict_type"] = arguments.take("state_dict_type")
    _strategy(arguments, found)
    offload = arguments.take("cpu_offload")
    if getattr(offload, "offload_params", offload):
        found.config["offload"] = "cpu"
    mixed = arguments.take("mixed_precision")
    if mixed is not None:
        found.config["precision"] = precision_of_policy(mixed)
    policy = _policy(arguments.take("auto_wrap_policy"))
    if policy is not None:
        found.config["units"] = units_of_policy(policy, "FSDPStrategy.auto_wrap_policy", "a function as the policy")
    _checkpointing(arguments, found)
    gathers_early = BackwardPrefetch.BACKWARD_PRE
    backward = arguments.take("backward_prefetch") if arguments.is_given("backward_prefetch") else gathers_early
    if backward is not gathers_early and not arguments.take("forward_prefetch"):
        found.config["prefetch"] = 0
    ignored = [*(arguments.take("ignored_modules") or ()), *(arguments.take("ignored_states") or ())]
    if ignored:
        found.config["ignore"] = tuple(ignored)
    if arguments.is_given("sync_module_states"):
        found.config["sync_module_states"] = bool(arguments.take("sync_module_states"))
    if arguments.take("param_init_fn") is not None:
        raise arguments.refused(
            "param_init_fn",
            "modules on the meta device get memory first and are filled then. Leave it out, and give the modules a "
            "reset_parameters().",
        )
    if arguments.take("process_group") is not None:
        raise arguments.refused(
            "process_group", "all ranks train together. Give device_mesh=(replicas, ranks) instead."
        )
    arguments.drop(*_ALWAYS, "backward_prefetch")
    arguments.end()
    return found


def _strategy(arguments: Arguments, found: Translation) -> None:
    chosen = arguments.take("sharding_strategy")
    name = str(getattr(chosen, "name", chosen)).upper().lstrip("_")
    if name not in SHARDING_STRATEGIES:
        raise ConfigError(
            f"FSDPStrategy.sharding_strategy must be one of {', '.join(SHARDING_STRATEGIES)}, not {chosen!r}."
        )
    found.config["strategy"] = SHARDING_STRATEGIES[name]
    mesh = arguments.take("device_mesh")
    if mesh is not None:
        sizes = tuple(mesh) if isinstance(mesh, (tuple, list)) else tuple(mesh.mesh.shape)
        if not name.startswith("HYBRID") or len(sizes) != 2:
            raise ConfigError(
                f"FSDPStrategy.device_mesh must be a pair (replicas, ranks) for a hybrid strategy; it is {sizes} for {name}."
            )
        found.config["shard_size"] = int(sizes[1])


def _policy(given: Any) -> Any:
    """Return a policy of torch's; a set of classes means one."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return ModuleWrapPolicy(given) if isinstance(given, set) else given


def _checkpointing(arguments: Arguments, found: Translation) -> None:
    classes = arguments.take("activation_checkpointing")
    policy = arguments.take("activation_checkpointing_policy")
    if classes is not None and policy is not None:
        raise ConfigError(
            "FSDPStrategy takes activation_checkpointing or activation_checkpointing_policy, and not both of them."
        )
    if policy is not None:
        classes = classes_of_policy(_policy(policy))
        if classes is None:
            found.unused.append("activation_checkpointing_policy (a function; give classes of layers)")
    if classes:
        found.options["activation_checkpointing"] = tuple(classes) if isinstance(classes, (list, tuple)) else (classes,)
