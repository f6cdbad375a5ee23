"""Programs written for torch's FSDP give the same losses and weights with one import changed."""

from __future__ import annotations

import pytest
import torch

from tests.fsdp import programs
from tests.fsdp.programs import OURS, PROGRAMS, TORCH, package, plain
from tests.support.marks import quick
from tests.support.ranks import ranks

# Where torch can't run it on a CPU in float64 (its clip_grad_norm_ insists on float32), or computes the next step with weights
# from before the optimizer's (set_reshard_after_backward(False)): another program, or a plain one, gives the numbers.
INSTEAD = {"module_wrap_policy": "clipped", "prefetch_by_hand": None}
QUICK = (
    "accumulate_without_sync",
    "meta_and_to_empty",
    "frozen_and_ignored",
    "no_sync",
)


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("name", quick(PROGRAMS, QUICK))
@pytest.mark.filterwarnings("ignore")
def test_a_program_for_torchs_fsdp_computes_the_same(name, rank):
    losses, weights = PROGRAMS[name](package(OURS), rank)
    instead = INSTEAD.get(name, name)
    wanted, expected = plain(rank) if instead is None else PROGRAMS[instead](package(TORCH), rank)
    torch.testing.assert_close(losses, wanted, rtol=1e-10, atol=1e-12)
    assert list(weights) == list(expected)
    for key, value in weights.items():
        torch.testing.assert_close(
            value, expected[key], rtol=1e-9, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}"
        )


@ranks(2)
def test_torchs_own_numbers_are_those_of_ddp(rank):
    losses, weights = programs.layer_by_layer(package(TORCH), rank)
    wanted, expected = plain(rank)
    torch.testing.assert_close(losses, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("part", ["", ".wrap", ".api", ".fully_sharded_data_parallel", ".sharded_grad_scaler"])
def test_everything_that_is_imported_from_torchs_fsdp_is_there(part):
    import importlib

    theirs, ours = importlib.import_module(TORCH + part), importlib.import_module(OURS + part)
    public = getattr(theirs, "__all__", None) or ["ShardedGradScaler"]
    private = ["_or_policy", "_module_wrap_policy"] if part == ".wrap" else []
    assert [name for name in (*public, *private) if not hasattr(ours, name)] == []


def test_signatures_are_torchs():
    import inspect

    theirs, ours = package(TORCH), package(OURS)
    for cls in ("FullyShardedDataParallel", "FSDPModule"):
        there, here = getattr(theirs, cls), getattr(ours, cls)
        public = [n for n, v in vars(there).items() if callable(getattr(there, n)) and not n.startswith("_")]
        for name in (*public, *(["__init__"] if cls == "FullyShardedDataParallel" else [])):
            wanted = list(inspect.signature(getattr(there, name)).parameters)
            if name not in ("named_parameters", "named_buffers", "apply"):
                assert list(inspect.signature(getattr(here, name)).parameters) == wanted, name
    wanted = list(inspect.signature(theirs.fully_shard).parameters)
    newer = {"dp_mesh_dims"} - set(wanted)  # than the oldest torch that is supported
    assert [name for name in inspect.signature(ours.fully_shard).parameters if name not in newer] == wanted
