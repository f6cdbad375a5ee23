"""A model with parameters of all odd kinds, optimizers, and comparison of them with those of a plain model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from tests.compat.harness import ATOL, RTOL, Pair, average_grads, batch, plain_backward, whole
from tests.support.marks import exhaustive
from torch_shard.shard_tensor.spec import shard_of_full
from torch_shard.shard_tensor.tensor import ShardTensor

O = torch.optim
COUNTERS = {"step", "mu_product", "eta", "mu"}
"""State that belongs to a parameter but does not have its shape: whole, and plain, on every rank."""


class Odd(nn.Module):
    """Sizes that no number of ranks divides; some ranks hold nothing of the small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.late = nn.Linear(7, 7).requires_grad_(False)  # for tests that unfreeze it
        self.up = nn.Linear(7, 11)
        self.head = nn.Linear(11, 3)
        self.turned = nn.Parameter(torch.randn(3, 5).t())  # strides that are not those of its shape
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.column = nn.Parameter(torch.randn(3, 1))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.extra = nn.Parameter(torch.randn(3))
        self.leave_out = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skip = torch.tanh(self.inp(x)), x @ self.turned * self.frozen
        x = self.head(torch.tanh(self.up(x + self.late(x)))) * self.scale
        x = x + skip + self.one + x @ self.column + self.nothing.sum()
        return x if self.leave_out else x + self.extra.sin()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def by_ndim(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups that divide every unit between them: weight decay for matrices only."""
    parameters = trainable(model)
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


class Descent(O.Optimizer):
    """Gradient descent of a user's own, of no kind; to be varied, and declared."""

    def __init__(self, params: Any, lr: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)
        return loss

    def begin(self, group: dict[str, Any]) -> None:
        """Before the parameters of a group."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"])


class Bare:
    """Momentum, as no torch.optim.Optimizer, so that torch's step hooks don't know it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(params), "lr": lr}]
        self.state: dict[Any, Any] = {}

    def zero_grad(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                own = self.state.setdefault(p, {"sum": torch.zeros_like(p)})
                own["sum"].add_(p.grad)
                p.sub_(own["sum"], alpha=self.param_groups[0]["lr"])


MAKE = {
    "SGD": lambda m: O.SGD(by_ndim(m), lr=0.1, momentum=0.9),
    "AdamW": lambda m: O.AdamW(by_ndim(m), lr=0.01),
    "AdamW foreach": lambda m: O.AdamW(by_ndim(m), lr=0.01, foreach=True),
    "AdamW fused": lambda m: O.AdamW(by_ndim(m), lr=0.01, fused=True),
    "NAdam": lambda m: O.NAdam(by_ndim(m), lr=0.01),
    "ASGD": lambda m: O.ASGD(by_ndim(m), lr=0.05, t0=1),
}
mostly_sgd = pytest.mark.parametrize("name", ["SGD", *exhaustive("AdamW", "AdamW foreach", "AdamW fused")])
mostly_adamw = pytest.mark.parametrize("name", ["AdamW", *exhaustive("SGD", "AdamW foreach", "AdamW fused")])


def close(actual: Any, expected: Any, what: str, rtol: float = RTOL, atol: float = ATOL) -> None:
    """Compare with a plain tensor; of a ShardTensor this rank's slice. Not collective."""
    if isinstance(actual, ShardTensor):
        assert actual.shape == expected.shape, what
        expected, actual = shard_of_full(expected.detach(), actual._spec), actual.to_local()
    torch.testing.assert_close(actual, expected.detach(), rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def _used(state: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.count_nonzero() for value in state.values())


def same_optimizers(
    ours: Any, theirs: Any, rtol: float = RTOL, atol: float = ATOL, full: bool = False, failed: bool = False
) -> None:
    """Assert that groups, their parameters and the state of each are alike, in kind and value.

    Each rank looks at its own slices; with `full` at the whole (collective). After a step that `failed`, state that the
    plain optimizer has initialised, but not used, may be missing: the next step makes it.
    """
    assert len(ours.param_groups) == len(theirs.param_groups)
    assert failed or len(ours.state) == len(theirs.state)
    for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert group.keys() == other.keys()
        for key in group.keys() - {"params"}:
            torch.testing.assert_close(group[key], other[key], rtol=0, atol=0)
        for p, q in zip(group["params"], other["params"], strict=True):
            name = p._spec.name
            close(whole(p) if full else p, q, name, rtol, atol)
            # .get, because the state is a defaultdict.
            found, expected = ours.state.get(p), theirs.state.get(q)
            if failed and not found and expected is not None and not _used(expected):
                continue
            assert (found is None) == (expected is None), name
            if expected is None:
                continue
            assert found.keys() == expected.keys(), name
            for key, value in expected.items():
                what = f"{key} of {name}"
                if not isinstance(value, torch.Tensor):
                    assert type(found[key]) is type(value) and found[key] == value, what
                    continue
                kind = torch.Tensor if key in COUNTERS else ShardTensor
                assert type(found[key]) is kind and found[key].shape == value.shape, what
                close(whole(found[key]) if full else found[key], value, what, rtol, atol)


def in_strides_of(p: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A plain tensor laid out as the parameter is.

    torch's fused CPU kernels go through memory without a look at the strides: on a plain model a contiguous gradient of
    a transposed parameter is added to other elements than its own. (On a sharded one it is right.)
    """
    return torch.empty_strided(p.shape, p.stride(), dtype=p.dtype).copy_(value)


def copy_grads(model: nn.Module, plain: nn.Module) -> None:
    """Give the plain model the sharded one's gradients, so that nothing but the step can differ. Collective."""
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        q.grad = None if p.grad is None else whole(p.grad)


def go(pair: Pair, start: int, steps: int = 1) -> None:
    """Steps of both; afterwards everything is compared."""
    for step in range(start, start + steps):
        for model in (pair.model, pair.plain):
            plain_backward(model, batch(pair.rank, step))
        average_grads(pair.plain)
        pair.update()
    pair.check()
    same_optimizers(pair.optimizer, pair.plain_optimizer)


def both(pair: Pair) -> list[tuple[nn.Module, Any]]:
    """The sharded and the plain model, each with its optimizer."""
    return [(pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer)]


def backward_both(pair: Pair, step: int) -> None:
    """A backward of both with this rank's batch of the step. Collective."""
    for model in (pair.model, pair.plain):
        plain_backward(model, batch(pair.rank, step))
    average_grads(pair.plain)


@contextlib.contextmanager
def step_hooks(
    optimizers: Sequence[Any],
    where: str,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """Hooks of these optimizers, or of all, which then only look at these."""

    def only(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda o, args, kwargs: hook(o, args, kwargs) if any(o is known for known in optimizers) else None

    handles: list[Any] = []
    for hook, kind in ((before, "pre"), (after, "post")):
        if hook is not None and where == "global":
            handles.append(getattr(torch_optimizer, f"register_optimizer_step_{kind}_hook")(only(hook)))
        elif hook is not None:
            handles += [getattr(o, f"register_step_{kind}_hook")(hook) for o in optimizers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
