"""What no run could be right with is refused with the reason and the remedy, on all ranks, before anything has changed."""

from __future__ import annotations

import importlib
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_shard
import torch_shard
from lightning_shard.registration.registry import FABRIC, TRAINER, strategy_class
from tests.lightning.support import loader, net_class, trainer
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import ShardTensor
from torch_shard.errors import ConfigError, SetupError, UnitStateError

OWNERS = {
    "lightning": ("lightning.pytorch", "Trainer"),
    "pytorch_lightning": ("pytorch_lightning", "Trainer"),
    "lightning.fabric": ("lightning.fabric", "Fabric"),
    "lightning_fabric": ("lightning_fabric", "Fabric"),
}
every_namespace = pytest.mark.parametrize("namespace", [*TRAINER, *FABRIC])


def make(namespace, strategy, **options):
    module, name = OWNERS[namespace]
    owner = getattr(importlib.import_module(module), name)
    return owner(strategy=strategy, **({"accelerator": "cpu", "devices": 2} | options))


def raised_on_all(error: Exception) -> str:
    """The message, which every rank must have."""
    messages: list = [None] * dist.get_world_size()
    dist.all_gather_object(messages, str(error))
    assert len({message.partition(":")[0] for message in messages}) == 1, messages
    return messages[0]


# -- names and instances --------------------------------------------------------------------------------------------------


@every_namespace
def test_what_is_no_strategy_there_is_refused_by_lightning(namespace):
    right = strategy_class(namespace)
    others = [strategy_class(other)() for other in {*TRAINER, *FABRIC} - {namespace}]
    for wrong in ("shard_typo", right, *others):
        with pytest.raises(ValueError, match="You selected an invalid strategy name"):
            make(namespace, wrong)
    make(namespace, right(), accelerator="auto" if torch.cuda.device_count() < 2 else "cpu")


def test_two_strategies_at_once_are_refused():
    with pytest.raises(MisconfigurationException, match="invalid type for plugin"):
        make("lightning", "shard", plugins=[DDPStrategy()])
    with pytest.raises(ValueError, match="invalid strategy name"):
        make("lightning", ["shard", "ddp"])
    used = lightning_shard.ShardStrategy()
    make("lightning", used)
    with pytest.raises(MisconfigurationException, match="set through both strategy class and"):
        make("lightning", used)  # by a second Trainer, as with ddp


# -- where and how ranks start --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start_method": "popn"}, r"^start_method must be one of 'popen', .*not 'popn'"),
        ({"timeout": 30}, r"^timeout must be a positive datetime\.timedelta"),
        ({"timeout": timedelta(-1)}, r"^timeout must be a positive datetime\.timedelta"),
        ({"process_group_backend": 3}, "^process_group_backend must be a name"),
    ],
)
def test_settings_of_the_start_are_checked_at_once(settings, message):
    for namespace in OWNERS:
        with pytest.raises(ConfigError, match=message):
            make(namespace, strategy_class(namespace)(**settings))


@pytest.mark.parametrize("namespace", ["lightning", "lightning.fabric"])
def test_a_notebook_needs_the_strategy_that_forks(namespace, monkeypatch):
    for connector in ("lightning.pytorch.trainer.connectors.accelerator_connector", "lightning.fabric.connector"):
        monkeypatch.setattr(f"{connector}._IS_INTERACTIVE", True)
    with pytest.raises((MisconfigurationException, RuntimeError), match="interactive"):
        make(namespace, "shard")
    assert make(namespace, "shard_fork").strategy.launcher.is_interactive_compatible


class Elsewhere(CPUAccelerator):
    """An accelerator whose devices are of another kind."""

    kind = "mps"

    @classmethod
    def get_parallel_devices(cls, devices):
        return [torch.device(cls.kind, index) for index in range(2)]


@pytest.mark.parametrize("namespace", ["lightning", "lightning.fabric"])
@pytest.mark.parametrize("kind", ["mps", *exhaustive("xpu")])
def test_an_accelerator_without_sharding_is_refused(kind, namespace, monkeypatch):
    monkeypatch.setattr(Elsewhere, "kind", kind)
    message = f"the accelerator has {kind} devices.*accelerator='cpu'"
    with pytest.raises((MisconfigurationException, TypeError), match=message):
        make(namespace, "shard", accelerator=Elsewhere())


# -- clusters that lie ----------------------------------------------------------------------------------------------------


class Claims(LightningEnvironment):
    """Says what it is told to."""

    creates_processes_externally = True

    def __init__(self, world, rank, local):
        super().__init__()
        self.said = world, rank, local

    def world_size(self):
        return self.said[0]

    def global_rank(self):
        return self.said[1]

    def local_rank(self):
        return self.said[2]

    def teardown(self):
        pass  # Lightning's removes a variable that later tests want


CLAIMS = {
    "too many": (
        lambda rank: (4, rank, rank),
        "Claims says that there are 4 ranks, but devices=2 and num_nodes=1 make 2",
    ),
    "too few": (lambda rank: (1, 0, 0), "Claims says that there are 1 ranks"),
    "rank": (lambda rank: (2, rank + 2, rank), "Claims says that this is rank"),
    "local rank": (lambda rank: (2, rank, rank + 2), "Claims says that this is rank"),
    "other rank": (lambda rank: (2, 1 - rank, 1 - rank), "in the process group that exists, but Claims says"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("lie", CLAIMS)
@ranks(2)
def test_a_cluster_environment_that_lies_about_its_size_is_refused_on_all_ranks(rank, world_size, lie):
    claim, message = CLAIMS[lie]
    module = net_class("lightning")()
    t = trainer("lightning", world_size, plugins=[Claims(*claim(rank))])
    with pytest.raises(MisconfigurationException, match=message):
        t.fit(module, loader(world_size))
    assert torch_shard.engine_of(module) is None
    trainer("lightning", world_size, plugins=[Claims(2, rank, rank)]).fit(module, loader(world_size))


@ranks(2)
def test_a_number_of_nodes_that_is_not_the_jobs_is_refused_on_all_ranks(rank, world_size):
    from lightning.fabric import Fabric

    t = trainer("lightning", world_size, num_nodes=2)
    with pytest.raises((MisconfigurationException, ValueError), match="num_nodes=2"):
        t.fit(net_class("lightning")(), loader(world_size))
    with pytest.raises((TypeError, ValueError), match="num_nodes=2"):
        Fabric(accelerator="cpu", devices=2, num_nodes=2, strategy="shard").launch()


# -- models ---------------------------------------------------------------------------------------------------------------


@ranks(2)
def test_a_module_that_another_way_of_sharding_has_taken_is_refused(world_size):
    from torch.distributed.fsdp import fully_shard

    module = net_class("lightning")()
    for block in module.blocks:
        fully_shard(block)
    with pytest.raises(SetupError, match=r"blocks\.0\.weight"):
        trainer("lightning", world_size).fit(module, loader(world_size))
    part = net_class("lightning")()
    engine = torch_shard.shard(part.blocks[0])
    with pytest.raises(SetupError, match=r"blocks\.0\.\w+ is already sharded"):
        trainer("lightning", world_size).fit(part, loader(world_size))
    assert isinstance(part.blocks[0].weight, ShardTensor), "still what it was"
    engine.close()


@ranks(2)
def test_a_module_in_two_runs_at_once_is_refused_and_the_first_goes_on(rank, world_size):
    class Nested(net_class("lightning")):
        error = None

        def on_train_batch_end(self, outputs, batch, index):
            if index == 2:
                first = self.trainer
                try:
                    trainer("lightning", world_size).validate(self, loader(world_size), verbose=False)
                except UnitStateError as error:
                    self.error = error
                self.trainer = first

    module, expected = Nested(), net_class("lightning")()
    t = trainer("lightning", world_size)
    t.fit(module, loader(world_size))
    assert "is in the run of another Trainer" in raised_on_all(module.error)
    trainer("lightning", world_size).fit(expected, loader(world_size))
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value)
