"""``python -m torch_shard`` runs scripts that name torch's classes, as they are."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.marks import exhaustive
from tests.support.run_python import run_python, variables
from torch_shard.errors import ConfigError
from torch_shard.frontend.launch import read_arguments
from torch_shard.launch.settings import RUNNER_SETTINGS

DDP = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(4):
    loss = model(torch.randn(5, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        with torch.no_grad():  # rank 0 alone looks at its model
            print("norm", round(float(sum(p.norm() for p in model.parameters())), 5), flush=True)
if rank == 0:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, sys.argv[1])
    print("KIND", type(next(model.parameters())).__name__, type(model).__module__, sys.argv, __name__, flush=True)
dist.destroy_process_group()
"""

ZERO = DDP.replace(
    "optimizer = torch.optim.Adam(model.parameters(), lr=0.01)",
    """
from torch.distributed.optim import ZeroRedundancyOptimizer as Zero
body, head = model.module[0], model.module[2]
optimizer = Zero(body.parameters(), optimizer_class=torch.optim.Adam, parameters_as_bucket_view=False, lr=0.01)
optimizer.add_param_group({"params": head.parameters(), "lr": 0.02})
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
assert isinstance(optimizer, Zero) and isinstance(optimizer, torch.optim.Optimizer)
""",
).replace(
    "if rank == 0:\n    torch.save",
    """
    scheduler.step()
optimizer.consolidate_state_dict(to=0)
if rank == 0:
    torch.save""",
)  # fmt: skip

FSDP = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

dist.init_process_group("gloo")
model = FullyShardedDataParallel(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True)
model(torch.randn(2, 4)).sum().backward()
other = fully_shard(nn.Linear(4, 4))
other(torch.randn(2, 4)).sum().backward()
if dist.get_rank() == 0:
    import torch_shard
    engines = [torch_shard.engine_of(getattr(each, "module", each)) for each in (model, other)]
    print("KIND", type(model).__module__, [engine.config.strategy for engine in engines], flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def launched(folder: Path, text: str, *before: str, arguments: tuple[str, ...] = (), **environment: str) -> str:
    (folder / "train.py").write_text(text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, *before, "train.py", *arguments],
        env=variables(**environment), cwd=folder, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_script_for_ddp_gives_the_same_numbers_and_the_same_file(tmp_path):
    plain = launched(tmp_path, DDP, arguments=("ddp.pt",))
    runner = ("-m", "torch_shard", "--shard.strategy=full_shard", "--report", "run.html")
    ours = launched(tmp_path, DDP, *runner, arguments=("shard.pt",))
    norms = [line for line in plain.splitlines() if line.startswith("norm")]
    assert len(norms) == 4 and [line for line in ours.splitlines() if line.startswith("norm")] == norms
    assert "KIND Parameter torch.nn.parallel.distributed ['train.py', 'ddp.pt'] __main__" in plain
    assert "KIND ShardTensor torch_shard.launch.distributed_data_parallel ['train.py', 'shard.pt'] __main__" in ours
    expected, found = (torch.load(tmp_path / f"{name}.pt") for name in ("ddp", "shard"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    page = (tmp_path / "run.html").read_text()
    assert "<h1>Sequential, rank 0 of 2</h1>" in page
    assert re.findall(r"<td>(\d+)</td>(?:<td>[\d.,]+</td>){7}", page) == [
        "2",
        "3",
        "4",
    ]  # not the first step, which sets up


@pytest.mark.exhaustive
def test_a_script_with_zero_redundancy_optimizer_gives_the_same_numbers_and_the_same_file(tmp_path):
    plain = launched(tmp_path, ZERO, arguments=("ddp.pt",))
    ours = launched(tmp_path, ZERO, "-m", "torch_shard", arguments=("shard.pt",))
    norms = [line for line in plain.splitlines() if line.startswith("norm")]
    assert len(norms) == 4 and [line for line in ours.splitlines() if line.startswith("norm")] == norms
    expected, found = (torch.load(tmp_path / f"{name}.pt") for name in ("ddp", "shard"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_a_report_of_many_steps_has_means_and_is_written_after_an_error(tmp_path):
    text = DDP.replace("range(4)", "range(450)").replace(
        "    loss.backward()", "    assert rank or step < 430\n    loss.backward()"
    )
    (tmp_path / "train.py").write_text(text.replace("if rank == 0:\n        with", "if rank > 1:\n        with"))
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "torch_shard")
    run_python(*launch, "--report", "run.html", "train.py", "x.pt", folder=tmp_path, expected=1)
    page = (tmp_path / "run.html").read_text()
    steps = [int(step) for step in re.findall(r"<td>(\d+)</td>(?:<td>[\d.,]+</td>){7}", page)]
    assert steps[-1] == 428 and {b - a for a, b in itertools.pairwise(steps)} == {4}


@pytest.mark.exhaustive
def test_a_report_that_cannot_be_written_ends_the_launch(tmp_path):
    (tmp_path / "train.py").write_text("print('begun')")
    done = run_python("-m", "torch_shard", "--report", "none/run.html", "train.py", folder=tmp_path, expected=2)
    assert "--report" in done.stderr and "begun" not in done.stdout


@pytest.mark.exhaustive
def test_fsdp_is_replaced_where_the_launch_says_so(tmp_path):
    found = launched(tmp_path, FSDP, "-m", "torch_shard", "--shard.fsdp", SHARD_STRATEGY="shard_optim")
    assert "KIND torch_shard.fsdp.fully_sharded_data_parallel ['shard_optim', 'shard_optim']" in found


def test_settings_stand_before_the_script():
    words = ["--shard.strategy=no_shard", "--shard.timeout", "none", "--shard.debug", "a.py", "--shard.strategy=x"]
    variables: dict[str, str] = {}
    found, rest = read_arguments(words, RUNNER_SETTINGS, variables)
    assert {field: value for field, (_, value) in found.items()} == {
        "strategy": "no_shard",
        "timeout": None,
        "debug": True,
    }
    assert rest == ["a.py", "--shard.strategy=x"]
    assert variables == {"SHARD_STRATEGY": "no_shard", "SHARD_TIMEOUT": "none", "SHARD_DEBUG": "true"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shard.stratgy=no_shard"], "Did you mean --shard.strategy"),
        (["--shard.strategy=zero"], "--shard.strategy must be one of full_shard"),
        (["--shard.strategy"], "nothing was given"),
        (["--shard.prefetch=many"], "--shard.prefetch must be a number of units, not 'many'"),
    ],
)
def test_wrong_settings_name_the_argument(words, said):
    with pytest.raises(ConfigError, match=said):
        read_arguments(words, RUNNER_SETTINGS, {})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shard.prefetch=-1", "train.py"], "torch_shard: prefetch must be"),
        *exhaustive(
            (["--shard.strategy=zero", "train.py"], "torch_shard: --shard.strategy must be one of"),
            (["gone.py"], "torch_shard: there is no script 'gone.py'."),
        ),
    ],
)
def test_mistakes_end_with_a_line_and_exit_code_2(tmp_path, words, said):
    (tmp_path / "train.py").write_text("print('RUN')")
    done = run_python("-m", "torch_shard", *words, folder=tmp_path, expected=2)
    assert said in done.stderr and "Traceback" not in done.stderr and "RUN" not in done.stdout


@pytest.mark.exhaustive
def test_errors_of_the_script_are_shown_without_the_runner(tmp_path):
    (tmp_path / "train.py").write_text("def f():\n    raise ValueError('mine')\n\nf()\n")
    done = run_python("-m", "torch_shard", "train.py", folder=tmp_path, expected=1)
    frames = [line for line in done.stderr.splitlines() if line.strip().startswith("File ")]
    assert len(frames) == 2 and all("train.py" in line for line in frames) and "ValueError: mine" in done.stderr


@pytest.mark.exhaustive
def test_the_commands_for_checkpoints_stay(tmp_path):
    assert "inspect" in run_python("-m", "torch_shard", "--help", folder=tmp_path).stdout
    assert run_python("-m", "torch_shard", "inspect", "gone", folder=tmp_path, expected=2).stderr.startswith(
        "torch-shard:"
    )
    assert os.path.exists(tmp_path)
