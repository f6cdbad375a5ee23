"""Reductions of ShardTensors: one number, which is that of the full tensor on all ranks."""

import copy
import math

import pytest
import torch
from torch import nn

import torch_shard
from tests.support.bad_input_helpers import Net, small, step
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from tests.support.shard_cases import REDUCTIONS
from tests.support.shard_helpers import SHAPES, GroupComm, same, sharded, values
from torch_shard.errors import NeedsGatherError, ShardError


@ranks(1, 2, exhaustive=(3,))
def test_reductions_to_a_scalar_are_those_of_the_whole(rank, world_size):
    plain = values()
    shards = sharded(plain, rank, world_size)
    for name in SHAPES:
        for function in REDUCTIONS:
            try:
                expected = function(plain[name])
            except (RuntimeError, IndexError):
                with pytest.raises((RuntimeError, IndexError)):
                    function(shards[name])
                continue
            result = function(shards[name])
            assert type(result) is torch.Tensor
            assert result.shape == expected.shape
            same(result, expected)
    assert shards["scalar"].item() == plain["scalar"].item()
    assert float(shards["one"]) == plain["one"].item()
    assert f"{shards['scalar']:.3f}" == f"{plain['scalar']:.3f}"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@ranks(2, 3)
def test_a_value_that_is_not_finite_reaches_all_ranks(rank, world_size, bad):
    plain = values()
    plain["matrix"][4, 6] = bad
    shards = sharded(plain, rank, world_size)
    for function in (*REDUCTIONS[:8], torch.max, torch.min, torch.amax, torch.amin, lambda a: a.isnan().any()):
        same(function(shards["matrix"]), function(plain["matrix"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32, torch.bool, torch.uint8])
@ranks(2)
def test_reductions_keep_to_the_dtype_of_plain_torch(rank, world_size, dtype):
    plain = {name: (t * 4).to(dtype) for name, t in values().items()}
    shards = sharded(plain, rank, world_size)
    for name in ("matrix", "scalar", "cube", "none"):
        for function in (torch.sum, torch.any, torch.all, torch.count_nonzero):
            same(function(shards[name]), function(plain[name]))
        if name != "none":
            same(torch.max(shards[name]), torch.max(plain[name]))
        if dtype.is_floating_point:
            same(shards[name].norm(), plain[name].norm())


@ranks(2)
def test_equal_and_allclose_agree_on_all_ranks(rank, world_size):
    plain = values()
    a, b = sharded(plain, rank, world_size), sharded(plain, rank, world_size)
    assert torch.equal(a["cube"], b["cube"]) and torch.allclose(a["cube"], b["cube"])
    assert torch.equal(a["cube"], plain["cube"])
    other = plain["cube"].clone()
    other[-1, -1, -1] += 1  # on the last rank only
    assert not torch.equal(a["cube"], other) and not torch.allclose(a["cube"], other)
    assert not torch.equal(a["cube"], plain["matrix"])
    assert (a["cube"] == b["cube"]).all() and not (a["cube"] != b["cube"]).any()


@ranks(2)
def test_allclose_broadcasts_as_plain_torch_does(rank, world_size):
    plain = torch.zeros(4, 6)
    ours = sharded({"zeros": plain}, rank, world_size)["zeros"]
    last = torch.zeros(6)
    last[-1] = 1  # seen by the last rank, too, which has the last row
    for other in (torch.tensor(0.0), torch.tensor(1.0), torch.zeros(6), torch.zeros(4, 1), last, torch.zeros(2, 4, 6)):
        assert torch.allclose(ours, other) == torch.allclose(other, ours) == torch.allclose(plain, other)
    with pytest.raises(RuntimeError, match="broadcast"):
        torch.allclose(ours, torch.zeros(5))
    assert not torch.equal(ours, torch.tensor(0.0))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@ranks(2)
def test_the_larger_and_the_smaller_of_two_tensors_are_elementwise_in_every_mode(rank, world_size, mode):
    plain, other = values(), values(seed=5)
    shards, others = sharded(plain, rank, world_size), sharded(other, rank, world_size)
    with mode():
        for name in ("matrix", "scalar", "cube", "none"):
            for function in (torch.max, torch.min, torch.maximum):
                same(function(shards[name], others[name]), function(plain[name], other[name]))
                same(function(shards[name], other[name]), function(plain[name], other[name]))


@ranks(2, 3)
def test_foreach_norm_is_one_collective_and_right(rank, world_size):
    comm = GroupComm(world_size, rank)
    plain = values()
    plain.pop("none")  # without elements there is no largest one
    shards = sharded(plain, rank, world_size, comm)
    for order in (1, 2, math.inf, 3):
        before = comm.calls
        norms = torch._foreach_norm(list(shards.values()), order)
        assert comm.calls == before + 1
        for result, expected in zip(norms, torch._foreach_norm(list(plain.values()), order), strict=True):
            same(result, expected)


@pytest.mark.parametrize("foreach", [None, True, False])
@ranks(2, exhaustive=(3,))
def test_clip_grad_norm_of_torch_is_right(rank, world_size, foreach):
    for order in (2.0, 1.0, math.inf):
        parameters, reference = [], []
        for name, full in sharded(values(), rank, world_size).items():
            if name == "none" and order == math.inf:
                continue  # plain torch has no largest of no elements either
            p, q = nn.Parameter(full), nn.Parameter(values()[name])
            q.grad = values(seed=3)[name]
            p.grad = q.grad.clone()
            parameters.append(p)
            reference.append(q)
        result = nn.utils.clip_grad_norm_(parameters, 0.5, order, foreach=foreach)
        same(result, nn.utils.clip_grad_norm_(reference, 0.5, order))
        nn.utils.clip_grad_value_(parameters, 0.1)
        nn.utils.clip_grad_value_(reference, 0.1)
        for p, q in zip(parameters, reference, strict=True):
            same(p.grad, q.grad)


@ranks(2)
def test_the_check_for_non_finite_gradients_sees_all_ranks(rank, world_size):
    for bad in (None, 0, -1):
        plain = values()
        if bad is not None:
            plain["matrix"].view(-1)[bad] = math.inf
        shards = sharded(plain, rank, world_size)
        results = []
        for tensors in (shards, plain):
            found, scale = torch.zeros(()), torch.tensor(0.5)
            torch._amp_foreach_non_finite_check_and_unscale_(list(tensors.values()), found, scale)
            results.append(found.item())
        assert results == [float(bad is not None)] * 2
        same(shards["cube"], plain["cube"])


def own_step(model, rank):
    """Run a backward of data of the rank's own."""
    model(torch.ones(2, 4) * (1 + rank)).square().sum().backward()


OWN_GRADIENTS = [
    {},
    *exhaustive(*({"strategy": s} for s in ("shard_grad_op", "shard_optim", "no_shard")), {"offload": "cpu"}),
]


@pytest.mark.parametrize("config", OWN_GRADIENTS, ids=str)
@ranks(2, exhaustive=(3,))
def test_a_rank_reads_its_own_gradient_under_no_sync_as_under_ddp(rank, world_size, config):
    model = Net()
    plain = copy.deepcopy(model)
    engine = torch_shard.shard(model, **config, **small)
    weight = model.left.weight
    for _ in range(2):  # the second adds to the first
        with engine.no_sync():
            own_step(model, rank)
        own_step(plain, rank)
        expected = plain.left.weight.grad
        for read in (
            lambda g: g.norm(),
            lambda g: g.mean(),
            lambda g: g.data.sum(),
            lambda g: g.detach().std(),
            lambda g: nn.utils.get_total_norm([g]),
            lambda g: g.sum(0),
            lambda g: torch.tensor(g.tolist()),
            lambda g: torch.from_numpy(g.numpy().copy()),
            lambda g: torch.zeros(g.shape).add_(g),
        ):
            same(read(weight.grad), read(expected))
        assert torch.allclose(weight.grad, expected) and not torch.allclose(expected + 1e-3, weight.grad)
        if rank == 0:  # nothing is sent
            same(weight.grad.full_tensor(), expected)
    first, alias = weight.grad, weight.grad.data
    own_step(model, rank)
    same(weight.grad.norm(), weight.grad.full_tensor().norm())
    weight.grad = None
    with engine.no_sync():
        own_step(model, rank)
    for stale in (first, alias):  # of an earlier accumulation
        with pytest.raises(NeedsGatherError, match="the gradient of left"):
            stale.norm()


@pytest.mark.parametrize("edit", ["data", "view", "list", "clip"])
@pytest.mark.parametrize("hold", [True, False])
@ranks(2)
def test_an_edit_of_a_gradient_under_no_sync_is_an_error_by_the_next_backward(rank, world_size, hold, edit):
    model = Net()
    engine = torch_shard.shard(model, **small)
    with engine.no_sync(hold):
        step(model)
    grad = model.left.weight.grad
    edits = {
        "data": lambda: grad.data.mul_(0.5),
        "view": lambda: grad.data.detach().mul_(0.5),
        "list": lambda: torch._foreach_mul_([grad.data], 0.5),
        "clip": lambda: nn.utils.clip_grad_norm_([model.left.weight], 1e-3),
    }
    edits[edit]()
    with pytest.raises(ShardError, match=r"the gradient of left\.weight was edited"):
        step(model)


@pytest.mark.parametrize("hold", [True, False])
@ranks(2)
def test_a_gradient_that_is_zeroed_through_an_alias_under_no_sync_is_dropped(rank, world_size, hold):
    model = Net()
    engine = torch_shard.shard(model, **small)
    with engine.no_sync(hold):
        step(model)
    for p in model.parameters():
        p.grad.data.zero_()
    step(model)
    once = [p.grad.full_tensor() for p in model.parameters()]
    model.zero_grad()
    step(model)
    for p, expected in zip(model.parameters(), once, strict=True):
        same(p.grad.full_tensor(), expected)


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
@ranks(2)
def test_what_is_computed_from_gradients_that_are_not_reduced_gives_no_number_of_the_ranks_shards(
    rank, world_size, strategy
):
    model = Net()
    engine = torch_shard.shard(model, strategy=strategy, **small)
    weight = model.left.weight
    with engine.no_sync():
        step(model)
    full = torch.zeros(weight.shape)
    accumulated = torch.zeros_like(weight.grad)
    assert accumulated.sum() == 0
    accumulated.add_(weight.grad)
    (halved,) = torch._foreach_mul([weight.grad], 0.5)
    for read in (
        lambda g: g.abs().max(),
        lambda g: g.clone().mean(),
        lambda g: torch.equal(g * 2, full),
        lambda g: torch.allclose(full, g.clone()),
        lambda g: copy.deepcopy(g).full_tensor(),
        lambda g: g.isnan().any(),
        lambda g: accumulated.sum(),
        lambda g: halved.sum(),
        lambda g: weight.data.sub_(g, alpha=0.1),
        lambda g: setattr(weight, "data", g),
    ):
        with pytest.raises(NeedsGatherError, match=r"rank \d: .+: the gradient of left\.weight, .*no_sync\(\)"):
            read(weight.grad)
    accumulated.zero_()
    assert accumulated.sum() == 0
    for clear in (weight.grad.zero_, lambda: torch._foreach_zero_([weight.grad])):
        clear()
        assert weight.grad.norm() == 0
        with engine.no_sync():
            step(model)
        with pytest.raises(NeedsGatherError, match="the gradient of left"):
            weight.grad.abs().max()
    step(model)
    same(weight.grad.norm(), weight.grad.full_tensor().norm())
    accumulated.copy_(weight.grad).add_(1)
    assert torch.equal(accumulated.full_tensor(), weight.grad.full_tensor() + 1)


@ranks(1)
def test_a_single_rank_reads_its_gradient_under_no_sync_as_plain_torch_does(rank, world_size):
    model = Net()
    plain = copy.deepcopy(model)
    engine = torch_shard.shard(model, **small)
    with engine.no_sync():
        step(model)
    step(plain)
    grad, expected = model.left.weight.grad, plain.left.weight.grad
    same(grad.abs().max(), expected.abs().max())
    same(grad.full_tensor(), expected)
    same(nn.utils.get_total_norm([grad]), nn.utils.get_total_norm([expected]))
