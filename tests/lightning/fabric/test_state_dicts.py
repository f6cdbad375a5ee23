"""State dicts that the user has made himself: ``fabric.save`` writes them as under DDP, ``torch.save`` names it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.lightning.fabric.support import Net, assert_same, batch, fabric, net, strategy, whole
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import NeedsGatherError, ShardPicklingError


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
def test_torch_save_writes_a_state_dict_and_a_module_and_names_fabrics_way_for_gradients(rank, tmp_path):
    _, model, _ = trained("shard")
    with pytest.raises(ShardPicklingError, match=r"fabric\.save\(path, model\.state_dict\(\)\)") as caught:
        torch.save(model.inner.weight.grad, tmp_path / "weights.pt")
    assert "accelerator" not in str(caught.value) and " engine." not in str(caught.value)
    if rank == 0:
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        assert {type(value) for value in torch.load(tmp_path / "weights.pt").values()} == {torch.Tensor}
        torch.save(model.module, tmp_path / "module.pt")
        loaded = torch.load(tmp_path / "module.pt", weights_only=False)
        assert type(loaded) is Net
        assert_same(loaded.state_dict(), torch.load(tmp_path / "weights.pt"))
    dist.barrier()


@ranks(2)
def test_what_has_to_be_gathered_is_gathered_in_fabrics_words():
    fabric, model, _ = trained("shard")
    weight = model.module.inner.weight
    with pytest.raises(NeedsGatherError, match=r"`with fabric\.strategy\.engine_of\(model\)\.gathered\(parameter\):`"):
        weight.data_ptr()
    with fabric.strategy.engine_of(model).gathered(weight):
        assert weight.data_ptr()
