"""Offload beside whatever else can be chosen gives, bit by bit, what that gives without offload."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.comm.test_comm_hook import PowerSGD
from tests.offload.models import HALF, OFFLOADS, Model, Training, alike, chosen, inputs, loss_of, steps
from tests.support.marks import one_at_a_time
from tests.support.ranks import ranks
from tests.tensor_parallel import harness as tensor_parallel
from torch_shard import Precision, Quantized

BF16 = torch.bfloat16
OPTIMIZERS = ["AdamW", "SGD"]

# -- numbers on their way -----------------------------------------------------------------------------------------------

SMALL = {"block": 16, "min_size": 0}
PARAMETERS, BOTH = Quantized("int8", **SMALL), Quantized("int8", "int8", error_feedback=False, **SMALL)
QUANTIZED = [PARAMETERS, Quantized(gradients="int8", **SMALL), Quantized("float8", **SMALL), BOTH]


@one_at_a_time(quantized=QUANTIZED, offload=["kept", *OFFLOADS], optimizer=OPTIMIZERS, precision=[None, HALF])
@ranks(2, exhaustive=(3,))
def test_quantized_gathers_and_reductions(rank, tmp_path, offload, optimizer, quantized, precision):
    def train(offload):
        settings = {"quantized": quantized, "precision": precision}
        return steps(Training(rank, offload, optimizer, **settings), accumulate=2, clip=0.5)

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


PRECISIONS = [
    Precision(stochastic_rounding=True),
    Precision(stochastic_rounding=True, keep_low_precision_grads=True),
    Precision(param_dtype=BF16, master_dtype=torch.float32, reduce_dtype=torch.float32),
    Precision(param_dtype=torch.float16, reduce_dtype=torch.float16),
    Precision(param_dtype=BF16, buffer_dtype=BF16, output_dtype=torch.float32, keep=[nn.LayerNorm]),
]


@one_at_a_time(precision=PRECISIONS, offload=OFFLOADS, optimizer=OPTIMIZERS)
@ranks(2, exhaustive=(1, 3))
def test_precisions_of_a_model_in_bf16(rank, tmp_path, offload, optimizer, precision):
    def train(offload):
        torch.manual_seed(3)
        training = Training(rank, offload, optimizer, make=lambda: Model().to(BF16), precision=precision)
        with mock.patch("tests.offload.models.inputs", lambda *at: inputs(*at).to(BF16)):
            return steps(training, accumulate=2, clip=0.5)

    alike(train, chosen(offload, tmp_path))


@one_at_a_time(in_backward=[True, False], offload=["cpu", "kept"], optimizer=OPTIMIZERS)
@ranks(2)
def test_stochastic_rounding_counts_the_steps_of_each_unit(rank, tmp_path, in_backward, offload, optimizer):
    def train(offload):
        torch.manual_seed(3)
        precision = Precision(stochastic_rounding=True)
        training = Training(rank, offload, optimizer, make=lambda: Model().to(BF16), precision=precision)
        if in_backward:
            training.engine.step_in_backward(training.optimizer)
        with mock.patch("tests.offload.models.inputs", lambda *at: inputs(*at).to(BF16)):
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


STRATEGIES = ["shard_optim", "shard_grad_op", "no_shard", "full_shard"]
SETTINGS = [{"precision": HALF}, {}, {"prefetch": 0}, {"prefetch": 3}, {"debug": True}, {"single_communicator": True}]


@one_at_a_time(strategy=STRATEGIES, settings=SETTINGS, offload=OFFLOADS, optimizer=OPTIMIZERS)
@ranks(2, exhaustive=(1, 3))
def test_strategies(rank, tmp_path, offload, optimizer, strategy, settings):
    def train(offload):
        training = Training(rank, offload, optimizer, strategy=strategy, units=["blocks.*"], **settings)
        return steps(training, accumulate=2, clip=0.5)

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


# -- compiled code, figures ---------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("of", ["blocks", "the whole model"])
@pytest.mark.parametrize("offload", OFFLOADS)
@ranks(2, timeout=120)
def test_compiled_code(rank, tmp_path, offload, of):
    def train(offload):
        torch._dynamo.reset()
        training = Training(rank, offload, precision=HALF)
        for part in training.model.blocks if of == "blocks" else [training.model]:
            part.compile(backend="aot_eager")
        return steps(training, clip=0.5)

    alike(train, chosen(offload, tmp_path))


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
