"""Several models, and optimizers of whole matrices: as without offload, bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_shard
from tests.offload.models import HALF, OFFLOADS, OPTIMIZERS, Model, Training, alike, chosen, inputs, loss_of
from tests.support.marks import one_at_a_time
from tests.support.ranks import ranks
from torch_shard import errors

DISKS = ("disk", "all on disk")


@pytest.mark.exhaustive
@one_at_a_time(
    of=["both", "each", "a half of each"],
    second=["offloaded, too", "on the device"],
    offload=OFFLOADS,
    optimizer=["AdamW", "SGD"],
)
@ranks(2, exhaustive=(1,))
def test_two_models(rank, tmp_path, offload, optimizer, of, second):
    def train(offload):
        models = [Model(), Model()]
        with torch.no_grad():
            for p in models[1].parameters():
                p.mul_(0.9)
        offloads = offload, offload if second == "offloaded, too" else None
        engines = [torch_shard.shard(m, offload=o) for m, o in zip(models, offloads, strict=True)]
        make = OPTIMIZERS[optimizer]
        if of == "each":
            optimizers = [make(m) for m in models]
        elif of == "both":
            optimizers = [make(nn.ModuleList(models))]
        else:
            optimizers = [make(nn.ModuleList([models[i].blocks[:2], models[1 - i].blocks[2:]])) for i in (0, 1)]
        seen = []
        for number in range(4):
            for turn, one in enumerate(optimizers):
                loss = loss_of(nn.Sequential(*models), inputs(rank, 10 * number + turn))
                loss.backward()
                seen.append(loss.item())
                one.step()
                for each in optimizers:
                    each.zero_grad()
        return seen, [e.state_dict(form="full") for e in engines]

    if offload in DISKS and of != "each":
        with pytest.raises(errors.ShardError, match="would keep its state in memory"):
            train(chosen(offload, tmp_path))
    else:
        alike(train, chosen(offload, tmp_path))


# -- optimizers of whole matrices -----------------------------------------------------------------------------------------


def muon(model):
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)


def adafactor(model):
    return torch.optim.Adafactor(model.parameters(), lr=0.02)


@one_at_a_time(make=[muon, adafactor], precision=[HALF, None], offload=["kept", "cpu"])
@ranks(2, exhaustive=(1, 3))
def test_whole_matrices(rank, tmp_path, offload, precision, make):
    def train(offload):
        t = Training(rank, offload, make, precision=precision)
        other = torch.optim.AdamW([p for p in t.model.parameters() if p.dim() == 1], lr=0.01)
        for number in range(4):
            t.step(number, clip=0.5)
            if make is muon:
                other.step()
            other.zero_grad()
            t.read(number)
        return t.seen, *t.state()

    alike(train, chosen(offload, tmp_path))
