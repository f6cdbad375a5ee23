"""Plain training, without any engine, on the batches of all ranks: what sharded training is compared with."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .model import SMALL, batch, make, mean_loss


@dataclass(frozen=True)
class Recipe:
    """A recipe for training a model.

    Attributes:
        optimizer: ``"SGD"`` or ``"AdamW"``.
        compute: the dtype of forward and backward; parameters, gradients and optimizer state are fp32.
        steps: the number of optimizer steps.
        micro: the micro-batches of a rank in each step.
        max_norm: the limit of the gradients' norm; None leaves them as they are.
        gradient_scale: a factor on all gradients, 1 but where a wrong scale is to be known when it is seen.
    """

    optimizer: str = "SGD"
    compute: torch.dtype = torch.float32
    steps: int = 4
    micro: int = 1
    max_norm: float | None = None
    gradient_scale: float = 1.0


@dataclass(frozen=True)
class Trained:
    """The outcome of a training: the mean loss and the gradients' norm of each step, and parameters before and after by name."""

    losses: Sequence[float]
    norms: Sequence[float]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def optimizer_of(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """Return the recipe's optimizer.

    AdamW divides the gradient's size out, and would not notice a wrong one. With an `eps` of about the gradients' size it does.
    """
    if recipe.optimizer == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=0.02, weight_decay=0.1)


def train_plainly(recipe: Recipe, device: torch.device, world: int) -> Trained:
    """Train on the batches of `world` ranks, one after the other. Not collective.

    In a low `compute` dtype a copy of the parameters in that dtype runs forward and backward, and its gradients are averaged in
    fp32: the mixed precision of the engine with ``reduce_dtype=torch.float32``.
    """
    model = make(SMALL, device)
    low = model if recipe.compute is torch.float32 else copy.deepcopy(model).to(recipe.compute)
    optimizer = optimizer_of(recipe, model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses, norms = [], []
    share = 1.0 / (world * recipe.micro)
    for step in range(recipe.steps):
        total = 0.0
        grads = [torch.zeros_like(p) for p in model.parameters()]
        with torch.no_grad():
            for p, master in zip(low.parameters(), model.parameters(), strict=True):
                p.copy_(master)
        for rank in range(world):
            for micro in range(recipe.micro):
                loss = mean_loss(low, batch(SMALL, device, step, rank, micro))
                found = torch.autograd.grad(loss, list(low.parameters()))
                total += share * loss.item()
                for grad, own in zip(grads, found, strict=True):
                    grad.add_(own.float(), alpha=share * recipe.gradient_scale)
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad
        losses.append(total)
        limit = math.inf if recipe.max_norm is None else recipe.max_norm
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
    return Trained(losses, norms, before, {name: p.detach() for name, p in model.named_parameters()})


def distance(found: Trained, plain: Trained) -> dict[str, float]:
    """Return how far a training is from the plain one, as relative errors by what was compared.

    ``update`` is relative to a parameter's change, for the worst parameter. Relative to values, a wrong update would look small.
    ``loss`` is relative to the change of the loss over the training, ``norm`` to the gradients' norm.
    """
    change = max(plain.losses) - min(plain.losses)
    errors = {
        "update": [
            ((found.after[name] - value).norm() / (value - plain.before[name]).norm()).item()
            for name, value in plain.after.items()
        ],
        "loss": [abs(a - b) / change for a, b in zip(found.losses, plain.losses, strict=True)],
        "norm": [abs(a - b) / b for a, b in zip(found.norms, plain.norms, strict=True)],
    }
    # A NaN is the largest error of all, which max() would not know.
    return {
        what: max((e if math.isfinite(e) else math.inf for e in each), default=0.0) for what, each in errors.items()
    }
