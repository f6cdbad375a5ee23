"""Replacement of Lightning's own strategies by ours in every Trainer and Fabric that a program makes.

The strategy is replaced in the connector of a Trainer or Fabric, which knows strategy and devices then, and has made nothing yet.
So names, instances, ``"auto"``, variables of the environment and LightningCLI are all one case.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch_shard
from torch_shard.errors import ConfigError
from torch_shard.frontend.zero_redundancy_optimizer import replace_zero_redundancy_optimizer
from torch_shard.log import logger

from ..registration.autoload import AfterImport
from ..registration.registry import NAMES
from ..strategy.settings import SettingsMixin, split_settings
from . import _private
from ._private import Root
from .arguments import given_to, note_arguments
from .from_ddp import from_ddp
from .from_deepspeed import from_deepspeed
from .from_fsdp import from_fsdp
from .from_model_parallel import from_model_parallel, note_fully_shard
from .stand_in import StandIn
from .translation import Translation, defaults_of

# The replaced classes, in the order in which they are tried: DeepSpeedStrategy derives from DDPStrategy.
_FAMILIES = ("DeepSpeedStrategy", "ModelParallelStrategy", "FSDPStrategy", "DDPStrategy")
# Names that a subclass may define and still be replaced.
_HARMLESS = {"__init__", "register_strategies", "strategy_name"}


def take_over(settings: Mapping[str, Any], restart: Sequence[str]) -> None:
    """Make programs that run in this process from now on shard their models. Not collective.

    Args:
        settings: fields of ``ShardConfig`` and of ``StrategySettings`` that the launch gives. They count for more than the
            program's own.
        restart: the arguments of ``python -m lightning_shard`` up to the program's own, for the ranks that a program starts.
    """
    note_fully_shard()
    replace_zero_redundancy_optimizer()
    AfterImport(_private.ROOTS, functools.partial(_change, settings, restart)).install()


def _change(settings: Mapping[str, Any], restart: Sequence[str], module: ModuleType) -> None:
    root = _private.ROOTS[module.__name__]
    for name in _FAMILIES:
        # DeepSpeed need not be installed, since it is not used.
        instead = _without_deepspeed(root) if name == "DeepSpeedStrategy" else None
        note_arguments(root.strategy_class(name), instead)
    _private.watch_strategies(root, functools.partial(_replaced, settings, root))
    # Other ranks are started under the runner, with the program's arguments at that moment.
    _private.watch_children(root, lambda: _private.started_by("lightning_shard", [*restart, *sys.argv[1:]]))


def _without_deepspeed(root: Root) -> Any:
    base = root.strategy_class("ParallelStrategy")
    taken = set(inspect.signature(base.__init__).parameters)

    def make(self: Any, given: Mapping[str, Any]) -> None:
        base.__init__(self, **{name: value for name, value in given.items() if name in taken})

    return make


def _replaced(settings: Mapping[str, Any], root: Root, connector: Any, strategy: Any) -> Any:
    """Return the strategy that a connector uses: ours, or `strategy` itself if its class is not replaced."""
    if type(connector.accelerator).__name__ not in ("CPUAccelerator", "CUDAAccelerator"):
        return strategy
    made = _instance(root, strategy)
    if made is None:
        return strategy
    if isinstance(made, SettingsMixin):  # ours already
        if settings and not isinstance(made, StandIn):  # a stand-in has them
            made.override(settings)
        return made
    family = next((f for f in _FAMILIES if isinstance(made, root.strategy_class(f))), None)
    if family is None:
        if _private.speaks(connector):
            logger.info("%s stays as it is: it is none of those that are replaced", type(made).__name__)
        return strategy
    _refuse_subclass(root, made, family)
    found = _translated(root, connector, made, family)
    ours = make_stand_in(root, found, settings)
    renamed = _private.lower_precision(root, connector, _plugins(root), found.precisions)
    if renamed is not None:
        found.unused.append(f"DeepSpeed's precision (it is {renamed!r} here, which also keeps fp32 parameters)")
    if _private.speaks(connector):
        logger.info("%s is replaced by %s(%s)", family, type(ours).__name__, ours.config)
        if found.unused:
            logger.warning("%s: without effect in a sharded run: %s.", family, ", ".join(found.unused))
    return ours


def _instance(root: Root, strategy: Any) -> Any:
    """Return an instance for a name of a strategy that is replaced, or of ours; None for other names."""
    if not isinstance(strategy, str):
        return strategy
    kind = _private.registered_class(root, strategy)
    families = tuple(map(root.strategy_class, _FAMILIES))
    if strategy in NAMES or (isinstance(kind, type) and issubclass(kind, families)):
        return _private.made_by_name(root, strategy)
    return None


def _refuse_subclass(root: Root, strategy: Any, family: str) -> None:
    base = root.strategy_class(family)
    own = type(strategy).__mro__[: type(strategy).__mro__.index(base)]
    names = sorted(
        name
        for kind in own
        for name, value in vars(kind).items()
        if name not in _HARMLESS and (callable(value) or isinstance(value, (property, classmethod, staticmethod)))
    )
    if names:
        raise ConfigError(
            f"{type(strategy).__name__} is a {family} with {', '.join(names[:3])} of its own, which a strategy that shards "
            f"would not call. Give the Trainer or Fabric strategy={family}(...) or a name such as 'ddp', or run the program "
            "without lightning_shard."
        )


def _translated(root: Root, connector: Any, strategy: Any, family: str) -> Translation:
    given, defaults = given_to(strategy), defaults_of(root.strategy_class(family))
    if family == "ModelParallelStrategy":
        return from_model_parallel(given, defaults, *_private.ranks_of(connector))
    translate = {"DDPStrategy": from_ddp, "FSDPStrategy": from_fsdp, "DeepSpeedStrategy": from_deepspeed}[family]
    return translate(given, defaults)


def make_stand_in(root: Root, found: Translation, settings: Mapping[str, Any]) -> Any:
    """Return the strategy that takes the place of the one that was translated; `settings` are those of the runner."""
    fields, options = split_settings(settings)
    ignored = {"ignore": (*found.config.get("ignore", ()), *fields.get("ignore", ()))}
    config = torch_shard.ShardConfig(**{**found.config, **fields, **ignored})
    made = importlib.import_module(root.stand_in)
    kind = getattr(made, made.__all__[0])
    ours = kind(config, **{**found.options, **options})
    ours.take_over(found)
    return ours


def _plugins(root: Root) -> tuple[Any, ...]:
    """Return the classes of precision plugins that belong to strategies that are replaced."""
    plugins = importlib.import_module(f"{root.package}.plugins.precision")
    return plugins.FSDPPrecision, plugins.DeepSpeedPrecision
