"""What ``Offload`` takes, and what ranks must agree on."""

from __future__ import annotations

import pytest

import torch_shard
from tests.offload.models import Model
from tests.support.ranks import ranks
from torch_shard import Offload, ShardConfig, errors
from torch_shard.offload import memory_limits, pinned


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"params": 1}, "offload.params must be True or False, not 1"),
        ({"optimizer": False}, "offload.optimizer: False with params=True"),
        ({"params": False, "optimizer": False}, "nothing is left to offload"),
        ({"pin_memory": None}, "offload.pin_memory must be"),
        ({"nvme": 3}, "offload.nvme must be None or the path"),
        ({"nvme": ""}, "offload.nvme must be None or the path"),
        ({"nvme_params": True}, "offload.nvme_params needs a directory"),
    ],
)
def test_values_that_mean_nothing_are_refused(settings, said):
    with pytest.raises(errors.ConfigError, match=said):
        Offload(**settings)


@pytest.mark.parametrize("value", [True, "gpu", {"params": True}, 1])
def test_offload_is_a_name_or_an_offload(value):
    with pytest.raises(errors.ConfigError, match=r"offload must be None, 'cpu' or a torch_shard\.Offload"):
        ShardConfig(offload=value)


def test_cpu_stands_for_the_defaults():
    assert ShardConfig(offload="cpu") == ShardConfig(offload=Offload())


@ranks(2)
def test_ranks_that_differ_are_told(rank):
    with pytest.raises(errors.ConfigError, match="offload differs between the ranks"):
        torch_shard.shard(Model(), offload=Offload(params=rank == 0))


@pytest.mark.parametrize("short", [0, 1])
@ranks(2)
def test_host_memory_that_is_short_is_told_before_anything_changes(rank, short, monkeypatch):
    if rank == short:
        limit = memory_limits.Limit("machine here", memory_limits.RESERVE + 1000, is_machine=True)
        monkeypatch.setattr(memory_limits, "limits", lambda *_: (limit,))
    model = Model()
    with pytest.raises(errors.HostMemoryError, match=r"is short of memory by .*rank [01]: .*are available"):
        torch_shard.shard(model, offload="cpu")
    assert not any(isinstance(p, torch_shard.ShardTensor) for p in model.parameters())
    monkeypatch.undo()
    torch_shard.shard(model, offload="cpu").close()


@pytest.mark.parametrize("call", [0, 5])  # for one of four shards, and of as many gradients
@ranks(2)
def test_memory_that_cannot_be_page_locked_on_one_rank_is_an_error_of_all(rank, call, monkeypatch):
    allocate, calls = pinned.allocate, []

    def refused(*args, **kwargs):
        calls.append(args)
        if rank == 1 and len(calls) > call:
            raise errors.PinnedMemoryError("no memory can be page-locked: set Offload(pin_memory=False).")
        return allocate(*args, **kwargs)

    monkeypatch.setattr(pinned, "allocate", refused)
    with pytest.raises(errors.ShardError, match=r"pin_memory=False"):
        torch_shard.shard(Model(), offload="cpu")
    monkeypatch.undo()
    model = Model()
    torch_shard.shard(model, offload="cpu").close()
