"""Manual optimization: several optimizers, toggled, accumulated, clipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.lightning.support import NAMESPACES, assert_same_state, either_namespace, loader, net_class, single, trainer
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import ShardError


def strategy(**options: Any) -> Any:
    from lightning_shard.for_lightning import ShardStrategy

    return ShardStrategy(**options)


def gan_class(namespace: str, sync: bool = True) -> Any:
    class Gan(NAMESPACES[namespace].LightningModule):
        """Two networks and a frozen one; gradients of two batches, by value and by norm; a scheduler each."""

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

            with for_critic.toggle_model(sync_grad=last or not sync):
                assert not any(p.requires_grad for p in self.generator.parameters())
                real, made = self.critic(y), self.critic(self.generator(x))
                self.manual_backward(((real - 1).square() + made.square()).mean() / 2)
                if last:
                    self.clip_gradients(for_critic, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
                    for_critic.step()
                    for_critic.zero_grad()
            with for_generator.toggle_model(sync_grad=last or not sync):
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
    if namespace == "lightning":
        given = strategy(defer_gradient_sync=defer)
    else:
        from lightning_shard.for_pytorch_lightning import ShardStrategy

        given = ShardStrategy(defer_gradient_sync=defer)
    expected, module = gan_class(namespace)(), gan_class(namespace)()
    single(namespace, max_epochs=2).fit(expected, loader(1))
    trainer(namespace, world_size, given, max_epochs=2).fit(module, loader(world_size))
    assert module.rates == expected.rates
    assert_same_state(module.state_dict(), expected.state_dict())


@ranks(2)
def test_steps_with_closures_as_lightnings_documentation_has_them(world_size):
    class Closures(net_class("lightning")):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            first, second = self.optimizers()
            for optimizer in (first, second):

                def closure(optimizer=optimizer):
                    optimizer.zero_grad()
                    loss = self.loss(batch)
                    self.manual_backward(loss)
                    return loss

                with optimizer.toggle_model():
                    self.seen.append(float(self.all_gather(optimizer.step(closure=closure).detach()).mean()))

        def configure_optimizers(self):
            blocks = list(self.blocks.parameters())
            others = [p for p in self.parameters() if all(p is not q for q in blocks)]
            return torch.optim.Adam(blocks, lr=0.01), torch.optim.SGD(others, lr=0.05)

    expected, module = Closures(), Closures()
    single("lightning").fit(expected, loader(1))
    trainer("lightning", world_size).fit(module, loader(world_size))
    assert module.seen == pytest.approx(expected.seen, rel=1e-5)
    assert_same_state(module.state_dict(), expected.state_dict())


@ranks(2)
def test_an_optimizer_may_be_left_out_of_a_step_and_two_may_share_a_parameter(world_size):
    class Shares(net_class("lightning")):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            optimizers = self.optimizers()
            self.manual_backward(self.loss(batch))
            for optimizer in optimizers if index % 2 else optimizers[:1]:
                optimizer.step()
            self.zero_grad()

        def configure_optimizers(self):
            body = [*self.inner.parameters(), *self.head.parameters()]
            return [torch.optim.SGD(body, lr=0.05), torch.optim.SGD([*self.blocks.parameters(), *body], lr=0.02)]

    expected, module = Shares(), Shares()
    single("lightning").fit(expected, loader(1))
    trainer("lightning", world_size).fit(module, loader(world_size))
    assert_same_state(module.state_dict(), expected.state_dict())


@pytest.mark.parametrize("defer", [False, True])
@ranks(2)
def test_a_step_within_toggle_model_without_sync_is_refused(world_size, defer):
    """Under ddp it would step each rank with its own gradients, and the ranks would drift apart."""

    class Steps(net_class("lightning")):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(self.loss(batch))
                optimizer.step()

    with pytest.raises(ShardError, match="no_sync"):
        trainer("lightning", world_size, strategy(defer_gradient_sync=defer)).fit(Steps(), loader(world_size))


@ranks(2)
def test_overridden_hooks_of_automatic_optimization_are_followed(world_size):
    class Hooks(net_class("lightning")):
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

    expected, module = Hooks(), Hooks()
    options = {"max_epochs": 2, "gradient_clip_val": 0.4}
    single("lightning", **options).fit(expected, loader(1))
    trainer("lightning", world_size, **options).fit(module, loader(world_size))
    assert module.seen == pytest.approx(expected.seen, rel=1e-4)
    assert_same_state(module.state_dict(), expected.state_dict())
