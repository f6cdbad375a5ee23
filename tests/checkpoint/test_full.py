"""Full checkpoints on real ranks: what is in them, which ones are loaded, and what is refused."""

from __future__ import annotations

import os
import signal
import zipfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.checkpoint.helpers import Model, adamw, alone, build, same, train, whole
from tests.compat.harness import batch as matrix_batch
from tests.compat.harness import plain_backward
from tests.optim.helpers import Odd
from tests.optim.matrix_optimizers import MAKE, maker
from tests.support.damage import full_disk, rezipped
from tests.support.marks import quick
from tests.support.ranks import RankFailure, ranks, run
from torch_shard.checkpoint.format.torch_file import Slot, TorchFileWriter
from torch_shard.errors import CheckpointError, ConfigError, DivergenceError, StateDictError


def plain(seed: int = 3) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = Model()
    return model, adamw(model)


@ranks(2)
def test_plain_torch_loads_what_was_saved(rank, tmp_path):
    model, engine, optimizer = build()
    train(model, optimizer, rank, range(2))
    model.note = "trained"
    engine.save_full(tmp_path / "m.pt")
    engine.save_full(tmp_path / "all.pt", optimizer)
    expected = whole(engine, optimizer)
    if rank:
        return  # buffers are rank 0's
    other, second = plain()
    for mapped in (False, True):
        state = torch.load(tmp_path / "m.pt", weights_only=True, mmap=mapped)
        assert list(state) == list(other.state_dict()) and state._metadata == other.state_dict()._metadata
        other.load_state_dict(state)
        same(dict(other.state_dict()), expected["model"])
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    second.load_state_dict(found["optimizer"])
    names = {p: n for n, p in other.named_parameters()}
    assert len(second.state) == len(expected["optimizer"]["state"])
    for p, entries in second.state.items():
        same(dict(entries), expected["optimizer"]["state"][names[p]])
    assert found["optimizer"]["param_groups"][1]["lr"] == 0.02


@ranks(2)
def test_what_plain_torch_saved_is_loaded(rank, tmp_path):
    other, second = plain()
    train(other, second, 0, range(2))
    other.note = "plain"
    contents = [
        other.state_dict(),
        {"model": other.state_dict(), "optimizer": second.state_dict()},
        {"state_dict": other.state_dict(), "optimizer_states": [second.state_dict()], "epoch": 3, "optim": "SGD"},
        {"model_state_dict": {f"module.{k}": v for k, v in other.state_dict().items()}, "mask": torch.ones(2)},
    ]
    for number, content in enumerate(contents):
        file = tmp_path / f"{number}.pt"
        if rank == 0:
            torch.save(content, file)
        dist.barrier()
        model, engine, optimizer = build()
        with_optimizer = number in (1, 2)
        assert engine.load(file, optimizer if with_optimizer else None) is None
        found = whole(engine, optimizer if with_optimizer else None)
        same(found["model"], dict(other.state_dict()))
        assert model.note == "plain"
        if with_optimizer:
            names = {p: n for n, p in other.named_parameters()}
            same(found["optimizer"]["state"], {names[p]: dict(entries) for p, entries in second.state.items()})
            assert found["optimizer"]["param_groups"][0]["weight_decay"] == 0.1
        engine.close()


def double() -> nn.Module:
    return Odd().double()


def of_matrices(rank: int, world_size: int, name: str, path: str, saving: bool) -> None:
    model, engine, optimizer = build(seed=0 if saving else 1, make=maker(name), model=double, unit_bytes=300)
    for step in range(2):
        model.zero_grad()
        plain_backward(model, matrix_batch(rank, step))
        optimizer.step()
    if saving:
        engine.save(f"{path}/c", optimizer)
        engine.save_full(f"{path}/c.pt", optimizer)
        expected = whole(engine, optimizer)
        if rank == 0:
            torch.save(expected, f"{path}/expected")
    else:
        for file in ("c", "c.pt"):
            engine.load(f"{path}/{file}", optimizer)
            same(whole(engine, optimizer), torch.load(f"{path}/expected", weights_only=True))
            optimizer.state.clear()
        engine.load(f"{path}/c", optimizer)
        model.zero_grad()
        plain_backward(model, matrix_batch(rank, 2))
        optimizer.step()
    engine.close()


@pytest.mark.parametrize("name", quick(MAKE, ["Muon"]))
def test_state_of_whole_matrices_goes_to_whoever_owns_it(name, tmp_path):
    run(2, of_matrices, name, str(tmp_path), True)
    run(3, of_matrices, name, str(tmp_path), False)
    torch.manual_seed(5)
    model = double()
    optimizer = maker(name)(model)
    found = torch.load(tmp_path / "c.pt", weights_only=True)
    expected = torch.load(tmp_path / "expected", weights_only=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    names = {id(p): n for n, p in model.named_parameters()}
    numbers = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    same({numbers[n]: s for n, s in found["optimizer"]["state"].items()}, expected["optimizer"]["state"])


class Entries(nn.Module):
    """Entries of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.randn(5, 3).bfloat16())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.turned = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("none", torch.empty(0, dtype=torch.int8))


@ranks(2, exhaustive=(4,))
def test_entries_of_every_kind(rank, tmp_path):
    _model, engine = alone(Entries)
    expected = whole(engine)["model"]
    for file in ("c.pt", "c.safetensors", "folder"):
        engine.save_full(tmp_path / file)
        _again, other = alone(Entries, seed=1)
        other.load(tmp_path / file)
        same(whole(other)["model"], expected)
        other.close()
    same(dict(torch.load(tmp_path / "c.pt", weights_only=True)), expected)


@ranks(2)
def test_tied_names_share_memory_in_the_file(rank, tmp_path):
    _model, engine = alone()
    engine.save_full(tmp_path / "c.pt")
    found = torch.load(tmp_path / "c.pt", weights_only=True)
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()


@ranks(2)
def test_another_dtype_in_the_file(rank, tmp_path):
    _model, engine = alone()
    engine.save_full(tmp_path / "low.pt", dtype=torch.bfloat16)
    low = {name: value.bfloat16() for name, value in whole(engine)["model"].items()}
    same(dict(torch.load(tmp_path / "low.pt", weights_only=True)), low)
    with pytest.raises(
        StateDictError, match=r"scale is torch\.bfloat16 in the file and torch\.float32 here; pass dtype="
    ):
        engine.load(tmp_path / "low.pt")
    engine.load(tmp_path / "low.pt", dtype=torch.float32)
    same(whole(engine)["model"], {name: value.float() for name, value in low.items()})


class Own:
    pass


@ranks(2)
def test_files_that_are_not_loaded(rank, tmp_path):
    _model, engine = alone()
    state = whole(engine)["model"]
    if rank == 0:
        torch.save({"model": state, "config": Own()}, tmp_path / "bomb.pt")
        torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
        torch.save(state, tmp_path / "cut.pt")
        os.truncate(tmp_path / "cut.pt", 2000)
        (tmp_path / "text.pt").write_text("hello")
        torch.save([1], tmp_path / "list.pt")
        torch.save(state, tmp_path / "plain.pt")
        (tmp_path / "packed.pt").write_bytes(rezipped((tmp_path / "plain.pt").read_bytes(), zipfile.ZIP_DEFLATED))
    dist.barrier()
    for file, message in (
        ("bomb.pt", r"bomb\.pt was refused.*Own.*add_safe_globals"),
        ("old.pt", r"old\.pt is in torch's format of before 1\.6.*torch\.save\(torch\.load"),
        ("cut.pt", r"cut\.pt is damaged or was cut off at 2000 bytes"),
        ("text.pt", r"text\.pt is a file, and neither"),
        ("list.pt", r"list\.pt holds list, and no state dict"),
        ("packed.pt", r"packed\.pt is an archive with compressed members"),
        ("none.pt", r"no checkpoint at .*none\.pt"),
    ):
        with pytest.raises(CheckpointError, match=message):
            engine.load(tmp_path / file)
    same(whole(engine)["model"], state)


@ranks(2)
def test_ranks_that_see_different_files_are_told(rank, tmp_path):
    _model, engine = alone()
    torch.save({name: value + rank for name, value in whole(engine)["model"].items()}, tmp_path / f"{rank}.pt")
    with pytest.raises(DivergenceError, match=r"engine\.load"):
        engine.load(tmp_path / f"{rank}.pt")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        engine.load(tmp_path / ("1.pt" if rank else "none.pt"))


@ranks(2)
def test_what_would_not_be_loaded_again_is_not_saved(rank, tmp_path):
    model, engine, _ = build()
    with pytest.raises(CheckpointError, match=r"extra can't be saved.*Own"):
        engine.save_full(tmp_path / "c.pt", extra={"config": Own()})
    model.note = Own()
    with pytest.raises(CheckpointError, match=r"_extra_state can't be saved.*Own"):
        engine.save_full(tmp_path / "c.pt")
    assert not list(tmp_path.iterdir())


@ranks(2)
def test_arguments_that_make_no_sense_are_refused_before_anything_is_written(rank, tmp_path):
    _model, engine, optimizer = build()
    (tmp_path / "there").mkdir(exist_ok=True)
    dist.barrier()
    for error, message, path, options in (
        (ConfigError, "hold a model only", "c.safetensors", {"optimizer": optimizer}),
        (ConfigError, "hold a model only", "c.safetensors", {"extra": 1}),
        (CheckpointError, r"_extra_state can't be saved.*format=\"torch\"", "c.safetensors", {}),
        (ConfigError, "format must be", "c.pt", {"format": "numpy"}),
        (ConfigError, "dtype must be", "c.pt", {"dtype": torch.int8}),
        (ConfigError, "max_shard_size", "c", {"max_shard_size": "many"}),
        (CheckpointError, "is a directory; give the name of a file", "there", {"format": "torch"}),
        (StateDictError, "holds no parameter of this model", "c.pt", {"optimizer": torch.optim.SGD([torch.ones(1)])}),
    ):
        with pytest.raises(error, match=message):
            engine.save_full(tmp_path / path, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


@ranks(2)
def test_a_full_disk_leaves_the_old_file_and_no_other(rank, tmp_path):
    _model, engine = alone()
    before = whole(engine)["model"]
    engine.save_full(tmp_path / "c.pt")
    with (
        full_disk((tmp_path / "c.pt").stat().st_size - 1),
        pytest.raises(CheckpointError, match=r"File too large: '.*c\.pt'"),
    ):
        engine.save_full(tmp_path / "c.pt")
    dist.barrier()
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]
    same(dict(torch.load(tmp_path / "c.pt", weights_only=True)), before)
    engine.save_full(tmp_path / "c.pt")


@ranks(2)
def test_only_rank_0_needs_the_path(rank, tmp_path):
    _model, engine = alone()
    engine.save_full(tmp_path / f"of-{rank}" / "c.pt")
    assert [p.name for p in tmp_path.iterdir()] == ["of-0"]


def dies_while_saving(rank: int, world_size: int, path: str) -> None:
    _model, engine = alone(timeout=2.0)
    engine.save_full(f"{path}/c.pt")
    if rank == 0:
        torch.save(dict(engine.state_dict(rank0_only=False)), f"{path}/expected")
        written, left = TorchFileWriter.write, [4]

        def last(self: TorchFileWriter, slot: Slot, tensor: torch.Tensor) -> None:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            written(self, slot, tensor)

        TorchFileWriter.write = last  # type: ignore[method-assign]
    else:
        engine.state_dict(rank0_only=False)
    engine.save_full(f"{path}/c.pt")


@pytest.mark.exhaustive
def test_a_process_that_is_killed_leaves_the_old_file(tmp_path):
    with pytest.raises(RankFailure, match=r"engine\.save_full"):
        run(2, dies_while_saving, str(tmp_path), may_die=(0,))
    assert len(list(tmp_path.glob(".c.pt.saving-*"))) == 1
    expected = torch.load(tmp_path / "expected", weights_only=True)
    same(dict(torch.load(tmp_path / "c.pt", weights_only=True)), expected)
    run(1, saves_again, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.pt", "expected"]


def saves_again(rank: int, world_size: int, path: str) -> None:
    _model, engine = alone()
    engine.save_full(f"{path}/c.pt")
    engine.close()
