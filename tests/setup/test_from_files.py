"""Models on meta that shard() fills from files: each rank reads its slices, of any strategy, dtype and tie."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.support.ranks import ranks
from torch_shard import Precision
from torch_shard.errors import CheckpointError, SetupError, StateDictError
from torch_shard.setup.lazy_param import deferred_of

safetensors_torch = pytest.importorskip("safetensors.torch")


class Tied(nn.Module):
    """A tied head, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6), nn.BatchNorm1d(6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.empty(()))
        self.register_buffer("factor", torch.empty(3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.fill_(1.5)
            self.factor.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x))) * self.scale * self.factor.sum()


def plain(seed: int = 3) -> Tied:
    torch.manual_seed(seed)
    model = Tied()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
        model.body[3].running_mean.normal_()
    return model


def on_meta() -> Tied:
    with torch.device("meta"):
        return Tied()


def save(folder: Path, model: nn.Module, form: str, rank: int) -> Path:
    """On rank 0; the others wait."""
    path = folder / {"index": "parts", "file": "one.safetensors", "torch": "one.pt"}[form]
    values = {name: v.clone() for name, v in model.state_dict().items()}
    if rank == 0 and form == "torch":
        torch.save(model.state_dict(), path)
    elif rank == 0 and form == "file":
        del values["head.weight"]
        safetensors_torch.save_file(values, path)
    elif rank == 0:
        path.mkdir()
        del values["embed.weight"]  # which is not the name that the model has first
        where = {}
        for number, name in enumerate(values):
            where[name] = f"model-{number % 2}.safetensors"
        for file in set(where.values()):
            safetensors_torch.save_file({n: values[n] for n in values if where[n] == file}, path / file)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    dist.barrier()
    return path


@pytest.mark.parametrize("form", ["file", "index", "torch"])
@ranks(1, 2)
def test_a_model_on_meta_gets_the_values_of_files(rank, form, tmp_path):
    reference = plain()
    path = save(tmp_path, reference, form, rank)
    model = on_meta()
    kept = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch_shard.from_files(model, path)
    engine = torch_shard.shard(model, unit_bytes=256)
    assert model.head.weight is model.embed.weight
    assert all(p is kept[name] for name, p in model.named_parameters())
    found = engine.state_dict(rank0_only=False)
    assert all(torch.equal(found[name], value) for name, value in reference.state_dict().items())
    assert torch.equal(model.factor, reference.factor)
    x = torch.arange(8) % 11
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for net, own in ((model, optimizer), (reference, reference_optimizer)):
        net(x).square().sum().backward()
        own.step()
    found = engine.state_dict(rank0_only=False)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(found[name], value)


def from_file(folder: Path, rank: int) -> tuple[Tied, Tied]:
    """A plain model, and one on meta that stands for the file it is in."""
    reference, model = plain(), on_meta()
    torch_shard.from_files(model, save(folder, reference, "file", rank))
    return reference, model


@pytest.mark.parametrize("strategy", ["no_shard", "shard_grad_op", "hybrid_shard"])
@ranks(2)
def test_every_strategy_reads_what_its_ranks_hold(rank, strategy, tmp_path):
    reference, model = from_file(tmp_path, rank)
    engine = torch_shard.shard(model, strategy=strategy, shard_size=1 if strategy == "hybrid_shard" else None)
    found = engine.state_dict(rank0_only=False)
    assert all(torch.equal(found[name], value) for name, value in reference.state_dict().items())


@ranks(2)
def test_values_are_rounded_to_the_dtype_of_the_model_and_stored_in_that_of_the_masters(rank, tmp_path):
    reference, model = from_file(tmp_path, rank)
    model.bfloat16()
    engine = torch_shard.shard(model, precision=Precision(master_dtype=torch.float32))
    found = engine.state_dict(rank0_only=False)
    for name, p in reference.named_parameters():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], p.bfloat16().float()), name


@ranks(2)
def test_real_parameters_may_be_added_and_come_from_rank_0(rank, tmp_path):
    reference, model = from_file(tmp_path, rank)
    torch.manual_seed(rank)
    model.body.append(nn.Linear(6, 6))
    added = model.body[4].weight.detach().clone()
    dist.broadcast(added, 0)
    engine = torch_shard.shard(model, ignore=["scale"])
    found = engine.state_dict(rank0_only=False)
    assert torch.equal(found["body.4.weight"], added)
    assert torch.equal(model.scale, reference.scale)
    assert all(torch.equal(found[name], value) for name, value in reference.state_dict().items())


@ranks(2)
def test_what_was_made_on_meta_since_is_refused(rank, tmp_path):
    _, model = from_file(tmp_path, rank)
    if rank == 1:
        model.body[0].weight = nn.Parameter(torch.empty(9, 6, device="meta"))
    with pytest.raises(SetupError, match=r"body\.0\.weight"):
        torch_shard.shard(model)
    assert all(p.device.type == "meta" for p in model.parameters())  # nothing has changed


@ranks(2)
def test_a_copy_of_the_whole_model_is_refused(rank, tmp_path):
    _, model = from_file(tmp_path, rank)
    for twin in (copied := copy.deepcopy(model), copy.deepcopy(copied)):
        with pytest.raises(SetupError, match=r"is a copy on the meta device"):
            torch_shard.shard(twin)
    copied.to_empty(device="cpu").load_state_dict(plain().state_dict())
    for own in (copied, model):
        found = torch_shard.shard(own).state_dict(rank0_only=False)
        assert all(torch.equal(found[name], value) for name, value in plain().state_dict().items())


@ranks(2)
def test_of_names_that_are_tied_here_and_were_not_the_last_one_counts(rank, tmp_path):
    values = {**plain().state_dict(), "embed.weight": torch.zeros(11, 6)}
    if rank == 0:
        torch.save(values, tmp_path / "model.pt")
    dist.barrier()
    model, reference = on_meta(), plain()
    torch_shard.from_files(model, tmp_path / "model.pt")
    reference.load_state_dict(values)
    found = torch_shard.shard(model).state_dict(rank0_only=False)
    assert torch.equal(found["head.weight"], reference.head.weight) and reference.head.weight.any()


@ranks(2)
def test_ranks_with_other_files_fail_together(rank, tmp_path):
    folder = tmp_path / str(rank)
    folder.mkdir()
    safetensors_torch.save_file({k: v.clone() for k, v in plain(rank).state_dict().items()}, folder / "x.safetensors")
    model = on_meta()
    torch_shard.from_files(model, folder / "x.safetensors")
    with pytest.raises(SetupError, match="equal files"):
        torch_shard.shard(model)
    assert deferred_of(model.embed.weight) is not None


@ranks(1)
def test_everything_that_does_not_fit_is_listed(rank, tmp_path):
    values = {k: v.clone() for k, v in plain().state_dict().items()}
    values["surplus"] = values.pop("scale")
    values["body.0.weight"] = torch.zeros(3, 3)
    values["body.0.bias"] = torch.zeros(9, dtype=torch.int32)
    safetensors_torch.save_file(values, tmp_path / "x.safetensors")
    model = on_meta()
    with pytest.raises(StateDictError) as error:
        torch_shard.from_files(model, tmp_path / "x.safetensors")
    for said in (
        "missing: scale",
        "unexpected: surplus",
        "body.0.weight has shape (3, 3)",
        "body.0.bias is torch.int32",
    ):
        assert said in str(error.value)
    assert all(deferred_of(p) is None for p in model.parameters())
    with pytest.raises(SetupError, match="not on the meta device"):
        torch_shard.from_files(plain(), tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        torch_shard.from_files(model, tmp_path / "y.safetensors")
