"""What stochastic rounding refuses, and steps that fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torch_shard
from tests.compat.harness import MLP, batch, loss_of
from tests.precision.rounding_harness import BF16, FP32, ROUND, O, adamw, mlp, same_values, train, wholes
from tests.support.ranks import ranks
from torch_shard import Precision
from torch_shard.errors import ConfigError

# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1, "bf16", None])
def test_a_wrong_value_names_the_field(value: Any):
    with pytest.raises(ConfigError, match=r"^precision\.stochastic_rounding"):
        Precision(stochastic_rounding=value)


@ranks(2)
@pytest.mark.parametrize("precision", [ROUND, Precision(BF16, stochastic_rounding=True)])
def test_without_anything_stored_in_bf16_it_is_an_error_and_the_model_stays_plain(precision, rank):
    model = MLP()
    with pytest.raises(ConfigError, match=r"precision\.stochastic_rounding: .*float32"):
        torch_shard.shard(model, precision=precision)
    assert torch_shard.engine_of(model) is None and type(model.head.weight) is nn.Parameter
    low = mlp()
    with pytest.raises(ConfigError, match=r"precision\.stochastic_rounding: .*float32"):
        torch_shard.shard(low, precision=Precision(master_dtype=FP32, stochastic_rounding=True))


class Unknown(O.AdamW):
    """Steps by itself, on what it is given."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


@ranks(2)
def test_an_optimizer_that_steps_on_sharded_tensors_is_refused_before_anything_has_changed(rank):
    model, _, optimizer = train(rank, lambda m: Unknown(m.parameters()), 0)
    before = wholes(model)
    loss_of(model(batch(rank, 0).to(BF16))).backward()
    with pytest.raises(ConfigError, match=r"stochastic_rounding with Unknown.*inp\.weight.*register\(Unknown"):
        optimizer.step()
    assert same_values(wholes(model), before)


class Failing(O.SGD):
    """Fails in the second group."""

    def _init_group(self, group: Any, *lists: Any) -> Any:
        if group.get("fails"):
            raise ArithmeticError("on purpose")
        return super()._init_group(group, *lists)


@ranks(2)
def test_a_step_that_fails_half_way_leaves_rounded_values_and_the_next_one_is_whole(rank):
    torch_shard.optim.register(Failing, kind="elementwise")
    model, _, _ = train(rank, adamw, 0)
    parameters = list(model.parameters())
    optimizer = Failing([{"params": parameters[:4]}, {"params": parameters[4:], "fails": True}], lr=0.5)
    before = wholes(model)
    loss_of(model(batch(rank, 0).to(BF16))).backward()
    with pytest.raises(ArithmeticError):
        optimizer.step()
    after = wholes(model)
    names = list(after)
    assert not torch.equal(after[names[0]], before[names[0]]) and torch.equal(after[names[-1]], before[names[-1]])
    optimizer.param_groups[1]["fails"] = False
    optimizer.step()
    assert not torch.equal(wholes(model)[names[-1]], before[names[-1]])
