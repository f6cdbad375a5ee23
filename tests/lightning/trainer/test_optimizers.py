"""Optimizers in a Trainer: closures, and classes that torch's step hooks don't see."""

from __future__ import annotations

import pytest
import torch

from lightning_shard.for_lightning import ShardStrategy
from tests.lightning.support import net_class
from tests.lightning.trainer.test_training import compare
from tests.support.ranks import ranks
from torch_shard import ShardError


class Bare:
    """What Lightning takes for an optimizer, without torch.optim.Optimizer's __init__ and hooks."""

    def __init__(self, params, lr=0.05):
        self.param_groups, self.state, self.defaults = [{"params": list(params), "lr": lr}], {}, {}

    def state_dict(self):
        group = self.param_groups[0]
        return {"state": {}, "param_groups": [{**group, "params": list(range(len(group["params"])))}]}

    def load_state_dict(self, state):
        pass

    def zero_grad(self, set_to_none=True):
        for p in self.param_groups[0]["params"]:
            p.grad = None

    def step(self, closure=None):
        loss = None if closure is None else closure()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
        return loss


@ranks(2)
def test_an_optimizer_that_is_not_torchs_trains_like_a_single_device(world_size):
    class Net(net_class("lightning")):
        def configure_optimizers(self):
            return Bare(self.parameters())

    compare("lightning", world_size, Net)


@ranks(2)
def test_an_optimizer_that_needs_everything_is_refused_before_it_steps(world_size):
    class Net(net_class("lightning")):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ShardError, match=r"LBFGS.*gathered"):
        compare("lightning", world_size, Net)


def test_state_is_loaded_where_the_module_has_no_trainer():
    # So it is after ranks that were processes of their own have ended.
    model = torch.nn.Linear(2, 2)
    saved, loaded = (torch.optim.SGD(model.parameters(), lr, momentum=0.9) for lr in (0.5, 0.1))
    strategy = ShardStrategy()
    strategy.connect(net_class("lightning")())
    strategy.optimizers = [loaded]
    strategy.load_optimizer_state_dict({"optimizer_states": [saved.state_dict()]})
    assert loaded.param_groups[0]["lr"] == 0.5
