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
from tests.support.marks import exhaustive, one_at_a_time
from tests.support.ranks import ranks
from torch_shard import Precision, errors
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
    flats = [flat for unit in engine._runtime.units for flat in unit.flats]
    device = beside_gpu(engine._runtime.host, [f.gradients for f in flats]) if gpu else contextlib.nullcontext()
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


@pytest.mark.parametrize("clip", [0.5, *exhaustive(None)])
@pytest.mark.parametrize("accumulate", [4, *exhaustive(1)])
@pytest.mark.parametrize(
    "kind", ["bf16-mixed", "16-mixed", *exhaustive("bf16-true", "reduced in fp32", "gradients in bf16")]
)
@ranks(1, exhaustive=(2, 3))
def test_every_precision_trains_as_without(rank, kind, accumulate, clip):
    trains_alike(rank, kind, accumulate=accumulate, clip=clip)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("kind", ["reduced in bf16", "norms in fp32"])
@pytest.mark.exhaustive
@ranks(1, 2)  # three have slices that are no whole registers: see Model
def test_units_of_several_dtypes_train_as_without(rank, kind, accumulate):
    trains_alike(rank, kind, accumulate=accumulate, clip=0.5)


@one_at_a_time(kind=["16-mixed", "bf16-mixed", "reduced in bf16", "norms in fp32"], accumulate=[1, 4], clip=[0.5, None])
@ranks(3, exhaustive=(2,))
def test_replicas_whose_sums_are_narrow_train_as_without(rank, kind, accumulate, clip):
    """With three ranks fp16 is divided before the sum and behind it."""
    trains_alike(rank, kind, accumulate=accumulate, clip=clip, strategy="no_shard")


@one_at_a_time(
    kind=["bf16-mixed", "16-mixed", "reduced in bf16"], strategy=["full_shard", "no_shard"], clip=[0.5, None]
)
@ranks(1, exhaustive=(2,))
def test_under_no_sync_as_without(rank, kind, strategy, clip):
    trains_alike(rank, kind, accumulate=3, sync=False, clip=clip, strategy=strategy)


@one_at_a_time(
    kind=["bf16-mixed", "16-mixed", "fp32", "reduced in fp32", "norms in fp32"],
    how=[{"accumulate": 1}, {"accumulate": 4}, {"accumulate": 3, "sync": False}],
)
@ranks(1, exhaustive=(3,))
def test_beside_a_gpu_as_without(rank, world_size, kind, how):
    strategy = "no_shard" if world_size > 1 else "full_shard"
    trains_alike(rank, kind, gpu=True, strategy=strategy, clip=0.5, **how)


# -- what crosses -----------------------------------------------------------------------------------------------------


def crossed(rank, kind, strategy="full_shard", **how):
    """Bytes an element of this rank's slices that cross in a step, and those of the largest dtype that it could be."""
    model = Model().to(BF16) if kind == "bf16-true" else Model()
    config = torch_shard.ShardConfig(offload="cpu", precision=KINDS[kind], strategy=strategy)
    engine = torch_shard.shard(model, config)
    loss_of(model, inputs(rank, 0).to(next(model.parameters()).dtype)).backward()
    flats = [flat for unit in engine._runtime.units for flat in unit.flats]
    return engine._runtime.host.arrived / sum(flat.layout.shard_numel for flat in flats)


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [
        ("bf16-mixed", 2),
        ("reduced in bf16", 4),  # nothing is reduced
        *exhaustive(("16-mixed", 2), ("bf16-true", 2), ("reduced in fp32", 2), ("gradients in bf16", 2)),
    ],
)
@ranks(1)
def test_alone_what_crosses_has_the_dtype_of_computation(rank, kind, nbytes):
    assert crossed(rank, kind) == nbytes


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [
        ("bf16-mixed", 2),
        ("reduced in fp32", 4),
        *exhaustive(("16-mixed", 2), ("bf16-true", 2), ("reduced in bf16", 2), ("gradients in bf16", 2)),
    ],
)
@ranks(2)
def test_what_crosses_has_the_dtype_of_the_reduction(rank, kind, nbytes):
    assert crossed(rank, kind, "no_shard") == nbytes


@ranks(2)
def test_over_gloo_slices_are_summed_and_cross_in_the_dtype_of_gradients(rank):
    assert crossed(rank, "bf16-mixed") == 4


@ranks(1)
def test_what_is_computed_with_in_two_dtypes_crosses_in_both(rank):
    assert 2 < crossed(rank, "norms in fp32") < 2.1


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


@ranks(1)
def test_what_comes_to_a_gradient_that_is_there_is_added_in_the_dtype_of_gradients(rank):
    *_, (buffer, *_) = prepared(1)
    coarse, fine = torch.full((WIDTH, WIDTH), 256.0, dtype=BF16), torch.full((WIDTH, WIDTH), 0.5, dtype=BF16)
    buffer.begin_backward()
    buffer.accept(0, coarse)
    assert buffer.flat.dtype is BF16
    buffer.accept(1, torch.ones(WIDTH, dtype=BF16))
    buffer.accept(0, fine)
    assert buffer.flat.dtype is FP32
    assert (buffer.flat[: WIDTH * WIDTH] == 256.5).all() and (buffer.flat[WIDTH * WIDTH :] == 1).all()
    buffer.forget()


# -- device memory ----------------------------------------------------------------------------------------------------


def prepared(units, **settings):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(units)))
    config = torch_shard.ShardConfig(
        offload="cpu", precision=Precision(BF16), units=[f"{n}" for n in range(units)], **settings
    )
    engine = torch_shard.shard(model, config)
    host = engine._runtime.host
    return model, engine, host, [flat.gradients for unit in engine._runtime.units for flat in unit.flats]


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


@ranks(1)
def test_buffers_grow_with_what_arrives_and_a_failure_is_raised_once(rank):
    *_, host, _ = prepared(1)
    values = torch.ones(1 << 16, dtype=BF16)
    staged, part = host.staging.take(values)
    assert part.shape == values.shape and part.dtype is BF16

    def fail():
        raise ValueError("no such gradient")

    staged.task = host.thread.do(fail)
    others = [host.staging.take(values) for _ in range(STAGED - 1)]
    assert len({part.data_ptr(), *(other.data_ptr() for _, other in others)}) == STAGED
    with pytest.raises(errors.HostStepError, match="no such gradient"):
        host.staging.take(values)
    for _ in range(STAGED):
        host.staging.take(values)
