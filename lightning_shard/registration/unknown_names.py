"""What the Trainer and Fabric say about ``strategy="shard_typo"``, and about strategies of ours that are not theirs.

Lightning's own error lists neither the names nor what can be set. All that it asks before that error is whether the value
is in the list that its registry returns, so that list is where a better answer can be given.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import Any

from . import registry as _registry

__all__ = ["answer"]


def answer(namespace: str, registry: Any) -> None:
    """Have `registry` return a list of names that refuses, with advice, what is meant for us but is no strategy there."""
    available: Any = getattr(registry, "available_strategies", None)  # its public method; shadowed in this one object
    if not isinstance(getattr(available, "__self__", None), type(registry)):
        return  # shadowed already: the names were registered again

    def available_strategies() -> list[str]:
        return _Names(namespace, available())

    registry.available_strategies = available_strategies


class _Names(list[str]):
    """The registered names."""

    def __init__(self, namespace: str, names: list[str]) -> None:
        super().__init__(names)
        self._namespace = namespace

    def __contains__(self, value: object) -> bool:
        found = super().__contains__(value)
        # To others than Lightning, `in` is the plain question that it looks like.
        asks = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if not found and asks in ("lightning", "lightning_fabric", "pytorch_lightning"):
            advice = _advice(self._namespace, value)
            if advice:
                raise ValueError(advice)
        return found

    def __reduce__(self) -> Any:
        return list, (list(self),)


def _advice(namespace: str, value: object) -> str:
    """Why `value` is no strategy in `namespace`, and what is; "" where it isn't ours."""
    fabric = namespace in _registry.FABRIC
    owner = "Fabric" if fabric else "Trainer"
    if isinstance(value, str) and "." in value and "shard" in value.lower():
        return (
            f"strategy={value!r} is not a registered name. A class on the command line needs its own option, since a string by "
            "itself is a name: --trainer.strategy.class_path. In code, give an instance."
        )
    if isinstance(value, str):
        return _known_names(namespace, value, owner) if "shard" in value.lower() else ""
    made = value if isinstance(value, type) else type(value)
    base = next((c for c in made.__mro__ if c.__module__.partition(".")[0] == "lightning_shard"), None)
    if base is None:
        return ""
    module = (_registry.FABRIC if fabric else _registry.TRAINER)[namespace]
    right = _registry.strategy_class(namespace)
    if issubclass(base, right):
        return (
            f"strategy={made.__name__} is a class; give an instance of it: {made.__name__}(...)."
            if made is value
            else ""
        )
    return (
        f"{base.__module__}.{base.__qualname__} is not for the {owner} of the package {namespace!r}, whose base classes are "
        f"others. Use {module}.{right.__name__}."
    )


def _known_names(namespace: str, value: str, owner: str) -> str:
    made = _registry.strategy_class(namespace)
    lines = [
        f"strategy={value!r} is not a registered name. The sharding ones, each with what it is short for and does:",
        *(
            f"  {name}: {made.__name__}({', '.join(f'{k}={v!r}' for k, v in arguments.items())}). {description}."
            for name, (description, arguments) in _registry.NAMES.items()
        ),
        f"Anything else is set in an instance, {owner}(strategy=lightning_shard.{made.__name__}(...)), which takes "
        f"{', '.join(_own_parameters(made))}; and the fields of ShardConfig, by name or in config=: "
        f"{', '.join(_config_fields())}.",
    ]
    return "\n".join(lines)


def _own_parameters(made: Any) -> list[str]:
    by_lightning = ("self", "accelerator", "parallel_devices")
    own = [p for p in inspect.signature(made.__init__).parameters.values() if p.name not in by_lightning]
    return [p.name if p.default is None else f"{p.name}={p.default!r}" for p in own if p.kind is not p.VAR_KEYWORD]


def _config_fields() -> list[str]:
    from torch_shard import ShardConfig

    return [_with_default(field) for field in dataclasses.fields(ShardConfig)]


def _with_default(field: dataclasses.Field[Any]) -> str:
    plain = isinstance(field.default, (str, int, float))  # others' text says little
    return f"{field.name}={field.default!r}" if plain else field.name
