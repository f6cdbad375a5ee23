"""Turns the sharded checkpoints that ``Accelerator.save_state`` writes here into the files that it writes under DDP."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path

import torch

from torch_shard.cli.main import main as torch_shard_cli

__all__ = ["consolidate"]


def consolidate(folder: Path) -> None:
    """Replace each folder ``sharded`` below `folder` by ``model.safetensors``, ``optimizer.bin``, ``optimizer_1.bin``, ... there.

    The project's own ``torch-shard consolidate`` does it, as a user would.
    """
    for sharded in [found for found in folder.rglob("sharded") if (found / ".metadata").is_file()]:
        single = sharded.with_suffix(".pt")
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert torch_shard_cli(["consolidate", str(sharded), str(single)]) == 0, output.getvalue()
        found = torch.load(single, weights_only=True)
        assert found.keys() == {"model", "optimizer"}, f"{sharded} holds {', '.join(found)}"
        _save_model(found["model"], sharded.parent / "model.safetensors")
        for number, state in found["optimizer"].items():
            torch.save(state, sharded.parent / ("optimizer.bin" if int(number) == 0 else f"optimizer_{number}.bin"))
        single.unlink()
        shutil.rmtree(sharded)


def _save_model(state: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    first: dict[int, str] = {}  # a tied tensor has one name there
    for name, value in state.items():
        first.setdefault(value.data_ptr() if value.numel() else id(value), name)
    save_file({name: state[name].contiguous() for name in first.values()}, path, metadata={"format": "pt"})
