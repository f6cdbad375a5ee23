"""Backward does not gather what it doesn't need, also where use counts of memory don't tell."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import torch_shard
from tests.simulated.modes import ACCELERATOR
from tests.simulated.process_group import SimulatedGroup
from tests.simulated.simulation import group, simulated
from tests.support.ranks import ranks

WORDS, WIDTH, LAYERS, STEPS = 24, 8, 3, 4


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        for layer in self.layers:
            h = h + layer(h).relu()
        return h


def words(rank: int, step: int) -> torch.Tensor:
    return torch.arange(rank, rank + 6) + step


def uses_its_weight(module: nn.Embedding, args: Any, output: torch.Tensor) -> torch.Tensor:
    """A forward hook of which autograd saves memory of the weight, but not the parameter."""
    return output * module.weight.detach()[: len(output)]


def trained_plainly(hooked: bool) -> Tagger:
    torch.manual_seed(0)
    model = Tagger()
    if hooked:
        model.words.register_forward_hook(uses_its_weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.stack([model(words(rank, step)).square().mean() for rank in range(2)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("hooked", [False, True])
@ranks(2)
def test_an_embedding_is_gathered_again_only_for_code_of_the_users(rank, hooked):
    run, gathers = SimulatedGroup._run, []

    def counting(self: SimulatedGroup, name: str, *args: Any) -> Any:
        gathers.append("gather" in name)
        return run(self, name, *args)

    plain = trained_plainly(hooked)
    batches = [words(rank, step) for step in range(STEPS)]
    with simulated("early"):
        torch.manual_seed(0)
        with ACCELERATOR:
            model = Tagger()
        if hooked:
            model.words.register_forward_hook(uses_its_weight)
        torch_shard.shard(model, units=[nn.Embedding, nn.Linear], mesh=group())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in batches:
            with mock.patch.object(SimulatedGroup, "_run", counting):
                gathers.clear()
                loss = model(x.to(ACCELERATOR)).square().mean()
                in_forward = sum(gathers)
                loss.backward()
                in_backward = sum(gathers) - in_forward
            assert (in_forward, in_backward) == (1 + LAYERS, LAYERS - 1 + hooked)  # the last layer stays gathered
            optimizer.step()
            optimizer.zero_grad()
        found = {name: p.detach().full_tensor().cpu() for name, p in model.named_parameters()}
    for name, p in plain.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=1e-5, atol=1e-6)
