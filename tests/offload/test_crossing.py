"""Gradients cross to host memory in the dtype in which they were reduced, and are widened, added and measured there: bit by bit
as without it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_shard
from tests.offload.beside_gpu import beside_gpu
from tests.offload.models import WIDTH, Model, inputs, loss_of, same
from tests.support.inside import runtime_of
from tests.support.marks import exhaustive, one_at_a_time, quick
from tests.support.ranks import ranks, run
from torch_shard import Precision
from torch_shard.config.offload import IN_FLIGHT, STAGED

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = {
    "bf16-mixed": Precision(BF16),
    "16-mixed": Precision(FP16),
    "bf16-true": None,
    "fp32": None,
    "reduced in fp32": Precision(BF16, reduce_dtype=FP32),
    "reduced in bf16": Precision(reduce_dtype=BF16),  # computed with in fp32
    "norms in fp32": Precision(BF16, keep=(nn.LayerNorm,)),
    "gradients in bf16": Precision(BF16, keep_low_precision_grads=True),
}


def train(rank, offload, kind, accumulate=1, clip=None, sync=True, strategy="full_shard", steps=5, gpu=False):
    """All that a training shows."""
    model = Model().to(BF16) if kind == "bf16-true" else Model()
    config = torch_shard.ShardConfig(offload=offload, precision=KINDS[kind], strategy=strategy)
    engine = torch_shard.shard(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=kind == "16-mixed")
    seen = []
    flats = [flat for unit in runtime_of(engine).units for flat in unit.flats]
    device = beside_gpu(runtime_of(engine).host, [f.gradients for f in flats]) if gpu else contextlib.nullcontext()
    with device:
        for number in range(steps):
            for micro in range(accumulate):
                last = micro == accumulate - 1
                with engine.no_sync() if not sync and not last else contextlib.nullcontext():
                    x = inputs(rank, 10 * number + micro).to(next(model.parameters()).dtype)
                    loss = loss_of(model, x) / accumulate
                    scaler.scale(loss).backward()
                seen.append(loss.item())
            scaler.unscale_(optimizer)
            if clip is not None:
                seen.append(engine.clip_grad_norm_(clip).item())
            scaler.step(optimizer)
            scaler.update()
            seen.append([p.grad.to_local().clone() for p in model.parameters()] if number == 1 else None)
            optimizer.zero_grad()
        return {"seen": seen, "model": engine.state_dict(form="full"), "state": engine.optim_state_dict(optimizer)}


def trains_alike(rank, kind, gpu=False, **how):
    same(train(rank, None, kind, **how), train(rank, "cpu", kind, gpu=gpu, **how))


ALONE = [{"accumulate": 4}, {"accumulate": 3, "sync": False}, {"accumulate": 4, "gpu": True}]
ALSO_ALONE = [{"accumulate": 1}, {"accumulate": 4, "clip": None}, {"accumulate": 3, "sync": False, "gpu": True}]


@pytest.mark.parametrize("how", [*ALONE, *exhaustive(*ALSO_ALONE)], ids=str)
@pytest.mark.parametrize("kind", quick(KINDS, ["bf16-mixed", "16-mixed"]))
@ranks(1, exhaustive=(2,))  # three have slices that are no whole registers: see Model
def test_every_precision_trains_as_without(rank, kind, how):
    trains_alike(rank, kind, **{"clip": 0.5, **how})


@one_at_a_time(
    kind=["16-mixed", "bf16-mixed", "reduced in bf16", "norms in fp32"],
    how=[{}, {"accumulate": 4}, {"accumulate": 3, "sync": False}, {"accumulate": 4, "gpu": True}, {"clip": None}],
)
@ranks(3, exhaustive=(2,))
def test_replicas_whose_sums_are_narrow_train_as_without(rank, kind, how):
    """With three ranks fp16 is divided before the sum and behind it."""
    trains_alike(rank, kind, **{"clip": 0.5, "strategy": "no_shard", **how})


# -- what crosses -----------------------------------------------------------------------------------------------------


def crossed(rank, world_size, kind, strategy):
    """Bytes an element of this rank's slices that cross in a step."""
    model = Model().to(BF16) if kind == "bf16-true" else Model()
    config = torch_shard.ShardConfig(offload="cpu", precision=KINDS[kind], strategy=strategy)
    engine = torch_shard.shard(model, config)
    loss_of(model, inputs(rank, 0).to(next(model.parameters()).dtype)).backward()
    flats = [flat for unit in runtime_of(engine).units for flat in unit.flats]
    return runtime_of(engine).host.arrived / sum(flat.layout.shard_numel for flat in flats)


LOW = ("16-mixed", "bf16-true", "gradients in bf16")


@pytest.mark.parametrize(
    ("number", "strategy", "kind", "nbytes"),
    [
        (1, "full_shard", "bf16-mixed", 2),
        (1, "full_shard", "reduced in bf16", 4),  # nothing is reduced: the dtype of computation
        *exhaustive(*((1, "full_shard", kind, 2) for kind in ("reduced in fp32", *LOW))),
        (1, "full_shard", "norms in fp32", pytest.approx(2.05, abs=0.05)),
        (2, "no_shard", "bf16-mixed", 2),
        (2, "no_shard", "reduced in fp32", 4),
        *exhaustive(*((2, "no_shard", kind, 2) for kind in ("reduced in bf16", *LOW))),
        (2, "full_shard", "bf16-mixed", 4),  # over Gloo slices are summed in the dtype of gradients
    ],
)
def test_what_crosses_has_the_dtype_of_the_reduction(number, strategy, kind, nbytes):
    assert run(number, crossed, kind, strategy) == [nbytes] * number


class Twice(nn.Module):
    """Backward comes to the same parameters twice, and then to others of their unit."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


@ranks(1)
def test_gradients_that_come_twice_in_a_backward_are_added_as_without(rank):
    """In bf16 the sum would be rounded."""
    found = []
    for offload in (None, "cpu"):
        model = Twice()
        torch_shard.shard(model, precision=Precision(BF16), offload=offload)
        model(inputs(rank, 0).requires_grad_()).square().sum().backward()
        found.append({name: p.grad.to_local().clone() for name, p in model.named_parameters()})
    same(*found)
    assert not torch.equal(found[0]["layer.weight"], found[0]["layer.weight"].bfloat16())


# -- device memory ----------------------------------------------------------------------------------------------------


def prepared(units, **settings):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(units)))
    config = torch_shard.ShardConfig(
        offload="cpu", precision=Precision(BF16), units=[f"{n}" for n in range(units)], **settings
    )
    engine = torch_shard.shard(model, config)
    host = runtime_of(engine).host
    return model, engine, host, [flat.gradients for unit in runtime_of(engine).units for flat in unit.flats]


@ranks(1)
def test_no_more_than_two_units_of_gradients_are_on_the_device_and_backward_waits_for_no_copy(rank):
    """The one that is being made, and the one before, on its way; no copy ends before backward does."""
    model, _, host, gradients = prepared(STAGED)
    most = []
    with beside_gpu(host, gradients, holds=True) as device:

        def look(*_):
            there = [values() is not None for _, values, _ in device.left]
            most.append(sum(there) + sum(g.flat is not None for g in gradients))
            for (event, *_), held in zip(device.left, there, strict=True):
                assert held or device.waits_for(event)

        for layer in model:
            layer.weight.register_hook(lambda grad: look())
        model(inputs(rank, 0)).sum().backward()
        look()
        assert len(device.left) == STAGED
        assert max(most) == IN_FLIGHT + 1
    assert all(p.grad.to_local().isfinite().all() for p in model.parameters())


@ranks(1)
def test_norms_wait_for_no_copy(rank):
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(STAGED)))
    model, engine, host, gradients = prepared(STAGED)
    with torch.no_grad(), engine.gathered(model):
        for own, other in zip(plain.parameters(), model.parameters(), strict=True):
            own.copy_(other)
    reference = torch_shard.shard(plain, precision=Precision(BF16))
    for step in range(2):  # from the second one on norms are taken on the way
        with beside_gpu(host, gradients, holds=step > 0) as device:
            norms = []
            for each, its in ((plain, reference), (model, engine)):
                each.zero_grad()
                each(inputs(rank, step)).square().sum().backward()
                norms.append(its.clip_grad_norm_(0.5))
            assert torch.equal(*norms)
            assert step == 0 or not any(event.query() for event, *_ in device.left)
    for own, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(own.grad.to_local(), other.grad.to_local())


@pytest.mark.parametrize("in_backward", [False, True])
@ranks(1)
def test_steps_wait_for_no_copy(rank, in_backward):
    def train(holds):
        torch.manual_seed(1)
        model, engine, host, gradients = prepared(STAGED)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if in_backward:
            engine.step_in_backward(optimizer)
        for step in range(3):
            with beside_gpu(host, gradients, holds=holds and step == 2) as device:
                model(inputs(rank, step)).square().sum().backward()
                if not in_backward:
                    engine.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
                assert not holds or step < 2 or not any(event.query() for event, *_ in device.left)
                assert step == 0 or all(flat.host.pending_writes for unit in engine.units for flat in unit.flats)
        return engine.state_dict(form="full"), engine.optim_state_dict(optimizer)

    same(train(True), train(False))


@ranks(1)
def test_the_host_is_never_further_behind_than_there_are_buffers(rank):
    model, _, host, _ = prepared(STAGED + 2)
    before = [buffer.memory.data_ptr() for buffer in host.staging._buffers]
    for number in range(3):
        model(inputs(rank, number)).sum().backward()
    assert len(before) == STAGED
    assert sorted(before) == sorted(buffer.memory.data_ptr() for buffer in host.staging._buffers)
