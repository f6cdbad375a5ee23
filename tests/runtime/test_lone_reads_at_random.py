"""Random programs in which ranks read the model alone anywhere give what plain training gives, or the error that is named.

Each rank has batches of its own; plain training, which stands for DDP, averages the gradients of all of them. One rank also puts
other weights into the model now and then, reads them alone, and puts those of before back; so do all together.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.support.ranks import ranks
from torch_shard.errors import DivergenceError

STRATEGIES = ("full_shard", "full_shard", "shard_grad_op", "shard_optim")
READS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "forward": lambda model, _: model(torch.ones(2, 6)),
    "part": lambda model, _: model[2](torch.ones(2, 6)),
    "norm": lambda model, _: model[1][0].weight.norm(),
    "row": lambda model, _: model[2][0].weight[1],
    "product": lambda model, _: torch.ones(3, 6) @ model[0][0].weight.T,
    "elements": lambda model, _: torch.zeros(10, 6) + model[1][0].weight,
    "state dict": lambda model, _: {key: value.clone().tolist() for key, value in model.state_dict().items()},
    "full state dict": lambda model, _: full_state_dict(model),
    "file": lambda model, _: file_of(model),
    "copy": lambda model, _: copy.deepcopy(model)(torch.ones(2, 6)),
    "file of a copy": lambda model, _: file_of(copy.deepcopy(model)),
    "file of the optimizer": lambda _, optimizer: file_of(optimizer),
}
# One rank alone reads it only where the others surely do something else, not where they are late or read alone themselves.
TOGETHER = {"full optimizer state": lambda model, optimizer: full_optimizer_state(model, optimizer)}


def net() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(3)))


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    engine = torch_shard.engine_of(model)
    return model.state_dict() if engine is None else engine.state_dict(form="full", rank0_only=False)


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    engine = torch_shard.engine_of(model)
    if engine is not None:
        return engine.optim_state_dict(optimizer, rank0_only=False)["state"]
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def file_of(source: nn.Module | torch.optim.Optimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def swap(model: nn.Module, plain: nn.Module, rng: random.Random, reads: Callable[[], None]) -> None:
    """Put other weights into some parameters of both models, call `reads`, and put those of before back."""
    pairs = [pair for pair in zip(model.parameters(), plain.parameters(), strict=True) if rng.random() < 0.7]
    before = [(p.detach().clone(), q.detach().clone()) for p, q in pairs]
    for _ in range(rng.randint(1, 2)):
        new = [q.detach() * rng.random() + rng.random() for _, q in pairs]
        for side in (0, 1):
            if rng.random() < 0.5 and pairs:
                torch._foreach_copy_([pair[side].data for pair in pairs], new)
            else:
                for pair, value in zip(pairs, new, strict=True):
                    pair[side].data.copy_(value)
        reads()
    for pair, values in zip(pairs, before, strict=True):
        for p, value in zip(pair, values, strict=True):
            p.data.copy_(value)


def program(seed: int, rank: int, world_size: int) -> int:
    """Run one program, and return how many of this rank's reads have met the error that the others have stepped."""
    shared = random.Random(seed)
    own = random.Random(f"{seed} {rank}")
    torch.manual_seed(seed)
    plain = net()
    model = net()
    model.load_state_dict(plain.state_dict())
    settings: dict[str, Any] = {"strategy": shared.choice(STRATEGIES), "prefetch": shared.randint(0, 2)}
    torch_shard.shard(model, units=["0", "1", "2"] if shared.random() < 0.7 else None, alone_after=0.05, **settings)
    pairs = [(each, torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.5)) for each in (model, plain)]
    readers = [other for other in range(world_size) if shared.random() < 0.6]
    late = 0

    def read(name: str) -> None:
        with torch.no_grad():
            torch.testing.assert_close(*({**READS, **TOGETHER}[name](*pair) for pair in pairs))

    def perhaps(between: bool = False, swaps: bool = False) -> None:
        nonlocal late
        if rank not in readers or own.random() < 0.5:
            return
        if swaps and rank == readers[0] and own.random() < 0.5:
            swap(model, plain, own, lambda: read(own.choice(list(READS))))
        # Of a copy whose original has changed elsewhere, a reader waits long for a rank that might still make the same copy.
        names = [name for name in READS if not (between and "copy" in name)]
        for _ in range(own.randint(1, 3)):
            name = own.choice(names)
            try:
                read(name)
            except DivergenceError as error:
                if not between or "has already made" not in str(error):
                    raise
                late += 1

    for step in range(shared.randint(2, 4)):
        generator = torch.Generator().manual_seed(seed * 100 + step)
        batches = [torch.randn(4, 6, generator=generator) for _ in range(world_size)]
        micro_batches, evaluates = shared.randint(1, 2), shared.random() < 0.4
        for micro_batch in range(micro_batches):
            perhaps(swaps=micro_batch == 0)
            loss = model(batches[rank]).square().mean()
            of_all = [plain(batch).square().mean() for batch in batches]
            torch.testing.assert_close(loss, of_all[rank])
            perhaps()
            loss.backward()
            (sum(of_all) / world_size).backward()
            perhaps(between=True)
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
        perhaps(swaps=True)
        if evaluates:
            read(shared.choice([*READS, *TOGETHER]))
        if shared.random() < 0.2:
            swap(model, plain, random.Random(seed), lambda: read("forward"))
    with torch.no_grad():
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.detach(), msg=name)
    return late


@ranks(2, exhaustive=(3,), timeout=60)
def test_a_few_programs(rank: int, world_size: int) -> None:
    for seed in range(8):
        program(seed, rank, world_size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(10))
@ranks(2, 3, 4, timeout=600)
def test_many_programs(rank: int, world_size: int, part: int) -> None:
    first = 10_000 * world_size + 100 * part  # no two of the 1000 programs have one seed
    late = torch.tensor([program(first + n, rank, world_size) for n in range({2: 60, 3: 25, 4: 15}[world_size])]).sum()
    dist.all_reduce(late)
    assert late > 0, "no read has met the error that the others have stepped"
