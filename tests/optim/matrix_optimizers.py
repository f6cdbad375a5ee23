"""Optimizers that need whole matrices, torch's, transformers' and two declared here, and comparison with a plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torch_shard.optim
from tests.compat.harness import ATOL, RTOL, Pair, batch, plain_backward, same_params
from tests.optim.helpers import Descent, O, copy_grads
from torch_shard.shard_tensor.tensor import ShardTensor


class Shampoo(Descent):
    """Preconditions every dimension with a root of the sum of the gradients' products; counts its steps in the group.

    Fails at matrices of the shape `fails_at`.
    """

    fails_at: tuple[int, ...] | None = None

    def __init__(self, params: Any, lr: float = 0.05, eps: float = 1e-3) -> None:
        super().__init__(params, lr, eps=eps, rounds=0)

    def begin(self, group: dict[str, Any]) -> None:
        group["rounds"] += 1

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        if p.shape == self.fails_at:
            raise ArithmeticError("no decomposition")
        grad, state = p.grad, self.state[p]
        assert grad is not None
        if not state:
            state["step"] = 0
            state["factors"] = [group["eps"] * torch.eye(n, dtype=p.dtype) for n in grad.shape]
        state["step"] += 1
        update = grad
        for dim, factor in enumerate(state["factors"]):
            rows = grad.movedim(dim, 0).reshape(grad.shape[dim], -1)
            factor += rows @ rows.T
            values, vectors = torch.linalg.eigh(factor)
            root = vectors @ torch.diag(values.clamp_min(group["eps"]) ** (-0.5 / grad.dim())) @ vectors.T
            update = torch.tensordot(root, update, dims=([1], [dim])).movedim(0, dim)
        p.add_(update, alpha=-group["lr"])


class Soap(Descent):
    """Adam in the eigenbasis of Shampoo's factors, which is renewed every other step; sets ``p.data``, as older code does."""

    def __init__(self, params: Any, lr: float = 0.02, weight_decay: float = 0.1) -> None:
        super().__init__(params, lr, betas=(0.9, 0.95), weight_decay=weight_decay)

    def update(self, p: Any, group: dict[str, Any]) -> None:
        (first, second), state, sizes = group["betas"], self.state[p], p.grad.shape
        if "step" not in state:
            state.update(step=torch.tensor(0.0), mean=torch.zeros_like(p), square=torch.zeros_like(p))
            state["GG"] = [torch.zeros(n, n, dtype=p.dtype) for n in sizes]
            state["Q"] = [torch.eye(n, dtype=p.dtype) for n in sizes]
        state["step"] += 1
        for dim, factor in enumerate(state["GG"]):
            rows = p.grad.movedim(dim, 0).reshape(sizes[dim], -1)
            factor.lerp_(rows @ rows.T, 1 - second)
        if state["step"] % 2 == 1:
            state["Q"] = [torch.linalg.eigh(factor)[1] for factor in state["GG"]]
        state["mean"].lerp_(p.grad, 1 - first)
        turned = self.turn(p.grad, state["Q"], 0)
        state["square"].mul_(second).addcmul_(turned, turned, value=1 - second)
        update = self.turn(state["mean"], state["Q"], 0) / (state["square"].sqrt() + 1e-6)
        p.data = p.data * (1 - group["lr"] * group["weight_decay"])
        p.data.add_(self.turn(update, state["Q"], 1), alpha=-group["lr"])

    @staticmethod
    def turn(value: torch.Tensor, bases: list[torch.Tensor], side: int) -> torch.Tensor:
        for dim, basis in enumerate(bases):
            value = torch.tensordot(basis, value, dims=([side], [dim])).movedim(0, dim)
        return value


for declared in (Shampoo, Soap):
    torch_shard.optim.register(declared, kind="matrix")


def transformers_adafactor(params: Any, **options: Any) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor(params, **options)


MAKE: dict[str, Callable[[Any], Any]] = {
    "Muon": lambda p: O.Muon(p, lr=0.02),
    "Muon adamw rms": lambda p: O.Muon(p, lr=0.02, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    "Adafactor": lambda p: O.Adafactor(p, lr=0.02, weight_decay=0.1),
    "Adafactor foreach": lambda p: O.Adafactor(p, lr=0.02, foreach=True, maximize=True),
    "transformers relative": lambda p: transformers_adafactor(p, warmup_init=True),
    "transformers fixed": lambda p: transformers_adafactor(
        p, lr=0.01, relative_step=False, scale_parameter=False, beta1=0.9, weight_decay=0.1
    ),
    "Shampoo": Shampoo,
    "Soap": Soap,
}


def takes(name: str, p: torch.Tensor) -> bool:
    """Whether the optimizer can step on it unsharded: all but Shampoo and Soap divide by the number of elements."""
    return p.numel() > 0 and (p.dim() == 2 or not name.startswith("Muon"))


def maker(name: str) -> Callable[[nn.Module], Any]:
    """Makes the optimizer for a model, with all parameters that it can take, frozen ones too."""
    return lambda model: MAKE[name]([p for p in model.parameters() if takes(name, p)])


def gradients(pair: Pair, step: int, without: str = "") -> None:
    """One backward on both. The plain model gets the sharded one's gradients, bit for bit: Muon rounds to bfloat16, which
    makes of a difference in the last bit one of half a percent."""
    for model in (pair.model, pair.plain):
        model.zero_grad()
        plain_backward(model, batch(pair.rank, step))
    copy_grads(pair.model, pair.plain)
    if without:
        for model in (pair.model, pair.plain):
            model.get_parameter(without).grad = None


def advance(pair: Pair, steps: range, without: str = "") -> None:
    for step in steps:
        gradients(pair, step, without)
        pair.optimizer.step()
        pair.plain_optimizer.step()
        same_params(pair.model, pair.plain)


def same_values(found: Any, wanted: Any, where: str) -> None:
    if isinstance(wanted, torch.Tensor):
        assert type(found) is torch.Tensor and found.dtype == wanted.dtype, where
        assert found.stride() == wanted.stride(), where
        torch.testing.assert_close(found, wanted, rtol=RTOL, atol=ATOL, msg=lambda text: f"{where}: {text}")
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key, value in wanted.items():
            same_values(found[key], value, f"{where} {key}")
    elif isinstance(wanted, (list, tuple)):
        assert type(found) is type(wanted) and len(found) == len(wanted), where
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            same_values(one, other, f"{where}[{i}]")
    else:
        assert type(found) is type(wanted) and found == wanted, where


def same_state(pair: Pair) -> None:
    """The whole state by name is that of the plain optimizer; on each rank there is a part of it. Collective."""
    names = {id(p): name for name, p in pair.plain.named_parameters()}
    wanted = {names[id(p)]: own for p, own in pair.plain_optimizer.state.items()}
    found = pair.engine.optim_state_dict(pair.optimizer, rank0_only=False)
    same_values(dict(sorted(found["state"].items())), dict(sorted(wanted.items())), "state of")
    for group, other in zip(found["param_groups"], pair.plain_optimizer.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}
    for p, own in pair.optimizer.state.items():
        same_values(own, wanted[p._spec.name], p._spec.name)
        assert not any(isinstance(value, ShardTensor) for value in own.values())
