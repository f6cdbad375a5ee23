"""``ShardConfig.quantized``: what it may be, and which parameters it concerns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_shard
from tests.compat.harness import MLP
from tests.quantized.harness import BF16, BOTH, GRADIENTS, PARAMETERS
from torch_shard import Quantized, ShardConfig
from torch_shard.errors import ConfigError, UnavailableError


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("parameters", {"parameters": "int4"}),
        ("parameters", {"parameters": torch.int8}),
        ("parameters", {}),
        ("gradients", {"gradients": "float8"}),
        ("gradients", {"gradients": True}),
        ("block", {"parameters": "int8", "block": 8}),
        ("block", {"parameters": "int8", "block": 256.0}),
        ("block", {"parameters": "int8", "block": True}),
        ("min_size", {"parameters": "int8", "min_size": -1}),
        ("error_feedback", {"gradients": "int8", "error_feedback": 1}),
        ("keep", {"parameters": "int8", "keep": nn.Linear}),
        ("keep", {"parameters": "int8", "keep": "head"}),
        ("keep", {"parameters": "int8", "keep": [3]}),
        ("keep", {"parameters": "int8", "keep": ["re:("]}),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_field(field, settings):
    with pytest.raises(ConfigError, match=rf"^quantized\.{field}\b"):
        Quantized(**settings)


@pytest.mark.parametrize("value", ["int8", True, torch.int8, {"parameters": "int8"}])
def test_only_a_quantized_is_one(value):
    with pytest.raises(ConfigError, match=r"^quantized must be"):
        ShardConfig(quantized=value)


@pytest.mark.parametrize("quantized", [PARAMETERS, BOTH, GRADIENTS])
def test_replicated_parameters_have_nothing_to_quantize(quantized):
    with pytest.raises(ConfigError, match=r"^quantized: strategy 'no_shard'"):
        ShardConfig(strategy="no_shard", quantized=quantized)


def test_a_name_that_no_module_has_is_an_error():
    with pytest.raises(ConfigError, match=r"quantized\.keep\[1\]: 'heads' is the name of no module"):
        torch_shard.shard(MLP(), quantized=Quantized("int8", keep=[nn.Embedding, "heads"]))


def test_a_device_without_float8_is_an_error():
    with pytest.raises(UnavailableError, match=r"^quantized\.parameters: mps has no float8"):
        Quantized("float8").check_device(torch.device("mps"))
    Quantized("float8").check_device(torch.device("cpu"))
    Quantized("int8").check_device(torch.device("mps"))


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(-128, 128, dtype=torch.int8).view(16, 16), requires_grad=False)
        self.tiny = nn.Parameter(torch.rand(3, 5))
        self.norm = nn.LayerNorm(300)
        self.frozen = nn.Linear(16, 20, bias=False).requires_grad_(False)
        self.low = nn.Linear(16, 20, bias=False).to(BF16)
        self.kept = nn.Sequential(nn.Linear(16, 20, bias=False))
        self.image = nn.Conv2d(4, 4, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_what_is_few_bytes_and_what_is_no_float_stays_exact():
    config = ShardConfig(quantized=Quantized("int8", keep=["kept"], min_size=300))
    plan = torch_shard.make_plan(Kinds(), config, world_size=2)
    chosen = {p.name for p in plan.params if p.dtypes.quantized is not None}
    assert chosen == {"frozen.weight", "low.weight", "image.weight"}
    assert "float32 [sends int8 parameters]" in plan.table()
    alone = torch_shard.make_plan(Kinds(), config, world_size=1)  # sends nothing
    assert all(p.dtypes.quantized is None for p in alone.params)


def test_the_plan_counts_what_error_feedback_keeps():
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)).requires_grad_()
    model[1].weight.requires_grad_(False)
    quantized = Quantized(gradients="int8")
    with_it = torch_shard.make_plan(model, ShardConfig(quantized=quantized), world_size=2)
    assert with_it.predicted.residual == 2 * 64 * 128  # bf16, of all elements that train
    assert with_it.predicted.total == with_it.predicted.parameters + 3 * with_it.predicted.gradients + 2 * 64 * 128
    without = ShardConfig(quantized=Quantized(gradients="int8", error_feedback=False))
    assert torch_shard.make_plan(model, without, world_size=2).predicted.residual == 0
