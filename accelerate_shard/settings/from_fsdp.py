"""Translation of the settings of torch's FSDP 1 and 2 into a :class:`~accelerate_shard.settings.plugin.ShardPlugin`.

They come from the environment that ``accelerate launch`` exports for a YAML with ``distributed_type: FSDP``, or from a
``FullyShardedDataParallelPlugin`` in ``Accelerator(fsdp_plugin=...)``. Changed settings that have no meaning here are named in
one warning. docs/accelerate.md says what each key becomes.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torch_shard import Offload
from torch_shard.errors import ConfigError
from torch_shard.frontend.fsdp_settings import SHARDING_STRATEGIES, Wrapped, precision_of_policy, units_of_policy
from torch_shard.log import logger

from .plugin import ShardPlugin, StateDictType

_ORDER = tuple(SHARDING_STRATEGIES)  # Accelerate also takes their numbers, from 1
_STATE_DICTS: dict[str, StateDictType] = {
    "FULL_STATE_DICT": "full",
    "SHARDED_STATE_DICT": "sharded",
    "LOCAL_STATE_DICT": "sharded",
}
_STATE_DICT_ORDER = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_TRUE, _FALSE = ("1", "true", "yes", "y", "on", "t"), ("0", "false", "no", "n", "off", "f")


@dataclass(frozen=True)
class Key:
    """One setting of FSDP: what it is called in the plugin, in a YAML and in the environment.

    Attributes:
        field: the field of ``FullyShardedDataParallelPlugin``.
        yaml: the key in ``fsdp_config``; empty where neither a YAML nor the environment has it.
        usual: the value of a key without a meaning here that promises nothing, as the environment has it; other values are
            named in the warning. None for keys with a meaning.
    """

    field: str
    yaml: str
    usual: str | None = None

    @property
    def variable(self) -> str:
        """Return the environment variable of this key."""
        return "FSDP_TRANSFORMER_CLS_TO_WRAP" if self.field == "transformer_cls_names_to_wrap" else self.yaml.upper()


KEYS = (
    Key("fsdp_version", "fsdp_version"),
    Key("sharding_strategy", "fsdp_sharding_strategy"),
    Key("reshard_after_forward", "fsdp_reshard_after_forward"),
    Key("cpu_offload", "fsdp_offload_params"),
    Key("auto_wrap_policy", "fsdp_auto_wrap_policy"),
    Key("transformer_cls_names_to_wrap", "fsdp_transformer_layer_cls_to_wrap"),
    Key("min_num_params", "fsdp_min_num_params"),
    Key("backward_prefetch", "fsdp_backward_prefetch"),
    Key("forward_prefetch", "fsdp_forward_prefetch"),
    Key("state_dict_type", "fsdp_state_dict_type"),
    Key("activation_checkpointing", "fsdp_activation_checkpointing"),
    Key("activation_checkpointing_offload", "fsdp_activation_checkpointing_offload"),
    Key("ignored_modules", "fsdp_ignored_modules"),
    Key("mixed_precision_policy", ""),
    Key("param_init_fn", ""),
    Key("sync_module_states", "fsdp_sync_module_states", "true"),
    Key("cpu_ram_efficient_loading", "fsdp_cpu_ram_efficient_loading"),
    Key("use_orig_params", "fsdp_use_orig_params", "true"),
    Key("limit_all_gathers", "", "true"),
    Key("state_dict_config", "", ""),
    Key("optim_state_dict_config", "", ""),
)

_BY_FIELD = {key.field: key for key in KEYS}


@dataclass
class _Reading:
    """The settings of FSDP that were given, by field, and the fields of ShardPlugin that were found for them."""

    given: Mapping[str, Any]
    name: Callable[[str], str]  # the user's name for a field
    found: dict[str, Any] = field(default_factory=dict)
    without_meaning: list[str] = field(default_factory=list)

    def flag(self, key: str) -> bool:
        value = self.given.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        text = str(value).strip().lower()
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        raise ConfigError(f"{self.name(key)} must be true or false, not {value!r}.")

    def choice(self, key: str, known: tuple[str, ...], numbered: tuple[str, ...] = ()) -> str | None:
        value = self.given.get(key)
        if value is None:
            return None
        text = str(getattr(value, "name", value)).strip().lstrip("_").upper()
        if text.isdecimal() and 0 < int(text) <= len(numbered):
            text = numbered[int(text) - 1]
        if text not in known:
            raise ConfigError(f"{self.name(key)} must be one of {', '.join(known)}, not {value!r}.")
        return text


def from_fsdp_environment(environment: Mapping[str, str]) -> ShardPlugin:
    """Translate the ``FSDP_*`` variables that ``accelerate launch`` exports. Not collective.

    Raises:
        ConfigError: a value is unknown, two contradict each other, or one asks for what is not there; names the variable.
    """
    given = {
        key.field: environment[key.variable] for key in KEYS if key.yaml and environment.get(key.variable, "") != ""
    }

    def called(name: str) -> str:
        key = _BY_FIELD[name]
        return f"{key.variable} ({key.yaml})"

    reading = _Reading(given, called)
    for key in KEYS:
        value = given.get(key.field)
        if key.usual is not None and value is not None and value.strip().lower() != key.usual:
            reading.without_meaning.append(f"{key.yaml}={value}")
    version = given.get("fsdp_version", "1")
    if version not in ("1", "2"):
        raise ConfigError(f"{called('fsdp_version')} must be 1 or 2, not {version!r}.")
    _strategy_of_environment(reading, int(version))
    # If it is absent the engine's default holds. NO_PREFETCH can only come from a YAML that says so.
    prefetch = reading.choice(
        "backward_prefetch", ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"), ("BACKWARD_PRE", "BACKWARD_POST")
    )
    _prefetch(reading, prefetch)
    _units(reading, reading.choice("auto_wrap_policy", _WRAPS))
    default = "FULL_STATE_DICT" if version == "1" else "SHARDED_STATE_DICT"
    return _finished(reading, reading.choice("state_dict_type", _STATE_DICT_ORDER, _STATE_DICT_ORDER) or default)


def _strategy_of_environment(reading: _Reading, version: int) -> None:
    if version == 2:
        key = "reshard_after_forward"
        reading.found["strategy"] = "full_shard" if key not in reading.given or reading.flag(key) else "shard_grad_op"
        return
    strategy = reading.choice("sharding_strategy", _ORDER, _ORDER) or "FULL_SHARD"
    # `accelerate config` asks for the strategy and writes it as fsdp_reshard_after_forward, while the launcher exports
    # FSDP_SHARDING_STRATEGY=FULL_SHARD for every YAML that has none. (Accelerate itself then loses the answer.)
    if strategy == "FULL_SHARD" and str(reading.given.get("reshard_after_forward", "true")).lower() not in _TRUE:
        strategy = reading.choice("reshard_after_forward", _ORDER, _ORDER) or strategy
    reading.found["strategy"] = SHARDING_STRATEGIES[strategy]


def from_fsdp_plugin(plugin: Any) -> ShardPlugin:
    """Translate a ``FullyShardedDataParallelPlugin``. Not collective.

    Raises:
        ConfigError: no such plugin, or as for :func:`from_fsdp_environment`; names the plugin's field.
    """
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    if not isinstance(plugin, FullyShardedDataParallelPlugin):
        raise ConfigError(f"fsdp_plugin must be a FullyShardedDataParallelPlugin, not {type(plugin).__name__}.")
    given = {f.name: getattr(plugin, f.name) for f in dataclasses.fields(plugin)}
    reading = _Reading(given, lambda name: f"fsdp_plugin.{name}")
    offload = plugin.cpu_offload  # a bool, CPUOffload, or FSDP 2's policy
    of_fsdp2 = isinstance(offload, CPUOffloadPolicy)
    given["cpu_offload"] = offload if isinstance(offload, bool) else getattr(offload, "offload_params", of_fsdp2)
    if of_fsdp2:
        reading.found["offload"] = Offload(pin_memory=offload.pin_memory)
    if plugin.limit_all_gathers is False:
        reading.without_meaning.append("limit_all_gathers=False")
    for name in ("state_dict_config", "optim_state_dict_config"):
        config = given[name]
        if config is not None and not (config.offload_to_cpu and getattr(config, "rank0_only", True)):
            reading.without_meaning.append(name)
    if plugin.param_init_fn is not None and not _is_accelerates(plugin.param_init_fn):
        raise ConfigError(
            "fsdp_plugin.param_init_fn: modules on the meta device get memory here before they are filled. Give "
            "shard_plugin=ShardPlugin(init_fn=...), which fills one module's parameters."
        )
    strategy = reading.choice("sharding_strategy", _ORDER, _ORDER)
    if plugin.fsdp_version == 2:
        reading.found["strategy"] = "full_shard" if plugin.reshard_after_forward else "shard_grad_op"
    else:
        strategy = strategy or reading.choice("reshard_after_forward", _ORDER, _ORDER) or "FULL_SHARD"
        reading.found["strategy"] = SHARDING_STRATEGIES[strategy]
    # None is also the default, so it does not show that the user has asked for it.
    _prefetch(reading, reading.choice("backward_prefetch", ("BACKWARD_PRE", "BACKWARD_POST")))
    _units_of_plugin(reading, plugin)
    if plugin.mixed_precision_policy is not None:
        reading.found["precision"] = precision_of_policy(plugin.mixed_precision_policy)
    return _finished(reading, reading.choice("state_dict_type", _STATE_DICT_ORDER) or "FULL_STATE_DICT")


def _is_accelerates(init_fn: Callable[..., Any]) -> bool:
    # The plugin sets this function by itself under sync_module_states.
    return str(getattr(init_fn, "__module__", "")).startswith("accelerate.")


def _units_of_plugin(reading: _Reading, plugin: Any) -> None:
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    policy = plugin.auto_wrap_policy
    if policy is None:
        # None may mean NO_WRAP or that it was left out. A user who names classes wants them wrapped.
        _units(reading, None)
    elif policy is transformer_auto_wrap_policy:
        _units(reading, "TRANSFORMER_BASED_WRAP")
    elif policy is size_based_auto_wrap_policy:
        _units(reading, "SIZE_BASED_WRAP")
    else:
        if plugin.transformer_cls_names_to_wrap:
            raise _two_policies(reading, "a callable")
        reading.found["units"] = units_of_policy(
            policy, reading.name("auto_wrap_policy"), "shard_plugin=ShardPlugin(units=...)"
        )


@dataclass(frozen=True)
class WholeModel:
    """``NO_WRAP`` as :attr:`ShardConfig.units`: everything is gathered at once."""

    def __call__(self, name: str, module: nn.Module) -> bool:
        return name == ""


def _units(reading: _Reading, policy: str | None) -> None:
    names = reading.given.get("transformer_cls_names_to_wrap") or ()
    classes = tuple(n.strip() for n in (names.split(",") if isinstance(names, str) else names) if n.strip())
    if classes and policy in ("SIZE_BASED_WRAP", "NO_WRAP"):
        raise _two_policies(reading, policy)
    if policy == "SIZE_BASED_WRAP":
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

        given = reading.given.get("min_num_params") or 0
        try:
            least = int(float(given))
        except ValueError:
            raise ConfigError(
                f"{reading.name('min_num_params')} must be a number of parameters, not {given!r}."
            ) from None
        if least > 0:  # with 0 Accelerate wraps nothing; here that is the automatic plan
            reading.found["units"] = Wrapped(functools.partial(size_based_auto_wrap_policy, min_num_params=least))
    elif policy == "NO_WRAP":
        reading.found["units"] = WholeModel()
    reading.found["layer_classes"] = classes


def _two_policies(reading: _Reading, policy: str) -> ConfigError:
    return ConfigError(
        f"{reading.name('transformer_cls_names_to_wrap')} names classes of layers, and "
        f"{reading.name('auto_wrap_policy')} is {policy}, which does not use them. Leave the classes out, or set "
        "TRANSFORMER_BASED_WRAP."
    )


def _prefetch(reading: _Reading, backward: str | None) -> None:
    if reading.flag("forward_prefetch"):
        reading.found["prefetch"] = 1
    elif backward in ("BACKWARD_POST", "NO_PREFETCH"):
        reading.found["prefetch"] = 0


def _ignored(reading: _Reading) -> tuple[Any, ...]:
    modules = reading.given.get("ignored_modules")
    if modules is None:
        return ()
    if not isinstance(modules, str):
        return tuple(modules)
    try:
        re.compile(modules)
    except re.error as error:
        raise ConfigError(
            f"{reading.name('ignored_modules')} is not a regular expression ({error}): {modules!r}."
        ) from None
    return (f"re:(?:{modules})\\..+",)


def _finished(reading: _Reading, state_dict: str) -> ShardPlugin:
    if reading.flag("cpu_offload"):
        reading.found.setdefault("offload", "cpu")
    recompute, offload = (reading.flag("activation_checkpointing" + end) for end in ("", "_offload"))
    if offload and not recompute:
        raise ConfigError(
            f"{reading.name('activation_checkpointing_offload')}: {reading.name('activation_checkpointing')} is false, so that "
            "there are no inputs of checkpointed layers to move. Set it to true, too."
        )
    if state_dict == "LOCAL_STATE_DICT":
        reading.without_meaning.append("state_dict_type=LOCAL_STATE_DICT (sharded checkpoints are written)")
    if reading.without_meaning:
        logger.warning("FSDP settings without a meaning here: %s.", ", ".join(reading.without_meaning))
    return ShardPlugin(
        **reading.found,
        ignore=_ignored(reading),
        activation_checkpointing=recompute,
        activation_offload=offload,
        state_dict_type=_STATE_DICTS[state_dict],
        fp32_masters=True,
    )
