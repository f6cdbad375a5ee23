"""What users' hooks and plugins do to checkpoints: rename and drop entries, keep what was loaded, act on one rank alone."""

from __future__ import annotations

import copy
import functools
import io
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn

from lightning_shard.for_lightning import ShardStrategy
from tests.lightning.support import NAMESPACES, loader, net_class, trainer
from tests.support.marks import quick
from tests.support.ranks import ranks
from torch_shard import ShardConfig
from torch_shard.checkpoint.sharded import save as sharded_save
from torch_shard.checkpoint.sharded.checkpoint_dir import Checkpoint
from torch_shard.errors import MissingRankError, StateDictError, UnitStateError

FORMS = ["sharded", "full"]


def strategy(form: str = "full", **options: Any) -> Any:
    return ShardStrategy(state_dict_type=form, unshard_at_end=False, **options)


def saved(world_size: int, form: str, module: Any, path: Path, **options: Any) -> None:
    t = trainer("lightning", world_size, strategy(form, **options), limit_train_batches=1)
    t.fit(module, loader(world_size))
    t.save_checkpoint(path)


def loaded(world_size: int, module: Any, path: Path, **options: Any) -> Any:
    t = trainer("lightning", world_size, strategy(), limit_train_batches=1, max_epochs=2, **options)
    t.fit(module, loader(world_size), ckpt_path=path)
    return t


def renaming_class(prefix: str, added: str = "") -> Any:
    class Renaming(NAMESPACES["lightning"].LightningModule):  # type: ignore[name-defined, misc]
        """Saves the network's own names, or names with a prefix."""

        strict_loading = False

        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return (self.model(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {added + key.removeprefix(prefix): value for key, value in state.items()}
            self.names = list(checkpoint["state_dict"])

        def on_load_checkpoint(self, checkpoint: Any) -> None:
            assert sorted(checkpoint["state_dict"]) == sorted(self.names)
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {prefix + key.removeprefix(added): value for key, value in state.items()}

        def on_train_start(self) -> None:
            self.at_start = self.trainer.strategy.engine.state_dict(rank0_only=False)

    return Renaming


@pytest.mark.parametrize(("prefix", "added"), [("model.", ""), ("", "module."), ("", "_orig_mod.")])
@pytest.mark.parametrize("form", quick(FORMS, ["sharded"]))
@ranks(2)
def test_a_hook_finds_the_names_that_the_hook_before_has_given(world_size, form, prefix, added, tmp_path):
    first, again = renaming_class(prefix, added)(), renaming_class(prefix, added)()
    saved(world_size, form, first, tmp_path / "a.ckpt")
    wanted = first.trainer.strategy.engine.state_dict(rank0_only=False)
    again.names = first.names
    loaded(world_size, again, tmp_path / "a.ckpt")
    for key, value in wanted.items():
        assert torch.equal(again.at_start[key], value), key


@ranks(2)
def test_a_hook_that_drops_an_entry_on_one_rank_is_an_error_on_all(rank, world_size, tmp_path):
    class Drops(net_class("lightning")):
        def on_save_checkpoint(self, checkpoint):
            if self.trainer.is_global_zero:
                del checkpoint["state_dict"]["offset"]

    with pytest.raises(StateDictError, match=r"(?s)more: \['offset'\].*on_save_checkpoint must make the same"):
        saved(world_size, "sharded", Drops(), tmp_path / "a.ckpt")


@ranks(2)
def test_a_hook_finds_entries_without_values_on_other_ranks_than_the_first(rank, world_size, tmp_path):
    class Asks(net_class("lightning")):
        def on_save_checkpoint(self, checkpoint):
            weight = checkpoint["state_dict"]["inner.weight"]
            assert weight.shape == (7, 6) and weight.half().dtype == copy.deepcopy(weight).half().dtype == torch.float16
            torch.save(checkpoint["state_dict"], io.BytesIO())
            assert torch.stack([weight, weight]).clone().detach().data.shape == (2, 7, 6)
            if rank:
                with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
                    weight.norm().item()

    saved(world_size, "full", Asks(), tmp_path / "a.ckpt")


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", quick(FORMS, ["sharded"]))
@ranks(2, fresh=True)
def test_a_hook_that_fails_on_one_rank_strands_no_other(rank, world_size, form, tmp_path):
    class Fails(net_class("lightning")):
        def on_save_checkpoint(self, checkpoint):
            if rank:
                raise ValueError("rank 1's hook")

    with pytest.raises(ValueError if rank else MissingRankError, match=r"rank 1|trainer\.save_checkpoint"):
        saved(world_size, form, Fails(), tmp_path / "a.ckpt", config=ShardConfig(timeout=2.0))
    ended = tmp_path / "ended"
    if rank == 0:
        ended.touch()
    while not ended.exists():  # without this rank 0 would notice the process that has ended
        time.sleep(0.01)


@pytest.mark.parametrize("form", FORMS)
@ranks(2)
def test_saving_within_a_step_is_refused(world_size, form, tmp_path):
    class Saves(net_class("lightning")):
        def training_step(self, batch, index):
            self.trainer.save_checkpoint(tmp_path / "a.ckpt")

    with pytest.raises(UnitStateError, match="forward"):
        saved(world_size, form, Saves(), tmp_path / "b.ckpt")


# -- what stays in use after loading ----------------------------------------------------------------------------------


class Metric(nn.Module):
    """Keeps the very tensor that it is given, as metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(3)

    def _save_to_state_dict(self, state: Any, prefix: str, keep_vars: bool) -> None:
        state[prefix + "total"] = self.total

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.total = state.pop(prefix + "total")


class Extra(nn.Module):
    kept = torch.zeros(3)

    def get_extra_state(self) -> Any:
        return {"kept": torch.arange(3.0)}

    def set_extra_state(self, state: Any) -> None:
        self.kept = state["kept"]


def keeping_class() -> Any:
    class Keeps(net_class("lightning")):
        def __init__(self) -> None:
            super().__init__(optimizer="adamw")
            self.metric, self.extra = Metric(), Extra()

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            checkpoint["kept"] = {"list": [torch.arange(4.0)]}

        def on_load_checkpoint(self, checkpoint: Any) -> None:
            self.kept = checkpoint["kept"]["list"][0]

    return Keeps


def is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    """Whether the tensor lies in this mapped file."""
    lines = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    areas = [[int(end, 16) for end in line.split("-")] for line in lines]
    return any(start <= tensor.untyped_storage().data_ptr() < end for start, end in areas)


@ranks(2)
def test_nothing_that_is_kept_after_loading_lies_in_the_file(world_size, tmp_path):
    path = tmp_path / "a.ckpt"
    saved(world_size, "full", keeping_class()(), path)
    module = keeping_class()()
    loaded(world_size, module, path)
    state = [v for own in module.trainer.optimizers[0].state.values() for v in own.values() if type(v) is torch.Tensor]
    assert state
    for tensor in (module.kept, module.metric.total, module.extra.kept, module.offset, *state):
        assert not is_mapped(tensor, path)
    assert module.kept.tolist() == [0, 1, 2, 3]


@pytest.mark.exhaustive
@ranks(2)
def test_files_of_a_plugin_that_writes_or_reads_in_a_way_of_its_own_are_not_mapped(rank, world_size, tmp_path):
    class InPlace(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            with open(path, "wb") as file:
                torch.save(checkpoint, file)

    class Reads(AsyncCheckpointIO):
        def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            return {**super().load_checkpoint(*args, **kwargs), "mine": True}

    path = tmp_path / "a.ckpt"
    saved(world_size, "full", keeping_class()(), path)

    class Looks(keeping_class()):
        def on_load_checkpoint(self, checkpoint: Any) -> None:
            super().on_load_checkpoint(checkpoint)
            self.mine = checkpoint.get("mine")
            self.mapped = is_mapped(checkpoint["state_dict"]["inner.weight"], path)

    for plugins, mapped, mine in (([], True, None), ([AsyncCheckpointIO()], True, None)):
        module = Looks()
        loaded(world_size, module, path, plugins=plugins)
        assert (module.mapped, module.mine) == (mapped, mine)
    module = Looks()
    loaded(world_size, module, path, plugins=[Reads()])
    assert module.mine is True
    module = Looks()
    t = loaded(world_size, module, path, plugins=[InPlace()])
    assert not module.mapped
    t.save_checkpoint(path, weights_only=True)
    assert module.kept.tolist() == [0, 1, 2, 3]


# -- names of saves in the background ---------------------------------------------------------------------------------


def slowly(save: Any, write: Any, *args: Any) -> Any:
    time.sleep(0.1)
    return write(save, *args)


@pytest.mark.exhaustive
@ranks(2)
def test_names_are_those_of_saves_that_are_waited_for(world_size, tmp_path):
    class Scores(net_class("lightning")):
        def on_validation_epoch_end(self) -> None:
            self.log("score", [1.0, 5.0, 3.0, 0.5, 4.0, 6.0][self.number])
            self.number += 1

    found = []
    for background in (False, True):
        folder = tmp_path / str(background)
        best = ModelCheckpoint(folder, "{epoch}", monitor="score", save_top_k=2, save_last=True)
        every = ModelCheckpoint(folder, "{epoch}", every_n_train_steps=2, save_top_k=1)
        t = trainer(
            "lightning",
            world_size,
            strategy("sharded", async_save=background),
            callbacks=[best, every],
            enable_checkpointing=True,
            max_epochs=3,
            val_check_interval=0.5,
        )
        module = Scores()
        module.number = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharded_save._Save, "write", functools.partialmethod(slowly, sharded_save._Save.write))
            t.fit(module, loader(world_size), loader(world_size, 1))
        t.strategy.barrier()
        sizes = {path.name: Checkpoint.open(path).manifest is not None for path in folder.iterdir()}
        paths = [os.path.basename(path) for path in (best.best_model_path, best.last_model_path, every.best_model_path)]
        scores = {os.path.basename(path): float(score) for path, score in best.best_k_models.items()}
        found.append((sorted(sizes.items()), paths, scores))
        assert "file_exists" not in vars(best)
    assert found[0] == found[1]
    assert len(found[0][0]) > 2
