"""A case: a small training script, written once, that every engine runs; and what such a script is given.

    @case("several forwards, then one backward", test="test_several_forwards_and_one_backward_train_like_plain")
    def several_forwards(job: Job) -> None:
        model, optimizer = job.prepare(MLP())
        for x in job.batches(3):
            job.backward(loss_of(model(x)) + loss_of(model(x * 2)), model)
            optimizer.step()
            optimizer.zero_grad()

The script runs on two ranks, and once without any engine in one process, on the batches of both ranks together: 4 rows a rank, 8
rows there. Its losses are means over rows, so that the gradients are the same. Compared are the parameters of every model that it
has prepared, as they are in the end, and what it has noted with ``job.see``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import Block, loss_of

from .engines import Engine, Options

__all__ = ["CASES", "ROWS", "Case", "Job", "case", "load_cases", "sgd"]

ROWS = 8
"""Rows of a batch, of all ranks together."""

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        text: what the script does.
        script: the function.
        test: the test of this engine behind the row, or the file with such tests below ``tests``.
        note: what else has to be known to read the row: calls that are an engine's own, or what its documentation says.
        refused: this engine refuses to do it: an error is what it promises.
        dtype: of parameters and inputs; None for the engine's own, float64 if it has the choice.
        tolerance: relative and absolute; None for one that fits the dtype.
        timeout: seconds until the ranks are held to hang; None for the usual.
    """

    text: str
    script: Callable[[Job], None]
    test: str
    note: str = ""
    refused: bool = False
    dtype: torch.dtype | None = None
    tolerance: tuple[float, float] | None = None
    timeout: float | None = None

    @property
    def name(self) -> str:
        return self.script.__name__


CASES: list[Case] = []
"""The registry of all cases, in the order of the table; :func:`case` adds to it."""


def case(text: str, test: str = "", **settings: Any) -> Callable[[Callable[[Job], None]], Callable[[Job], None]]:
    """Register a script as a case; the arguments are the fields of :class:`Case`."""

    def register(script: Callable[[Job], None]) -> Callable[[Job], None]:
        CASES.append(Case(text, script, test, **settings))
        return script

    return register


def load_cases(file: str | None) -> None:
    """Fill the registry of cases: from a Python file, or with the cases of this folder."""
    if file is None:
        importlib.import_module("compare.cases")
        return
    spec = importlib.util.spec_from_file_location("compared_cases", file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


def sgd(model: nn.Module, **options: Any) -> Optimizer:
    """SGD over what is trainable, under which a gradient of a wrong scale shows."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], **{"lr": 0.1, **options})


class Job:
    """What a script is given: its data, a way to put a model under the engine, and the calls that each engine has of its own.

    Attributes:
        rank: of this process; 0 in the plain run.
    """

    def __init__(self, engine: Engine, rank: int, ranks: int) -> None:
        self.rank = rank
        self._ranks = ranks
        self._engine = engine
        self._models: list[nn.Module] = []
        self._seen: dict[str, Any] = {}

    # -- data ------------------------------------------------------------------------------------

    def batch(self, step: int, *shape: int, shared: bool = False) -> Tensor:
        """Return this rank's rows of a step's random batch, each of `shape`, by default (5,).

        If `shared`, all ranks get the same rows, and the plain run no others.
        """
        generator = torch.Generator().manual_seed(step)
        whole = torch.randn(ROWS, *(shape or (5,)), generator=generator, dtype=torch.float64)
        whole = whole.to(torch.get_default_dtype())
        return whole[: ROWS // 2] if shared else self.rows(whole)

    def batches(self, steps: int, *shape: int, shared: bool = False) -> Iterable[Tensor]:
        """Yield the batches of so many steps."""
        return (self.batch(step, *shape, shared=shared) for step in range(steps))

    def rows(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a batch that is given as a whole."""
        return whole.chunk(self._ranks)[self.rank]

    # -- the engine ------------------------------------------------------------------------------

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[nn.Module], Optimizer] = sgd,
        *,
        blocks: tuple[type[nn.Module], ...] = (Block,),
        **options: Any,
    ) -> tuple[Any, Any]:
        """Put a model under the engine, and give it an optimizer; return both, as the engine wants them used.

        Args:
            optimizer: makes an optimizer of a model when the engine's documentation says so; or an optimizer that is there
                already.
            blocks: the classes of modules that are units, where the engine has units; the rest is one more unit.
            options: the fields of :class:`~compare.engines.Options`.
        """
        prepared, optimizer = self._engine.prepare(model, optimizer, blocks, Options(**options))
        self._models.append(prepared)
        return prepared, optimizer

    def create(
        self,
        make: Callable[[], nn.Module],
        optimizer: Callable[[nn.Module], Optimizer] = sgd,
        *,
        blocks: tuple[type[nn.Module], ...] = (Block,),
        file: str | None = None,
    ) -> tuple[Any, Any]:
        """Make a model on the device meta and put it under the engine, as :meth:`prepare` does a model with values.

        Args:
            make: makes the model.
            optimizer: makes an optimizer of it.
            blocks: as for :meth:`prepare`.
            file: has its state dict, by ``torch.save``; without one its values are those that ``reset_parameters`` draws.
        """
        prepared, made = self._engine.create(make, optimizer, blocks, file)
        self._models.append(prepared)
        return prepared, made

    def backward(self, loss: Tensor, model: nn.Module, **arguments: Any) -> None:
        """Call ``loss.backward()``, or what the engine has in place of it."""
        self._engine.backward(loss, model, **arguments)

    def train(self, model: nn.Module, optimizer: Any, x: Tensor) -> None:
        """Make a step in which nothing is peculiar."""
        self.backward(loss_of(model(x)), model)
        optimizer.step()
        optimizer.zero_grad()

    def unwrapped(self, model: nn.Module) -> Any:
        """Return what attributes and state dicts are asked of: ``model.module`` if the engine's wrapper does not pass them on."""
        return self._engine.unwrapped(model)

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return the engine's context in which backwards only accumulate."""
        return self._engine.no_sync(model)

    def clip(self, model: nn.Module, limit: float) -> None:
        """Clip by the norm of all gradients, by the engine's own call. Tell :meth:`prepare` the limit, too."""
        self._engine.clip(model, limit)

    def state_dict(self, model: nn.Module, offload: bool = False) -> dict[str, Any]:
        """Return the full state dict on rank 0, by the engine's own call, moved to the CPU if `offload`. Call on all ranks."""
        return self._engine.state_dict(model, offload)

    # -- what is compared ------------------------------------------------------------------------

    def see(self, name: str, value: Any) -> None:
        """Note a number, a string, a plain tensor or a list of such; what a rank notes must be what the plain run does."""
        self._seen[name] = value.detach().clone() if isinstance(value, Tensor) else value

    def also(self, model: nn.Module) -> None:
        """Compare the parameters of this model, too: a copy of a prepared one."""
        self._models.append(model)

    def result(self) -> dict[str, Any]:
        """Return all that is compared, as plain tensors. Call on all ranks."""
        return {"seen": self._seen, "models": [self._engine.parameters(model) for model in self._models]}
