"""Small models with adapters of PEFT, and one training of them to compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import peft
import torch
from torch import nn

from tests.accelerate.support.accelerators import accelerator, engine_of
from tests.support.hf_models import VOCAB, build
from torch_shard import ShardTensor

TARGETS = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj", "down_proj"], "t5": ["q", "v"]}


def lora(name: str = "llama", **options: Any) -> peft.LoraConfig:
    options = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS[name], **options}
    return peft.LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=name == "gpt2", **options)


def adapted(
    name: str = "llama", config: Any = None, dtype: torch.dtype = torch.float32, **more: Any
) -> tuple[Any, dict[str, torch.Tensor], Callable[[Any], torch.Tensor]]:
    """A model with one adapter (LoRA by default) and those in `more` by name; no adapter is zero."""
    model, inputs, loss = build(name)
    model = peft.get_peft_model(model.to(dtype), config or lora(name))
    for adapter, entry in more.items():
        model.add_adapter(adapter, entry)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "lora_B" in key:
                p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return model, inputs, loss


@dataclass
class Run:
    """What a training shows; values of trainable parameters are whole."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    trained: dict[str, torch.Tensor] = field(default_factory=dict)


def whole(model: nn.Module) -> Any:
    """Inside, parameters are whole, under our Accelerator as under the stock one. Collective."""
    sharded = any(isinstance(p, ShardTensor) for p in model.parameters())
    return engine_of(model).gathered() if sharded else contextlib.nullcontext()


def train(
    acc: Any, model: Any, inputs: dict[str, torch.Tensor], loss: Any, steps: int = 3, between: Any = None
) -> tuple[Any, Run]:
    """Prepare and train with clipped SGD, on other data on each rank. Collective.

    Args:
        between: called with the unwrapped model and the step before each step.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.3, momentum=0.9)
    model, optimizer = acc.prepare(model, optimizer)
    inputs = {key: (value + acc.process_index) % VOCAB for key, value in inputs.items()}
    run = Run()
    for step in range(steps):
        if between is not None:
            between(acc.unwrap_model(model), step)
        value = loss(model(**inputs))
        acc.backward(value)
        run.norms.append(float(acc.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(value.item())
    plain = acc.unwrap_model(model)
    with whole(plain):
        run.trained = {k: p.detach().clone() for k, p in plain.named_parameters() if p.requires_grad}
    return model, run


def compare(kinds: Any, make: Any, rtol: float = 1e-5, between: Any = None, **options: Any) -> None:
    """The trainings of ``make()`` under both kinds of Accelerator agree. Collective."""
    runs = []
    for kind in kinds:
        with accelerator(kind, **options) as acc:
            runs.append(train(acc, *make(), between=between)[1])
    assert_same(runs[1], runs[0], rtol)


def assert_same(found: Run, wanted: Run, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(found.losses, wanted.losses, rtol=rtol, atol=0)
    torch.testing.assert_close(found.norms, wanted.norms, rtol=rtol, atol=0)
    assert list(found.trained) == list(wanted.trained) and wanted.trained
    for name, value in wanted.trained.items():
        scale = value.abs().max().item()
        torch.testing.assert_close(found.trained[name], value, rtol=0, atol=10 * rtol * scale + 1e-8, msg=name)
