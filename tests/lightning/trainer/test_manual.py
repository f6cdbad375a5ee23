"""Manual optimization with several optimizers, and optimizers that torch's step hooks don't see or that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.lightning.support import NAMESPACES, Net, compare, either_namespace, fitted, shard_strategy
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import ShardError


def gan_class(namespace: str) -> Any:
    class Gan(NAMESPACES[namespace].LightningModule):
        """Two networks and a frozen layer; gradients of two batches, clipped by value and by norm; a scheduler each."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(8)
            self.generator = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
            self.critic = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
            self.features = nn.Linear(3, 2).requires_grad_(False)
            self.rates: list[float] = []

        def training_step(self, batch: Any, index: int) -> None:
            x, y = batch
            for_generator, for_critic = self.optimizers()
            last = index % 2 == 1

            with for_critic.toggle_model(sync_grad=last):
                assert not any(p.requires_grad for p in self.generator.parameters())
                real, made = self.critic(y), self.critic(self.generator(x))
                self.manual_backward(((real - 1).square() + made.square()).mean() / 2)
                if last:
                    self.clip_gradients(for_critic, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
                    for_critic.step()
                    for_critic.zero_grad()
            with for_generator.toggle_model(sync_grad=last):
                assert not any(p.requires_grad for p in self.critic.parameters())
                made = self.generator(x)
                near = (self.features(made) - self.features(y)).square().mean()
                self.manual_backward(((self.critic(made) - 1).square().mean() + near) / 2)
                if last:
                    self.clip_gradients(for_generator, gradient_clip_val=0.01, gradient_clip_algorithm="value")
                    for_generator.step()
                    for_generator.zero_grad()
            for scheduler in self.lr_schedulers():
                scheduler.step()
            self.rates.append(for_critic.param_groups[0]["lr"])
            assert not any(p.requires_grad for p in self.features.parameters())
            assert all(p.requires_grad for net in (self.critic, self.generator) for p in net.parameters())

        def configure_optimizers(self) -> Any:
            optimizers = [
                torch.optim.SGD(self.generator.parameters(), lr=0.5, momentum=0.9),
                torch.optim.SGD(self.critic.parameters(), lr=0.5),
            ]
            return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]

    return Gan


@either_namespace
@pytest.mark.parametrize("defer", [False, *exhaustive(True)], ids=["reduced", "deferred"])
@ranks(2)
def test_a_gan_with_toggled_models_accumulation_and_clipping(world_size, namespace, defer):
    given = shard_strategy(namespace, defer_gradient_sync=defer)
    module, expected, _ = compare(world_size, gan_class(namespace), given, namespace, max_epochs=2)
    assert module.rates == expected.rates


@pytest.mark.parametrize("defer", [False, True])
@ranks(2)
def test_a_step_within_toggle_model_without_sync_is_refused(defer):
    """Under ddp it would step each rank with its own gradients, and the ranks would drift apart."""

    class Steps(Net):
        automatic_optimization = False

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(self.loss(batch))
                optimizer.step()

    with pytest.raises(ShardError, match="no_sync"):
        fitted(Steps(), shard_strategy(defer_gradient_sync=defer))


@ranks(2)
def test_overridden_hooks_of_automatic_optimization_are_followed(world_size):
    class Hooks(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * min(1.0, (self.trainer.global_step + 1) / 3)
            if batch_idx % 3 == 2:
                optimizer_closure()  # without a step
            else:
                optimizer.step(closure=optimizer_closure)

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            if batch_idx % 3 == 0:
                optimizer.zero_grad(set_to_none=False)

        def backward(self, loss):
            (loss * 0.5).backward()

        def on_after_backward(self):
            self.seen.append(float(torch.stack([p.grad.norm() for p in self.parameters()]).norm()))
            for p in self.blocks.parameters():
                p.grad.mul_(0.9)

        def on_before_zero_grad(self, optimizer):
            self.seen.append(float(self.head.weight.detach().norm()))

    module, expected, _ = compare(world_size, Hooks, max_epochs=2, gradient_clip_val=0.4)
    assert module.seen == pytest.approx(expected.seen, rel=1e-4)


# -- other optimizers ------------------------------------------------------------------------------------------------------


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
    class Steps(Net):
        def configure_optimizers(self):
            return Bare(self.parameters())

    compare(world_size, Steps)


@ranks(2)
def test_an_optimizer_that_needs_everything_is_refused_before_it_steps(world_size):
    class Steps(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ShardError, match=r"LBFGS.*gathered"):
        compare(world_size, Steps)


def test_state_is_loaded_where_the_module_has_no_trainer():
    # So it is after ranks that were processes of their own have ended.
    model = torch.nn.Linear(2, 2)
    saved, loaded = (torch.optim.SGD(model.parameters(), lr, momentum=0.9) for lr in (0.5, 0.1))
    strategy = shard_strategy()
    strategy.connect(Net())
    strategy.optimizers = [loaded]
    strategy.load_optimizer_state_dict({"optimizer_states": [saved.state_dict()]})
    assert loaded.param_groups[0]["lr"] == 0.5
