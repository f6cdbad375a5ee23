"""The engines that are compared: each turns a plain model into a :class:`Runner` of its steps."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

__all__ = [
    "ENGINES",
    "FRONT_ENDS",
    "LABELS",
    "LOW_PRECISION",
    "Runner",
    "build",
    "decay_groups",
    "full_parameters",
    "wrap",
    "wrap_from_meta",
]

LABELS = {
    "alone": "one rank alone, no communication",
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "ours": "torch_shard",
    "offload": "torch_shard, offload",
    "report": "torch_shard, with the runners' --report",
    "autocast": "torch_shard under autocast",
    "autocast_alone": "torch_shard, autocast alone",
    "accelerate_ddp": "Accelerate with DDP",
    "accelerate": "Accelerate with torch_shard",
}
ENGINES = ("alone", "ddp", "fsdp1", "fsdp2", "ours", "offload")
REPORTED = "report"
"""The first model that steps is the one that is observed, so that this one comes before all others of torch_shard."""

_OBSERVED: list[Any] = []  # what keeps observing

LOW_PRECISION = (*ENGINES, "autocast", "autocast_alone")
"""In bf16 the first two run under autocast; torch_shard gathers in bf16 without autocast, under it, or leaves all to it."""

FRONT_ENDS = ("accelerate_ddp", "accelerate")
"""The same loop as a script for Hugging Face Accelerate has it; in bf16 with its ``mixed_precision="bf16"``."""


@dataclass
class Runner:
    """A model, its optimizer and its way of clipping, ready for steps."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[float], Any]
    autocast: torch.dtype | None = None

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """One training step on this rank's batch; returns the local loss."""
        with torch.autocast(tokens.device.type, self.autocast, enabled=self.autocast is not None):
            loss: Tensor = self.model(tokens, targets)
        loss.backward()
        self.clip(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def settle(self) -> None:
        """Wait for what a step has left to run in the background: offload's update of parameters."""
        for p in self.model.parameters():
            # Whoever asks for a slice waits for it. to_local() would note that the user may write to it, too.
            getattr(p, "_local", None)


@dataclass
class AccelerateRunner(Runner):
    """Steps as Accelerate's documentation writes them; `model` and `optimizer` are what ``prepare`` gave back."""

    accelerator: Any = None

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """One training step on this rank's batch; returns the local loss."""
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            loss: Tensor = self.model(tokens, targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()


def wrap(
    name: str,
    model: nn.Module,
    blocks: Iterable[nn.Module],
    device: torch.device,
    low: torch.dtype | None = None,
) -> tuple[nn.Module, Callable[[float], Any]]:
    """Put `model` under the engine `name`, as its documentation says; return it and its clipping.

    `blocks` are FSDP's units, beside the root's; torch_shard plans for itself. With `low` parameters are gathered, and gradients
    reduced, in that dtype, where the engine does not leave it to autocast.
    """
    blocks = list(blocks)
    if name in ("ours", REPORTED, "offload", "autocast", "autocast_alone"):
        import torch_shard

        precision = None
        if low is not None and name in ("ours", "offload"):
            precision = torch_shard.Precision(param_dtype=low)
        elif low is not None and name == "autocast":
            precision = torch_shard.Precision(low, cast_inputs=False, cast_params="autocast")
        engine = torch_shard.shard(model, precision=precision, offload="cpu" if name == "offload" else None)
        return model, engine.clip_grad_norm_
    if name == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp import MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({type(block) for block in blocks})
        mixed = None if low is None else MixedPrecision(low, low, low)
        fsdp = FSDP(model, use_orig_params=True, auto_wrap_policy=policy, device_id=device, mixed_precision=mixed)
        return fsdp, fsdp.clip_grad_norm_
    if name == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        mixed_policy = MixedPrecisionPolicy(low, low)
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=mixed_policy)
        fully_shard(model, mesh=mesh, mp_policy=mixed_policy)
    elif name == "ddp":
        devices = [device] if device.type == "cuda" else None
        model = nn.parallel.DistributedDataParallel(model, device_ids=devices)
    elif name != "alone":
        raise ValueError(f"engine {name!r}: expected one of {', '.join(ENGINES)}")
    # A DDP or FSDP2 model has ordinary parameters, or DTensors that torch's function knows.
    return model, lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit)


def wrap_from_meta(
    name: str, model: nn.Module, blocks: Iterable[nn.Module], fill: Callable[[nn.Module], None]
) -> nn.Module:
    """Put `model`, built on meta, under an engine on the CPU; `fill` initialises one module's own parameters."""
    blocks = list(blocks)
    if name == "ours":
        import torch_shard

        torch_shard.shard(model, init_fn=fill, sync_module_states=False)
        return model
    if name == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        def materialise(module: nn.Module) -> None:
            module.to_empty(device="cpu", recurse=False)
            fill(module)

        policy = ModuleWrapPolicy({type(block) for block in blocks})
        cpu = torch.device("cpu")
        return FSDP(model, use_orig_params=True, auto_wrap_policy=policy, device_id=cpu, param_init_fn=materialise)
    model, _ = wrap(name, model, blocks, torch.device("cpu"))
    model.to_empty(device="cpu")
    for module in model.modules():
        fill(module)
    return model


def decay_groups(parameters: Iterable[Tensor], dims: Iterable[int]) -> list[dict[str, Any]]:
    """Return an optimizer's usual two groups: matrices decay, the rest does not.

    `dims` are those of the plain model's parameters; FSDP1's are flat once they are sharded.
    """
    pairs = list(zip(parameters, dims, strict=True))
    return [
        {"params": [p for p, dim in pairs if dim >= 2], "weight_decay": 0.1},
        {"params": [p for p, dim in pairs if dim < 2], "weight_decay": 0.0},
    ]


def build(name: str, config: Any, device: torch.device, lr: float, low: torch.dtype | None = None) -> Runner:
    """Make the GPT with the same weights for every engine and rank, and put it under an engine; in mixed precision with `low`."""
    from gpt import GPT

    torch.manual_seed(0)
    plain = GPT(config).to(device)
    if name in FRONT_ENDS:
        return _with_accelerate(name, plain, device, lr, low)
    model, clip = wrap(name, plain, plain.blocks, device, low)
    casts_itself = name in ("fsdp1", "fsdp2", "ours", "offload")
    if name == REPORTED:
        _begin_report()
    return Runner(name, model, torch.optim.AdamW(model.parameters(), lr=lr), clip, None if casts_itself else low)


def _begin_report() -> None:
    """Observe steps as the runners do with ``--report``, until the process ends; the page is not written."""
    from torch_shard.frontend.reports import reporting

    observed = reporting(Path(tempfile.gettempdir(), "report.html"))
    observed.__enter__()
    _OBSERVED.append(observed)


def _with_accelerate(name: str, plain: nn.Module, device: torch.device, lr: float, low: torch.dtype | None) -> Runner:
    import accelerate

    import accelerate_shard

    # What a launcher sets, and Accelerate reads where the process group exists already.
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    local = rank if device.index is None else str(device.index)
    os.environ |= {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": world}
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    kind = accelerate_shard.Accelerator if name == "accelerate" else accelerate.Accelerator
    precision = {None: "no", torch.bfloat16: "bf16"}[low]
    accelerator = kind(cpu=device.type == "cpu", mixed_precision=precision)
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=lr))
    return AccelerateRunner(name, model, optimizer, lambda limit: None, accelerator=accelerator)


def full_parameters(runner: Runner) -> Iterable[Tensor]:
    """Yield the whole parameters in the order of the plain model's. Call on all ranks."""
    if runner.name == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        with FSDP.summon_full_params(runner.model, writeback=False):
            yield from (p.detach() for p in runner.model.parameters())
        return
    for p in runner.model.parameters():
        yield p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach()
