"""What front ends say of a pickled file that can't be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torch_shard.errors import CheckpointError, ConfigError
from torch_shard.frontend.checkpoint import read_pickled

REMEDY = "Trainer(weights_only=False)"


class Other:
    """A class that the safe loader does not know."""


def read(path: Path, weights_only: bool = True) -> object:
    return read_pickled(lambda: torch.load(path, weights_only=weights_only), path, REMEDY)


def test_an_object_that_the_safe_loader_refuses_is_named_with_the_remedy(tmp_path):
    torch.save({"other": Other()}, tmp_path / "f.pt")
    with pytest.raises(
        CheckpointError, match=r"f\.pt holds objects .*Other.* load it with Trainer\(weights_only=False\)"
    ):
        read(tmp_path / "f.pt")
    assert read(tmp_path / "f.pt", weights_only=False)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("contents", [b"", b"not a checkpoint\n", b"PK\x03\x04 cut off"])
def test_bytes_that_are_no_file_of_torchs_are_called_damaged_without_the_remedy(contents, weights_only, tmp_path):
    (tmp_path / "f.pt").write_bytes(contents)
    with pytest.raises(CheckpointError, match=r"f\.pt is damaged, or no checkpoint") as info:
        read(tmp_path / "f.pt", weights_only)
    assert REMEDY not in str(info.value)


class my_truncated_thing:
    pass


def test_what_a_class_is_called_does_not_make_a_file_damaged(tmp_path):
    torch.save(my_truncated_thing(), tmp_path / "f.pt")
    with pytest.raises(CheckpointError, match=r"f\.pt holds objects .*my_truncated_thing"):
        read(tmp_path / "f.pt")


def test_another_protocol_of_pickle_is_no_damage(tmp_path):
    torch.save({"x": torch.ones(3)}, tmp_path / "f.pt", pickle_protocol=4)
    with pytest.warns(UserWarning, match="protocol 4"), pytest.raises(CheckpointError, match=r"load it with Trainer"):
        read(tmp_path / "f.pt")
    assert read(tmp_path / "f.pt", weights_only=False)


def test_a_class_that_is_not_there_is_named(tmp_path, monkeypatch):
    torch.save(Other(), tmp_path / "f.pt")
    monkeypatch.delattr(f"{__name__}.Other")
    with pytest.raises(CheckpointError, match=r"f\.pt holds objects of a class that is not found here.*Other"):
        read(tmp_path / "f.pt", weights_only=False)


def test_memory_that_runs_out_is_no_damage(tmp_path):
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        read_pickled(fail, tmp_path, REMEDY)


def test_an_error_of_this_package_is_raised_as_it_is(tmp_path):
    def fail() -> None:
        raise ConfigError("another setting")

    with pytest.raises(ConfigError, match=r"^another setting$"):
        read_pickled(fail, tmp_path, REMEDY)
