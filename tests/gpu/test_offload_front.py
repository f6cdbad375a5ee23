"""Offload on a GPU: one process without a process group, and a GradScaler whose gradients are in host memory."""

from __future__ import annotations

import pytest
import torch

import torch_shard
from tests.gpu.models import GPT, tokens
from tests.support.run_python import run_python
from torch_shard import Precision, ShardTensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none here")


def train(offload: str | None, device: torch.device) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Steps with a scaler, of which the third overflows: losses, scales and norms, weights."""
    torch.manual_seed(0)
    model = GPT().float()
    mesh = device if offload else None
    if offload is None:
        model = model.to(device)
    settings = {"precision": Precision(param_dtype=torch.float16), "offload": offload, "unit_bytes": 2000}
    engine = torch_shard.shard(model, mesh=mesh, **settings)
    assert engine.device == device
    assert all(isinstance(p, ShardTensor) and (p.device.type == "cpu") == bool(offload) for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=2)
    losses, others = [], []
    for step in range(6):
        loss = model(tokens(0, step, device)).float().pow(2).mean()
        torch.cuda._sleep(50_000_000)  # the scale's copy to the host waits behind it
        scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        norm = float(engine.clip_grad_norm_(0.5))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        others += [scaler.get_scale(), norm if step != 2 else 0.0]
    state = {name: value.cpu() for name, value in engine.state_dict().items()}
    engine.close()
    return losses, others, state


def alone() -> None:
    device = torch.device("cuda", 0)
    plain, offloaded = train(None, device), train("cpu", device)
    torch.testing.assert_close(offloaded, plain, rtol=1e-3, atol=1e-4)


def test_one_process_scales_clips_and_steps_as_without_offload(tmp_path):
    code = "from tests.gpu.test_offload_front import alone; alone()"
    run_python("-c", code, folder=tmp_path)


def mixed() -> None:
    """One optimizer over a model in host memory and one on the GPU."""
    device = torch.device("cuda", 0)

    def train(offload: str | None) -> list[dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        models = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).to(device)]
        if offload is None:
            models[0].to(device)
        engines = [
            torch_shard.shard(models[0], mesh=device if offload else None, offload=offload),
            torch_shard.shard(models[1]),
        ]
        optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()], lr=0.01)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(device)
        for _ in range(3):
            models[1](models[0](x)).pow(2).mean().backward()
            torch.nn.utils.clip_grad_value_([p for model in models for p in model.parameters()], 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return [{name: value.cpu() for name, value in engine.state_dict().items()} for engine in engines]

    torch.testing.assert_close(train("cpu"), train(None), rtol=1e-5, atol=1e-6)


def test_one_optimizer_steps_a_model_in_host_memory_and_one_on_the_gpu(tmp_path):
    run_python("-c", "from tests.gpu.test_offload_front import mixed; mixed()", folder=tmp_path)
