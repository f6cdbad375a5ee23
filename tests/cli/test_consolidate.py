"""consolidate and convert: the same values in another format, to the bit, and never half a file."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from tests.checkpoint.helpers import Model, adamw, build, files_of, load, loads, same, whole
from tests.checkpoint.test_bad_files import values_of
from tests.checkpoint.test_interop import double, plain
from tests.cli.makers import fit, lightning_net
from tests.lightning.support import loader, single
from tests.support.damage import flip, full_disk
from tests.support.marks import exhaustive
from tests.support.odd_model import batch
from tests.support.optimizer_state import by_name
from tests.support.ranks import run
from torch_shard.checkpoint import save
from torch_shard.cli import main


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


# -- to a torch file --------------------------------------------------------------------------------------------------


def test_a_sharded_checkpoint_becomes_a_file_that_plain_torch_loads(made, tmp_path, cli):
    assert "66 tensors" in cli("consolidate", made / "ours", tmp_path / "x.pt")
    found, expected = loaded(tmp_path / "x.pt"), loaded(made / "ours.expected")
    assert list(found) == ["model", "optimizer", "extra"] and found["extra"] == {"step": 2}
    same(dict(found["model"]), expected["model"])
    assert list(found["model"]) == list(Model().state_dict())
    model = Model()
    optimizer = adamw(model)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    state = {name: own for name, own in expected["optimizer"]["state"].items() if own}
    same(by_name(model, optimizer)["state"], state)
    plain_groups = optimizer.state_dict()["param_groups"]
    assert [g["params"] for g in plain_groups] == [g["params"] for g in found["optimizer"]["param_groups"]]
    assert [g["lr"] for g in plain_groups] == [0.01, 0.02] and plain_groups[0]["weight_decay"] == 0.1
    assert model.note == "trained"
    assert found["model"]._metadata == Model().state_dict()._metadata
    assert found["model"]["net.head.weight"].data_ptr() == found["model"]["net.embed.weight"].data_ptr()  # tied
    assert files_of(tmp_path) == ["x.pt"]


def test_a_model_alone_is_a_plain_state_dict(made, tmp_path, cli):
    cli("consolidate", made / "wide", tmp_path / "wide.pt")
    assert "blocks.0.weight" in loaded(tmp_path / "wide.pt")
    cli("consolidate", made / "ours", tmp_path / "x.pt", "--model-only", "--dtype", "bf16")
    found, expected = loaded(tmp_path / "x.pt"), loaded(made / "ours.expected")["model"]
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            same(found[name], value.bfloat16() if value.is_floating_point() else value, name)


def test_dtype_leaves_the_optimizer_as_it_is(made, tmp_path, cli):
    cli("consolidate", made / "ours", tmp_path / "x.pt", "--dtype", "fp64")
    found = loaded(tmp_path / "x.pt")
    assert found["model"]["net.scale"].dtype == torch.float64 and found["model"]["mask"].dtype == torch.bool
    assert {s["exp_avg"].dtype for s in found["optimizer"]["state"].values()} == {torch.float32}


def test_several_models_and_optimizers_keep_their_names(made, tmp_path, cli):
    cli("consolidate", made / "several", tmp_path / "x.pt")
    found = loaded(tmp_path / "x.pt")
    assert set(found) == {"model", "models", "optimizer", "extra"} and set(found["optimizer"]) == {"one", "two"}
    double().load_state_dict(found["models"]["teacher"])
    model, optimizer = plain()
    optimizer.load_state_dict(found["optimizer"]["one"])
    assert len(optimizer.state) == len(list(model.parameters()))
    same(found["extra"], [1, torch.ones(2)])


@pytest.mark.parametrize("kind", ["fsdp2", "ddp", "titan", "app"])
def test_what_others_have_saved(kind, made, tmp_path, cli):
    cli("consolidate", made / kind, tmp_path / "x.pt")
    found = loaded(tmp_path / "x.pt")
    expected = loaded(made / ("fsdp2.expected" if kind == "fsdp2" else "ddp.expected"))
    model, optimizer = plain()
    prefix = "module." if kind == "ddp" else ""
    values = expected["model"]
    same(dict(found["model"]), {prefix + name: value for name, value in values.items()})
    if kind == "titan":  # says nothing of groups: those of equal settings, in the model's order
        assert found["train_state"] == {"step": 2}
        assert [len(group["params"]) for group in found["optimizer"]["param_groups"]] == [
            sum(p.ndim >= 2 for p in model.parameters()),
            sum(p.ndim < 2 for p in model.parameters()),
        ]
    model.load_state_dict(values)
    optimizer.load_state_dict(found["optimizer"])
    if kind == "fsdp2":
        same(by_name(model, optimizer)["state"], expected["optimizer"]["state"])
        return
    again, other = plain()
    again.load_state_dict(values)
    other.load_state_dict(expected["optimizer"])
    same(by_name(model, optimizer)["state"], by_name(again, other)["state"])


# -- Lightning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lightning", "lightning_fsdp1", "ours_lightning"])
def test_a_trainers_checkpoint_comes_back_as_a_trainer_wrote_it(kind, made, tmp_path, cli):
    found = cli("consolidate", made / kind, tmp_path / "x.ckpt", "--json")
    assert found["lightning"] is True
    consolidated, expected = loaded(tmp_path / "x.ckpt"), loaded(made / "trainer.ckpt")
    same(
        {**consolidated, "state_dict": dict(consolidated["state_dict"])},
        {**expected, "state_dict": dict(expected["state_dict"])},
    )


def test_plain_lightning_goes_on_from_what_the_shard_strategy_has_saved(tmp_path, cli):
    state = run(2, fit, tmp_path / "folder.ckpt")[0]
    assert (tmp_path / "folder.ckpt").is_dir()
    cli("verify", tmp_path / "folder.ckpt")
    cli("consolidate", tmp_path / "folder.ckpt", tmp_path / "x.ckpt")
    cli("diff", tmp_path / "folder.ckpt", tmp_path / "x.ckpt")
    model = type(lightning_net()).load_from_checkpoint(tmp_path / "x.ckpt")
    same(dict(model.state_dict()), state)
    trainer = single("lightning", max_epochs=2)
    trainer.fit(model, loader(1), ckpt_path=tmp_path / "x.ckpt")
    assert trainer.current_epoch == 2
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.01 * 0.5**2


# -- to safetensors ---------------------------------------------------------------------------------------------------


def test_safetensors_in_one_file_and_in_several(made, tmp_path, cli, capsys):
    out = cli("consolidate", made / "fsdp2", tmp_path / "x.safetensors", "--json")
    assert out["left_out"] == ["optimizer"]
    expected = loaded(made / "fsdp2.expected")["model"]
    same(load_file(tmp_path / "x.safetensors"), expected)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    cli("consolidate", made / "fsdp2", tmp_path / "hf", "--max-shard-size", "500")
    parts = [name for name in files_of(tmp_path / "hf") if name.endswith(".safetensors")]
    assert len(parts) > 1 and {"config.json", "model.safetensors.index.json"} < set(files_of(tmp_path / "hf"))
    found: dict[str, torch.Tensor] = {}
    for name in parts:
        found.update(load_file(tmp_path / "hf" / name))
    same(found, expected)
    cli("consolidate", made / "fsdp2", tmp_path / "hf", expected=2)
    cli("consolidate", made / "fsdp2", tmp_path / "hf", "--overwrite")
    assert files_of(tmp_path / "hf") == ["config.json", "model.safetensors"]
    cli("diff", tmp_path / "hf", made / "fsdp2", "--model-only")


# -- to sharded -------------------------------------------------------------------------------------------------------


def test_every_format_goes_to_every_other_and_back(made, tmp_path, cli):
    cli("convert", made / "ours", tmp_path / "a.pt", "--to", "torch")
    cli("convert", tmp_path / "a.pt", tmp_path / "b", "--to", "sharded")
    cli("convert", tmp_path / "b", tmp_path / "c.pt", "--to", "torch")
    for one in (made / "ours", tmp_path / "a.pt", tmp_path / "b", tmp_path / "c.pt"):
        cli("diff", one, tmp_path / "b")
        cli("diff", tmp_path / "b", one)
        cli("verify", one)
    found = loaded(tmp_path / "c.pt")
    same({**found, "model": dict(found["model"])}, {**loaded(tmp_path / "a.pt"), "model": dict(found["model"])})
    cli("convert", tmp_path / "b", tmp_path / "d", "--to", "safetensors")
    cli("convert", tmp_path / "d", tmp_path / "e", "--to", "sharded")
    cli("diff", tmp_path / "d", tmp_path / "e")
    cli("verify", tmp_path / "e")


@pytest.mark.parametrize("source", ["ours", *exhaustive("x.pt")])
def test_engine_load_takes_a_converted_checkpoint(source, made, tmp_path, cli):
    """From a sharded one, and from a torch file, where optimizer state has numbers for names; on two ranks."""
    (tmp_path / "c.expected").write_bytes((made / "ours.expected").read_bytes())
    cli("consolidate", made / "ours", tmp_path / "x.pt")
    cli("convert", tmp_path / "x.pt" if source == "x.pt" else made / source, tmp_path / "c", "--to", "sharded")
    run(2, loads, str(tmp_path / "c"), {})


def _loads_foreign(rank: int, world_size: int, path: str, expected: str) -> None:
    _, engine, optimizer = build(seed=2, make=adamw, model=double)
    extra = load(engine, path, optimizer)
    model, other = plain()
    values = torch.load(expected, weights_only=True)
    model.load_state_dict(values["model"])
    other.load_state_dict(values["optimizer"])
    found = whole(engine, optimizer)
    same(found["model"], dict(model.state_dict()))
    state = {name: own for name, own in found["optimizer"]["state"].items() if own}
    same(state, by_name(model, other)["state"])
    assert extra == (
        {"epoch": 7} if path.endswith("plain") else {"train_state": {"step": 2}} if path.endswith("titan") else None
    )
    engine.close()


@pytest.mark.parametrize("source", [*exhaustive("plain.pt"), "ddp", *exhaustive("titan", "app")])
def test_engine_load_takes_what_others_have_saved_once_it_is_converted(source, made, tmp_path, cli):
    target = tmp_path / source.removesuffix(".pt")
    cli("convert", made / source, target, "--to", "sharded")
    cli("verify", target)
    run(2, _loads_foreign, str(target), str(made / "ddp.expected"))


def test_lightnings_checkpoints_are_still_lightnings_when_sharded(made, tmp_path, cli):
    for source in ("trainer.ckpt", "lightning"):
        cli("convert", made / source, tmp_path / source[:4], "--to", "sharded")
        cli("consolidate", tmp_path / source[:4], tmp_path / "back.ckpt", "--overwrite")
        cli("diff", made / "trainer.ckpt", tmp_path / "back.ckpt")


@pytest.mark.parametrize("form", ["torch", "sharded"])
def test_models_that_a_hook_has_added_to_a_lightning_checkpoint_are_kept(form, made, tmp_path, cli):
    ema = {"ema": {"w": torch.ones(2)}}
    for key in ("models", "model"):
        torch.save({**loaded(made / "trainer.ckpt"), key: ema}, tmp_path / "a.ckpt")
        cli("convert", tmp_path / "a.ckpt", tmp_path / "b", "--to", form, "--overwrite")
        cli("consolidate", tmp_path / "b", tmp_path / "c.ckpt", "--overwrite")
        cli("diff", tmp_path / "a.ckpt", tmp_path / "c.ckpt")
        same(loaded(tmp_path / "c.ckpt")[key], ema)
        assert set(loaded(tmp_path / "c.ckpt")) == set(loaded(tmp_path / "a.ckpt"))


def test_odd_contents_of_a_torch_file_survive(tmp_path, cli):
    """State of no parameter, keys that are no strings, empty containers, tensors beside the model, shared memory."""
    w = torch.randn(3, 2)
    values = {
        "model": {"w": w, "tied": w, "view": w[:, 0], "none": torch.empty(0, 2), "half": torch.ones(2).half(), "e": {}},
        "optimizer": {
            "state": {0: {"m": torch.ones(3, 2), "blocks": {0: torch.ones(1), 1: [torch.zeros(1)]}}, "calls": 5},
            "param_groups": [{"lr": torch.tensor(0.1), "betas": (0.9, 0.99), "params": [0]}],
        },
        "ema": {"w": torch.ones(3, 2)},
        "epoch": 3,
        "path": Path("a/b"),
        "list": [1, (2, torch.ones(2)), {"x": None}],
    }
    torch.save(values, tmp_path / "a.pt")
    cli("convert", tmp_path / "a.pt", tmp_path / "s", "--to", "sharded")
    cli("verify", tmp_path / "s")
    cli("convert", tmp_path / "s", tmp_path / "b.pt", "--to", "torch")
    cli("convert", tmp_path / "a.pt", tmp_path / "c.pt", "--to", "torch")
    cli("diff", tmp_path / "a.pt", tmp_path / "c.pt")
    with torch.serialization.safe_globals([type(Path())]):
        direct, back = loaded(tmp_path / "c.pt"), loaded(tmp_path / "b.pt")
    direct["model"], back["model"] = dict(direct["model"]), dict(back["model"])
    same(direct, values)
    # What engine.load returns is in `extra` then.
    assert {key: back["extra"].pop(key) for key in ("epoch", "path")} == {"epoch": 3, "path": Path("a/b")}
    for key in ("model", "optimizer", "ema"):
        same(back[key], values[key], key)


@pytest.mark.parametrize("extra", [[1, 2], {"epoch": 3, "seed": 4}])
def test_entries_beside_an_extra_that_can_not_take_them_up_keep_their_own_place(extra, tmp_path, cli):
    values = {"model": {"w": torch.ones(2)}, "extra": extra, "epoch": 12, "history": [1, {"a": 2.5}], "none": {}}
    torch.save(values, tmp_path / "a.pt")
    cli("convert", tmp_path / "a.pt", tmp_path / "s", "--to", "sharded")
    cli("verify", tmp_path / "s")
    cli("convert", tmp_path / "s", tmp_path / "b.pt", "--to", "torch")
    back = loaded(tmp_path / "b.pt")
    assert back["epoch"] == 12
    taken_up = back["extra"] if isinstance(extra, dict) else back
    assert (taken_up["history"], taken_up["none"]) == ([1, {"a": 2.5}], {})
    assert back["extra"] == ({**extra, "history": [1, {"a": 2.5}], "none": {}} if isinstance(extra, dict) else extra)


def test_an_entry_that_a_sharded_checkpoint_has_no_place_for_is_refused_by_name(tmp_path, cli):
    values = {"model": "resnet50", "state_dict": {"w": torch.ones(2)}, "extra": [1]}
    torch.save(values, tmp_path / "a.pt")
    error = cli("convert", tmp_path / "a.pt", tmp_path / "s", "--to", "sharded", expected=2)
    assert "'model'" in error and not (tmp_path / "s").exists()
    torch.save({"model": {"w": torch.ones(2)}, "extra": [1], 0: "a", "0": "b"}, tmp_path / "b.pt")
    error = cli("convert", tmp_path / "b.pt", tmp_path / "s", "--to", "sharded", expected=2)
    assert "'0'" in error and not (tmp_path / "s").exists()


def test_a_model_of_another_name_is_kept_but_not_taken_for_one(tmp_path, cli):
    values = {"net": {"w": torch.ones(2)}, "opt": {"state": {}, "param_groups": []}, "step": 3}
    torch.save(values, tmp_path / "a.pt")
    cli("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch")
    same(loaded(tmp_path / "b.pt"), values)
    cli("convert", tmp_path / "a.pt", tmp_path / "s", "--to", "sharded")
    cli("verify", tmp_path / "s")
    assert "net, opt, step" in cli("inspect", tmp_path / "a.pt")
    for arguments in (("--to", "safetensors"), ("--to", "torch", "--model-only")):
        assert "no model" in cli("convert", tmp_path / "a.pt", tmp_path / "c", *arguments, expected=2)


# -- optimizers that are given as a list ---------------------------------------------------------------------------------


def _two(model: nn.Module) -> list[Any]:
    matrices = [p for p in model.parameters() if p.ndim >= 2 and p.requires_grad]
    vectors = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    groups = [{"params": vectors[:1], "lr": 0.1}, {"params": vectors[1:]}]
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(groups, lr=0.01)]


def _there_and_back(rank: int, world_size: int, folder: Path) -> None:
    model, engine, several = build(make=_two)
    model(batch(0)).pow(2).mean().backward()  # the same on all ranks: buffers are one rank's own
    for optimizer in several:
        optimizer.step()
    expected = [whole(engine, own) for own in several]
    save(engine, folder / "ours", several)
    dist.barrier()
    if rank == 0:
        state = {"model": expected[0]["model"], "optimizer": [_numbered(own["optimizer"]) for own in expected]}
        torch.save(state, folder / "list.pt")
        for source, target, form in (
            ("ours", "merged.pt", "torch"),
            ("list.pt", "list2.pt", "torch"),
            ("list.pt", "sharded", "sharded"),
            ("sharded", "merged2.pt", "torch"),
        ):
            assert main(["convert", str(folder / source), str(folder / target), "--to", form]) == 0
        assert type(torch.load(folder / "list2.pt", weights_only=True)["optimizer"]) is list
        assert main(["diff", str(folder / "ours"), str(folder / "list.pt")]) == 0
    dist.barrier()
    engine.close()
    for name in ("ours", "merged.pt", "list.pt", "list2.pt", "sharded", "merged2.pt"):
        _model, engine, several = build(seed=1, make=_two)  # the engine does not hold it
        load(engine, folder / name, several)
        same([whole(engine, own) for own in several], expected, name)
        engine.close()


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    """As optimizer.state_dict() of an unsharded model has it."""
    numbers: dict[str, int] = {}
    groups = []
    for group in state["param_groups"]:
        groups.append({**group, "params": [numbers.setdefault(name, len(numbers)) for name in group["params"]]})
    return {"state": {numbers[name]: own for name, own in state["state"].items()}, "param_groups": groups}


@pytest.mark.exhaustive
def test_a_list_of_optimizers_goes_to_every_format_and_back(tmp_path):
    run(2, _there_and_back, tmp_path)


# -- whole or not there -----------------------------------------------------------------------------------------------


def test_what_is_there_is_not_replaced_unasked(made, tmp_path, cli):
    (tmp_path / "x.pt").write_text("mine")
    assert "--overwrite" in cli("consolidate", made / "ours", tmp_path / "x.pt", expected=2)
    assert (tmp_path / "x.pt").read_text() == "mine"
    cli("consolidate", made / "ours", tmp_path / "x.pt", "--overwrite")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").touch()
    for form in ("torch", "sharded"):
        cli("convert", made / "ours", tmp_path / "work", "--to", form, "--overwrite", expected=2)
    (tmp_path / "work" / "figures").mkdir()
    cli("convert", made / "ours", tmp_path / "work", "--to", "safetensors", "--overwrite", expected=2)
    assert files_of(tmp_path / "work") == ["figures", "thesis.tex"] and files_of(tmp_path) == ["work", "x.pt"]


@pytest.mark.parametrize("form", ["torch", "sharded", "safetensors"])
def test_a_full_disk_leaves_nothing(form, made, tmp_path, cli):
    """What was there before stays."""
    target = tmp_path / ("x.safetensors" if form == "safetensors" else "x")
    cli("convert", made / "fsdp2", target, "--to", form)
    before = files_of(tmp_path)
    with full_disk(1_000_000):
        error = cli("convert", made / "wide", target, "--to", form, "--overwrite", expected=2)
    assert "File too large" in error or "Errno 27" in error or "os error 27" in error
    assert files_of(tmp_path) == before
    cli("diff", made / "fsdp2", target, "--model-only")


@pytest.mark.parametrize("form", ["torch", "sharded", "safetensors"])
def test_a_damaged_source_leaves_nothing(form, made, copied, tmp_path, cli):
    folder = copied("ours")
    file, position = values_of(folder, "model.net.blocks.1.0.weight")
    flip(folder / file, position)
    error = cli("convert", folder, tmp_path / "x", "--to", form, expected=2)
    assert file in error and "model.net.blocks.1.0.weight" in error
    assert files_of(tmp_path) == ["ours"]


@pytest.mark.parametrize("form", ["torch", *exhaustive("sharded")])
def test_one_tensor_is_in_memory_at_a_time(form, made, tmp_path, cli):
    """The peak of the process's own memory, above that before: the model has 32 MiB, a tensor 2."""
    cli("convert", made / "fsdp2", tmp_path / "small", "--to", form)  # what is only allocated once
    before, done, seen = own_memory(), threading.Event(), [0]

    def watch() -> None:
        while not done.wait(0.0005):
            seen.append(own_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    cli("convert", made / "wide", tmp_path / "wide", "--to", form)
    done.set()
    thread.join()
    assert len(seen) > 5 and max(seen) - before < 10 << 20, (before, seen)


def own_memory() -> int:
    """Bytes that are this process's own: mapped files don't count."""
    found = re.search(r"RssAnon:\s*(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10
