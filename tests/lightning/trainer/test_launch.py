"""A run starts in each of Lightning's ways, and what it leaves is in the process that started it, as with ddp."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_python import run_python

# Prints what a run leaves in the process that called fit: of ddp and of shard this must be the same.
SCRIPT = """
import json, logging, os, sys, warnings
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
        self.register_buffer("steps", torch.zeros(()))
        self.double()

    def loss(self, batch):
        return (self.net(batch[:, :4]) - batch[:, 4:]).square().mean()

    def training_step(self, batch, index):
        self.steps += 1
        loss = self.loss(batch)
        self.log("train", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch, index):
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, index):
        return self.net(batch[:, :4])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(strategy, devices, nodes, folder):
    data = torch.randn(32, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    load = lambda size=8 // (devices * nodes): torch.utils.data.DataLoader(data, batch_size=size)
    off = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    keep = ModelCheckpoint(dirpath=folder, monitor="val", save_last=True)
    t = pl.Trainer(accelerator="cpu", devices=devices, num_nodes=nodes, strategy=strategy, max_epochs=2,
                   num_sanity_val_steps=0, default_root_dir=folder, callbacks=[keep], **off)
    net = Net()
    found = {"before": t.validate(net, load(), verbose=False)[0]["val"]}
    t.fit(net, load(), load())
    found["state"] = {name: value.tolist() for name, value in net.state_dict().items()}
    found["plain"] = all(type(p) is torch.nn.Parameter for p in net.parameters())
    found["metrics"] = {name: float(value) for name, value in t.callback_metrics.items()}
    found["best"] = os.path.relpath(keep.best_model_path, folder)
    found["trainer"] = [t.current_epoch, t.global_step, str(t.state.status), t.world_size]
    found["test"] = t.test(net, load(), verbose=False, ckpt_path="best")[0]["test"]
    found["last"] = t.validate(net, load(), verbose=False, ckpt_path="last")[0]["val"]
    predicted = t.predict(net, load(), return_predictions=devices * nodes == 1 or strategy.endswith(("ddp", "shard")))
    found["predicted"] = None if predicted is None else torch.cat(predicted).tolist()
    found["node"] = [t.node_rank, t.local_rank]
    if t.is_global_zero:
        print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def result(printed: str) -> dict[str, Any]:
    (line,) = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def run(script: Path, strategy: str, devices: int = 2, **environment: str) -> dict[str, Any]:
    folder = script.parent / strategy
    return result(
        run_python(script, strategy, devices, 1, folder, folder=script.parent, timeout=300, **environment).stdout
    )


def assert_same(found: Any, wanted: Any, path: str = "") -> None:
    """Equal but for rounding in double precision."""
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), path
        for key in wanted:
            assert_same(found[key], wanted[key], f"{path}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), path
        for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert_same(a, b, f"{path}[{index}]")
    elif isinstance(wanted, float):
        assert math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-12), f"{path}: {found} is not {wanted}"
    else:
        assert found == wanted, f"{path}: {found!r} is not {wanted!r}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_process_that_started_the_ranks_gets_all_that_ddp_gives_back(script, method):
    found = run(script, f"shard_{method}")
    assert found["plain"] and found["trainer"][3] == 2
    assert_same(found, run(script, f"ddp_{method}"))


@pytest.mark.exhaustive
def test_a_script_started_once_per_rank_gives_what_ddp_gives(script):
    assert_same(run(script, "shard"), run(script, "ddp"))


@pytest.mark.exhaustive
def test_one_device_is_a_run_like_any_other(script):
    found = run(script, "shard", devices=1)
    assert found["trainer"][3] == 1
    assert_same(found, run(script, "ddp", devices=1))


def on_two_nodes(script: Path, strategy: str, per_node: int, backend: str) -> dict[str, Any]:
    """Started by torchrun once for each of two nodes, both on this machine, that meet in one of torchrun's ways."""
    folder = script.parent / strategy
    port = 29800 + sum(map(ord, strategy)) % 97
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(per_node)]
    rendezvous = {
        "static": ["--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--master-port", str(port)],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"],
    }[backend]
    words = [str(script), strategy, str(per_node), "2", str(folder)]
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    nodes = [
        subprocess.Popen(
            [*launch, *rendezvous, *(["--node-rank", str(node)] if backend == "static" else []), *words],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    printed = []
    try:
        for node in nodes:
            printed.append(node.communicate(timeout=200)[0])
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(printed)
    return result("".join(printed))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "per_node", "backend"), [("shard", 1, "static"), ("shard", 1, "c10d"), ("shard_hybrid", 2, "c10d")]
)
def test_torchrun_on_two_nodes_trains_like_ddp(script, strategy, per_node, backend):
    found = on_two_nodes(script, strategy, per_node, backend)
    assert found["trainer"][3] == 2 * per_node
    wanted = on_two_nodes(script, "ddp", per_node, backend)
    for predicted in (found, wanted):
        predicted.pop("predicted")
    assert_same(found, wanted)


def under_slurm(script: Path, strategy: str, nodes: int, **overrides: str) -> list[subprocess.CompletedProcess[str]]:
    """Two tasks with the variables that srun sets: on one node, or on two."""
    per_node = 2 // nodes
    running = []
    for rank in range(2):
        values = {
            "NTASKS": 2,
            "NTASKS_PER_NODE": per_node,
            "NNODES": nodes,
            "PROCID": rank,
            "LOCALID": rank % per_node,
            "NODEID": rank // per_node,
            "JOB_ID": 17,
            "JOB_NAME": "train",
            "NODELIST": "localhost",
        }
        variables = {f"SLURM_{name}": str(value) for name, value in values.items()} | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(29900 + nodes + 3 * ("ddp" in strategy)),
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        words = [sys.executable, str(script), strategy, str(per_node), str(nodes), str(script.parent / strategy)]
        process = subprocess.Popen(
            words, env=os.environ | variables | overrides, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        running.append(process)
    done = []
    try:
        for process in running:
            out, error = process.communicate(timeout=200)
            done.append(subprocess.CompletedProcess(process.args, process.returncode, out, error))
    finally:
        for process in running:
            process.kill()
    return done


@pytest.mark.exhaustive
@pytest.mark.parametrize("nodes", [1, 2])
def test_tasks_of_slurm_train_like_ddp(script, nodes):
    found, wanted = ("".join(task.stdout for task in under_slurm(script, s, nodes)) for s in ("shard", "ddp"))
    assert_same(result(found), result(wanted))


@pytest.mark.exhaustive
def test_another_number_of_nodes_than_slurm_has_given_is_an_error_of_all_tasks_at_once(script):
    # At once: a rank that waited for the others would do so for 30 minutes, and under_slurm() does not wait so long for it.
    # Lightning checks the first two variables by itself, where they are set.
    for overrides in ({"SLURM_NNODES": "2"}, {"SLURM_NTASKS": "4"}):
        for task in under_slurm(script, "shard", 1, **overrides):
            assert task.returncode != 0
            assert "num_nodes=1" in task.stderr, task.stderr
