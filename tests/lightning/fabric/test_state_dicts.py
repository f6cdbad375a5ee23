"""State dicts that the user has made himself: ``fabric.save`` writes them as under DDP, ``torch.save`` names it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.lightning.fabric.support import assert_same, batch, fabric, net, strategy, whole
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ShardPicklingError


def trained(which):
    f = fabric(which)
    model = net()
    model, optimizer = f.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
    x, y = batch(0)
    f.backward((model(x) - y).square().mean())
    optimizer.step()
    return f, model, optimizer


@pytest.mark.parametrize("form", ["full", *exhaustive("sharded")])
@ranks(2)
def test_a_state_dict_becomes_the_file_that_ddp_writes(world_size, form, tmp_path):
    for name in (form, "ddp"):
        f, model, _ = trained("ddp" if name == "ddp" else strategy(state_dict_type=name))
        f.save(tmp_path / name, model.state_dict())
    found, expected = (torch.load(tmp_path / name) for name in (form, "ddp"))
    assert list(found) == list(expected) and {type(value) for value in found.values()} == {torch.Tensor}
    assert_same(found, expected)
    net(6).load_state_dict(found)  # a plain model


@pytest.mark.parametrize("form", [*exhaustive("full"), "sharded"])
@ranks(2)
def test_state_dicts_beside_a_module_are_saved_full(world_size, form, tmp_path):
    f, model, optimizer = trained(strategy(state_dict_type=form))
    state = {"net": model, "kept": {"weights": model.state_dict(), "adam": optimizer.state_dict()}, "step": 1}
    f.save(tmp_path / "state", state)
    rest = f.load(tmp_path / "state", {"net": model})
    assert rest["step"] == 1
    assert_same(rest["kept"]["weights"], whole(model))
    moments = [entry["exp_avg"] for entry in rest["kept"]["adam"]["state"].values()]
    assert {type(moment) for moment in moments} == {torch.Tensor}


@ranks(2)
def test_torch_save_of_a_module_is_an_error_that_names_fabrics_way_and_of_its_state_dict_works(rank, tmp_path):
    _, model, _ = trained("shard")
    with pytest.raises(ShardPicklingError, match=r"fabric\.save\(path, model\.state_dict\(\)\)") as caught:
        torch.save(model, tmp_path / "weights.pt")
    assert "accelerator" not in str(caught.value) and " engine." not in str(caught.value)
    if rank == 0:
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        assert {type(value) for value in torch.load(tmp_path / "weights.pt").values()} == {torch.Tensor}
    dist.barrier()
