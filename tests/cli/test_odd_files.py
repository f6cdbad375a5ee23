"""Files that are unusual: entries whose names collide or mislead, tensors that can't be read, errors of no known kind."""

from __future__ import annotations

import os
import zipfile
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.helpers import same
from tests.support.damage import rezipped
from tests.support.run_python import run_python


def loaded(path: Any) -> Any:
    return torch.load(path, weights_only=True)


# -- names that collide or mislead ------------------------------------------------------------------------------------


def test_two_tensors_of_one_name_are_refused_by_safetensors(tmp_path, cli):
    torch.save({0: torch.zeros(2), "0": torch.ones(2)}, tmp_path / "a.pt")
    error = cli("convert", tmp_path / "a.pt", tmp_path / "a", "--to", "safetensors", expected=2)
    assert "'0' of the model" in error and "0 of the model and" in error and os.listdir(tmp_path) == ["a.pt"]
    nested = {"model": {"critic.w": torch.zeros(2)}, "models": {"critic": {"w": torch.ones(2)}}}
    torch.save(nested, tmp_path / "b.pt")
    error = cli("convert", tmp_path / "b.pt", tmp_path / "b", "--to", "safetensors", expected=2)
    assert "'critic.w' of the model and 'w' of the model 'critic'" in error


def test_a_configuration_is_not_taken_for_the_model(tmp_path, cli):
    weights = {"w": torch.ones(3)}
    torch.save({"model": {"hidden": 128}, "state_dict": weights}, tmp_path / "a.pt")
    cli("convert", tmp_path / "a.pt", tmp_path / "a", "--to", "safetensors")
    same(load_file(tmp_path / "a" / "model.safetensors"), weights)
    cli("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch")
    found = loaded(tmp_path / "b.pt")
    same({**found, "state_dict": dict(found["state_dict"])}, {"model": {"hidden": 128}, "state_dict": weights})
    torch.save({"model": {"hidden": 128}, "w": torch.ones(3)}, tmp_path / "c.pt")  # the model is at the top
    cli("convert", tmp_path / "c.pt", tmp_path / "c", "--to", "safetensors")
    same(load_file(tmp_path / "c" / "model.safetensors"), weights)


def test_entries_with_the_names_of_our_own_are_kept(tmp_path, cli):
    values = {"model": "resnet50", "state_dict": {"w": torch.ones(3)}, "optimizer": "sgd", "epoch": 3}
    values["optimizer_state_dict"] = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save(values, tmp_path / "a.pt")
    cli("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch")
    found = loaded(tmp_path / "b.pt")
    same({**found, "state_dict": dict(found["state_dict"])}, values)
    cli("convert", tmp_path / "a.pt", tmp_path / "s", "--to", "sharded")
    cli("convert", tmp_path / "s", tmp_path / "c.pt", "--to", "torch")
    assert loaded(tmp_path / "c.pt")["extra"] == {"model": "resnet50", "optimizer": "sgd", "epoch": 3}
    taken = {"model": [torch.ones(2)], "state_dict": {"w": torch.ones(3)}}
    torch.save(taken, tmp_path / "d.pt")
    assert "'model'" in cli("convert", tmp_path / "d.pt", tmp_path / "d", "--to", "sharded", expected=2)


# -- what differs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"a": {1: 2, "1": 3}}, {"a": {1: 5, "1": 3}}),
        ({"a": {"b": {"c": 1}, "b.c": 2}}, {"a": {"b": {"c": 3}, "b.c": 2}}),
        ({"a": {1: 2}}, {"a": {"1": 2}}),
        ({"a": [2]}, {"a": {0: 2}}),
        ({"a": []}, {"a": {}}),
        ({"a": []}, {}),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 0.0}, {"a": -0.0}),
        ({"a": {1: 2}}, {"a": {True: 2}}),
    ],
)
def test_contents_that_differ_are_not_equal(one, two, tmp_path, cli):
    for name, extra in (("a.pt", one), ("b.pt", two)):
        torch.save({"model": {"w": torch.ones(2)}, "extra": {"x": 1, **extra}}, tmp_path / name)
    cli("diff", tmp_path / "a.pt", tmp_path / "a.pt")
    cli("diff", tmp_path / "a.pt", tmp_path / "b.pt", expected=1)
    cli("convert", tmp_path / "a.pt", tmp_path / "a", "--to", "sharded")
    cli("diff", tmp_path / "a.pt", tmp_path / "a")
    cli("diff", tmp_path / "a", tmp_path / "b.pt", expected=1)


def test_conjugated_and_negated_views(tmp_path, cli):
    z = torch.tensor([1 + 2j, 3 - 1j])
    values = {"a": z, "b": z.conj(), "n": z.clone().conj().imag, "w": torch.ones(2)}
    torch.save(values, tmp_path / "a.pt")
    torch.save({name: value.clone().resolve_conj().resolve_neg() for name, value in values.items()}, tmp_path / "b.pt")
    cli("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    torch.save({**values, "b": z}, tmp_path / "c.pt")
    cli("diff", tmp_path / "a.pt", tmp_path / "c.pt", expected=1)
    for form, name in (("torch", "d.pt"), ("sharded", "d")):
        cli("convert", tmp_path / "a.pt", tmp_path / name, "--to", form)
        cli("diff", tmp_path / name, tmp_path / "b.pt")


# -- what can't be read -----------------------------------------------------------------------------------------------


def _loop() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sparse", "sparse_csr", "quantized", "meta", "contains itself"])
def test_what_can_not_be_read_is_refused_by_name(kind, tmp_path, cli):
    odd = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        "meta": lambda: torch.empty(3, device="meta"),
        "contains itself": _loop,
    }[kind]()
    path = tmp_path / "a.pt"
    torch.save({"model": {"w": torch.ones(2), "odd": odd}}, path)
    for arguments in (("inspect", path), ("diff", path, path), ("convert", path, tmp_path / "x", "--to", "torch")):
        error = cli(*arguments, expected=2)
        assert kind in error and "model.odd" in error and str(path) in error
    cli("verify", path)  # its bytes are good


def test_any_other_error_is_one_line_and_2(tmp_path, cli, monkeypatch):
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")

    def fail(*arguments: Any) -> Any:
        raise RecursionError("too deep\nfor this")

    monkeypatch.setattr("torch_shard.cli.inspect.open_checkpoint", fail)
    error = cli("inspect", tmp_path / "a.pt", expected=2)
    assert str(tmp_path / "a.pt") in error and "RecursionError: too deep; for this" in error


@pytest.mark.exhaustive
def test_output_that_has_no_such_character(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "extra": "é" + "x" * 100}, tmp_path / "a.pt")
    done = run_python("-X", "utf8=0", "-m", "torch_shard", "inspect", tmp_path / "a.pt", PYTHONIOENCODING="ascii")
    assert "\\xe9xxx" in done.stdout and done.stdout.isascii()


def test_compressed_archives_are_not_called_damaged(tmp_path, cli):
    torch.save({"w": torch.ones(200)}, tmp_path / "plain.pt")
    (tmp_path / "a.pt").write_bytes(rezipped((tmp_path / "plain.pt").read_bytes(), zipfile.ZIP_DEFLATED))
    for command in ("inspect", "verify"):
        error = cli(command, tmp_path / "a.pt", expected=2)
        assert "Re-save it with torch.save" in error and "damaged" not in error


# -- directories of safetensors ---------------------------------------------------------------------------------------
