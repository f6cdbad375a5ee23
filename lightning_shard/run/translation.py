"""Translation of a strategy of Lightning's to settings of ours, and refusal of arguments without a counterpart here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_shard.errors import ConfigError

# Arguments that both strategies have under the same name. The connector decides on the precision plugin.
_SAME = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "process_group_backend")
_PLUGINS = ("precision_plugin", "precision")


@dataclass
class Translation:
    """The settings of ours that stand for a strategy.

    Attributes:
        config: fields of ``ShardConfig``.
        options: further arguments of our strategy.
        unused: descriptions, for one warning, of arguments that have no effect here.
        ddp_kwargs: the arguments for DistributedDataParallel, of a DDPStrategy.
        precisions: precisions that are replaced by others, by name.
        compress: the dtype in which gradients are sent, on GPUs.
        parallelize: Fabric's ``parallelize_fn``, of a ModelParallelStrategy.
        has_mesh: True if modules get a device mesh, as from a ModelParallelStrategy.
    """

    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    ddp_kwargs: dict[str, Any] = field(default_factory=dict)
    precisions: dict[str, str] = field(default_factory=dict)
    compress: torch.dtype | None = None
    parallelize: Any = None
    has_mesh: bool = False


class Arguments:
    """The arguments of one strategy, which are taken out one by one; those that remain are refused.

    Args:
        strategy: the name of the strategy's class, for messages.
        given: the arguments by name. An argument with its default value counts as not given, since LightningCLI gives all.
        defaults: the defaults of the strategy.
        wrapper: the class that gets the strategy's ``**kwargs``.
    """

    def __init__(
        self, strategy: str, given: Mapping[str, Any], defaults: Mapping[str, Any], wrapper: type | None = None
    ) -> None:
        self.strategy, self._defaults = strategy, {**(defaults_of(wrapper) if wrapper else {}), **defaults}
        self._left = {n: v for n, v in given.items() if n not in self._defaults or not _same(v, self._defaults[n])}

    def take(self, name: str) -> Any:
        """Return the value of an argument, or its default; None where it has none."""
        return self._left.pop(name, self._defaults.get(name))

    def is_given(self, name: str) -> bool:
        """Return True if the user has given this argument another value than its default, and it has not been taken out."""
        return name in self._left

    def take_same(self, into: Translation) -> None:
        """Move the arguments that our strategy has under the same name to `into`."""
        for name in _PLUGINS:
            self._left.pop(name, None)
        for name in _SAME:
            if self._left.get(name) is not None:
                into.options[name] = self._left[name]
            self._left.pop(name, None)
        timeout = self.take("timeout")
        if timeout is not None:
            into.options["timeout"] = timeout

    def drop(self, *names: str) -> None:
        """Take out arguments whose request is always met here, or has no meaning at all."""
        for name in names:
            self._left.pop(name, None)

    def note(self, into: Translation, *names: str) -> None:
        """Take out arguments that have no effect here, and note those that the user has changed."""
        for name in names:
            if name in self._left:
                into.unused.append(f"{name}={_short(self._left[name])}")
            self._left.pop(name, None)

    def refused(self, name: str, why: str) -> ConfigError:
        """Return the error for an argument that can't be right here. `why`: reason and remedy, as whole sentences."""
        return ConfigError(f"{self.strategy}({name}=...) has no counterpart in a sharded run: {why}")

    def end(self) -> None:
        """Raise for arguments that nobody has taken.

        Raises:
            ConfigError: an argument is left.
        """
        for name in self._left:
            raise self.refused(name, "it may change what is trained. Leave it out, or run without lightning_shard.")


def defaults_of(kind: Any) -> dict[str, Any]:
    """Return the defaults of a constructor's arguments by name. Not collective."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, (str, int, float, bool)) and type(a) is type(b) and a == b)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
