"""Gradients that reach parameters past their modules' forwards, or not at all."""

import pytest
import torch
from torch import nn

from tests.compat.harness import loss_of, train_both
from tests.support.ranks import ranks
from torch_shard.unit.held_gradients import HeldGradients, is_unshared, least_references


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


@pytest.mark.parametrize("view", [False, True])
def test_whether_others_hold_a_gradient_is_told_without_another_backward(view, monkeypatch):
    """For each gradient it would cost more than the launches that are saved."""
    least_references(view)  # set-up runs one for each kind
    backward, begun, answers = torch.autograd.backward, [], []
    monkeypatch.setattr(torch.autograd, "backward", lambda *args, **rest: begun.append(1) or backward(*args, **rest))
    leaf = torch.zeros(3, 2, requires_grad=True)
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    node.register_prehook(lambda grads: answers.append(is_unshared(grads)))
    (2 * (leaf.t() if view else leaf)).sum().backward()
    assert answers == [True] and len(begun) == 1


@pytest.mark.parametrize(("numel", "is_short"), [(3, True), (1 << 15, False)])
def test_short_padding_is_zeroed_along_with_gradients_that_are_copied(numel, is_short):
    """Long padding is left to a kernel of its own, because copying zeros would read memory."""
    flat = torch.full((4 + numel,), 9.0)
    held = HeldGradients([(4, 4 + numel)])
    held.hold(0, torch.ones(4), adds=False)
    assert held.copy_to(flat, [flat[:4]], factor=1.0, whole=True) == is_short
    assert flat[:4].eq(1).all() and flat[4:].eq(0 if is_short else 9).all()
