"""YAMLs as ``accelerate config`` writes them, and launches through the ``accelerate`` executable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from accelerate_shard.settings._private_launch import launch_environment

FSDP1 = {
    "fsdp_version": 1,
    "fsdp_reshard_after_forward": "FULL_SHARD",
    "fsdp_offload_params": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_forward_prefetch": False,
    "fsdp_use_orig_params": True,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_sync_module_states": True,
    "fsdp_activation_checkpointing": False,
}
"""What the questionnaire writes for FSDP 1 where the defaults are taken."""

FSDP2 = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_offload_params": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_activation_checkpointing": False,
}


def write_yaml(folder: Path, fsdp: dict[str, Any], **top: Any) -> Path:
    """A YAML with ``distributed_type: FSDP`` for two processes, as `accelerate config` writes it."""
    contents = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "FSDP",
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "fsdp_config": fsdp,
        "machine_rank": 0,
        "main_process_port": 0,
        "main_training_function": "main",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 2,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
        **top,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(contents), encoding="utf-8")
    return path


def exported(path: Path) -> dict[str, str]:
    """The ``FSDP_*`` variables that Accelerate's launcher exports for a YAML."""
    return {name: value for name, value in launch_environment(str(path)).items() if name.startswith("FSDP_")}


def accelerate_launch(
    *arguments: object, folder: Path, expected: int | None = 0, timeout: float = 170.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``accelerate launch ...`` in `folder`, and fail with all that was printed unless it exits with `expected`."""
    command = [str(Path(sys.executable).with_name("accelerate")), "launch", *map(str, arguments)]
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("FSDP_", "ACCELERATE_", "SHARD_"))
    }
    search = os.pathsep.join(p for p in sys.path if p)
    variables = {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        command, env=inherited | variables, cwd=folder, capture_output=True, text=True, timeout=timeout
    )
    if expected is not None:
        assert done.returncode == expected, done.stdout + done.stderr
    return done


SCRIPT = """
import json, os, sys

import torch
from accelerate import Accelerator
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def main():
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    x = torch.randn(16, 8)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :3].abs().argmax(1)), batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses, norms = [], []
    for x, y in data:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    if accelerator.is_main_process:
        plugin = getattr(accelerator, "shard_plugin", None)
        settings = {name: getattr(plugin, name, None) for name in ("strategy", "prefetch", "layer_classes", "state_dict_type")}
        settings["offload"] = repr(getattr(plugin, "offload", None))
        print("RESULT", json.dumps({
            "argv": sys.argv, "losses": losses, "norms": norms, "ranks": accelerator.num_processes, "settings": settings,
            "class": type(accelerator).__module__, "type": accelerator.distributed_type.value, "path": sys.path[0],
            "plugins": [getattr(accelerator.state, f"{name}_plugin", None) is not None for name in ("fsdp", "deepspeed")],
        }), flush=True)
    if "--fail" in sys.argv:
        raise ValueError("something in the script")
    if not os.environ.get("KEEP_GROUP"):
        accelerator.end_training()


if __name__ == "__main__":
    main()
"""
"""A plain Accelerate script, which prints what it has seen as one line of JSON."""
