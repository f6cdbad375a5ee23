"""What can't be had is an error that says so, on all ranks, before anything has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torch_shard
from tests.precision.harness import MLP, Mixed, batch, loss_of
from tests.support.ranks import ranks
from torch_shard import Precision, ShardConfig
from torch_shard.errors import ConfigError, UnitStateError

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("param_dtype", torch.int8),
        ("param_dtype", "bf16"),
        ("reduce_dtype", torch.float8_e4m3fn),
        ("buffer_dtype", torch.complex64),
        ("output_dtype", 16),
        ("master_dtype", torch.int32),
        ("cast_inputs", "units"),
        ("keep", "norm"),
        ("keep", nn.LayerNorm),
        ("keep", [nn.LayerNorm(3)]),
        ("keep", [int]),
        ("keep", {"a", "b"}),  # whose order differs between ranks
        ("keep_low_precision_grads", 1),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_field(field: str, value: Any):
    with pytest.raises(ConfigError, match=rf"^precision\.{field}"):
        Precision(**{field: value})


@pytest.mark.parametrize("value", ["bf16", 16, {"param_dtype": BF16}])
def test_a_precision_that_is_none_is_an_error(value: Any):
    with pytest.raises(ConfigError, match=r"^precision must be"):
        ShardConfig(precision=value)


def test_a_dtype_stands_for_the_dtype_of_the_computation():
    assert ShardConfig(precision=BF16) == ShardConfig(precision=Precision(param_dtype=BF16))


@ranks(2)
def test_a_name_that_no_module_has_is_an_error_and_the_model_stays_plain(rank):
    model = MLP()
    with pytest.raises(ConfigError, match=r"precision\.keep\[0\]: 'router'"):
        torch_shard.shard(model, precision=Precision(param_dtype=BF16, keep=["router"]))
    assert torch_shard.engine_of(model) is None and type(model.head.weight) is nn.Parameter


@ranks(2)
def test_ranks_with_different_precision_are_an_error_on_both(rank):
    with pytest.raises(ConfigError, match="precision differs between the ranks"):
        torch_shard.shard(MLP(), precision=BF16 if rank else torch.float16)


@ranks(2)
def test_a_backward_of_what_was_computed_inside_gathered_is_an_error_inside_and_outside(rank):
    """Its gradients would go to copies."""
    pair = Mixed(MLP, Precision(param_dtype=BF16))
    with pair.engine.gathered():
        loss = loss_of(pair.model(batch(rank, 0).float()))
        with pytest.raises(UnitStateError, match=r"ShardConfig\.precision"):
            loss_of(pair.model(batch(rank, 0).float())).backward()
    with pytest.raises(UnitStateError, match=r"engine\.gathered\(\)"):
        loss.backward()
    pair.train(rank, steps=1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 5), nn.Linear(5, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


@ranks(2)
def test_a_parameter_that_is_kept_and_not_kept_is_an_error_that_names_both_modules(rank):
    with pytest.raises(
        ConfigError, match=r"precision\.keep: embedding\.weight is tied between 'embedding'.*and 'head'"
    ):
        torch_shard.shard(Tied(), precision=Precision(param_dtype=BF16, keep=[nn.Embedding]))
    model = Tied()
    torch_shard.shard(model, precision=Precision(param_dtype=BF16, keep=[nn.Embedding], cast_inputs=False))
    with torch.autocast("cpu", BF16):
        model(torch.arange(3)).sum().backward()
