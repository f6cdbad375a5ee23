"""The plan says, before anything is allocated, what offload takes of host memory, to the byte."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

import torch_shard
from tests.offload.models import WIDTH, Model, Training
from tests.support.inside import runtime_of
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import Precision, Quantized, ShardConfig
from torch_shard.config.offload import STAGED
from torch_shard.offload import Offload
from torch_shard.offload.host import Host

BF16 = Precision(param_dtype=torch.bfloat16)


@contextmanager
def noted():
    """The bytes of each host tensor that is made inside."""
    made, empty = [], Host.empty

    def note(host, numel, dtype):
        made.append(numel * dtype.itemsize)
        return empty(host, numel, dtype)

    Host.empty = note
    try:
        yield made
    finally:
        Host.empty = empty


def staged(engine):
    """The bytes of the buffers in which gradients arrive that are narrower than ``.grad``."""
    flats = [flat for unit in engine.units for flat in unit.flats]
    dtypes = [(flat, flat.dtypes.crossing(engine.world_size > 1)) for flat in flats if flat.params[0].requires_grad]
    return STAGED * max(
        (flat.layout.shard_numel * d.itemsize for flat, d in dtypes if d != flat.dtypes.grad), default=0
    )


def plan_of(offload, world_size=2, model=None, **settings):
    return torch_shard.make_plan(model or Model(), ShardConfig(offload=offload, **settings), world_size=world_size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sync", [*exhaustive(True), False])
@pytest.mark.parametrize(
    "precision", [None, BF16, *exhaustive(Precision(torch.bfloat16, keep_low_precision_grads=True))]
)
@pytest.mark.parametrize("offload", ["cpu", Offload(params=False)])
@ranks(2, exhaustive=(1, 3))
def test_what_is_allocated_was_predicted(rank, world_size, offload, precision, sync):
    with noted() as made:
        training = Training(rank, offload, precision=precision)
        for number in range(3):
            training.step(number, accumulate=1 if sync else 3, clip=0.5, sync=sync)
    b = training.engine.plan.predicted
    # Over Gloo slices are summed in the dtype of `.grad`, and there is nothing to widen.
    staging = staged(training.engine) * (world_size > 1)
    assert sum(made) == (b.host if sync else b.host_peak) - b.optimizer - staging
    assert b.host_at_setup == b.host - b.optimizer
    held = [v for state in training.optimizer.state.values() for v in state.values() if v.dim()]
    unpadded = sum(v._local.nbytes for v in held)
    assert unpadded <= b.optimizer <= unpadded + 2 * 64 * len(list(training.model.parameters()))


@pytest.mark.parametrize("precision", [None, *exhaustive(BF16)])
@pytest.mark.parametrize("offload", ["kept", *exhaustive("cpu", "disk")])
@ranks(2, exhaustive=(3,))
def test_where_codes_are_gathered_the_copies_are_codes(rank, tmp_path, offload, precision):
    offload = {"cpu": Offload(), "kept": Offload(params=False), "disk": Offload(nvme=tmp_path, nvme_params=True)}[
        offload
    ]
    quantized = Quantized("int8", min_size=4096)  # of the matrices alone
    with noted() as made:
        training = Training(rank, offload, precision=precision, quantized=quantized)
        for number in range(3):
            training.step(number)
    b = training.engine.plan.predicted
    assert sum(made) == b.host_at_setup - staged(training.engine)
    flats = [flat for unit in training.engine.units for flat in unit.flats]
    assert sum(flat.host._resident.nbytes for flat in flats if not offload.params) == b.device
    quantized = [flat for flat in flats if flat.quantizer is not None]
    kept = [flat.host._cast if offload.params else flat.host._resident for flat in quantized]
    elements = sum(flat.memory.numel() for flat in quantized)
    assert sum(tensor.nbytes for tensor in kept) == pytest.approx(
        elements * (1 + 4 / 256), rel=0.01
    )  # a scale for each 256


@ranks(2)
def test_frozen_parameters_have_no_gradient_but_a_copy_to_compute_with(rank):
    model = Model().requires_grad_(False)
    model.blocks[0].requires_grad_(True)
    with noted() as made:
        engine = torch_shard.shard(model, precision=BF16, offload="cpu")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()
    b = engine.plan.predicted
    staging = staged(engine)
    assert sum(made) == b.host - b.optimizer - staging
    assert 0 < b.gradients < b.parameters == 2 * (b.total - b.parameters - b.gradients - b.optimizer - staging)


def test_buffers_for_gradients_that_arrive_narrower_are_allocated_at_set_up():
    """Where the backend sums in the dtype that is sent, as all do but Gloo. A lack of memory shows before the first step."""
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        model = Model()
        with noted() as made:
            engine = torch_shard.shard(model, precision=BF16, offload="cpu")
        assert staged(engine) > 0
        assert sum(made) == engine.plan.predicted.host_at_setup
        engine.close()
    finally:
        dist.destroy_process_group()


def test_without_offload_nothing_is_in_host_memory():
    b = plan_of(None).predicted
    assert b.host == b.host_peak == b.disk == 0
    assert b.device == b.total == b.parameters + b.gradients + b.optimizer


def test_with_offload_the_device_holds_what_a_step_needs():
    model = Model()
    full, unit = (
        4 * sum(p.numel() for p in model.parameters()),
        4 * sum(p.numel() for p in model.blocks[0].parameters()),
    )
    b = plan_of("cpu", model=model).predicted
    assert b.device == 0
    assert b.host == pytest.approx(2 * full, rel=0.01)  # 16 bytes an element over two ranks
    assert b.gathered_peak == 2 * unit  # one runs, one is prefetched
    assert b.device_peak == b.gathered_peak + b.gradient_peak
    # Full gradients of the unit and of two in flight; this rank's halves of these, of one more, and on their way to the host.
    assert b.gradient_peak == pytest.approx(3 * unit + 4 * unit / 2, rel=0.01)


def test_alone_the_device_holds_no_more():
    """Without other ranks nothing is gathered, but copied; and nothing is reduced."""
    b, among_two = (plan_of("cpu", n).predicted for n in (1, 2))
    assert b.gathered_peak == among_two.gathered_peak
    assert among_two.gradient_peak == pytest.approx(2.5 * b.gradient_peak, rel=0.01)  # of 2 units here, of 5 there


def test_slices_on_the_device_are_counted_there():
    b = plan_of(Offload(params=False), precision=BF16).predicted
    assert b.device == b.parameters // 2
    assert b.total == b.host + b.device
    assert b.host == plan_of("cpu", precision=BF16).predicted.host  # which keeps the copy, too


@pytest.mark.parametrize("nvme_params", [False, True])
@ranks(2)
def test_what_is_on_disk_was_predicted(rank, tmp_path, nvme_params):
    offload = Offload(nvme=tmp_path, nvme_params=nvme_params)
    with noted() as made:
        training = Training(rank, offload, precision=BF16)
        for number in range(2):
            training.step(number)
    b = training.engine.plan.predicted
    assert runtime_of(training.engine).host.disk.allocated == b.disk
    assert b.disk == b.optimizer + nvme_params * b.parameters
    assert sum(made) == b.host - staged(training.engine) and b.host == b.host_at_setup
    # One flat buffer for each block: of the five pieces, the largest four.
    assert 0 < b.host_peak - b.host - b.gradients <= b.disk


def test_of_what_is_on_disk_four_units_are_in_memory():
    model = torch.nn.Sequential(*(Model() for _ in range(5)))
    b = plan_of(Offload(nvme="/scratch"), model=model).predicted
    units = len(plan_of(None, model=model).units)
    assert units == 20 and b.host_peak - b.host - b.gradients == pytest.approx(b.disk * 4 / units)


def test_the_table_says_what_is_where():
    b, table = plan_of("cpu", precision=BF16).predicted, plan_of("cpu", precision=BF16).table()
    assert f"of these {b.host / 2**20:.2f} MiB in host memory (at most {b.host_peak / 2**20:.2f}" in table
    assert "0.00 MiB on the device" in table and "copies between host and device" in table
    assert "host memory" not in plan_of(None).table()


def test_a_model_on_meta_is_enough():
    with torch.device("meta"):
        model = Model()
    assert plan_of("cpu", model=model).predicted == plan_of("cpu").predicted
