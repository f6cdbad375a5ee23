"""Training programs that run on a simulated device."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch
from torch import nn

import torch_shard

from . import steps
from .programs import Model, Scenario

BF16 = torch_shard.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ROUNDED = torch_shard.Precision(master_dtype=torch.bfloat16, stochastic_rounding=True)
INT8 = torch_shard.Quantized(parameters="int8", gradients="int8", min_size=1)

DISK = tempfile.gettempdir()  # the files in it have no names

PRECISIONS: dict[str, Any] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "bf16 summed in fp32": BF16,
    "fp16": torch.float16,
}
STRATEGIES = ("full_shard", "shard_grad_op", "shard_optim", "no_shard")
CHECKPOINTED: dict[str, bool | None] = {"": None, ", checkpointed": False, ", checkpointed reentrantly": True}
OFFLOADS: dict[str, Any] = {
    "all": "cpu",
    "optimizer": torch_shard.Offload(params=False),
    "pageable": torch_shard.Offload(pin_memory=False),
}

# Each strategy with each precision, accumulation and kind of checkpointing.
PLAIN = {
    f"{strategy}, {precision}{', accumulated' if accumulate > 1 else ''}{checkpointed}": Scenario(
        config={"strategy": strategy, "precision": PRECISIONS[precision]},
        model=functools.partial(Model, checkpointed=CHECKPOINTED[checkpointed]),
        accumulate=accumulate,
        clip=True,
    )
    for strategy in STRATEGIES
    for precision in PRECISIONS
    for accumulate in (1, 2)
    for checkpointed in CHECKPOINTED
}

SPECIAL = {
    "sgd": Scenario(optimizer=torch.optim.SGD),
    "fused": Scenario(optimizer=steps.fused),
    "muon": Scenario(optimizer=steps.matrices),
    "muon in bf16": Scenario(optimizer=steps.matrices, config={"precision": BF16}),
    "rounded": Scenario(config={"precision": ROUNDED}),
    "quantized": Scenario(config={"quantized": INT8}),
    "quantized, matrices alone": Scenario(
        model=steps.without_vectors, config={"quantized": INT8, "units": (nn.Linear,)}
    ),
    "quantized in bf16": Scenario(config={"quantized": INT8, "precision": BF16}),
    "adapters": Scenario(model=steps.adapters),
    "adapters in bf16": Scenario(model=steps.adapters, config={"precision": BF16}),
    "evaluation": Scenario(evaluate=True),
    "evaluation in bf16": Scenario(evaluate=True, config={"precision": BF16}),
    "buffers": Scenario(model=functools.partial(Model, norm=True)),
    "one communicator": Scenario(config={"single_communicator": True}),
    "no prefetch": Scenario(config={"prefetch": 0}),
    "more prefetch": Scenario(config={"prefetch": 3}),
    "registered memory": Scenario(config={"registered_memory": True}),
    "registered memory, bf16, adapters": Scenario(
        model=steps.adapters, config={"registered_memory": True, "precision": BF16}, accumulate=2
    ),
    "registered memory, replicated": Scenario(config={"registered_memory": True, "strategy": "no_shard"}),
    "registered memory, offload": Scenario(config={"registered_memory": True, "offload": "cpu"}, evaluate=True),
    "debug": Scenario(config={"debug": True}),
    "two streams": Scenario(step=steps.two_streams),
    "two streams in bf16": Scenario(step=steps.two_streams, config={"precision": BF16}),
    "two streams, replicated": Scenario(step=steps.two_streams, config={"strategy": "no_shard", "precision": BF16}),
    "two streams, shards kept": Scenario(step=steps.two_streams, config={"strategy": "shard_grad_op"}),
    "two streams, joined late": Scenario(step=steps.joined_late),
    "two streams, checkpointed reentrantly": Scenario(
        step=steps.two_streams, model=functools.partial(Model, checkpointed=True)
    ),
    "units on two streams": Scenario(model=steps.split),
    "units on two streams in bf16, accumulated": Scenario(model=steps.split, config={"precision": BF16}, accumulate=2),
    "two chains on two streams": Scenario(step=steps.two_chains, model=functools.partial(Model, blocks=6)),
    "two streams, joined late, replicated": Scenario(
        step=steps.joined_late, config={"strategy": "no_shard", "precision": BF16}
    ),
    "streams apart": Scenario(step=steps.streams_apart),
    "streams apart, unsharded between": Scenario(step=steps.streams_apart, config={"strategy": "shard_optim"}),
    "another stream": Scenario(step=steps.on_another_stream),
    "another stream in bf16": Scenario(step=steps.on_another_stream, config={"precision": BF16}),
    "another stream, replicated": Scenario(
        step=steps.on_another_stream, config={"strategy": "no_shard", "precision": BF16}, accumulate=2
    ),
    "another stream, quantized": Scenario(step=steps.on_another_stream, config={"quantized": INT8}),
    "another stream, offload": Scenario(step=steps.on_another_stream, config={"offload": "cpu"}),
    "failing backwards": Scenario(step=steps.failing),
    "failing backwards in bf16": Scenario(step=steps.failing, config={"precision": BF16}),
    "branches": Scenario(step=steps.branches, steps=7),
    "gradient penalty": Scenario(step=steps.penalty),
    "assigned gradients": Scenario(step=steps.assigned),
    "assigned gradients, offload": Scenario(step=steps.assigned, config={"offload": "cpu"}),
    "lone reader": Scenario(step=steps.lone_reader),
    "lone reader of quantized shards": Scenario(step=steps.lone_reader, config={"quantized": INT8}),
    "clipped by value": Scenario(step=steps.clipped_by_value),
    "state dicts": Scenario(step=steps.saved),
    "saved in the background": Scenario(step=steps.saved_in_background),
    "saved in the background, bf16": Scenario(step=steps.saved_in_background, config={"precision": BF16}),
    "a backend with streams of its own": Scenario(own_streams=True),
    "activations on the host": Scenario(model=steps.offloaded_activations),
    "activations on the host, another stream": Scenario(
        model=steps.offloaded_activations, step=steps.on_another_stream
    ),
    "activations on the host, failing backwards": Scenario(model=steps.offloaded_activations, step=steps.failing),
    "activations on the host, dropped": Scenario(model=steps.offloaded_activations, step=steps.dropped),
    "step in backward": Scenario(in_backward=True),
    "step in backward, bf16": Scenario(in_backward=True, config={"precision": BF16}),
    "step in backward, fused": Scenario(in_backward=True, optimizer=steps.fused, config={"precision": BF16}),
    "step in backward, replicated": Scenario(in_backward=True, config={"strategy": "no_shard", "precision": BF16}),
    "step in backward, checkpointed": Scenario(in_backward=True, model=functools.partial(Model, checkpointed=False)),
    "step in backward, offload": Scenario(in_backward=True, config={"offload": "cpu", "precision": BF16}),
    "hook": Scenario(step=steps.hooked),
    "hook, failing backwards": Scenario(step=steps.hooked_and_failing),
    "edited": Scenario(step=steps.edited),
    "stepped elsewhere": Scenario(step=steps.stepped_elsewhere),
    "weight in backward": Scenario(step=steps.weight_in_backward),
    "own collective": Scenario(step=steps.own_collective),
    "two engines": Scenario(model=steps.Pair, parts=("left", "right")),
    "two engines in bf16, accumulated": Scenario(
        model=steps.Pair, parts=("left", "right"), config={"precision": BF16}, accumulate=2
    ),
    "weights used elsewhere": Scenario(step=steps.on_outputs),
    "closed": Scenario(config={"precision": BF16}, close=True),
}

# Of four ranks, in two replicas.
HYBRID = {
    f"{strategy}, {precision}{', accumulated' if accumulate > 1 else ''}": Scenario(
        config={"strategy": strategy, "shard_size": 2, "precision": PRECISIONS[precision]}, accumulate=accumulate
    )
    for strategy in ("hybrid_shard", "hybrid_shard_zero2")
    for precision in ("fp32", "bf16", "bf16 summed in fp32")
    for accumulate in (1, 2)
} | {
    "secondary shards": Scenario(config={"reshard_after_forward": 2}),
    "hybrid_shard, registered memory": Scenario(
        config={"strategy": "hybrid_shard", "shard_size": 2, "registered_memory": True}
    ),
    "hybrid_shard, quantized": Scenario(config={"strategy": "hybrid_shard", "shard_size": 2, "quantized": INT8}),
    "hybrid_shard, offload": Scenario(config={"strategy": "hybrid_shard", "shard_size": 2, "offload": "cpu"}),
    "hybrid_shard, offload in bf16, checkpointed, accumulated": Scenario(
        config={"strategy": "hybrid_shard", "shard_size": 2, "offload": "cpu", "precision": BF16},
        model=functools.partial(Model, checkpointed=False),
        accumulate=2,
    ),
    "hybrid_shard, step in backward": Scenario(
        in_backward=True, config={"strategy": "hybrid_shard", "shard_size": 2, "precision": BF16}
    ),
    "tensor parallel": Scenario(parallelized=steps.tensor_parallel),
    "tensor parallel, bf16, accumulated": Scenario(
        parallelized=steps.tensor_parallel, config={"precision": BF16}, accumulate=2
    ),
    "tensor parallel, replicated": Scenario(
        parallelized=steps.tensor_parallel, config={"strategy": "no_shard"}, clip=True
    ),
    "tensor parallel, another stream": Scenario(parallelized=steps.tensor_parallel, step=steps.on_another_stream),
    "hybrid_shard, another stream": Scenario(
        step=steps.on_another_stream, config={"strategy": "hybrid_shard", "shard_size": 2, "precision": BF16}
    ),
}

# Of one process without a process group.
ALONE = {
    "fp32": Scenario(clip=True),
    "bf16": Scenario(config={"precision": BF16}, clip=True, accumulate=2),
    "two streams in bf16": Scenario(step=steps.two_streams, config={"precision": BF16}),
    "another stream in bf16": Scenario(step=steps.on_another_stream, config={"precision": BF16}),
    "two streams, joined late": Scenario(step=steps.joined_late, config={"precision": BF16}),
    "two streams, joined late, shards kept": Scenario(
        step=steps.joined_late, config={"precision": BF16, "strategy": "shard_grad_op"}
    ),
    "two engines": Scenario(model=steps.Pair, parts=("left", "right")),
    "offload": Scenario(config={"offload": "cpu"}, clip=True),
    "offload in bf16, two streams": Scenario(step=steps.two_streams, config={"offload": "cpu", "precision": BF16}),
    "units on two streams": Scenario(model=steps.split, config={"precision": BF16}),
    "offload, units on two streams": Scenario(model=steps.split, config={"offload": "cpu"}),
    "offload on two streams, joined late": Scenario(step=steps.joined_late, config={"offload": "cpu"}),
    "offload in bf16, accumulated": Scenario(config={"offload": "cpu", "precision": BF16}, accumulate=2),
    "offload, another stream": Scenario(step=steps.on_another_stream, config={"offload": "cpu"}),
}

OFFLOADED = (
    {
        f"offload of {what}, {precision}{', accumulated' if accumulate > 1 else ''}": Scenario(
            config={"offload": OFFLOADS[what], "precision": PRECISIONS[precision]}, accumulate=accumulate, clip=True
        )
        for what in OFFLOADS
        for precision in ("fp32", "bf16 summed in fp32")
        for accumulate in (1, 2)
    }
    | {
        f"offload of all, {strategy}, {precision}{checkpointed}": Scenario(
            config={"offload": "cpu", "strategy": strategy, "precision": PRECISIONS[precision]},
            model=functools.partial(Model, checkpointed=CHECKPOINTED[checkpointed]),
        )
        for strategy in STRATEGIES[1:]
        for precision in ("fp32", "bf16 summed in fp32")
        for checkpointed in CHECKPOINTED
    }
    | {
        "offload, closed": Scenario(config={"offload": "cpu"}, close=True),
        "offload, quantized": Scenario(config={"offload": "cpu", "quantized": INT8}),
        "offload, two engines": Scenario(model=steps.Pair, parts=("left", "right"), config={"offload": "cpu"}),
        "offload, clipped by value": Scenario(step=steps.clipped_by_value, config={"offload": "cpu"}),
        "offload, edited": Scenario(step=steps.edited, config={"offload": "cpu"}),
        "offload of many units": Scenario(
            model=functools.partial(Model, blocks=8), config={"offload": "cpu", "precision": BF16}, accumulate=2
        ),
        "offload, scaled loss": Scenario(step=steps.scaled, config={"offload": "cpu"}),
        "state on disk": Scenario(config={"offload": torch_shard.Offload(nvme=DISK)}, clip=True),
        "state and parameters on disk": Scenario(
            config={"offload": torch_shard.Offload(nvme=DISK, nvme_params=True), "precision": BF16},
            clip=True,
            accumulate=2,
        ),
        "offload, state dicts": Scenario(config={"offload": "cpu"}, step=steps.saved),
    }
)

SCENARIOS: dict[str, Scenario] = PLAIN | SPECIAL | OFFLOADED

QUICK = (
    "full_shard, fp32",
    "full_shard, bf16 summed in fp32, accumulated, checkpointed",
    "shard_grad_op, bf16",
    "no_shard, bf16 summed in fp32",
    "two streams in bf16",
    "another stream, replicated",
    "muon",
    "quantized",
    "failing backwards",
    "hook, failing backwards",
    "offload of all, bf16 summed in fp32",
    "offload, closed",
)
