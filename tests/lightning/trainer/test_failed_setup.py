"""A run whose set-up fails ends with the error of the set-up, whatever state that left the module in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_shard
from lightning_shard.registration.registry import strategy_class
from tests.lightning.support import both_namespaces, late_class, loader, net_class, trainer
from tests.support.logs import captured_log
from tests.support.ranks import ranks
from torch_shard import errors


class Bare(nn.Module):
    """A parameter that nothing initialises: it has no reset_parameters()."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


@both_namespaces
@ranks(1, 2)
def test_sharding_that_fails_half_way_is_the_error_that_is_raised(world_size, namespace):
    module = late_class(namespace, Bare)()
    with pytest.raises(errors.SetupError, match=r"extra\.bias was on the meta device"):
        trainer(namespace, world_size).fit(module, loader(world_size))
    assert torch_shard.engine_of(module) is None


@both_namespaces
@ranks(1, 2)
def test_what_is_still_on_meta_does_not_hide_the_error(world_size, namespace):
    strategy = strategy_class(namespace)(ignore=["extra.*"])
    with pytest.raises(errors.SetupError, match=r"ignored parameter extra\.bias is on the meta device"):
        trainer(namespace, world_size, strategy).fit(late_class(namespace, Bare)(), loader(world_size))


@ranks(2)
def test_a_failure_before_anything_is_sharded_is_the_error_that_is_raised(rank, world_size):
    class Differs(late_class("lightning", Bare)):
        def configure_model(self):
            super().configure_model()
            if rank == 1:
                self.head.weight.data = self.head.weight.data[:2]

    with pytest.raises(errors.SetupError, match="the ranks hold different models"):
        trainer("lightning", world_size).fit(Differs(), loader(world_size))


@ranks(2)
def test_what_fails_in_teardown_after_an_error_is_logged_and_the_rest_of_teardown_runs(rank, world_size):
    from lightning.pytorch.plugins import LayerSync, TorchCheckpointIO

    closed = []

    class Swap(LayerSync):
        def apply(self, model):
            return model

        def revert(self, model):
            raise ZeroDivisionError("reverting")

    class Files(TorchCheckpointIO):
        def teardown(self):
            closed.append(True)

    t = trainer("lightning", world_size, plugins=[Swap(), Files()])
    with captured_log() as messages, pytest.raises(errors.SetupError, match="was on the meta device"):
        t.fit(late_class("lightning", Bare)(), loader(world_size))
    if rank == 0:  # the other ranks log errors only
        assert any("ZeroDivisionError: reverting" in message for message in messages)
    assert closed == [True]


@ranks(2)
def test_what_fails_in_teardown_after_a_good_run_is_raised(world_size):
    from lightning.pytorch.plugins import TorchCheckpointIO

    class Files(TorchCheckpointIO):
        failing = True

        def teardown(self):
            if self.failing:
                self.failing = False
                raise ZeroDivisionError("closing")

    with pytest.raises(ZeroDivisionError, match="closing"):
        trainer("lightning", world_size, plugins=[Files()]).fit(net_class("lightning")(), loader(world_size))
