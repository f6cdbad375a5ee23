"""The transforms of torch.func with respect to inputs go through a sharded model, with the results of the plain one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_map

import torch_shard
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ShardError

X, V = (torch.linspace(-1, 1, 20).view(5, 4).roll(n) for n in (0, 3))


class Shown(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    def forward(self, x):
        return self.weight[:]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Sigmoid())
        self.head = nn.Linear(8, 3)
        self.shown = Shown()

    def forward(self, x):
        return self.head(self.body(x)) + x[..., :1]


def loss(model):
    return lambda x: model(x).square().sum()


TRANSFORMS = {
    "grad": lambda m: grad(loss(m))(X),
    "vjp": lambda m: vjp(m, X)[1](V[:, :3])[0],
    "jvp": lambda m: jvp(m, (X,), (V,)),
    "jacrev": lambda m: jacrev(m)(X),
    "jacfwd": lambda m: jacfwd(m)(X),
    "vmap": lambda m: vmap(m)(X),
    "vmap of grad": lambda m: vmap(grad(loss(m)))(X),
    "grad of grad": lambda m: grad(lambda x: grad(loss(m))(x).square().sum())(X),
    "hessian": lambda m: hessian(loss(m))(X[0]),
    "grad of a module that returns its weight": lambda m: grad(lambda x: loss(m)(x) + (m.shown(x) * x).sum())(X),
    "vmap of a module that returns its weight": lambda m: vmap(m.shown, out_dims=None)(X) * 1,
    "grad beside modules": lambda m: grad(lambda x: (x @ m.body[0].weight.t()).square().sum())(X),
    "vmap beside modules": lambda m: vmap(lambda x: m.body[0].weight @ x)(X),
}


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def sharded(strategy="full_shard"):
    model = Net()
    return model, torch_shard.shard(model, strategy=strategy, units=[nn.Linear])


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
@pytest.mark.parametrize("recording", [True, False], ids=["recording", "no_grad"])
@ranks(2)
def test_each_gives_the_plain_result_and_what_it_has_gathered_goes(rank, world_size, recording, strategy):
    plain, (model, engine) = Net(), sharded(strategy)
    for name, transform in TRANSFORMS.items():
        with torch.set_grad_enabled(recording):
            expected = transform(plain)
            found = transform(model)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        if recording:
            loss(model)(X).backward()  # which ends what the graph above kept
    assert strategy != "full_shard" or engine.memory_summary()["gathered"] == 0


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
@ranks(2)
def test_losses_made_of_them_train_as_plain_ones_do(rank, world_size, strategy):
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            total = loss(model)(X) + grad(loss(model))(X).square().mean() + vmap(model)(X).mean()
            total = total + sum(t.square().mean() for t in jvp(model, (X,), (V,)))
            y, pull = vjp(model, X)
            (total + pull(torch.ones_like(y))[0].square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                grad(loss(model))(X)
        return {name: full(p.detach()) for name, p in model.named_parameters()}

    torch.testing.assert_close(train(sharded(strategy)[0]), train(Net()), rtol=1e-4, atol=1e-5)


@ranks(2)
def test_functional_call_inside_them_has_the_gradients_of_the_values_it_is_given(rank, world_size):
    plain, (model, _) = Net(), sharded()
    values = {name: p.detach() for name, p in plain.named_parameters()}

    def per_sample(net, given):
        return vmap(grad(lambda own, x: functional_call(net, own, (x,)).square().sum()), (None, 0))(given, X)

    for given in (values, {"head.weight": values["head.weight"]}):
        torch.testing.assert_close(per_sample(model, given), per_sample(plain, given), rtol=1e-4, atol=1e-5)
    with pytest.raises(ShardError, match="needs the full parameter"):
        grad(lambda own: functional_call(model, own, (X,)).sum())(
            tree_map(torch.Tensor.detach, dict(model.named_parameters()))
        )


@ranks(2)
def test_after_an_error_inside_one_training_goes_on(rank, world_size):
    model, _ = sharded()

    def fail(x):
        model(x)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        grad(fail)(X)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        vmap(model)(torch.ones(5, 3))
    loss(model)(X).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    grad(loss(model))(X)
