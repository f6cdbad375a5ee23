"""``transformers.Trainer`` on sharded models, by a mixin or by changing the class itself.

Both run the functions of :data:`STEPS` in the place of a few methods of the Trainer; each function gets the Trainer's own method
as its second argument. Everything else is the Trainer's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch_shard import ShardConfig
from torch_shard.errors import ConfigError

from ..settings.plugin import ShardPlugin
from . import checkpoint, setup

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object

STEPS: dict[str, Callable[..., Any]] = {
    "create_accelerator_and_postprocess": setup.create_accelerator,
    "_move_model_to_device": setup.move_model,
    "evaluation_loop": setup.evaluation_loop,
    "_save": checkpoint.save_weights,
    "_save_optimizer_and_scheduler": checkpoint.save_optimizer,
    "_load_from_checkpoint": checkpoint.load_weights,
    "_load_optimizer_and_scheduler": checkpoint.load_optimizer,
}
"""Methods of the Trainer, and what runs in their place: ``function(trainer, own_method, *args, **kwargs)``."""


class ShardTrainerMixin(_Base):  # type: ignore[misc]
    """Makes a Trainer shard its model: ``class MyTrainer(ShardTrainerMixin, Trainer)``, any Trainer, the mixin first.

    ``trainer.model`` stays the plain object that was given. It is sharded from the first ``train``, ``evaluate`` or ``predict``
    on. ``train``, ``evaluate``, ``predict`` and ``save_model`` are collective: all ranks call them. Checkpoints are the Trainer's
    own files (``model.safetensors``, ``optimizer.pt``, ...) with full tensors, gathered to the rank that writes them. A Trainer
    without this mixin resumes from them, and this one from that one's, on any number of ranks.

    Args:
        shard_plugin: the settings of sharding, a :class:`~accelerate_shard.ShardPlugin` or a :class:`torch_shard.ShardConfig`;
            next to the Trainer's own arguments. By default the class attribute of this name; without one,
            ``TrainingArguments(fsdp=...)`` is translated, else the settings are those of ``accelerate_shard.enable()``, of the
            environment, or the defaults.

    Raises:
        ConfigError: settings of another engine (DeepSpeed, tensor parallelism, ...), or settings that contradict each other.
    """

    shard_plugin: ShardPlugin | ShardConfig | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(ShardTrainerMixin)]
        for base in before:
            if not issubclass(base, ShardTrainerMixin) and hasattr(base, "create_accelerator_and_postprocess"):
                raise _misplaced(cls.__name__)

    def __init__(self, *args: Any, shard_plugin: ShardPlugin | ShardConfig | None = None, **kwargs: Any) -> None:
        if not hasattr(super(), "create_accelerator_and_postprocess"):
            raise _misplaced(type(self).__name__)
        if shard_plugin is not None:
            self.shard_plugin = shard_plugin
        super().__init__(*args, **kwargs)


def _misplaced(name: str) -> ConfigError:
    return ConfigError(
        f"{name}: ShardTrainerMixin comes before a transformers.Trainer (5.0 or newer), as in "
        "class MyTrainer(ShardTrainerMixin, Trainer)."
    )


def _mixed_in(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, getattr(super(ShardTrainerMixin, self), name), *args, **kwargs)

    method.__name__, method.__qualname__ = name, f"ShardTrainerMixin.{name}"
    method.__doc__ = function.__doc__
    return method


for _name, _function in STEPS.items():
    setattr(ShardTrainerMixin, _name, _mixed_in(_name, _function))


# -- the class itself ---------------------------------------------------------------------------------------------------


def apply_to_trainer() -> None:
    """Make ``transformers.Trainer``, and with it every subclass, do what the mixin does. Not collective; call it on all ranks.

    Trainers that exist already keep their Accelerator and behave as before. Applying it twice is the same as once.
    """
    from transformers import Trainer

    for name, function in STEPS.items():
        own = Trainer.__dict__[name]
        if not hasattr(own, "_torch_shard_own"):
            setattr(Trainer, name, _applied(own, function))


def remove_from_trainer() -> None:
    """Give ``transformers.Trainer`` its own methods back. Not collective.

    A Trainer that is training goes on without sharded checkpoints, so let it finish first.

    Raises:
        ConfigError: something else has replaced one of the methods in between, and calls ours. Nothing has changed then.
    """
    from transformers import Trainer

    found = {name: inspect.getattr_static(Trainer, name) for name in STEPS}
    applied = {name: method for name, method in found.items() if hasattr(method, "_torch_shard_own")}
    if applied and len(applied) < len(STEPS):
        other = next(name for name in STEPS if name not in applied)
        raise ConfigError(f"transformers.Trainer.{other} was replaced by something else; undo that first.")
    for name, method in applied.items():
        setattr(Trainer, name, method._torch_shard_own)


def _applied(own: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, ShardTrainerMixin):  # the mixin's method of this name has called this one
            return own(self, *args, **kwargs)
        return function(self, functools.partial(own, self), *args, **kwargs)

    method._torch_shard_own = own  # type: ignore[attr-defined]
    return method
