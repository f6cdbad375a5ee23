"""What is hard to name: odd keys, empty containers, scalars of one-element parameters, a tensor alone; and failures half-way."""

from __future__ import annotations

import io
import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import torch_shard
from tests.checkpoint.helpers import alone, build, files_of, load, same, save, train, whole
from tests.support.marks import exhaustive
from tests.support.odd_model import Net, batch
from tests.support.ranks import ranks
from torch_shard import optim_state, state_dict_type
from torch_shard.checkpoint.format.dcp_metadata import load_metadata
from torch_shard.checkpoint.sharded import load as sharded_load
from torch_shard.errors import CheckpointError, ShardError, StateDictError


class ExtraState(nn.Linear):
    """A module with state of its own."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.kept: Any = {1: "one", "t": torch.ones(2), "e": {}, "l": [[], {}]}

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


@ranks(2)
def test_extra_state_of_a_module_keeps_its_form(rank, tmp_path):
    model, engine = alone(ExtraState)
    before = model.kept
    save(engine, tmp_path / "c")
    model.kept = None
    load(engine, tmp_path / "c")
    same(model.kept, before)


class Scalar(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.scale * ids.float()


@pytest.mark.parametrize("way", ["checkpoint", "state dict"])
@pytest.mark.parametrize("make", [torch.optim.NAdam, *exhaustive(torch.optim.ASGD)])
@ranks(2)
def test_a_0_dim_parameters_counters_stay_whole(rank, way, make, tmp_path):
    model, engine, optimizer = build(model=Scalar, make=lambda m: make(m.parameters(), lr=0.1))
    plain = Scalar()
    reference = make(plain.parameters(), lr=0.1)

    def step(m: nn.Module, o: Any) -> None:
        m(torch.ones(3)).sum().backward()
        o.step()
        o.zero_grad()

    for _ in range(2):
        step(model, optimizer)
        step(plain, reference)
    if way == "checkpoint":
        save(engine, tmp_path / "c", optimizer)
    else:
        kept = engine.optim_state_dict(optimizer, rank0_only=False), engine.state_dict(rank0_only=False)
    model, engine, optimizer = build(seed=1, model=Scalar, make=lambda m: make(m.parameters(), lr=0.1))
    if way == "checkpoint":
        load(engine, tmp_path / "c", optimizer)
    else:
        engine.load_optim_state_dict(optimizer, kept[0])
        engine.load_state_dict(kept[1])
    step(model, optimizer)
    step(plain, reference)
    same(engine.state_dict(rank0_only=False)["scale"], plain.scale.detach())


@pytest.mark.parametrize("way", ["directory", *exhaustive("file", "state dict")])
@ranks(2, exhaustive=(3,))
def test_state_of_parameters_that_no_model_has_is_saved(rank, way, tmp_path):
    heads = []

    def make(model: nn.Module) -> torch.optim.Optimizer:
        torch.manual_seed(5)
        heads.append(nn.Linear(1, 3))  # of a loss, which each rank trains by itself
        return torch.optim.Adam([*model.parameters(), *heads[-1].parameters()], lr=0.1)

    def step(model: nn.Module, optimizer: Any) -> None:
        heads[-1](model(torch.ones(3)).reshape(3, 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, engine, optimizer = build(model=Scalar, make=make)
    for _ in range(2):
        step(model, optimizer)
    if way == "state dict":
        kept = engine.optim_state_dict(optimizer, rank0_only=False)
    else:
        getattr(engine, "save" if way == "directory" else "save_full")(tmp_path / "c.pt", optimizer)
    values, head = engine.state_dict(rank0_only=False), {k: v.clone() for k, v in heads[-1].state_dict().items()}
    step(model, optimizer)
    expected = engine.state_dict(rank0_only=False), heads[-1].state_dict()
    model, engine, optimizer = build(seed=1, model=Scalar, make=make)
    if way == "state dict":
        engine.load_optim_state_dict(optimizer, kept)
        engine.load_state_dict(values)
    else:
        load(engine, tmp_path / "c.pt", optimizer)
    heads[-1].load_state_dict(head)
    step(model, optimizer)
    same((engine.state_dict(rank0_only=False), heads[-1].state_dict()), expected)


class Numbers(nn.Module):
    """Parameters whose names are numbers, made in another order than they are counted in."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("1", "0"):
            self.register_parameter(name, nn.Parameter(torch.full((4,), float(name) + 1)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.get_parameter("0") * 2 + self.get_parameter("1") * 3


@ranks(2)
def test_names_that_look_like_numbers_are_names(rank, tmp_path):
    model, engine, optimizer = build(
        model=Numbers, make=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
    )
    train(model, optimizer, rank, range(1))
    expected = whole(engine, optimizer)
    save(engine, tmp_path / "c", optimizer)
    train(model, optimizer, rank, range(2))
    load(engine, tmp_path / "c", optimizer)
    same(whole(engine, optimizer), expected)


def twice(seed: int, tied: bool) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    if tied:
        model[1].weight = model[0].weight
    return model


@ranks(2)
def test_of_tied_parameters_that_were_not_tied_the_last_counts_as_in_plain_torch(rank, tmp_path):
    apart = twice(1, tied=False)
    save(torch_shard.shard(apart, unit_bytes=64), tmp_path / "c")
    torch.manual_seed(1)
    plain = twice(2, tied=True)
    plain.load_state_dict(twice(1, tied=False).state_dict())
    model = twice(3, tied=True)
    engine = torch_shard.shard(model, unit_bytes=64)
    load(engine, tmp_path / "c")
    same(engine.state_dict(rank0_only=False)["1.weight"], plain[1].weight.detach())


@pytest.mark.parametrize("way", ["instance", *exhaustive("pre-hook", "post-hook")])
@ranks(2)
def test_hooks_that_exchange_entries_get_what_was_saved(rank, way, tmp_path):
    def exchanged(found: dict[str, Any]) -> None:
        found["0.weight"], found["1.weight"] = found["1.weight"], found["0.weight"]

    model = twice(1, tied=False)
    engine = torch_shard.shard(model, unit_bytes=64)
    if way == "post-hook":
        model.register_state_dict_post_hook(lambda module, found, prefix, metadata: exchanged(found))
    expected = engine.state_dict(rank0_only=False)
    save(engine, tmp_path / "c")
    if way == "pre-hook":
        model.register_load_state_dict_pre_hook(lambda module, found, *rest: exchanged(found))
    if way == "instance":
        own = model._load_from_state_dict

        def patched(found: Any, *rest: Any) -> None:
            exchanged(found)
            own(found, *rest)

        model._load_from_state_dict = patched
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    load(engine, tmp_path / "c")
    found = engine.state_dict(rank0_only=False)
    if way != "post-hook":
        found = {"0.weight": found["1.weight"], "1.weight": found["0.weight"]}
    for name in ("0.weight", "1.weight"):
        # With the post-hook both directions exchange: what the entry of that name was is there again under that name's entry.
        same(found[name], expected[name] if way != "post-hook" else expected[{"0": "1", "1": "0"}[name[0]] + ".weight"])


# -- half-way ---------------------------------------------------------------------------------------------------------


class Fails(ExtraState):
    def set_extra_state(self, state: Any) -> None:
        if self.kept != state and dist.get_rank() == 1:
            raise RuntimeError("no")


@ranks(2)
def test_a_module_that_fails_on_one_rank_while_loading_fails_on_all(rank, tmp_path):
    model, engine = alone(Fails)
    model.kept = "saved"
    save(engine, tmp_path / "c")
    model.kept = "live"
    with pytest.raises(StateDictError, match=r"rank 1: .*some have been overwritten.*no"):
        load(engine, tmp_path / "c")
    model.kept = "saved"
    load(engine, tmp_path / "c")  # the ranks are still together


@ranks(2)
def test_a_second_read_that_fails_is_said_and_no_graph_goes_on(rank, tmp_path):
    model, engine = alone()
    save(engine, tmp_path / "c")
    loss = model(batch(rank)).pow(2).mean()
    original = sharded_load._Load.fill

    def fails(work: Any) -> None:
        original(work)
        if rank == 1:
            raise CheckpointError("gone")

    sharded_load._Load.fill = fails
    try:
        with pytest.raises(CheckpointError, match="gone"):
            load(engine, tmp_path / "c")
    finally:
        sharded_load._Load.fill = original
    with pytest.raises((RuntimeError, ShardError)):
        loss.backward()


@ranks(2)
def test_an_optimizer_that_fails_while_loading_says_so(rank, tmp_path):
    model, engine, optimizer = build(model=Net)
    train(model, optimizer, rank, range(1))
    save(engine, tmp_path / "c", optimizer)

    def hook(_optimizer: Any, _state: Any) -> None:
        if rank == 1:
            raise RuntimeError("no")

    handle = optimizer.register_load_state_dict_pre_hook(hook)
    with pytest.raises(StateDictError, match="but the parameters have been"):
        load(engine, tmp_path / "c", optimizer)
    handle.remove()
    load(engine, tmp_path / "c", optimizer)


# -- places -----------------------------------------------------------------------------------------------------------


def test_the_working_directory_is_no_checkpoint(tmp_path, monkeypatch):
    _model, engine = alone()
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for path in (".", tmp_path, tmp_path / "inner"):
        with pytest.raises(CheckpointError, match="working directory"):
            save(engine, path)
    save(engine, "c")
    assert files_of(tmp_path / "inner") == ["c"]


def test_the_new_directory_lets_in_whom_the_old_one_did(tmp_path):
    _model, engine = alone()
    save(engine, tmp_path / "c")
    os.chmod(tmp_path / "c", 0o2775)
    save(engine, os.fsencode(tmp_path / "c"))
    assert (tmp_path / "c").stat().st_mode & 0o7777 == 0o2775


def test_metadata_that_changes_a_class_is_refused_and_undone(tmp_path):
    # BUILD on the class itself: the pickle names it and gives it a state.
    raw = b"\x80\x02c" + MetadataIndex.__module__.encode() + b"\nMetadataIndex\nN}X\x08\x00\x00\x00__hash__K\x01s\x86b."
    with pytest.raises(CheckpointError, match="MetadataIndex"):
        load_metadata(io.BytesIO(raw), "x")
    assert {MetadataIndex("a"): 1} and pickle.loads(pickle.dumps(Metadata({}))) is not None


# -- FSDP's functions -------------------------------------------------------------------------------------------------


@ranks(2)
def test_with_rank0_only_what_rank_0_has_is_loaded(rank):
    model, engine, optimizer = build(model=Net)
    train(model, optimizer, rank, range(1))
    expected = whole(engine, optimizer)
    with state_dict_type.state_dict_type(
        model,
        state_dict_type.StateDictType.FULL_STATE_DICT,
        state_dict_type.FullStateDictConfig(rank0_only=True, offload_to_cpu=True),
        state_dict_type.FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True),
    ):
        taken = optim_state.optim_state_dict(model, optimizer)
        assert bool(taken) == (rank == 0)
        kept = model.state_dict()
        train(model, optimizer, rank, range(1))
        optimizer.load_state_dict(optim_state.optim_state_dict_to_load(model, optimizer, taken))
    engine.load_state_dict({**kept} if rank == 0 else dict(expected["model"]))
    same(whole(engine, optimizer), expected)


@ranks(2)
def test_ranks_without_a_dict_are_told(rank):
    model, engine, optimizer = build(model=Net)
    train(model, optimizer, rank, range(1))
    taken = engine.optim_state_dict(optimizer)
    with pytest.raises(StateDictError, match=r"rank 1: .*needs a dict"):
        optim_state.optim_state_dict_to_load(model, optimizer, taken)
