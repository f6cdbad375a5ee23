"""``Fabric(strategy="shard")`` needs no import, in both namespaces, and starts its ranks in each of Fabric's ways."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.lightning.fabric.support import NAMESPACES
from tests.lightning.registration.test_registration import NAMES
from tests.support.run_python import run_python

SCRIPT = """
import json, sys
import torch
from {namespace} import Fabric


def train(fabric):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))[fabric.global_rank :: fabric.world_size]
    for step in range(3):
        loss = (model(batch[:, :4]) - batch[:, 4:]).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return [type(fabric.strategy).__name__, fabric.world_size, fabric.all_reduce(loss.detach()).item()]


def main(how):
    fabric = Fabric() if how == "cli" else Fabric(accelerator="cpu", devices=2, strategy=how)
    if how in ("cli", "shard", "ddp"):
        if how != "cli":
            fabric.launch()
        found = train(fabric)
    else:
        found = fabric.launch(train)
    if fabric.is_global_zero:
        print("RESULT", json.dumps(found), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # left to the exit, torch aborts now and then, under DDP too


if __name__ == "__main__":
    main(sys.argv[1])
"""


def result(printed: str) -> list[Any]:
    (line,) = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def script(folder: Path, namespace: str = "lightning.fabric") -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(namespace=namespace))
    return path


def test_the_command_line_offers_the_names():
    cli = importlib.import_module("lightning.fabric.cli")
    # Lightning leaves out every name that has one of these words in it.
    assert set(NAMES) - set(cli._get_supported_strategies()) <= {"shard_spawn", "shard_fork", "shard_offload"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_a_script_trains_on_two_ranks_as_with_ddp_without_importing_anything_of_ours(namespace, tmp_path):
    path = script(tmp_path, namespace)
    expected = [
        "ShardFabricStrategy",
        2,
        pytest.approx(result(run_python(path, "ddp", folder=tmp_path).stdout)[2], rel=1e-5),
    ]
    assert result(run_python(path, "shard", folder=tmp_path).stdout) == expected
    # The console script is that of one of the two packages.
    program = ("-c", f"from {namespace}.cli import _main; _main()", "run", "--strategy", "shard")
    options = ("--accelerator", "cpu", "--devices", 2, "--main-port", 29731)
    assert result(run_python(*program, *options, path, "cli", folder=tmp_path).stdout) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["variable", "script"])
def test_fabric_run_trains_with_offload_where_its_own_option_leaves_the_name_out(way, tmp_path):
    path = script(tmp_path)
    loss = result(run_python(path, "ddp", folder=tmp_path).stdout)[2]
    text = path.read_text().replace("type(fabric.strategy).__name__", "fabric.strategy.config.offload is not None")
    path.write_text(text.replace("Fabric() if", 'Fabric(strategy="shard_offload") if') if way == "script" else text)
    program = ("-c", "from lightning.fabric.cli import _main; _main()", "run")
    options = ("--accelerator", "cpu", "--devices", 2, "--main-port", 29733)
    variables = {"LT_STRATEGY": "shard_offload"} if way == "variable" else {}
    done = run_python(*program, *options, path, "cli", folder=tmp_path, **variables)
    assert result(done.stdout) == [True, 2, pytest.approx(loss, rel=1e-5)]
    refused = run_python(*program, *options, "--strategy", "shard_offload", path, "cli", folder=tmp_path, expected=None)
    assert "'shard_offload' is not one of" in refused.stderr
