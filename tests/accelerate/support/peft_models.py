"""Small models with adapters of PEFT, and one training of them to compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from packaging.version import Version

from tests.accelerate.support.accelerators import BOTH, accelerator
from tests.accelerate.support.training import Result, assert_same, full_parameters
from tests.support.hf_models import VOCAB, build

# transformers may ask for a version of peft that is not out yet.
transformers_takes_peft = pytest.mark.skipif(
    Version(peft.__version__) < Version(transformers.integrations.peft.MIN_PEFT_VERSION),
    reason="transformers refuses this version of peft",
)
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


def train(
    acc: Any, model: Any, inputs: dict[str, torch.Tensor], loss: Any, steps: int = 3, between: Any = None
) -> tuple[Any, Result]:
    """Prepare and train with clipped SGD, on other data on each rank; the result has the trainable parameters. Collective.

    Args:
        between: called with the unwrapped model and the step before each step.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = acc.prepare(model, torch.optim.SGD(trainable, lr=0.3, momentum=0.9))
    inputs = {key: (value + acc.process_index) % VOCAB for key, value in inputs.items()}
    run, plain = Result(), acc.unwrap_model(model)
    for step in range(steps):
        if between is not None:
            between(plain, step)
        value = loss(model(**inputs))
        acc.backward(value)
        run.norms.append(float(acc.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(value.item())
    parameters = full_parameters(plain)
    run.parameters = {name: parameters[name] for name, p in plain.named_parameters() if p.requires_grad}
    return model, run


def compare(make: Callable[[], Any], between: Any = None) -> None:
    """The trainings of ``make()`` under both kinds of Accelerator agree. Collective."""
    runs = []
    for kind in BOTH:
        with accelerator(kind) as acc:
            runs.append(train(acc, *make(), between=between)[1])
    assert_same(runs[1], runs[0])
