"""Activation offload on the GPU: the same bits, memory that is free between forward and backward, copies beside compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torch_shard
from tests.gpu.models import GPT, VOCABULARY, Block, tokens
from tests.support.ranks import ranks
from torch_shard import ShardConfig
from torch_shard.activation_checkpointing import checkpointed_layers, offload_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none here")

BLOCKS, WIDTH, SIZE, LENGTH = 6, 192, 8, 128
INPUT = SIZE * LENGTH * WIDTH * 4  # bytes


def made(device: torch.device, offloaded: bool, **settings: Any) -> tuple[GPT, Any]:
    torch.manual_seed(0)
    model = GPT(width=WIDTH, blocks=BLOCKS, heads=4, length=LENGTH).to(device)
    config = ShardConfig(units=(Block,), timeout=60.0, **settings)
    with checkpointed_layers(model, (Block,), config.units, offloaded):
        return model, torch_shard.shard(model, config)


def loss_of(model: GPT, rank: int, step: int, device: torch.device) -> torch.Tensor:
    x = tokens(rank, step, device, size=SIZE, length=LENGTH)
    return F.cross_entropy(model(x)[:, :-1].reshape(-1, VOCABULARY), x[:, 1:].reshape(-1))


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@ranks(1, 2, timeout=300)
def test_training_gives_the_same_bits_and_takes_the_same_buffers_in_every_step(rank, device, strategy):
    found, held = {}, []
    for offloaded in (False, True):
        model, _ = made(device, offloaded, strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(8):
            # Nothing waits for the device between steps, so that buffers are taken while copies from them may be under way.
            losses.append(loss_of(model, rank, step, device))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1] = losses[-1].detach()
            offload = offload_of(model)
            if offload is not None:
                held.append(offload.host_bytes)
                assert offload.late == 0
        found[offloaded] = torch.stack(losses)
    assert torch.equal(found[True], found[False])
    assert len(set(held)) == 1 and held[0] >= BLOCKS * INPUT


@ranks(1, timeout=300)
def test_inputs_are_in_pinned_memory_and_not_on_the_device(rank, device):
    between = {}
    for offloaded in (False, True):
        model, _ = made(device, offloaded)
        loss_of(model, rank, 0, device).backward()
        model.zero_grad()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        loss = loss_of(model, rank, 1, device)
        between[offloaded] = torch.cuda.memory_allocated(device) - before
        offload = offload_of(model)
        if offload is not None:
            assert all(copy.host.is_pinned() for copy in offload._copies.values())
            assert offload.host_bytes_in_use >= BLOCKS * INPUT
        loss.backward()
    assert between[False] - between[True] >= (BLOCKS - 1) * INPUT


@ranks(1, timeout=300)
def test_a_graph_that_is_dropped_with_copies_under_way_harms_nobody(rank, device):
    """Its memory on the device goes to the next forward, and its buffers do, while the copies may still be running."""
    found = {}
    for offloaded in (False, True):
        model, _ = made(device, offloaded)
        losses = []
        for step in range(4):
            for _ in range(3):
                loss_of(model, rank, step, device)
            loss = loss_of(model, rank, step, device)
            loss.backward(retain_graph=True)
            loss.backward()
            losses += [loss.detach(), *(p.grad.full_tensor().norm() for p in model.parameters())]
            model.zero_grad()
        found[offloaded] = torch.stack(losses)
    assert torch.equal(found[True], found[False])
