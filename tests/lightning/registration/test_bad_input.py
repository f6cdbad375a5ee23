"""What no run could be right with is refused with the reason and the remedy, on all ranks, before anything has changed."""

from __future__ import annotations

import importlib
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import torch_shard
from lightning_shard.registration.registry import FABRIC, TRAINER, strategy_class
from tests.lightning.support import Claims, Net, assert_same_state, fitted, loader, trainer
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError, UnitStateError

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


# -- names and instances --------------------------------------------------------------------------------------------------


@every_namespace
def test_what_is_no_strategy_there_is_refused_by_lightning(namespace):
    right = strategy_class(namespace)
    others = [strategy_class(other)() for other in {*TRAINER, *FABRIC} - {namespace}]
    for wrong in ("shard_typo", right, *others):
        with pytest.raises(ValueError, match="You selected an invalid strategy name"):
            make(namespace, wrong)
    make(namespace, right(), accelerator="auto" if torch.cuda.device_count() < 2 else "cpu")


# -- where and how ranks start --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start_method": "popn"}, r"^start_method must be one of 'popen', .*not 'popn'"),
        ({"timeout": 30}, r"^timeout must be a positive datetime\.timedelta"),
        ({"timeout": timedelta(-1)}, r"^timeout must be a positive datetime\.timedelta"),
        ({"process_group_backend": 3}, "^process_group_backend must be a name"),
        ({"state_dict_type": "half"}, "^state_dict_type"),
        ({"async_save": True}, "^async_save.*AsyncCheckpointIO"),
    ],
)
def test_settings_are_checked_at_once(settings, message):
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

    @classmethod
    def get_parallel_devices(cls, devices):
        return [torch.device("mps", index) for index in range(2)]


@pytest.mark.parametrize("namespace", ["lightning", "lightning.fabric"])
def test_an_accelerator_without_sharding_is_refused(namespace):
    message = "the accelerator has mps devices.*accelerator='cpu'"
    with pytest.raises((MisconfigurationException, TypeError), match=message):
        make(namespace, "shard", accelerator=Elsewhere())


# -- clusters that lie ----------------------------------------------------------------------------------------------------


CLAIMS = {
    "too many": (
        lambda rank: (4, rank, rank),
        "Claims says that there are 4 ranks, but devices=2 and num_nodes=1 make 2",
    ),
    "local rank": (lambda rank: (2, rank, rank + 2), "Claims says that this is rank"),
    "other rank": (lambda rank: (2, 1 - rank, 1 - rank), "in the process group that exists, but Claims says"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("lie", CLAIMS)
@ranks(2)
def test_a_cluster_environment_that_lies_about_its_size_is_refused_on_all_ranks(rank, world_size, lie):
    claim, message = CLAIMS[lie]
    module = Net()
    t = trainer("lightning", world_size, plugins=[Claims(*claim(rank))])
    with pytest.raises(MisconfigurationException, match=message):
        t.fit(module, loader(world_size))
    assert torch_shard.engine_of(module) is None
    fitted(module, plugins=[Claims(2, rank, rank)])


@ranks(2)
def test_a_number_of_nodes_that_is_not_the_jobs_is_refused_on_all_ranks(world_size):
    t = trainer("lightning", world_size, num_nodes=2)
    with pytest.raises((MisconfigurationException, ValueError), match="num_nodes=2"):
        t.fit(Net(), loader(world_size))
    with pytest.raises((TypeError, ValueError), match="num_nodes=2"):
        make("lightning.fabric", "shard", num_nodes=2).launch()


# -- models ---------------------------------------------------------------------------------------------------------------


@ranks(2)
def test_a_module_in_two_runs_at_once_is_refused_and_the_first_goes_on(world_size):
    class Nested(Net):
        error = None

        def on_train_batch_end(self, outputs, batch, index):
            if index == 2:
                first = self.trainer
                try:
                    trainer("lightning", world_size).validate(self, loader(world_size), verbose=False)
                except UnitStateError as error:
                    self.error = error
                self.trainer = first

    module, expected = Nested(), Net()
    for each in (module, expected):
        fitted(each)
    assert_same_state(module.state_dict(), expected.state_dict())
    messages: list = [None] * world_size
    dist.all_gather_object(messages, str(module.error))
    assert all("is in the run of another Trainer" in message for message in messages), messages
