"""Gradients that reach parameters past their modules' forwards, or not at all."""

import torch
from torch import nn

from tests.compat.harness import loss_of, train_both
from tests.support.ranks import ranks


class WithoutBias(torch.autograd.Function):
    """A linear function without a derivative by its bias."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, None


@ranks(2)
def test_norms_of_many_parameters_in_a_loss(rank, world_size):
    def run(model, x):
        norms = torch._foreach_norm(list(model.parameters()))
        (loss_of(model(x)) + sum(norms) * (rank + 1) + torch._foreach_norm([*model.parameters(), x], 3)[1]).backward()

    train_both(lambda: nn.Linear(5, 5), rank, world_size, run=run)


@ranks(2)
def test_a_function_without_a_derivative_by_a_parameter_leaves_it_without_a_gradient(rank, world_size):
    def run(model, x):
        loss_of(WithoutBias.apply(x, model.weight, model.bias)).backward()
        assert model.bias.grad is None

    train_both(lambda: nn.Linear(5, 5), rank, world_size, run=run)
