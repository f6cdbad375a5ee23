"""Programs with Fabric that name their strategy: under the runner they train sharded, with the numbers of DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lightning.runner.support import RUNNER, run, script
from tests.lightning.support import assert_alike
from tests.support.marks import exhaustive

# As TRAINER in support.py: trains with one strategy after the other. "cli" is for a program that `fabric run` starts.
FABRIC = """
import json, os, sys, warnings
import torch
from {namespace} import Fabric
from {namespace}.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed._composable.fsdp import fully_shard

warnings.filterwarnings("ignore")


def parallelize(model, mesh):
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def load(fabric, model, path):
    if isinstance(fabric.strategy, (FSDPStrategy, ModelParallelStrategy)):
        raise AssertionError("code for parameters that are this rank's shard")
    model.load_state_dict(torch.load(path))


def train(strategy, folder):
    fabric = Fabric() if strategy == "cli" else Fabric(accelerator="cpu", devices=2, strategy=strategy)
    if strategy != "cli":
        fabric.launch()
    start = os.path.join(folder, "start.pt")
    torch.manual_seed(3)
    if fabric.is_global_zero:
        os.makedirs(folder, exist_ok=True)
        torch.save(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).state_dict(), start)
    fabric.barrier()
    with fabric.init_module(empty_init=isinstance(strategy, (FSDPStrategy, ModelParallelStrategy))):
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
    load(fabric, model, start)
    losses = []
    data = torch.randn(24, 6, generator=torch.Generator().manual_seed(2))[fabric.global_rank :: fabric.world_size]
    for step in range(4):
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            loss = (model(data[:, :4]) - data[:, 4:]).square().mean()
            fabric.backward(loss)
        losses.append(fabric.all_reduce(loss.detach()).item())
        if step % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    fabric.save(os.path.join(folder, "end.pt"), {"model": model, "optimizer": optimizer, "step": step})
    if fabric.is_global_zero:
        found = {"class": type(fabric.strategy).__module__, "ranks": fabric.world_size, "losses": losses}
        print("RESULT", json.dumps({**found, "is": isinstance(fabric.strategy, DDPStrategy)}), flush=True)


if __name__ == "__main__":
    for number, given in enumerate(sys.argv[2:]):
        train(eval(given) if "(" in given else given, os.path.join(sys.argv[1], str(number)))
    torch.distributed.destroy_process_group()
"""
NAMES = ("ddp", "deepspeed_stage_1")
INSTANCES = (
    'FSDPStrategy(auto_wrap_policy={torch.nn.Linear}, state_dict_type="full")',
    "ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)",
)
OURS = {
    "lightning.fabric": "lightning_shard.run.for_lightning_dot_fabric",
    "lightning_fabric": "lightning_shard.run.for_lightning_fabric",
}


def assert_equal(found: dict[str, Any], wanted: dict[str, Any], namespace: str) -> None:
    assert found["class"] == OURS[namespace] and found["is"]
    assert found["ranks"] == wanted["ranks"] == 2
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("namespace", ["lightning.fabric", *exhaustive("lightning_fabric")])
def test_programs_train_with_the_numbers_and_checkpoints_of_ddp(tmp_path, namespace):
    path = script(tmp_path, FABRIC, namespace=namespace)
    (wanted,) = run(path, tmp_path / "ddp", "ddp", folder=tmp_path)
    assert wanted["class"] == f"{namespace}.strategies.ddp"
    all_found = run(*RUNNER, path, tmp_path / "ours", *NAMES, *INSTANCES, folder=tmp_path)
    assert len(all_found) == len(NAMES) + len(INSTANCES)
    for number, found in enumerate(all_found):
        assert_equal(found, wanted, namespace)
        files = (tmp_path / "ours" / str(number) / "end.pt", tmp_path / "ddp" / "0" / "end.pt")
        assert_alike(*(torch.load(file, weights_only=False) for file in files))


@pytest.mark.exhaustive
@pytest.mark.parametrize("namespace", list(OURS))
def test_fabric_run_starts_ranks_that_train_as_with_ddp(tmp_path, namespace):
    path = script(tmp_path, FABRIC, namespace=namespace)
    words = ("run", "--accelerator", "cpu", "--devices", 2, "--strategy", "ddp", "--main-port", 29751, path)
    (wanted,) = run(
        "-c", f"from {namespace}.cli import _main; _main()", *words, tmp_path / "ddp", "cli", folder=tmp_path
    )
    (found,) = run(*RUNNER, "--shard.prefetch=0", "fabric", *words, tmp_path / "ours", "cli", folder=tmp_path)
    assert_equal(found, wanted, namespace)
