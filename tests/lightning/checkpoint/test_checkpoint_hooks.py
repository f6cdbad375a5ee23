"""What users' hooks and plugins do to checkpoints: rename and drop entries, keep what was loaded, act on one rank alone."""

from __future__ import annotations

import copy
import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn

from tests.lightning.support import (
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
from tests.support.ranks import ranks
from torch_shard import ShardConfig, ShardTensor
from torch_shard.errors import MissingRankError, StateDictError, UnitStateError


def strategy(form: str = "full", **options: Any) -> Any:
    return shard_strategy(state_dict_type=form, unshard_at_end=False, **options)


def saved(form: str, module: Any, path: Path, **options: Any) -> None:
    fitted(module, strategy(form, **options), limit_train_batches=1).save_checkpoint(path)


def loaded(module: Any, path: Path, **options: Any) -> Any:
    return fitted(module, strategy(), ckpt_path=path, limit_train_batches=1, max_epochs=2, **options)


class Renaming(Net):
    """Saves some names without a prefix, or all with one."""

    strict_loading = False

    def __init__(self, prefix: str, added: str) -> None:
        super().__init__()
        self.prefix, self.added = prefix, added

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {self.added + key.removeprefix(self.prefix): v for key, v in state.items()}
        self.names = list(checkpoint["state_dict"])

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        state = checkpoint["state_dict"]
        assert sorted(state) == sorted(self.names)
        own = {name.removeprefix(self.prefix): name for name in self.state_dict()}
        checkpoint["state_dict"] = {own[key.removeprefix(self.added)]: value for key, value in state.items()}

    def on_train_start(self) -> None:
        self.at_start = self.trainer.strategy.engine.state_dict(rank0_only=False)


@pytest.mark.parametrize(("prefix", "added"), [("inner.", ""), ("", "_orig_mod.")])
@either_form
@ranks(2)
def test_a_hook_finds_the_names_that_the_hook_before_has_given(form, prefix, added, tmp_path):
    first, again = Renaming(prefix, added), Renaming(prefix, added)
    saved(form, first, tmp_path / "a.ckpt")
    wanted = first.trainer.strategy.engine.state_dict(rank0_only=False)
    again.names = first.names
    loaded(again, tmp_path / "a.ckpt")
    for key, value in wanted.items():
        assert torch.equal(again.at_start[key], value), key


@either_form
@ranks(2)
def test_edits_count_on_all_ranks(form, tmp_path):
    class Edits(Net):
        def on_save_checkpoint(self, checkpoint):
            state = checkpoint["state_dict"]
            del state["offset"]
            state["renamed"], state["added"] = state.pop("scale"), torch.full((2,), 9.0)

        def on_load_checkpoint(self, checkpoint):
            state = checkpoint["state_dict"]
            assert isinstance(state["head.weight"], ShardTensor) == (form == "sharded")
            assert type(state["renamed"]) is torch.Tensor
            state["offset"] = state.pop("added")[0]
            state["scale"] = state.pop("renamed") * 0 + 2
            state["head.weight"] = state["head.weight"] * 0 + 3
            checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 0.125

        def on_train_start(self):
            if self.trainer.max_epochs == 2:  # the second run
                assert float(self.offset) == 9.0 and self.trainer.optimizers[0].param_groups[0]["lr"] == 0.125
                with self.trainer.strategy.engine.gathered():
                    assert self.scale.tolist() == [2.0] * 3 and self.head.weight.eq(3).all()

    saved(form, Edits(), tmp_path / "edited.ckpt")
    loaded(Edits(), tmp_path / "edited.ckpt")


@pytest.mark.exhaustive
@ranks(2)
def test_optimizers_start_anew_where_a_hook_drops_their_state(tmp_path):
    class Drops(Net):
        def on_load_checkpoint(self, checkpoint):
            checkpoint["optimizer_states"] = []

        def on_train_start(self):
            assert not self.trainer.optimizers[0].state

    saved("sharded", Drops(), tmp_path / "a.ckpt")
    loaded(Drops(), tmp_path / "a.ckpt")


@ranks(2)
def test_a_hook_that_drops_an_entry_on_one_rank_is_an_error_on_all(tmp_path):
    class Drops(Net):
        def on_save_checkpoint(self, checkpoint):
            if self.trainer.is_global_zero:
                del checkpoint["state_dict"]["offset"]

    with pytest.raises(StateDictError, match=r"(?s)more: \['offset'\].*on_save_checkpoint must make the same"):
        saved("sharded", Drops(), tmp_path / "a.ckpt")


@ranks(2)
def test_a_hook_finds_entries_without_values_on_other_ranks_than_the_first(rank, tmp_path):
    class Asks(Net):
        def on_save_checkpoint(self, checkpoint):
            weight = checkpoint["state_dict"]["inner.weight"]
            assert weight.shape == (7, 6) and weight.half().dtype == copy.deepcopy(weight).half().dtype == torch.float16
            torch.save(checkpoint["state_dict"], io.BytesIO())
            assert torch.stack([weight, weight]).clone().detach().data.shape == (2, 7, 6)
            if rank:
                with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
                    weight.norm().item()

    saved("full", Asks(), tmp_path / "a.ckpt")


@pytest.mark.exhaustive
@either_form
@ranks(2, fresh=True)
def test_a_hook_that_fails_on_one_rank_strands_no_other(rank, form, tmp_path):
    class Fails(Net):
        def on_save_checkpoint(self, checkpoint):
            if rank:
                raise ValueError("rank 1's hook")

    with pytest.raises(ValueError if rank else MissingRankError, match=r"rank 1|trainer\.save_checkpoint"):
        saved(form, Fails(), tmp_path / "a.ckpt", config=ShardConfig(timeout=2.0))
    ended = tmp_path / "ended"
    if rank == 0:
        ended.touch()
    while not ended.exists():  # without this rank 0 would notice the process that has ended
        time.sleep(0.01)


@both_forms
@ranks(2)
def test_saving_within_a_step_is_refused(form, tmp_path):
    class Saves(Net):
        def training_step(self, batch, index):
            self.trainer.save_checkpoint(tmp_path / "a.ckpt")

    with pytest.raises(UnitStateError, match="forward"):
        saved(form, Saves(), tmp_path / "b.ckpt")


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
    class Keeps(Net):
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
def test_nothing_that_is_kept_after_loading_lies_in_the_file(tmp_path):
    path = tmp_path / "a.ckpt"
    saved("full", keeping_class()(), path)
    module = keeping_class()()
    loaded(module, path)
    state = [v for own in module.trainer.optimizers[0].state.values() for v in own.values() if type(v) is torch.Tensor]
    assert state
    for tensor in (module.kept, module.metric.total, module.extra.kept, module.offset, *state):
        assert not is_mapped(tensor, path)
    assert module.kept.tolist() == [0, 1, 2, 3]


@pytest.mark.exhaustive
@ranks(2)
def test_files_of_a_plugin_that_writes_or_reads_in_a_way_of_its_own_are_not_mapped(tmp_path):
    class InPlace(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            with open(path, "wb") as file:
                torch.save(checkpoint, file)

    class Reads(AsyncCheckpointIO):
        def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            return {**super().load_checkpoint(*args, **kwargs), "mine": True}

    path = tmp_path / "a.ckpt"
    saved("full", keeping_class()(), path)

    class Looks(keeping_class()):
        def on_load_checkpoint(self, checkpoint: Any) -> None:
            super().on_load_checkpoint(checkpoint)
            self.mine = checkpoint.get("mine")
            self.mapped = is_mapped(checkpoint["state_dict"]["inner.weight"], path)

    for plugins, mapped, mine in (
        ([], True, None),
        ([AsyncCheckpointIO()], True, None),
        ([Reads()], False, True),
        ([InPlace()], False, None),
    ):
        module = Looks()
        t = loaded(module, path, plugins=plugins)
        assert (module.mapped, module.mine) == (mapped, mine)
    t.save_checkpoint(path, weights_only=True)  # over the file
    assert module.kept.tolist() == [0, 1, 2, 3]


# -- what hooks see of a checkpoint: as under DDP, all of it is there before set-up is ----------------------------------


class Data(LightningDataModule):
    """Trains on fewer batches once it has been saved."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.world_size, self.batches = world_size, 6

    def train_dataloader(self) -> Any:
        return loader(self.world_size, self.batches)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


class Looking(Net):
    """Notes what it sees in hooks, and the rate that was saved."""

    rate, configured, at_start, counted = 0.04, (), None, 0

    def whole(self) -> torch.Tensor:
        weight = self.head.weight
        return (weight.full_tensor() if isinstance(weight, ShardTensor) else weight).detach().clone()

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["rate"] = 0.01

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.rate = checkpoint["rate"]

    def configure_optimizers(self) -> Any:
        self.configured = (self.rate, self.whole(), self.trainer.estimated_stepping_batches)
        return torch.optim.SGD(self.parameters(), lr=self.rate)

    def on_fit_start(self) -> None:
        self.at_start = self.whole()


class Counting(Callback):
    count = 0

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        module.counted = self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@either_form
@ranks(2)
def test_hooks_before_and_in_set_up_see_the_checkpoint_as_on_a_single_device(rank, world_size, tmp_path, form):
    def resumed(path: Path, n: int, strategy: Any) -> Any:
        for epochs, ckpt_path in ((1, None), (2, path)):
            module, t = Looking(), trainer("lightning", n, strategy(), max_epochs=epochs, callbacks=[Counting()])
            module.on_train_end = lambda t=t: t.save_checkpoint(path)
            t.fit(module, datamodule=Data(n), ckpt_path=ckpt_path)
        return module

    expected = resumed(tmp_path / f"single{rank}.ckpt", 1, lambda: "auto")
    module = resumed(tmp_path / "shard.ckpt", world_size, lambda: shard_strategy(state_dict_type=form))
    assert (module.counted, module.configured[0]) == (7, 0.01)
    torch.testing.assert_close(module.configured, expected.configured)
    torch.testing.assert_close(module.at_start, expected.at_start)
    assert_same_state(module.state_dict(), expected.state_dict())


@ranks(2)
def test_a_hook_adds_the_layers_that_a_file_has(rank, world_size, tmp_path):
    class Grown(Net):
        def on_load_checkpoint(self, checkpoint):
            self.more = torch.nn.Linear(3, 3)

    t = single("lightning")
    module = Net()
    module.more = torch.nn.Linear(3, 3)
    t.strategy.connect(module)
    t.save_checkpoint(tmp_path / f"{rank}.ckpt", weights_only=True)
    torch.distributed.barrier()
    found = Grown()
    trainer("lightning", world_size).validate(found, loader(world_size), ckpt_path=tmp_path / "0.ckpt", verbose=False)
    torch.testing.assert_close(found.more.weight, module.more.weight)
