"""What one rank does alone, as a DDP program may, and what is done to leaves: neither may change what is trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_shard
from tests.compat.harness import MLP, Block, Pair, batch, loss_of, plain_backward, train_both
from tests.support.marks import seldom
from tests.support.ranks import ranks

WIDTH = 5


class Logs(Block):
    """Rank 0 looks at what it returns, without detaching it."""

    def __init__(self, who: int | None) -> None:
        super().__init__(WIDTH)
        self.who, self.rank = who, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.who in (None, self.rank):
            self.seen = (x * self.up.weight.mean()).norm().item()
        return x


@pytest.mark.parametrize("who", [0, *seldom(None)])
@ranks(2, exhaustive=(3,))
def test_a_block_that_one_rank_logs_from_trains_like_plain(rank, world_size, who):
    pair = Pair(
        lambda: nn.Sequential(*(Logs(who) for _ in range(4)), nn.Linear(WIDTH, 3)), rank, world_size, unit_bytes=300
    )
    for model in (pair.model, pair.plain):
        for block in model[:4]:
            block.rank = rank
    for step in range(4):
        pair.step(plain_backward, batch(rank, step))
        with torch.no_grad():
            pair.each(lambda m, x: m(x), batch(rank, step))
    pair.check()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Block(WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for i in order:
            x = self.experts[i](x)
        return self.head(x)


@ranks(2, exhaustive=(3,))
def test_replicated_units_that_only_some_ranks_use_train_like_plain(rank, world_size):
    pair = Pair(Experts, rank, world_size, strategy="no_shard", units=[Block])
    orders = [[[0], [1]], [[1], [0]], [[0, 1], [1, 2]], [[2, 1, 0], [0, 1, 2]], [[2], [2, 0]]]
    for step, order in enumerate(orders):
        mine = order[rank % 2]
        pair.step(lambda m, x, mine: loss_of(m(x, mine)).backward(), batch(rank, step), mine)
    pair.check()


@pytest.mark.parametrize("how", ["half", *seldom("data")])
@ranks(2)
def test_values_of_another_dtype_inside_gathered_leave_training_as_it_was(rank, world_size, how):
    pair = Pair(MLP, rank, world_size)
    pair.step(plain_backward, batch(rank, 0))
    with pair.engine.gathered():
        if how == "half":
            pair.model.half()
        else:
            pair.model.head.weight.data = torch.zeros(2, 2)
    pair.train(*range(1, 4))


@ranks(2)
def test_a_parameter_unfrozen_before_gathered_on_one_rank_trains_on_all(rank, world_size):
    def build() -> nn.Module:
        model = MLP()
        model.blocks[1].requires_grad_(False)
        return model

    pair = Pair(build, rank, world_size, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    pair.step(plain_backward, batch(rank, 0))
    for model in (pair.model, pair.plain):
        model.blocks[1].requires_grad_(True)
    with pair.engine.gathered(ranks=0):
        pass
    pair.train(*range(1, 3))


@ranks(3)
def test_gradients_in_low_precision_are_divided_by_the_number_of_ranks_exactly(rank, world_size):
    model = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    torch_shard.shard(model, timeout=20.0)
    x = torch.arange(1.0, 65.0).to(torch.bfloat16).view(1, 64)
    model(x).backward(torch.ones(1, 64, dtype=torch.bfloat16))
    expected = (
        torch.stack([x * (1 / 3)] * 3).sum(dim=0).expand(64, 64)
    )  # a third as a number is not rounded to bfloat16
    rounded = torch.stack([x * torch.full((1, 64), 1 / 3, dtype=torch.bfloat16)] * 3).sum(dim=0)
    assert not torch.equal(expected, rounded.expand(64, 64))
    assert torch.equal(model.weight.grad.full_tensor(), expected)


@ranks(2)
def test_a_hook_registered_on_a_parameter_inside_forward_is_called(rank, world_size):
    class Registers(Block):
        called = 0
        handle = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.handle is None:
                self.handle = self.up.weight.register_post_accumulate_grad_hook(self.count)
            return super().forward(x)

        def count(self, param: torch.Tensor) -> None:
            assert param.grad is not None
            self.called += 1

    pair = Pair(lambda: nn.Sequential(Registers(WIDTH), nn.Linear(WIDTH, 3)), rank, world_size)
    for step in range(2):
        pair.step(plain_backward, batch(rank, step))
    assert pair.model[0].called == pair.plain[0].called == 2


class Scratch(torch.autograd.Function):
    """Its gradient lies in memory that it uses again."""

    memory = torch.zeros(WIDTH, dtype=torch.float64)

    @staticmethod
    def forward(ctx, x, bias):
        return x + bias

    @staticmethod
    def backward(ctx, grad):
        Scratch.memory.copy_(grad.sum(0))
        return grad, Scratch.memory


@ranks(2)
def test_a_gradient_in_memory_that_is_used_again_trains_like_plain(rank, world_size):
    class Biases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.biases = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for bias in self.biases:
                x = Scratch.apply(torch.tanh(x), bias)
            return x

    train_both(Biases, rank, world_size)
