"""Checkpoints of Lightning's own strategies are loaded, those of this one by Lightning, and what is none is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from tests.lightning.support import (
    BATCHES,
    Net,
    assert_same_state,
    copied_state,
    fitted,
    loader,
    shard_strategy,
    single,
    trainer,
)
from tests.support.logs import captured_log
from tests.support.ranks import ranks, run
from tests.support.run_python import run_python
from torch_shard.cli.main import main as command_line
from torch_shard.errors import CheckpointError


class FSDPOnCpu(FSDPStrategy):  # type: ignore[misc]
    """Lightning's strategy; one of its lines is for GPUs alone, and all else is its own."""

    def _setup_model(self, model: Any) -> Any:
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=True, sharding_strategy=self.sharding_strategy
        )


class Parallel(Net):
    """Sharded by FSDP2 under Lightning's ModelParallelStrategy; as it is otherwise."""

    def configure_model(self) -> None:
        mesh = getattr(self, "device_mesh", None)
        if mesh is not None:
            for block in self.blocks:
                fully_shard(block, mesh=mesh["data_parallel"])
            fully_shard(self, mesh=mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        # By name: of FSDP's parameters all are 1-D here.
        decayed = [p for name, p in self.named_parameters() if name.endswith("weight")]
        others = [p for name, p in self.named_parameters() if not name.endswith("weight")]
        optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


STRATEGIES = {
    "ddp": lambda: "ddp",
    "fsdp sharded": lambda: FSDPOnCpu(state_dict_type="sharded"),
    "parallel sharded": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    "parallel full": lambda: ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False
    ),
}


def fit(rank, world_size, strategy, epochs, path=None, save=None):
    """Fit with any strategy, save before the run ends; the whole state where that is ours or plain."""
    how = STRATEGIES[strategy]() if strategy in STRATEGIES else strategy
    t = trainer("lightning", world_size, how, max_epochs=epochs)
    module = Parallel(optimizer="adamw")
    if save:
        module.on_train_end = lambda: t.save_checkpoint(save)
    t.fit(module, loader(world_size), ckpt_path=path)
    assert t.global_step == epochs * BATCHES
    return dict(module.state_dict()) if strategy in ("shard", "auto") else None


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_continues_from_a_checkpoint_of_lightnings_strategy(tmp_path, strategy):
    path = tmp_path / "theirs.ckpt"
    run(2, fit, strategy, 1, None, path, fresh=True)
    assert path.is_dir() == strategy.endswith("sharded")
    found = run(2, fit, "shard", 2, path)
    assert_same_state(found[0], run(1, fit, "auto", 2)[0])


def test_training_continues_from_a_file_of_lightnings_fsdp(tmp_path):
    # Torch's FSDP can't make whole state of a model on the CPU (it returns freed memory), so the file is made here as
    # FSDPStrategy.save_checkpoint writes it: that of a single device, but with the optimizer's parameters numbered in the
    # order of module.parameters(), not in that of its groups, and their state in any order.
    path = tmp_path / "theirs.ckpt"
    run(1, fit, "auto", 1, None, path)
    checkpoint = torch.load(path, weights_only=True)
    module = Parallel(optimizer="adamw")
    place = {id(p): number for number, p in enumerate(module.parameters())}
    [optimizer], _ = module.configure_optimizers()
    order = [place[id(p)] for group in optimizer.param_groups for p in group["params"]]
    [state] = checkpoint["optimizer_states"]
    assert order != sorted(order)
    state["state"] = {order[number]: own for number, own in reversed(state["state"].items())}
    for group in state["param_groups"]:
        group["params"] = [order[number] for number in group["params"]]
    torch.save(checkpoint, path)
    found = run(2, fit, "shard", 2, path)
    assert_same_state(found[0], run(1, fit, "auto", 2)[0])


# -- without this package ---------------------------------------------------------------------------------------------

WITHOUT = """
import sys

for name in ("torch_shard", "lightning_shard"):
    sys.modules[name] = None  # an import of it is an ImportError
import torch

wanted = torch.load(sys.argv[1])
for path in sys.argv[2:]:
    found = torch.load(path, weights_only=True)["state_dict"]
    assert list(found) == list(wanted)
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
"""


def leave(rank, world_size, folder):
    for form in ("full", "sharded"):
        t = fitted(Net(optimizer="adamw", width=9), shard_strategy(state_dict_type=form, unshard_at_end=False))
        t.save_checkpoint(folder / f"{form}.ckpt")
    return t.strategy.engine.state_dict()


@pytest.mark.exhaustive
def test_plain_lightning_loads_both_forms_where_this_package_is_not_installed(tmp_path):
    torch.save(run(2, leave, tmp_path)[0], tmp_path / "wanted.pt")
    paths = [tmp_path / "full.ckpt", tmp_path / "consolidated.ckpt"]
    assert command_line(["consolidate", str(tmp_path / "sharded.ckpt"), str(paths[1])]) == 0
    run_python("-c", WITHOUT, tmp_path / "wanted.pt", *paths, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    for path in paths:  # A module is made of it, and a plain Trainer resumes from it.
        assert Net.load_from_checkpoint(path, weights_only=True).hparams.width == 9
        t, module = single("lightning", max_epochs=2), Net(optimizer="adamw", width=9)
        t.fit(module, loader(1), ckpt_path=path)
        assert t.global_step == 2 * BATCHES


# -- what is no checkpoint --------------------------------------------------------------------------------------------


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def cut_off(path: Path) -> None:
    torch.save({"pytorch-lightning_version": "2.6.0", "state_dict": {"x": torch.zeros(1000)}}, path)
    path.write_bytes(path.read_bytes()[:2000])


def of_deepspeed(path: Path) -> None:
    (path / "checkpoint").mkdir(parents=True)
    (path / "checkpoint" / "mp_rank_00_model_states.pt").touch()
    (path / "latest").write_text("checkpoint")


def with_code(path: Path, exploded: Path | None = None) -> None:
    bomb = Bomb(exploded or path.parent / "exploded")
    torch.save({"pytorch-lightning_version": "2.6.0", "bomb": bomb}, path)


def with_code_beside_shards(path: Path) -> None:
    torch.distributed.checkpoint.save({"model": dict(Net().state_dict())}, checkpoint_id=path, no_dist=True)
    with_code(path / "meta.pt", path.parent / "exploded")


BAD = {
    "missing": (lambda path: None, "no checkpoint"),
    "link to nothing": (lambda path: path.symlink_to(path.parent / "gone.ckpt"), r"link to .*gone\.ckpt"),
    "text": (lambda path: path.write_text("not a checkpoint\n"), "no checkpoint"),
    "cut off": (cut_off, "damaged"),
    "weights": (lambda path: torch.save({"inner.weight": torch.zeros(7, 6)}, path), "pytorch-lightning_version"),
    "bomb": (with_code, "weights_only=False"),
    "bomb beside shards": (with_code_beside_shards, "weights_only=False"),
    "deepspeed": (of_deepspeed, "no checkpoint"),
    "empty folder": (Path.mkdir, "no checkpoint"),
}


@ranks(2)
def test_what_is_no_checkpoint_is_refused_on_all_ranks_with_nothing_changed(rank, world_size, tmp_path):
    for kind, (make, message) in BAD.items():
        folder = tmp_path / kind
        if rank == 0:
            folder.mkdir()
            make(folder / "bad.ckpt")
        torch.distributed.barrier()
        module = Net()
        before = copied_state(module)
        t = trainer("lightning", world_size)
        with pytest.raises(CheckpointError, match=message):
            t.fit(module, loader(world_size), ckpt_path=folder / "bad.ckpt")
        if t.strategy.engine_or_none is not None:  # of a folder: slices were about to be read
            t.strategy.engine.close()
        assert_same_state(dict(module.state_dict()), before)
        assert not (folder / "exploded").exists()


def plain_file(path: Path) -> Any:
    """A module that a single device has trained, and its checkpoint."""
    t, module = single("lightning"), Net()
    t.fit(module, loader(1))
    t.save_checkpoint(path)
    return module


@ranks(2)
def test_a_file_that_only_one_rank_sees_is_an_error_on_all(rank, tmp_path, monkeypatch):
    (tmp_path / str(rank)).mkdir()
    plain_file(tmp_path / str(rank) / f"{rank}.ckpt")
    torch.distributed.barrier()
    monkeypatch.chdir(tmp_path / str(rank))  # the relative path leads elsewhere on each rank
    with pytest.raises(CheckpointError, match="no checkpoint"):
        fitted(Net(), ckpt_path="0.ckpt")


@ranks(2)
def test_a_file_in_the_old_format_is_read_with_a_word_about_it(rank, world_size, tmp_path):
    module = plain_file(tmp_path / f"new{rank}.ckpt")
    path = tmp_path / "old.ckpt"
    if rank == 0:
        checkpoint = torch.load(tmp_path / "new0.ckpt", weights_only=True)
        torch.save(checkpoint, path, _use_new_zipfile_serialization=False)
    torch.distributed.barrier()
    again = Net()
    with captured_log(logging.INFO) as messages:
        trainer("lightning", world_size).validate(again, loader(world_size), ckpt_path=path, verbose=False)
    assert any("can't be mapped" in text for text in messages)
    assert_same_state(dict(again.state_dict()), dict(module.state_dict()))
