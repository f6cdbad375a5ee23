"""``print(p)`` shows a parameter's values, as plain torch does; ``repr(p)``, which debuggers ask for, what this rank has."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.runtime.test_lone_derived import batch, goes_on, made, train
from tests.support.marks import quick
from tests.support.ranks import ranks

TEXTS: dict[str, Callable[[nn.Module], str]] = {
    "a parameter": lambda m: str(m.first.weight),
    "an f-string": lambda m: f"{m.first.weight}",
    "a scalar": lambda m: f"{m.scale} {m.scale.detach()}",
    "values": lambda m: str(m.first.weight.detach()),
    "data": lambda m: f"{m.second.bias.data!s:}",
    "what was computed": torch.no_grad()(lambda m: str(m.first.weight * 2)),
    "numbers": lambda m: str(m.second.bias.tolist()),
    "a frozen parameter": lambda m: frozen(m.second.bias),
}


def frozen(param: torch.Tensor) -> str:
    text = str(param.requires_grad_(False))
    param.requires_grad_(True)  # one rank alone has frozen it
    return text


@pytest.mark.parametrize("text", quick(TEXTS, ["a parameter", "a scalar", "values"]))
@ranks(2, exhaustive=(3,))
def test_one_rank_and_all_print_what_plain_torch_prints(rank: int, text: str) -> None:
    sharded, engine, plain = made(alone_after=0.1)
    wanted = TEXTS[text](plain)
    if rank == 1:
        assert TEXTS[text](sharded) == wanted
    goes_on(sharded, engine, plain)
    assert TEXTS[text](sharded) == TEXTS[text](plain) != wanted


@ranks(2)
def test_a_hook_in_the_forward_and_one_in_backward_of_one_rank_print(rank: int) -> None:
    sharded, engine, plain = made()
    seen: dict[bool, list[str]] = {True: [], False: []}
    for model in (sharded, plain):

        def show(*args: Any, model: nn.Module = model) -> None:
            if rank == 0:
                seen[model is sharded].append(str(model.first.weight) + str(model.scale))

        model.second.register_forward_hook(show)
        model.second.register_full_backward_hook(show)
    goes_on(sharded, engine, plain)
    assert len(seen[True]) == (2 if rank == 0 else 0)
    for text, wanted in zip(seen[True], seen[False], strict=True):
        assert text == wanted


@ranks(2)
def test_repr_sends_nothing_and_says_which_part_it_shows(rank: int) -> None:
    sharded, engine, _ = made()
    dist.barrier()
    text = repr([sharded.first.weight])
    assert engine.statistics().lone_reads == 0
    assert text.startswith("[ShardTensor(first.weight, shape=(7, 5), dtype=torch.float32, device='cpu', rank")
    assert f"rank {rank} of 2 holds [" in text and ") of 35: tensor([" in text and text.endswith("requires_grad=True)]")
    dist.barrier()


@ranks(2)
def test_what_this_rank_can_not_read_is_printed_as_its_part(rank: int) -> None:
    sharded, engine, plain = made()
    sharded(batch()).square().mean().backward()
    assert str(sharded.first.weight.grad) == repr(sharded.first.weight.grad)  # gradients are not handed out
    if rank == 1:
        torch.optim.SGD(sharded.parameters(), lr=0.1).step()
    dist.barrier()
    if rank == 0:  # the other rank has stepped already
        assert str(sharded.first.weight) == repr(sharded.first.weight)
        torch.optim.SGD(sharded.parameters(), lr=0.1).step()
    sharded.zero_grad()
    train(plain)
    goes_on(sharded, engine, plain)
    sharded, _, _ = made(alone="error")
    assert str(sharded.first.weight) == repr(sharded.first.weight)


@ranks(2)
def test_edits_inside_gathered_are_printed_and_saved(rank: int) -> None:
    sharded, engine, plain = made()
    kept = sharded.first.weight
    with engine.gathered(write=True), torch.no_grad():
        for model in (sharded, plain):
            model.first.weight.mul_(3)
        assert str(kept.detach()) == str(plain.first.weight.detach())
        file = io.BytesIO()
        torch.save(kept, file)
    found = torch.load(io.BytesIO(file.getvalue()))
    torch.testing.assert_close(found, plain.first.weight)
