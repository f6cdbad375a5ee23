"""A run starts in each of Lightning's ways, and what it leaves is in the process that started it, as with ddp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lightning.support import assert_alike
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


def results(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("RESULT ")) for line in printed.splitlines() if line.startswith("RESULT ")]


def run(script: Path, strategy: str, devices: int = 2, **environment: str) -> dict[str, Any]:
    folder = script.parent / strategy
    done = run_python(script, strategy, devices, 1, folder, folder=script.parent, timeout=300, **environment)
    (found,) = results(done.stdout)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_process_that_started_the_ranks_gets_all_that_ddp_gives_back(script, method):
    script.write_text("import lightning_shard\n" + script.read_text())  # which autoloading would do
    found = run(script, f"shard_{method}", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found["plain"] and found["trainer"][3] == 2
    assert_alike(found, run(script, f"ddp_{method}"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [1, 2])
def test_a_script_started_once_per_rank_gives_what_ddp_gives(script, devices):
    found = run(script, "shard", devices)
    assert found["trainer"][3] == devices
    assert_alike(found, run(script, "ddp", devices))


VARIABLES = {
    "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def together(*commands: tuple[list[str], dict[str, str]]) -> list[subprocess.CompletedProcess[str]]:
    """Commands that run at the same time, each with its variables."""
    running = [
        subprocess.Popen(
            words, env=os.environ | VARIABLES | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for words, own in commands
    ]
    try:
        done = [process.communicate(timeout=200) for process in running]
    finally:
        for process in running:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *printed)
        for process, printed in zip(running, done, strict=True)
    ]


def on_two_nodes(script: Path, strategy: str, per_node: int, backend: str) -> dict[str, Any]:
    """Started by torchrun once for each of two nodes, both on this machine, that meet in one of torchrun's ways."""
    port = 29800 + sum(map(ord, strategy)) % 97
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(per_node)]
    rendezvous = {
        "static": ["--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--master-port", str(port)],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"],
    }[backend]
    words = [str(script), strategy, str(per_node), "2", str(script.parent / strategy)]
    ranks = [["--node-rank", str(node)] if backend == "static" else [] for node in range(2)]
    nodes = together(*(([*launch, *rendezvous, *rank, *words], {}) for rank in ranks))
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(node.stdout + node.stderr for node in nodes)
    (found,) = results("".join(node.stdout for node in nodes))
    return found


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
    assert_alike(found, wanted)


def under_slurm(script: Path, strategy: str, nodes: int) -> list[subprocess.CompletedProcess[str]]:
    """Two tasks with the variables that srun sets: on one node, or on two."""
    per_node = 2 // nodes
    port = str(29900 + nodes + 3 * ("ddp" in strategy))
    words = [sys.executable, str(script), strategy, str(per_node), str(nodes), str(script.parent / strategy)]
    tasks = []
    for rank in range(2):
        job = {"NTASKS": 2, "NTASKS_PER_NODE": per_node, "NNODES": nodes, "NODELIST": "localhost", "JOB_ID": 17}
        own = {"PROCID": rank, "LOCALID": rank % per_node, "NODEID": rank // per_node, "JOB_NAME": "train"}
        variables = {f"SLURM_{name}": str(value) for name, value in (job | own).items()}
        tasks.append((words, variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}))
    return together(*tasks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("nodes", [1, 2])
def test_tasks_of_slurm_train_like_ddp(script, nodes):
    found, wanted = ("".join(task.stdout for task in under_slurm(script, s, nodes)) for s in ("shard", "ddp"))
    assert_alike(results(found), results(wanted))
