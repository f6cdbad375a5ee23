"""``ModelCheckpoint`` with both forms: the best, the last, and what is deleted; and saving while training goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_shard.checkpoint import files
from tests.lightning.support import (
    BATCHES,
    FORMS,
    Net,
    assert_same_state,
    both_forms,
    either_form,
    fitted,
    loader,
    shard_strategy,
    single,
    trainer,
)
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.checkpoint.format import atomic_directory
from torch_shard.checkpoint.sharded import save as sharded_save
from torch_shard.checkpoint.sharded.checkpoint_dir import Checkpoint
from torch_shard.errors import CheckpointError


def strategy(form: str, **options: Any) -> Any:
    return shard_strategy(state_dict_type=form, **options)


def fit(how: Any, saves: Any, epochs: int = 1, module: Any = None, path: Any = None, **options: Any) -> Any:
    options |= {"callbacks": saves, "enable_checkpointing": bool(saves), "max_epochs": epochs}
    return fitted(module or Net(optimizer="adamw"), how, path, **options)


def is_whole(path: Path, form: str) -> bool:
    """Whether there is a checkpoint of this form, and nothing else."""
    if form == "full":
        return path.is_file() and "state_dict" in torch.load(path, weights_only=True)
    return path.is_dir() and Checkpoint.open(path).manifest is not None


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.exhaustive
@both_forms
@ranks(2)
def test_the_best_and_the_last_are_kept_and_others_deleted(world_size, form, tmp_path):
    class Scores(Net):
        def on_train_epoch_end(self):
            self.log("score", [3.0, 1.0, 2.0, 0.5, 4.0][self.current_epoch])

    saves = ModelCheckpoint(tmp_path, "{epoch}", monitor="score", save_top_k=2, save_last=True)
    t = fit(strategy(form), [saves], 5, Scores(optimizer="adamw"))
    t.strategy.barrier()
    assert names(tmp_path) == ["epoch=1.ckpt", "epoch=3.ckpt", "last.ckpt"]
    assert all(is_whole(path, form) for path in tmp_path.iterdir())
    assert saves.best_model_path == str(tmp_path / "epoch=3.ckpt")
    t.validate(ckpt_path="best", dataloaders=loader(world_size), verbose=False)
    assert t.ckpt_path == saves.best_model_path


@either_form
@ranks(2)
def test_the_last_can_be_a_link_and_the_run_resumes_from_it(form, tmp_path):
    def saves() -> Any:
        return ModelCheckpoint(tmp_path, "{step}", save_last="link", every_n_train_steps=2, save_top_k=1)

    t = fit(strategy(form), [saves()], max_steps=5)
    t.strategy.barrier()
    assert names(tmp_path) == ["last.ckpt", "step=4.ckpt"]
    assert os.readlink(tmp_path / "last.ckpt") == "step=4.ckpt" and is_whole(tmp_path / "last.ckpt", form)
    t = fit(strategy(form), [saves()], path="last")
    t.strategy.barrier()
    assert t.global_step == BATCHES
    # Lightning keeps what a run was resumed from, link or not.
    assert os.readlink(tmp_path / "last.ckpt") == "step=6.ckpt" and is_whole(tmp_path / "last.ckpt", form)


@pytest.mark.exhaustive
@both_forms
@ranks(2)
def test_links_with_names_that_change_are_deleted_and_not_what_they_lead_to(form, tmp_path):
    saves = ModelCheckpoint(tmp_path, "{epoch}", save_last="link", save_top_k=-1, monitor="train")
    saves.CHECKPOINT_NAME_LAST = "last-{epoch}"
    t = fit(strategy(form), [saves], 2)
    t.strategy.barrier()
    assert names(tmp_path) == ["epoch=0.ckpt", "epoch=1.ckpt", "last-epoch=1.ckpt"]
    assert is_whole(tmp_path / "epoch=0.ckpt", form)


@pytest.mark.exhaustive
@either_form
@ranks(2)
def test_each_form_takes_the_place_of_the_other_once_it_is_whole(form, tmp_path):
    class Fails(Net):
        broken = True

        def on_save_checkpoint(self, checkpoint):
            if self.broken:  # torch can't pickle it.
                checkpoint["state_dict" if form == "full" else "bad"] = {"x": threading.Lock()}

    other = FORMS[1 - FORMS.index(form)]
    path, module = tmp_path / "a.ckpt", Fails()
    t = fit(strategy(other, unshard_at_end=False), [])
    t.save_checkpoint(path)
    t = fit(strategy(form, unshard_at_end=False), [], module=module)
    with pytest.raises((OSError, TypeError, RuntimeError), match="pickle"):
        t.save_checkpoint(path)
    t.strategy.barrier()
    assert is_whole(path, other) and names(tmp_path) == ["a.ckpt"]
    module.broken = False
    for _ in range(2):  # The second one replaces one of its own form.
        t.save_checkpoint(path)
        assert is_whole(path, form) and names(tmp_path) == ["a.ckpt"]
    fit(strategy(form), [], 2, Net(), path)


@either_form
@ranks(2)
def test_the_newest_checkpoint_of_a_preempted_job_is_found_beside_what_a_killed_save_left(rank, form, tmp_path):
    t = fit(strategy(form, unshard_at_end=False), [])
    for number in (2, 10):
        t.save_checkpoint(tmp_path / f"hpc_ckpt_{number}.ckpt")
    if rank == 0:
        (tmp_path / ".hpc_ckpt_11.ckpt.saving-0123456789abcdef").mkdir()
    t.strategy.barrier()
    t = fit(strategy(form), [], 2, path="hpc", default_root_dir=tmp_path)
    assert t.global_step == 2 * BATCHES


@either_form
@ranks(2)
def test_a_folder_that_is_no_checkpoint_is_never_lost(rank, form, tmp_path):
    if rank == 0:
        (tmp_path / "a.ckpt").mkdir()
        (tmp_path / "a.ckpt" / "thesis.tex").touch()
    t = fit(strategy(form, unshard_at_end=False), [])
    with pytest.raises((OSError, CheckpointError), match="checkpoint"):
        t.save_checkpoint(tmp_path / "a.ckpt")
    t.strategy.remove_checkpoint(tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt" / "thesis.tex").exists()


# -- while training goes on -------------------------------------------------------------------------------------------


class Gate:
    """Holds up what writes a checkpoint until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: bool = False) -> None:
        self.open = threading.Event()
        write = sharded_save._Save.write

        def slow(save: Any, *args: Any) -> Any:
            self.open.wait(30)
            if error:
                raise OSError("the disk is full")
            return write(save, *args)

        monkeypatch.setattr(sharded_save._Save, "write", slow)


@ranks(2)
def test_a_sharded_save_in_the_background_is_a_snapshot_and_older_ones_stay_until_it_is_whole(world_size, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        gate, seen = Gate(patch), []

        class Looks(Net):
            def on_train_batch_end(self, *args):
                if self.global_step == 3:  # the save of step 2 waits at the gate
                    seen.append(names(tmp_path))
                    gate.open.set()
                if self.global_step == 5:
                    self.trainer.strategy.engine.finish_saving()
                    seen.append(names(tmp_path))

        class Waits(ModelCheckpoint):
            def on_train_batch_end(self, trainer, *args):
                if trainer.global_step == 4:
                    self.wanted = trainer.strategy.engine.state_dict(rank0_only=False)
                super().on_train_batch_end(trainer, *args)

        saves = Waits(tmp_path, "{step}", every_n_train_steps=2, save_top_k=1, save_last=False)
        how = strategy("sharded", async_save=True, unshard_at_end=False)
        t = fit(how, [saves], module=Looks(optimizer="adamw"), max_steps=5)
        t.strategy.barrier()
        assert not any("step=2.ckpt" in found for found in seen[:1])
        assert "step=2.ckpt" in seen[1] and "step=4.ckpt" in seen[1], "deleted once a later save is known to be whole"
        assert names(tmp_path) == ["step=4.ckpt"]
        fresh = Net(optimizer="adamw")
        t = trainer("lightning", world_size)
        t.validate(fresh, loader(world_size), ckpt_path=tmp_path / "step=4.ckpt", verbose=False)
        assert_same_state(dict(fresh.state_dict()), saves.wanted)


@pytest.mark.exhaustive
@ranks(2)
def test_a_link_to_the_last_checkpoint_never_leads_nowhere(tmp_path):
    class Looks(Net):
        def on_train_batch_end(self, *args):
            link = tmp_path / "last.ckpt"
            assert link.exists() == link.is_symlink()

    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=1, save_last="link")
    fit(strategy("sharded", async_save=True), [saves], module=Looks(optimizer="adamw"))
    assert is_whole(tmp_path / "last.ckpt", "sharded")


@pytest.mark.exhaustive
@ranks(2)
def test_names_in_the_background_are_those_of_saves_that_are_waited_for(world_size, tmp_path):
    class Scores(Net):
        number = 0

        def on_validation_epoch_end(self) -> None:
            self.log("score", [1.0, 5.0, 3.0, 0.5, 4.0, 6.0][self.number])
            self.number += 1

    def slowly(save: Any, *args: Any) -> Any:
        time.sleep(0.1)
        return write(save, *args)

    found, write = [], sharded_save._Save.write
    for background in (False, True):
        folder = tmp_path / str(background)
        best = ModelCheckpoint(folder, "{epoch}", monitor="score", save_top_k=2, save_last=True)
        every = ModelCheckpoint(folder, "{epoch}", every_n_train_steps=2, save_top_k=1)
        options = {"callbacks": [best, every], "enable_checkpointing": True, "max_epochs": 3, "val_check_interval": 0.5}
        t = trainer("lightning", world_size, strategy("sharded", async_save=background), **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharded_save._Save, "write", slowly)
            t.fit(Scores(), loader(world_size), loader(world_size, 1))
        t.strategy.barrier()
        assert all(is_whole(path, "sharded") for path in folder.iterdir())
        paths = [os.path.basename(path) for path in (best.best_model_path, best.last_model_path, every.best_model_path)]
        scores = {os.path.basename(path): float(score) for path, score in best.best_k_models.items()}
        found.append((names(folder), paths, scores))
        assert "file_exists" not in vars(best)
    assert found[0] == found[1] and len(found[0][0]) > 2


@pytest.mark.exhaustive
@ranks(2)
def test_what_two_callbacks_have_saved_under_one_name_stays_until_both_delete_it(tmp_path):
    every = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1, enable_version_counter=False)
    last = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=1, enable_version_counter=False)
    fit(strategy("sharded", async_save=True), [last, every], max_steps=5)
    torch.distributed.barrier()
    assert names(tmp_path) == [f"step={number}.ckpt" for number in range(1, 6)]


@pytest.mark.parametrize("unshard", [True, *exhaustive(False)])
@ranks(2)
def test_a_background_save_that_fails_is_the_error_of_the_run_and_deletes_nothing(unshard, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        how = strategy("sharded", async_save=True, unshard_at_end=unshard)
        saves = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=1, monitor="train")
        gates = []

        class Breaks(Net):
            def on_train_epoch_start(self):
                if self.current_epoch == 1:
                    self.trainer.strategy.engine.finish_saving()
                    gates.append(Gate(patch, error=True))
                    gates[0].open.set()

        with pytest.raises(CheckpointError, match="the disk is full"):
            fit(how, [saves], 2, Breaks(optimizer="adamw"))
        torch.distributed.barrier()
        assert names(tmp_path) == ["epoch=0.ckpt"]
    fit(strategy("sharded"), [], 2, path=tmp_path / "epoch=0.ckpt")


@ranks(2)
def test_a_background_save_that_fails_deletes_nothing_where_its_error_has_been_raised_before(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        saves = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=1, monitor="train")

        class Breaks(Net):
            def on_train_epoch_start(self):
                if self.current_epoch == 1:
                    self.trainer.strategy.engine.finish_saving()
                    Gate(patch, error=True).open.set()

            def on_train_end(self):
                with pytest.raises(CheckpointError, match="the disk is full"):
                    self.trainer.strategy.engine.finish_saving()

        fit(strategy("sharded", async_save=True), [saves], 2, Breaks(optimizer="adamw"))
        torch.distributed.barrier()
        assert names(tmp_path) == ["epoch=0.ckpt"]


@ranks(2)
def test_a_background_save_that_fails_deletes_nothing_where_a_wait_for_it_was_interrupted(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        saves, gates = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=1, monitor="train"), []
        interrupted = []

        class Breaks(Net):
            def on_train_epoch_start(self):
                if self.current_epoch == 1:
                    self.trainer.strategy.engine.finish_saving()
                    gates.append(Gate(patch, error=True))

            def on_train_end(self):
                before = signal.signal(signal.SIGALRM, signal.default_int_handler)
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                try:
                    with pytest.raises(KeyboardInterrupt):
                        self.trainer.strategy._finish_save()
                    interrupted.append(True)
                finally:
                    signal.signal(signal.SIGALRM, before)
                    gates[0].open.set()

        with pytest.raises(CheckpointError, match="the disk is full"):
            fit(strategy("sharded", async_save=True), [saves], 2, Breaks(optimizer="adamw"))
        torch.distributed.barrier()
        assert interrupted and names(tmp_path) == ["epoch=0.ckpt"]


@ranks(2)
def test_with_lightnings_asynchronous_plugin_older_checkpoints_stay_until_the_newer_snapshot_is_whole(tmp_path):
    gate = threading.Event()
    gate.set()

    class Slow(AsyncCheckpointIO):
        """Its writing thread, and nothing else, waits at the gate."""

        def _ensure_setup(self) -> None:
            super()._ensure_setup()
            self._executor.submit(gate.wait, 30)

    class Looks(Net):
        def on_train_batch_end(self, *args):
            if self.global_step == 3:
                while self.trainer.is_global_zero and not (tmp_path / "step=2.ckpt").exists():
                    time.sleep(0.01)
                gate.clear()
            if self.global_step == 5 and self.trainer.is_global_zero:
                assert names(tmp_path) == ["step=2.ckpt"]
                gate.set()

    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=1)
    fit("shard", [saves], module=Looks(optimizer="adamw"), max_steps=5, plugins=[Slow()])
    torch.distributed.barrier()
    assert names(tmp_path) == ["step=4.ckpt"]
    plain = Net(optimizer="adamw")
    single("lightning", max_steps=4).fit(plain, loader(1))
    found = torch.load(tmp_path / "step=4.ckpt", weights_only=True)
    assert_same_state(found["state_dict"], dict(plain.state_dict()))


@pytest.mark.exhaustive
@ranks(2)
def test_a_failure_of_lightnings_asynchronous_plugin_is_raised_on_all_ranks(tmp_path):
    class Broken(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **options: Any) -> None:
            raise OSError("the disk is full")

    with pytest.raises((OSError, CheckpointError), match="the disk is full"):
        fit("shard", [ModelCheckpoint(tmp_path, "broken")], plugins=[AsyncCheckpointIO(Broken())])


@ranks(2)
def test_lightnings_asynchronous_plugin_replaces_a_folder(rank, tmp_path):
    t = fit(strategy("sharded", unshard_at_end=False), [])
    t.save_checkpoint(tmp_path / "a.ckpt")
    saves = ModelCheckpoint(tmp_path, "a", enable_version_counter=False)
    fit("shard", [saves], plugins=[AsyncCheckpointIO()])
    if rank == 0:
        assert is_whole(tmp_path / "a.ckpt", "full") and names(tmp_path) == ["a.ckpt"]


def test_the_files_take_each_others_place_where_names_cannot_be_exchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_directory, "exchange", lambda one, other: False)
    target, beside = tmp_path / "target", tmp_path / "beside"
    target.mkdir()
    (target / "old").touch()
    beside.write_text("new")
    files.swap(beside, target)
    assert target.read_text() == "new" and names(beside) == ["old"]
    files.delete(beside)
    beside.mkdir()
    (beside / "newer").touch()
    files.swap(beside, target)
    files.delete(beside)
    assert names(target) == ["newer"] and names(tmp_path) == ["target"]
