"""The engine of a model that is planned, not sharded: parameters stay full, and methods do what plain torch does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..config.shard_config import ShardConfig
from ..engine import Engine
from ..errors import UnavailableError
from ..plan.planner import make_plan
from ..runtime import registry
from ..setup import build


class PlannedEngine(Engine):
    """The engine that a script gets in ``torch-shard plan``, over a plain model on a single rank.

    Collective methods go through a runtime of this engine's own, which has one rank and no unit of the model.

    Args:
        model, config: the arguments of ``shard()``.
        ranks: the number of ranks that is planned for.
        alone: a process group of this rank alone, or None without ``torch.distributed``.
        closing: a function that :meth:`close` calls with the model.

    Raises:
        UnavailableError: by methods that save, before the first step is over, and by ``step_in_backward``, which is not planned.
    """

    def __init__(
        self, model: nn.Module, config: ShardConfig, ranks: int, alone: Any, closing: Callable[[nn.Module], object]
    ) -> None:
        self._stands_in = nn.Linear(1, 1)  # the runtime needs a model
        runtime, _ = build.build(self._stands_in, ShardConfig(strategy="no_shard"), alone)
        super().__init__(model, runtime, make_plan(model, config, ranks), config)
        self._ranks = ranks
        self._closing = closing
        registry.note(model, self)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        parameters: Iterable[torch.Tensor] | None = None,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Clip gradients by their norm, as ``torch.nn.utils.clip_grad_norm_`` does."""
        chosen = self.model.parameters() if parameters is None else parameters
        return nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Clip gradients by their values, as ``torch.nn.utils.clip_grad_value_`` does."""
        nn.utils.clip_grad_value_(self.model.parameters() if parameters is None else parameters, clip_value)

    def attach(self, optimizer: Any) -> None:
        """Do nothing, since the optimizer holds the plain parameters."""

    @contextlib.contextmanager
    def gathered(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Do nothing: parameters are full."""
        yield

    def apply(self, fn: Callable[[nn.Module], None]) -> None:
        """Apply `fn` to the modules, as ``nn.Module.apply`` does."""
        self.model.apply(fn)

    def state_dict(self, **_: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's own state dict."""
        return self.model.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Load a state dict into the plain model."""
        return self.model.load_state_dict(state_dict, strict)

    def load(self, *_: Any, **__: Any) -> Any:
        """Load nothing: values don't matter."""

    def load_optim_state_dict(self, *_: Any, **__: Any) -> None:
        """Load nothing: values don't matter."""

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Do nothing, since the time and memory of a hook are not planned."""

    def grad_norms(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        """Return no norms."""
        return {}

    @property
    def world_size(self) -> int:
        """The number of ranks that is planned for."""
        return self._ranks

    def close(self, *optimizers: torch.optim.Optimizer) -> None:
        """Forget the engine; the model is a plain one."""
        self._closing(self.model)
        registry.forget(self.model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        return self


def _unavailable(name: str) -> Callable[..., Any]:
    def method(self: PlannedEngine, *args: Any, **kwargs: Any) -> Any:
        raise UnavailableError(f"engine.{name}() can't be used in torch-shard plan before the first step is over.")

    return method


for _name in ("optim_state_dict", "save", "save_full", "step_in_backward"):
    setattr(PlannedEngine, _name, _unavailable(_name))
