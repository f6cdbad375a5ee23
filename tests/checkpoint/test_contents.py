"""What a checkpoint keeps, beside the plain case: odd state, several optimizers and models, other dtypes, and `extra`."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.checkpoint.helpers import alone, build, comes_back, load, same, save, train, whole
from tests.compat.harness import MLP, Pair, batch, plain_backward
from tests.support.marks import exhaustive
from tests.support.odd_model import Net
from tests.support.ranks import ranks
from torch_shard.errors import CheckpointError, ConfigError, DivergenceError, StateDictError

FORMS = {
    "sharded": torch_shard.Engine.save,
    "full": functools.partial(torch_shard.Engine.save_full, format="torch"),
}


def two(model: nn.Module) -> dict[str, Any]:
    blocks = [p for n, p in model.named_parameters() if "blocks" in n]
    rest = [p for n, p in model.named_parameters() if "blocks" not in n]
    return {"inner": torch.optim.SGD(blocks, lr=0.1, momentum=0.9), "outer": torch.optim.AdamW(rest, lr=0.01)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("named", [True, False])
@ranks(2)
def test_several_optimizers(named, form, rank, tmp_path):
    model, engine, optimizers = build(make=two, model=Net)
    model(torch.arange(6).view(2, 3) + rank).pow(2).mean().backward()
    for optimizer in optimizers.values():
        optimizer.step()
    FORMS[form](engine, tmp_path / "c", optimizers if named else list(optimizers.values()))
    _again, other, seconds = build(seed=1, make=two, model=Net)
    load(other, tmp_path / "c", seconds if named else list(seconds.values()))
    same([whole(other, o) for o in seconds.values()], [whole(engine, o) for o in optimizers.values()])


@ranks(2)
def test_several_models(rank, tmp_path):
    wholes = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        one, other = Net(), MLP()
        engines = [torch_shard.shard(m, unit_bytes=256) for m in (one, other)]
        optimizers = {"net": torch.optim.AdamW(one.parameters()), "critic": torch.optim.Muon([other.inp.weight])}
        one(torch.arange(6).view(2, 3)).pow(2).mean().backward()
        other(batch(rank, 0).float()).pow(2).mean().backward()
        for optimizer in optimizers.values():
            optimizer.step()
        if seed == 0:
            save(engines[0], tmp_path / "c", optimizers, models={"critic": engines[1]})
        else:
            load(engines[0], tmp_path / "c", optimizers, models={"critic": other})
        wholes.append([whole(e, o) for e, o in zip(engines, optimizers.values(), strict=True)])
    same(wholes[1], wholes[0])


@ranks(2)
def test_parameters_without_state_have_none_afterwards(rank, tmp_path):
    model, engine, optimizer = build(model=Net)
    train(model, optimizer, rank, range(1))
    del optimizer.state[model.head.bias]
    save(engine, tmp_path / "c", optimizer)
    expected = whole(engine, optimizer)
    assert "head.bias" not in expected["optimizer"]["state"]
    again, other, second = build(seed=1, model=Net)
    train(again, second, rank, range(1))
    load(other, tmp_path / "c", second)
    same(whole(other, second), expected)


@ranks(2)
def test_an_optimizer_that_has_not_stepped(rank, tmp_path):
    _model, engine, optimizer = build(model=Net)
    save(engine, tmp_path / "c", optimizer)
    model, other, second = build(seed=1, model=Net)
    train(model, second, rank, range(1))
    load(other, tmp_path / "c", second)
    assert not second.state
    same(whole(other, second), whole(engine, optimizer))


class Keeper(torch.optim.Optimizer):
    """State of all kinds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "rate": torch.tensor(0.5), "nested": {"a": [1, 2]}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["rounds"] = {"count": 2, "history": torch.arange(3.0)}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                own = self.state[p]
                own["count"] = own.get("count", 0) + 1
                own["moment"] = own.get("moment", torch.zeros_like(p)) + p.grad
                own["low"] = p.grad.to(torch.bfloat16)
                own["scalar"] = torch.tensor(3.0)
                own["words"] = ("a", None, True)
                own["nested"] = {"inner": torch.arange(3), "none": {}}
                own["empty"], own["none"] = [], {}
                own["parts"] = [{}, torch.ones(2), {"a": {}}]
                own["by number"] = {0: torch.zeros(3), 1: [], "name": "x"}
                p.sub_(p.grad, alpha=0.01)


@ranks(2, exhaustive=(3,))
def test_state_of_every_kind(rank, tmp_path):
    model, engine, optimizer = build(model=Net, make=lambda m: Keeper(m.parameters()))
    train(model, optimizer, rank, range(2))
    optimizer.param_groups[0]["schedule"] = {0: "a", "nested": {}}
    save(engine, tmp_path / "c", optimizer)
    again, other, second = build(seed=1, model=Net, make=lambda m: Keeper(m.parameters()))
    load(other, tmp_path / "c", second)
    same(whole(other, second), whole(engine, optimizer))
    assert isinstance(second.state[again.head.bias]["moment"], torch_shard.ShardTensor)
    assert second.state["rounds"]["count"] == 2


@ranks(2)
def test_state_that_each_rank_has_all_of_is_not_sharded_by_a_load(rank, tmp_path):
    model, engine, optimizer = build(model=Net)
    train(model, optimizer, rank, range(1))
    wanted = model.head.weight.full_tensor().detach().clone()
    optimizer.state[model.head.weight]["average"] = wanted.clone()
    save(engine, tmp_path / "c", optimizer)
    again, other, second = build(seed=1, model=Net)
    load(other, tmp_path / "c", second)
    found = second.state[again.head.weight]["average"]
    assert type(found) is torch.Tensor and torch.equal(found, wanted)


def halved() -> nn.Module:
    return Net().bfloat16()


@pytest.mark.parametrize("form", FORMS)
@ranks(2)
def test_another_dtype_where_it_is_asked_for(form, rank, tmp_path):
    model, engine, optimizer = build(model=Net)
    train(model, optimizer, rank, range(1))
    FORMS[form](engine, tmp_path / "c", optimizer)
    _again, other, second = build(seed=1, model=halved)
    before = whole(other, second)
    with pytest.raises(StateDictError, match=r"blocks\.0\.0\.weight is torch\.float32 in the .* and torch\.bfloat16"):
        load(other, tmp_path / "c", second)
    with pytest.raises(StateDictError, match=r"scale is torch\.float32"):
        load(other, tmp_path / "c", second, dtype=torch.float16)
    same(whole(other, second), before)
    load(other, tmp_path / "c", second, dtype=torch.bfloat16)
    expected = whole(engine, optimizer)
    found = whole(other, second)
    same(found["model"], {k: v.bfloat16() for k, v in expected["model"].items()})
    for name, state in expected["optimizer"]["state"].items():
        same(found["optimizer"]["state"][name]["exp_avg"], state["exp_avg"].bfloat16())
        same(found["optimizer"]["state"][name]["step"], state["step"])


@ranks(2)
def test_state_keeps_its_own_dtype(rank, tmp_path):
    """torch's load_state_dict would round it to the parameter's."""
    model, engine, optimizer = build(model=halved)
    train(model, optimizer, rank, range(1))
    wide = {p: {k: v.double() if k == "exp_avg" else v for k, v in s.items()} for p, s in optimizer.state.items()}
    optimizer.state.update(wide)
    save(engine, tmp_path / "c", optimizer)
    _again, other, second = build(seed=1, model=halved)
    load(other, tmp_path / "c", second)
    assert {v.dtype for s in second.state.values() for k, v in s.items() if k == "exp_avg"} == {torch.float64}
    same(whole(other, second), whole(engine, optimizer))


@ranks(2)
def test_buffers_are_those_of_rank_0(rank, tmp_path):
    model, engine, _ = build()
    model.norm.running_mean.fill_(rank + 1.0)
    save(engine, tmp_path / "c")
    again, other, _ = build(seed=1)
    load(other, tmp_path / "c")
    assert again.norm.running_mean.tolist() == [1.0] * 7


@ranks(2)
def test_a_buffer_that_was_made_of_a_sharded_parameter_comes_back(rank, tmp_path):
    """An average of the weights, say. Loading copies it, as it is no parameter whose memory could be read into."""
    model, engine = alone(Net)
    model.register_buffer("average", model.head.weight.detach().clone())
    expected = whole(engine)
    save(engine, tmp_path / "c")
    with torch.no_grad():
        for t in (*model.parameters(), model.average):
            t.mul_(0.5)
    load(engine, tmp_path / "c")
    same(whole(engine), expected)


@pytest.mark.parametrize("form", FORMS)
@ranks(2)
def test_parameters_that_are_not_sharded_are_kept(form, rank, tmp_path):
    model, engine, optimizer = build(ignore=["net.head.bias"])
    train(model, optimizer, 0, range(2))
    FORMS[form](engine, tmp_path / "c", optimizer)
    comes_back(tmp_path / "c", engine, optimizer, ignore=["net.conv.weight"])


@ranks(2)
def test_tied_parameters_are_written_once(rank, tmp_path):
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        model[1].weight = model[0].weight
        return model

    _model, engine = alone(tied)
    save(engine, tmp_path / "c")
    size = (tmp_path / "c" / f"__{rank}_0.distcp").stat().st_size
    assert 64 * 64 * 4 / 2 < size < 64 * 64 * 4 * 0.7
    comes_back(tmp_path / "c", engine, model=tied)


@pytest.mark.parametrize(
    "extra",
    [
        {"a": [1, (2.5, "x")], "t": torch.arange(4), 5: {}, ("x", 2): [None, {}, []]},
        torch.arange(5),
        *exhaustive(None, 3, {}, [torch.ones(2)], b"raw"),
    ],
)
@ranks(2)
def test_extra_comes_back(extra, rank, tmp_path):
    _model, engine, _ = build()
    save(engine, tmp_path / "c", extra=extra if rank == 0 else "another rank's")
    found = load(engine, tmp_path / "c")
    same(found, extra)


class Own:
    pass


@pytest.mark.parametrize("asynchronous", [False, True])
@ranks(2)
def test_extra_that_would_not_be_loaded_is_refused_when_saving(asynchronous, rank, tmp_path):
    _model, engine, optimizer = build()
    with pytest.raises(CheckpointError, match=r"extra.*Own"):
        save(engine, tmp_path / "c", optimizer, extra={"config": Own()}, asynchronous=asynchronous)
    dist.barrier()  # rank 0 tidies up
    assert not list(tmp_path.iterdir())
    engine.finish_saving()
    save(engine, tmp_path / "c", optimizer)


@ranks(2)
def test_the_manifest_says_what_the_checkpoint_is(rank, tmp_path):
    _model, engine, optimizer = build(model=Net)
    save(engine, tmp_path / "c", optimizer)
    found = json.loads((tmp_path / "c" / "manifest.json").read_text())["manifest"]
    assert (found["version"], found["world_size"], found["strategy"]) == (1, 2, "full_shard")
    assert found["torch"] == torch.__version__ and found["torch_shard"] == torch_shard.__version__
    assert [u["name"] for u in found["units"]] == [u.name for u in engine.units]
    rows = {row["name"]: row for row in found["parameters"]}
    assert rows["frozen"] == {"name": "frozen", "shape": [3], "dtype": "float32", "trainable": False}
    files = {p.name: p.stat().st_size for p in (tmp_path / "c").iterdir() if p.name != "manifest.json"}
    assert files == {name: record["size"] for name, record in found["files"].items()}


@ranks(2)
def test_what_is_loaded_inside_inference_mode_trains_on(rank, world_size, tmp_path):
    """As evaluation hooks load."""
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01))
    pair.step(plain_backward, batch(rank, 0))
    pair.engine.save(tmp_path / "saved", pair.optimizer)
    with torch.no_grad():
        for p in pair.model.parameters():
            p.zero_()
            pair.optimizer.state[p]["exp_avg"].zero_()
    with torch.inference_mode():
        pair.engine.load(tmp_path / "saved", pair.optimizer)
    for step in (1, 2):
        pair.step(plain_backward, batch(rank, step))
    pair.check()


@ranks(2)
def test_wrong_arguments(rank, tmp_path):
    _model, engine, optimizer = build()
    for arguments, text in (
        ({"optimizer": 3}, "optimizer must be"),
        ({"optimizer": {"state": optimizer}}, "can't be an optimizer's name"),
        ({"models": {"x": nn.Linear(1, 1)}}, "models: 'x'"),
        ({"keep": 0}, "keep must be"),
        ({"keep": 2}, "'c' has no number"),
    ):
        with pytest.raises(ConfigError, match=text):
            save(engine, tmp_path / "c", **arguments)
    with pytest.raises(ConfigError, match="dtype"):
        load(engine, tmp_path / "c", dtype="bfloat16")
    with pytest.raises(StateDictError, match="holds no parameter of this model"):
        save(engine, tmp_path / "c", torch.optim.SGD([nn.Parameter(torch.ones(2))]))
    with pytest.raises(DivergenceError):
        save(engine, tmp_path / f"c{rank}", optimizer)
    assert not list(tmp_path.iterdir())
    save(engine, tmp_path / "c", optimizer)
