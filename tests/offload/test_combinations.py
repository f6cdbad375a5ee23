"""Offload beside whatever else can be chosen gives, bit by bit, what that gives without offload."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.comm.test_comm_hook import PowerSGD
from tests.offload.models import HALF, OFFLOADS, WIDTH, Model, Training, alike, chosen, inputs, loss_of, steps
from tests.support.marks import one_at_a_time, quick
from tests.support.ranks import ranks
from tests.tensor_parallel import harness as tensor_parallel
from torch_shard import Precision, Quantized

BF16 = torch.bfloat16
OPTIMIZERS = ["AdamW", "SGD"]

# -- settings -----------------------------------------------------------------------------------------------------------


class Uneven(Model):
    """Tied and frozen parameters, one of the root's own, and some to leave out."""

    def __init__(self):
        super().__init__()
        self.blocks[3][1].weight = self.blocks[0][1].weight
        self.blocks[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return super().forward(x) * self.scale


def in_bf16():
    return Model().to(BF16)


SMALL = {"block": 16, "min_size": 0}
BOTH = Quantized("int8", "int8", error_feedback=False, **SMALL)
WIDE = Precision(param_dtype=BF16, master_dtype=torch.float32, reduce_dtype=torch.float32)
FP16 = Precision(param_dtype=torch.float16, reduce_dtype=torch.float16)
KEPT = Precision(param_dtype=BF16, buffer_dtype=BF16, output_dtype=torch.float32, keep=[nn.LayerNorm])
SETTINGS = {
    "shard_optim": {"strategy": "shard_optim", "precision": HALF},
    "shard_grad_op": {"strategy": "shard_grad_op", "precision": HALF},
    "no_shard": {"strategy": "no_shard", "precision": HALF},
    "prefetch 0": {"prefetch": 0, "units": ["blocks.*"]},
    "prefetch 3": {"prefetch": 3, "units": ["blocks.*"]},
    "debug": {"debug": True},
    "one communicator": {"single_communicator": True},
    "int8 gathers": {"quantized": Quantized("int8", **SMALL)},
    "int8 gathers of bf16": {"quantized": Quantized("int8", **SMALL), "precision": HALF},
    "float8 gathers": {"quantized": Quantized("float8", **SMALL)},
    "int8 reductions": {"quantized": Quantized(gradients="int8", **SMALL)},
    "int8 both": {"quantized": BOTH},
    "rounded": {"make": in_bf16, "precision": Precision(stochastic_rounding=True)},
    "rounded, low gradients": {
        "make": in_bf16,
        "precision": Precision(stochastic_rounding=True, keep_low_precision_grads=True),
    },
    "fp32 masters": {"make": in_bf16, "precision": WIDE},
    "fp16": {"make": in_bf16, "precision": FP16},
    "norms kept": {"make": in_bf16, "precision": KEPT},
    "uneven": {"make": Uneven, "precision": HALF},
    "uneven, some left out": {"make": Uneven, "precision": HALF, "ignore": ("blocks.2.0.*",)},
}


@pytest.mark.parametrize(
    "settings", quick(SETTINGS, ["shard_optim", "int8 gathers", "rounded", "uneven, some left out"])
)
@one_at_a_time(offload=["kept", "cpu", "disk", "all on disk"], optimizer=OPTIMIZERS)
@ranks(3)
def test_settings(rank, tmp_path, offload, optimizer, settings):
    def train(offload):
        return steps(Training(rank, offload, optimizer, **SETTINGS[settings]), accumulate=2, clip=0.5)

    alike(train, chosen(offload, tmp_path))


class Sums:
    """Reduces, and keeps what it was given."""

    def __init__(self):
        self.kept = []

    def __call__(self, state, grad, output=None):
        self.kept.append(grad)
        if output is None:
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        else:
            dist.reduce_scatter_tensor(output, grad)
            output /= dist.get_world_size()


SHARDED, ALIKE = [(PowerSGD, "full_shard"), (PowerSGD, "shard_grad_op"), (Sums, "full_shard")], [(Sums, "no_shard")]


@one_at_a_time(hook=[*SHARDED, *ALIKE], sync=[True, False], offload=OFFLOADS, optimizer=OPTIMIZERS)
@ranks(2, exhaustive=(3,))
def test_a_communication_hook(rank, tmp_path, offload, optimizer, hook, sync):
    make, strategy = hook

    def train(offload):
        training = Training(rank, offload, optimizer, strategy=strategy)
        training.engine.register_comm_hook(None, make())
        return steps(training, accumulate=2, clip=0.5, sync=sync)

    alike(train, chosen(offload, tmp_path))


@one_at_a_time(in_backward=[True, False], offload=["cpu", "kept"], optimizer=OPTIMIZERS)
@ranks(2)
def test_stochastic_rounding_counts_the_steps_of_each_unit(rank, tmp_path, in_backward, offload, optimizer):
    def train(offload):
        torch.manual_seed(3)
        precision = Precision(stochastic_rounding=True)
        training = Training(rank, offload, optimizer, make=in_bf16, precision=precision)
        if in_backward:
            training.engine.step_in_backward(training.optimizer)
        for number in range(4):
            training.model.blocks[2].requires_grad_(number % 2 == 0)
            training.step(number)
            training.optimizer.step()  # without gradients
        return training.seen, *training.state()

    alike(train, chosen(offload, tmp_path))


# -- strategies ---------------------------------------------------------------------------------------------------------

COPIES = [
    {"strategy": "hybrid_shard_zero2", "shard_size": 2, "precision": HALF},
    {"strategy": "hybrid_shard", "shard_size": 2},
    {"strategy": "hybrid_shard", "shard_size": 1},
    {"strategy": "hybrid_shard", "shard_size": 4, "reshard_after_forward": 2},
    {"reshard_after_forward": 2, "precision": HALF},
    {"reshard_after_forward": 2, "quantized": BOTH},
    {"strategy": "hybrid_shard_zero2", "shard_size": 2, "quantized": BOTH},
]


@pytest.mark.exhaustive
@one_at_a_time(settings=COPIES, offload=OFFLOADS, optimizer=OPTIMIZERS, sync=[True, False])
@ranks(4)
def test_copies_and_units_among_few_ranks(rank, tmp_path, offload, optimizer, settings, sync):
    def train(offload):
        return steps(Training(rank, offload, optimizer, **settings), count=3, accumulate=2, clip=0.5, sync=sync)

    alike(train, chosen(offload, tmp_path))


@pytest.mark.exhaustive
@one_at_a_time(
    strategy=["full_shard", "shard_grad_op", "no_shard"],
    optimizer=OPTIMIZERS,
    precision=[None, torch.float32],
    offload=OFFLOADS,
)
@ranks(4)
def test_parameters_that_are_distributed_tensors(rank, tmp_path, offload, optimizer, strategy, precision):
    def train(offload):
        mesh = tensor_parallel.mesh_of(2, 2)
        model = tensor_parallel.parallel(mesh)
        engine = torch_shard.shard(model, mesh=mesh["dp"], strategy=strategy, offload=offload, precision=precision)
        # Sizes are odd: fused kernels compute the last elements another way.
        options = {"lr": 0.05, "momentum": 0.9} if optimizer == "SGD" else {"lr": 0.01, "weight_decay": 0.1}
        made = getattr(torch.optim, optimizer)(model.parameters(), **options, fused=False)
        seen = []
        for number in range(3):
            tensor_parallel.backward(model, mesh, number)
            seen.append(engine.clip_grad_norm_(0.5).item())
            made.step()
            made.zero_grad()
            if number % 2:
                seen.append(model.blocks[0].up.weight.detach().full_tensor())
                seen += [v.full_tensor() for v in made.state[model.embed.weight].values() if v.dim()]
        return seen, engine.state_dict(form="full"), engine.optim_state_dict(made)

    alike(train, chosen(offload, tmp_path))


@ranks(1, 2)
def test_gradients_of_complex_parameters_are_clipped_as_without(rank):
    def train(offload):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8, dtype=torch.complex128), nn.Linear(8, 2, dtype=torch.complex128))
        engine = torch_shard.shard(model, offload=offload)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        norms = []
        for number in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + number), dtype=torch.float64)
            model(x.to(torch.complex128)).abs().sum().backward()
            norms.append(engine.clip_grad_norm_(0.5))
            optimizer.step()
            optimizer.zero_grad()
        return norms, engine.state_dict(form="full")

    torch.testing.assert_close(train("cpu"), train(None), rtol=1e-12, atol=1e-12)


# -- compiled code, figures ---------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("offload", ["cpu", "kept"])
@ranks(2)
def test_figures_of_traffic_memory_and_norms(rank, tmp_path, offload):
    def train(offload):
        training = Training(rank, offload, units=["blocks.*"])
        for number in range(3):
            training.step(number, accumulate=2, clip=0.5)
        figures = training.engine.statistics()
        loss_of(training.model, inputs(rank, 9)).backward()
        return {
            "sent": (figures.bytes_sent, figures.bytes_sent_across, training.engine.bytes_sent),
            "peak": figures.peak_gathered,
            "memory": training.engine.memory_summary(training.optimizer),
            "norms": training.engine.grad_norms(),
        }

    alike(train, chosen(offload, tmp_path))
