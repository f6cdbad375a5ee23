"""What Fabric saves with ``shard`` it loads again, on any number of ranks, and so does ``ddp``; and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.lightning.fabric.support import NAMESPACES, assert_same, batch, fabric, net, strategy, whole
from tests.lightning.support import both_forms, either_form
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks, run
from torch_shard import engine_of
from torch_shard.errors import CheckpointError, ConfigError, StateDictError


class Counter:
    """Something with a state of its own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def start(which: Any = "shard", seed: int = 5, **options: Any) -> tuple[Any, dict[str, Any]]:
    f = fabric(which, **options)
    model = net(seed)
    model, optimizer = f.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
    return f, {"net": model, "adam": optimizer, "counter": Counter(), "step": 0}


def train(f: Any, state: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        x, y = batch(state["step"])
        f.backward((state["net"](x) - y).square().mean())
        state["adam"].step()
        state["adam"].zero_grad()
        state["step"] += 1
        state["counter"].count += 2


def uninterrupted() -> dict[str, torch.Tensor]:
    f, state = start("ddp")
    train(f, state, 4)
    return whole(state["net"])


def assert_resumes(saving: Any, loading: Any, path: Path, namespace: str = NAMESPACES[0]) -> None:
    f, state = start(saving, namespace=namespace)
    train(f, state, 2)
    f.save(path, {**state, "notes": {"lr": 0.01}})
    f, again = start(loading, seed=6, namespace=namespace)
    assert f.load(path, again) == {"notes": {"lr": 0.01}}
    assert again["step"] == 2 and again["counter"].count == 4
    train(f, again, 2)
    assert_same(whole(again["net"]), uninterrupted())


@pytest.mark.parametrize("namespace", quick(NAMESPACES, NAMESPACES[:1]))
@either_form
@ranks(2)
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(form, namespace, tmp_path):
    saving, loading = (strategy(namespace, state_dict_type=form) for _ in range(2))
    assert_resumes(saving, loading, tmp_path / "state.ckpt", namespace)


@pytest.mark.parametrize(("saving", "loading"), [("shard", "ddp"), *exhaustive(("ddp", "shard"))])
@ranks(2)
def test_the_file_is_that_of_ddp_both_ways(saving, loading, tmp_path):
    assert_resumes(saving, loading, tmp_path / "state.ckpt")


def optimizer_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """Full, by name, on all ranks."""
    return engine_of(model.module).optim_state_dict(optimizer.optimizer, rank0_only=False)["state"]


def save_on(rank: int, world: int, form: str, path: Path) -> None:
    f, state = start(strategy(state_dict_type=form))
    train(f, state, 2)
    f.save(path, state)


def load_on(rank: int, world: int, path: Path) -> dict[str, Any]:
    f, state = start(seed=6)
    f.load(path, state)
    moments = {name: own["exp_avg"] for name, own in optimizer_state(state["net"], state["adam"]).items()}
    return {"weights": whole(state["net"]), "moments": moments, "step": state["step"]}


@pytest.mark.exhaustive
@both_forms
def test_another_number_of_ranks_loads_it(form, tmp_path):
    run(2, save_on, form, tmp_path / "state.ckpt")
    (alone,) = run(1, load_on, tmp_path / "state.ckpt")
    for other in run(3, load_on, tmp_path / "state.ckpt"):
        assert_same(other["weights"], alone["weights"], rtol=0, atol=0)
        assert_same(other["moments"], alone["moments"], rtol=0, atol=0)
        assert other["step"] == alone["step"] == 2


@either_form
@ranks(2)
def test_a_filter_chooses_what_is_saved_and_strict_false_loads_it(form, tmp_path):
    f, state = start(strategy(state_dict_type=form))
    path = tmp_path / "heads.ckpt"
    chosen = {"net": lambda name, value: name.startswith("head") and value.shape[0] == 3}
    f.save(path, {"net": state["net"], "step": 3}, filter=chosen)
    f, other = start(seed=6)
    before = whole(other["net"])
    with pytest.raises(StateDictError, match="scale"):
        f.load(path, {"net": other["net"]})
    assert_same(whole(other["net"]), before, rtol=0, atol=0)
    asked = {"net": other["net"], "unknown": 1}
    with pytest.raises(KeyError, match="unknown"):
        f.load(path, asked)
    assert f.load(path, asked, strict=False) == {"step": 3} and asked["unknown"] == 1
    saved = whole(state["net"])
    expected = {name: saved[name] if name.startswith("head") else value for name, value in before.items()}
    assert_same(whole(other["net"]), expected, rtol=0, atol=0)
    if form == "full":
        file = torch.load(path, weights_only=True)
        assert sorted(file["net"]) == ["head.bias", "head.weight"]


@ranks(2)
def test_load_raw_takes_a_module_or_an_optimizer_out_of_plain_files(rank, tmp_path):
    plain = net(8)
    adam = torch.optim.Adam(plain.parameters(), lr=0.5)
    plain(torch.ones(2, 6)).sum().backward()
    adam.step()
    if rank == 0:
        torch.save(plain.state_dict(), tmp_path / "model.pt")
        torch.save(adam.state_dict(), tmp_path / "adam.pt")
        torch.save({"head.bias": torch.ones(3)}, tmp_path / "part.pt")
    dist.barrier()
    f, state = start()
    f.load_raw(tmp_path / "model.pt", state["net"])
    f.load_raw(tmp_path / "adam.pt", state["adam"])
    assert_same(whole(state["net"]), plain.state_dict(), rtol=0, atol=0)
    assert state["adam"].param_groups[0]["lr"] == 0.5
    named = optimizer_state(state["net"], state["adam"])
    for (name, _), own in zip(plain.named_parameters(), adam.state_dict()["state"].values(), strict=True):
        torch.testing.assert_close(named[name]["exp_avg"], own["exp_avg"])
    with pytest.raises(StateDictError, match="scale"):
        f.load_raw(tmp_path / "part.pt", state["net"])
    f.load_raw(tmp_path / "part.pt", state["net"], strict=False)
    assert whole(state["net"])["head.bias"].tolist() == [1.0] * 3


@ranks(2)
def test_load_raw_takes_a_module_or_an_optimizer_out_of_a_folder(tmp_path):
    f, state = start(strategy(state_dict_type="sharded"))
    train(f, state, 2)
    f.save(tmp_path / "folder", {"net": state["net"], "adam": state["adam"]})
    f, again = start(seed=6)
    for key in ("adam", "net"):
        f.load_raw(tmp_path / "folder", again[key])
    again["step"] = 2
    train(f, again, 2)
    assert_same(whole(again["net"]), uninterrupted())


@ranks(2)
def test_several_modules_and_plain_ones_go_into_one_file(tmp_path):
    f, state = start()
    other = f.setup(net(9))
    teacher = torch.nn.Linear(2, 2)
    f.save(tmp_path / "all.ckpt", {**state, "other": other, "teacher": teacher})
    everything = f.load(tmp_path / "all.ckpt")
    assert sorted(everything) == ["adam", "counter", "net", "other", "step", "teacher"]
    assert_same(everything["other"], whole(other), rtol=0, atol=0)
    fresh = f.setup(net(10))
    copy = torch.nn.Linear(2, 2)
    remainder = f.load(tmp_path / "all.ckpt", {"other": fresh, "teacher": copy})
    assert sorted(remainder) == ["adam", "counter", "net", "step"]
    assert_same(whole(fresh), whole(other), rtol=0, atol=0)
    assert_same(copy.state_dict(), everything["teacher"], rtol=0, atol=0)


@ranks(2)
def test_what_a_folder_cannot_hold_is_refused_and_nothing_is_written(tmp_path):
    f, state = start(strategy(state_dict_type="sharded"))
    path = tmp_path / "folder"
    with pytest.raises(ConfigError, match="a string without dots"):
        f.save(path, {"a": state["net"], "b.c": f.setup(net())})
    with pytest.raises(ConfigError, match="'adam' is an optimizer"):
        f.save(path, state, filter={"adam": lambda name, value: True})
    assert not path.exists()
    f.save(path, state)
    with pytest.raises(CheckpointError, match="pass that as part of the state"):
        f.load(path, {"step": 0})


@ranks(2)
def test_a_failure_on_one_rank_is_raised_on_all(rank, tmp_path):
    f, state = start()

    def fail(*args: Any) -> Any:
        raise ValueError("not today")

    broken = Counter()
    broken.state_dict = fail if rank == 1 else broken.state_dict
    with pytest.raises(Exception, match="not today"):
        f.save(tmp_path / "state.ckpt", {**state, "counter": broken})
    with pytest.raises(Exception, match="not today"):
        f.save(tmp_path / "state.ckpt", state, filter={"net": fail})
    assert not (tmp_path / "state.ckpt").exists()
    (tmp_path / "a folder").mkdir(exist_ok=True)
    with pytest.raises(OSError, match="a folder"):
        f.save(tmp_path / "a folder", state)
    (tmp_path / "no checkpoint").write_bytes(b"hello")
    before = whole(state["net"])
    for name, message in (("missing", "missing"), ("no checkpoint", "damaged, or no checkpoint")):
        with pytest.raises(CheckpointError, match=message):
            f.load(tmp_path / name, state)
    assert_same(whole(state["net"]), before, rtol=0, atol=0)


@ranks(2)
def test_folders_are_written_while_training_goes_on(tmp_path):
    f, state = start(strategy(state_dict_type="sharded", async_save=True))
    for _ in range(2):
        train(f, state, 1)
        f.save(tmp_path / "folder", state)
    saved = whole(state["net"])
    train(f, state, 1)
    f.load(tmp_path / "folder", state)
    assert state["step"] == 2
    assert_same(whole(state["net"]), saved, rtol=0, atol=0)
