"""Where things are, to the model's code, with parameters in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import torch_shard
from tests.offload.models import Model, inputs
from tests.support.inside import runtime_of
from tests.support.ranks import ranks
from torch_shard.runtime.mixed_precision_hooks import moved


@dataclass
class Batch:
    values: torch.Tensor
    name: str


def test_inputs_are_moved_wherever_they_are_within():
    batch = Batch(torch.zeros(2), "one")
    there = torch.ones(3, device="meta")
    given = ({"x": [torch.zeros(1), 3]}, batch, there, None)
    found = moved(given, torch.device("meta"))
    assert found[0]["x"][0].device.type == "meta" and found[0]["x"][1] == 3
    assert found[1].values.device.type == "meta" and found[1].name == "one"
    assert found[2] is there and found[3] is None
    assert batch.values.device.type == "cpu"


@ranks(1)
def test_parameters_show_the_device_that_computes_inside_a_forward(rank):
    model = Model()
    engine = torch_shard.shard(model, offload="cpu")
    device = torch.device("cuda", 0)  # there is none: only what is shown is of interest
    other, seen = model.blocks[3][1].weight, []
    model.blocks[0].register_forward_hook(lambda *_: seen.append(other.device))
    runtime_of(engine).host.device = device
    model(inputs(rank, 0))
    assert seen == [device]
    assert other.device.type == "cpu"
