"""ShardTensor: what it answers is what plain torch answers for the whole tensor, or it raises."""

import copy
import io
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.ranks import ranks
from tests.shard_helpers import SHAPES, GroupComm, same, sharded, values
from torch_shard.errors import NeedsGatherError, ShardPicklingError
from torch_shard.layout import FlatLayout, ParamMeta
from torch_shard.shard_tensor import ShardSpec, ShardTensor, broadcast_slice, same_cut, slice_full

F = nn.functional

# -- slicing, as properties over any number of ranks --------------------------------------------------------------


@st.composite
def placed(draw):
    """A dense tensor of any strides behind another parameter, its layout, and a number of ranks."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]))
    world_size = draw(st.one_of(st.integers(1, 5), st.sampled_from([64, 4096])))
    full = torch.arange(math.prod(shape)).reshape([shape[d] for d in order]).to(dtype)
    full = full.permute(sorted(range(len(order)), key=order.__getitem__))
    metas = [ParamMeta("before", (draw(st.integers(0, 40)),), (1,)), ParamMeta("w", shape, full.stride())]
    return full, FlatLayout.build(metas, full.element_size(), world_size)


def join(locals_, full):
    return torch.cat(locals_).as_strided(full.shape, full.stride())


@given(placed())
@settings(max_examples=100, deadline=None)
def test_the_ranks_slices_together_are_the_tensor(case):
    full, layout = case
    ranks_ = layout.owners(1) or range(1)
    specs = [ShardSpec(layout, 1, rank, GroupComm(layout.world_size, rank)) for rank in ranks_]
    assert torch.equal(join([slice_full(full, spec) for spec in specs], full), full)
    # Strides of the operand do not matter, only its elements.
    other = full.clone(memory_format=torch.contiguous_format)
    assert torch.equal(join([slice_full(other, spec) for spec in specs], full), full)


@given(placed(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_plain_operand_is_broadcast_to_the_global_shape_or_rejected(case, data):
    full, layout = case
    shape = [data.draw(st.sampled_from([1, size, 2])) for size in full.shape[data.draw(st.integers(0, full.dim())) :]]
    operand = torch.randint(1, 9, shape).to(full.dtype)
    ranks_ = layout.owners(1) or range(1)
    shards = [ShardTensor.from_full(full, ShardSpec(layout, 1, r, GroupComm(layout.world_size, r))) for r in ranks_]
    try:
        expected = full + operand
    except RuntimeError:
        for shard in shards:
            with pytest.raises(RuntimeError):
                shard + operand
        return
    if expected.shape != full.shape:
        with pytest.raises(NeedsGatherError, match="sharded w"):
            shards[0] + operand
        return
    results = [shard + operand for shard in shards]
    assert all(isinstance(r, ShardTensor) and r.shape == full.shape for r in results)
    assert results[0].dtype == expected.dtype
    assert torch.equal(join([r.to_local() for r in results], full), expected)


def test_slicing_an_expanded_operand_does_not_materialise_it():
    layout = FlatLayout.build([ParamMeta("w", (1 << 20, 1 << 20), (1 << 20, 1))], 4, 4096)
    spec = ShardSpec(layout, 0, 17, GroupComm(4096, 17))
    assert slice_full(torch.ones(()).expand(spec.shape), spec).untyped_storage().nbytes() == 4
    assert broadcast_slice(torch.tensor(2.0), spec, "mul").dim() == 0


# -- arithmetic ---------------------------------------------------------------------------------------------------

UNARY = [
    lambda a: a * 2 + 1,
    lambda a: 1 - a,
    lambda a: 2**a,
    lambda a: a**2,
    lambda a: -a,
    lambda a: abs(a),
    lambda a: a > 0,
    lambda a: a.clamp(-0.5, 0.5),
    lambda a: a.sqrt().nan_to_num(),
    lambda a: a.sign() * a.abs().pow(0.5),
    lambda a: torch.where(a > 0, a, 0.1 * a),
    lambda a: torch.where(a.isnan(), torch.zeros_like(a), a),
    lambda a: a.masked_fill(a > 0, 3.0),
    lambda a: torch.zeros_like(a),
    lambda a: torch.ones_like(a),
    lambda a: torch.full_like(a, 4.0),
    lambda a: a.new_zeros(a.shape),
    lambda a: a.clone().fill_(2.0),
    lambda a: a.double(),
    lambda a: a.to(torch.bfloat16),
    lambda a: a.detach().clone().zero_(),
    lambda a: F.gelu(a) + F.silu(a) + torch.tanh(a) + F.relu(a) + F.softplus(a),
    lambda a: a / torch.tensor(3.0, dtype=torch.float64),
    lambda a: torch.tensor(3.0) - a,
    lambda a: a.lerp(torch.ones_like(a), 0.25),
    lambda a: a.addcmul(a, a, value=0.5),
    lambda a: a.addcdiv(a, a.abs() + 1, value=0.5),
    lambda a: a.view_as(a) + a.expand_as(a),
    lambda a: (a > 0) & (a < 1) | ~(a > -1),
    lambda a: a.maximum(a * a).minimum(torch.tensor(0.7)),
]


@ranks(1, 2, 3)
def test_elementwise_arithmetic_equals_plain(rank, world_size):
    plain = values()
    shards = sharded(plain, rank, world_size)
    for name in SHAPES:
        for function in UNARY:
            result = function(shards[name])
            assert isinstance(result, ShardTensor)
            same(result, function(plain[name]))


@ranks(2, 3)
def test_in_place_arithmetic_equals_plain_and_keeps_the_tensor(rank, world_size):
    plain, other = values(), values(seed=1)
    shards, others = sharded(plain, rank, world_size), sharded(other, rank, world_size)
    for name in SHAPES:
        for a, b in ((plain[name], other[name]), (shards[name], others[name])):
            kept = a
            local = getattr(a, "_local", a)
            a.mul_(0.9).add_(b, alpha=2).sub_(1).div_(3)
            a.lerp_(b, 0.3).addcmul_(b, b, value=0.1).addcdiv_(b, b.abs() + 1, value=-0.2)
            a += b
            a *= 2
            a.clamp_(-2, 2)
            a.copy_(a * b)
            a.masked_fill_(b > 1, 5.0)
            a[b < -1] = 7.0
            a.copy_(torch.ones(a.shape)) if name == "one" else None
            assert a is kept and getattr(a, "_local", a) is local
        same(shards[name], plain[name])


@ranks(2, 3)
def test_plain_operands_are_broadcast_to_the_global_shape(rank, world_size):
    plain = values()
    shards = sharded(plain, rank, world_size)
    row, column, full = torch.randn(7), torch.randn(5, 1), torch.randn(5, 7)
    a, w = shards["matrix"], plain["matrix"]
    for operand in (row, column, full, full.t().contiguous().t(), full[:1], torch.tensor(2.0), full > 0):
        same(a * operand, w * operand)
        same(operand * a, operand * w)
        same(a.clone().mul_(operand), w.clone().mul_(operand))
        same(a.clone().copy_(operand), w.clone().copy_(operand))
    same(torch.where(full > 0, a, row), torch.where(full > 0, w, row))
    same(a.masked_fill(column > 0, 1.5), w.masked_fill(column > 0, 1.5))
    image = torch.randn(3, 1, 3)
    same(shards["image"] * image, plain["image"] * image)
    for bad in (torch.randn(5), torch.randn(4, 7)):
        with pytest.raises(RuntimeError):
            a * bad
    with pytest.raises(NeedsGatherError, match="sharded matrix"):
        a * torch.randn(2, 5, 7)
    with pytest.raises(NeedsGatherError, match="sharded scalar"):
        shards["scalar"] * row
    with pytest.raises(NeedsGatherError):
        row.clone().expand(5, 7).clone().mul_(a)
    with pytest.raises(NeedsGatherError):
        full.clone().copy_(a)
    with pytest.raises(NeedsGatherError):  # its gradient would be spread over the ranks
        a * full.clone().requires_grad_()


@pytest.mark.parametrize("other", [torch.float64, torch.float16, torch.int64])
@ranks(2)
def test_dtypes_are_promoted_as_in_plain_torch(rank, world_size, other):
    plain = values()
    shards = sharded(plain, rank, world_size)
    for name in SHAPES:
        zero_dim = torch.ones((), dtype=other)
        same(shards[name] + zero_dim, plain[name] + zero_dim)
        whole = torch.ones(plain[name].shape, dtype=other)
        same(shards[name] + whole, plain[name] + whole)
        same(shards[name].to(other) + 0.5, plain[name].to(other) + 0.5)


@ranks(2)
def test_two_shard_tensors_must_share_the_cut(rank, world_size):
    comm = GroupComm(world_size, rank)
    plain = {"first": torch.randn(6, 5), "second": torch.randn(6, 5)}
    shards = sharded(plain, rank, world_size, comm)
    again = sharded(plain, rank, world_size, comm)
    assert not same_cut(shards["first"]._spec, shards["second"]._spec)
    same(shards["first"] + again["first"], plain["first"] * 2)
    for function in (torch.add, torch.equal, lambda a, b: a.copy_(b), lambda a, b: torch._foreach_add_([a], [b])):
        with pytest.raises(NeedsGatherError, match="sharded first"):
            function(shards["first"], shards["second"])


@ranks(2, 3)
def test_foreach_functions_equal_plain(rank, world_size):
    plain, other = values(), values(seed=1)
    shards, others = sharded(plain, rank, world_size), sharded(other, rank, world_size)
    a, b = list(shards.values()), list(others.values())
    c, d = list(plain.values()), list(other.values())
    for x, y in ((a, b), (c, d)):
        torch._foreach_mul_(x, 0.5)
        torch._foreach_add_(x, y, alpha=2)
        torch._foreach_mul_(x, torch.tensor(1.5))
        torch._foreach_lerp_(x, y, 0.1)
        torch._foreach_addcdiv_(x, y, torch._foreach_add(torch._foreach_abs(y), 1.0), 0.3)
        torch._foreach_addcmul_(x, y, y, [0.1 * i for i in range(len(x))])
        torch._foreach_copy_(y, torch._foreach_sqrt(torch._foreach_abs(x)))
    for result, expected in zip(a + b, c + d, strict=True):
        same(result, expected)
    mixed = torch._foreach_mul([shards["matrix"], torch.ones(3)], [torch.full((5, 7), 2.0), torch.ones(3)])
    same(mixed[0], plain["matrix"] * 2)
    assert type(mixed[1]) is torch.Tensor


# -- reductions ---------------------------------------------------------------------------------------------------

REDUCTIONS = [
    lambda a: a.sum(),
    lambda a: torch.sum(a, dtype=torch.float64),
    lambda a: a.mean(),
    lambda a: a.norm(),
    lambda a: a.norm(1),
    lambda a: a.norm(math.inf),
    lambda a: a.norm(-math.inf),
    lambda a: a.norm(0),
    lambda a: a.norm(3.5),
    lambda a: torch.linalg.vector_norm(a, 2, dtype=torch.float64),
    lambda a: torch.linalg.vector_norm(a, keepdim=True),
    lambda a: torch.linalg.norm(a),
    lambda a: a.sum(dim=tuple(range(a.dim())), keepdim=True),
    lambda a: a.max(),
    lambda a: a.min(),
    lambda a: a.amax(),
    lambda a: a.amin(),
    lambda a: a.std(),
    lambda a: a.var(unbiased=False),
    lambda a: (a > 0).any(),
    lambda a: (a > -10).all(),
    lambda a: (a > 0.5).sum(),
    lambda a: a.count_nonzero(),
    lambda a: a.isnan().any(),
    lambda a: a.isfinite().all(),
]


@ranks(1, 2, 3)
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
@ranks(2, 3)
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


# -- random numbers -----------------------------------------------------------------------------------------------

FILLS = [
    lambda a, g: a.normal_(1, 2, generator=g),
    lambda a, g: a.uniform_(-1, 1, generator=g),
    lambda a, g: a.bernoulli_(0.3, generator=g),
    lambda a, g: a.exponential_(generator=g),
    lambda a, g: nn.init.trunc_normal_(a, std=0.5, generator=g),
    lambda a, g: nn.init.normal_(a, generator=g),
    lambda a, g: nn.init.kaiming_uniform_(a, a=5**0.5, generator=g) if a.dim() > 1 and a.numel() else a.zero_(),
    lambda a, g: nn.init.xavier_normal_(a, generator=g) if a.dim() > 1 and a.numel() else a.zero_(),
]


@ranks(1, 2, 3)
def test_the_same_seed_gives_what_plain_torch_gives(rank, world_size):
    plain = values()
    shards = {name: nn.Parameter(t) for name, t in sharded(plain, rank, world_size).items()}
    with torch.no_grad():
        for fill in FILLS:
            generators = [torch.Generator().manual_seed(5) for _ in range(2)]
            for name in SHAPES:  # one after the other: the generators must stay in step
                assert fill(shards[name], generators[0]) is shards[name]
                fill(plain[name], generators[1])
                same(shards[name].detach(), plain[name])
        for like in (torch.rand_like, torch.randn_like):
            torch.manual_seed(3)
            result = like(shards["image"])
            torch.manual_seed(3)
            same(result, like(plain["image"]))
        nn.init.constant_(shards["cube"], 3.0)
        assert (shards["cube"] == 3).all()


# -- parameters and gradients -------------------------------------------------------------------------------------


@ranks(2)
def test_it_takes_a_parameters_place(rank, world_size):
    layer = nn.Linear(7, 5)
    weight, before = layer.weight, layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    shard = sharded({"weight": before}, rank, world_size)["weight"]
    torch.utils.swap_tensors(weight, nn.Parameter(shard))
    assert layer.weight is weight is optimizer.param_groups[0]["params"][0]
    assert isinstance(weight, nn.Parameter) and isinstance(weight, ShardTensor)
    assert weight.shape == (5, 7) and weight.ndim == 2 and weight.numel() == 35 and weight.requires_grad
    assert dict(layer.named_parameters())["weight"] is weight
    assert weight.is_leaf and weight.grad is None and len(weight) == 5 and weight.dtype == torch.float32
    same(layer.state_dict()["weight"], before)
    # Conversions that change nothing are allowed; others would leave the unit behind.
    assert layer.to("cpu").weight is weight and weight.to_local() is shard.to_local()
    for convert in (layer.half, layer.double, lambda: layer.to(torch.bfloat16)):
        with pytest.raises(NeedsGatherError, match="sharded weight"):
            convert()
    layer.load_state_dict({"weight": before * 2, "bias": layer.bias.detach()})
    same(weight.detach(), before * 2)


@ranks(2, 3)
def test_autograd_through_local_arithmetic_equals_plain(rank, world_size):
    losses = [
        lambda p: p.sum(),
        lambda p: p.mean(),
        lambda p: p.pow(2).sum(),
        lambda p: (p * 3 + 1).abs().mean(),
        lambda p: p.norm(),
        lambda p: torch.linalg.vector_norm(p, 1) + p.norm(3),
        lambda p: p.norm(math.inf) + p.max() - p.amin(),
        lambda p: p.std() * p.sum(),
        lambda p: torch.tanh(p).mul(torch.ones(p.shape)).sum(),
        lambda p: F.gelu(p).sum() + F.silu(p).mean() + (p - p.detach() * 0.5).square().mean(),
        lambda p: (p.sum(dim=tuple(range(p.dim())), keepdim=True) * 2).sum(),
        lambda p: (p.exp() * 2).mul_(2).sum(),
        lambda p: p.pow(2).sum() * p.norm(),
    ]
    for name in ("matrix", "scalar", "vector", "image", "one"):
        for loss in losses:
            q = values()[name].requires_grad_()
            if name in ("scalar", "one") and loss is losses[7]:
                continue
            p = nn.Parameter(sharded(values(), rank, world_size)[name])
            for _ in range(2):  # the second time adds to the gradient
                result, expected = loss(p), loss(q)
                same(result.detach(), expected.detach())
                result.backward()
                expected.backward()
            assert type(p.grad) is ShardTensor
            same(p.grad, q.grad)
            p.grad.mul_(2)


@ranks(2)
def test_derivatives_of_derivatives(rank, world_size):
    p = nn.Parameter(sharded(values(), rank, world_size)["matrix"])
    q = values()["matrix"].requires_grad_()
    for t in (p, q):
        (grad,) = torch.autograd.grad(t.pow(3).sum(), [t], create_graph=True)
        (grad.pow(2).sum() + grad.sum()).backward()
    same(p.grad, q.grad)


@ranks(2, 3)
def test_what_is_computed_from_a_parameter_can_be_used_whole(rank, world_size):
    # Each rank has data of its own; gradients are averaged, as DDP averages them.
    inputs = [torch.randn(2, 7, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    mask = torch.arange(7) % 2
    p = nn.Parameter(sharded(values(), rank, world_size)["matrix"])
    q = values()["matrix"].requires_grad_()
    F.linear(inputs[rank], p * mask).pow(2).sum().backward()
    sum(F.linear(x, q * mask).pow(2).sum() for x in inputs).div(world_size).backward()
    same(p.grad, q.grad)


@ranks(2)
def test_a_tensor_changed_before_backward_is_noticed(rank, world_size):
    p = nn.Parameter(sharded(values(), rank, world_size)["matrix"])
    loss = p.pow(2).sum()
    with torch.no_grad():
        p.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        p.mul_(2)


@ranks(2, 3)
def test_assignments_to_data_and_grad_slice_whole_tensors(rank, world_size):
    for name in SHAPES:
        shards, other = sharded(values(), rank, world_size), values(seed=4)
        p = nn.Parameter(shards[name])
        local = p.to_local()
        p.data = other[name]
        same(p.detach(), other[name])
        p.data = shards[name] * 2
        assert p.to_local() is local
        p.data.mul_(3)
        same(p.detach(), other[name] * 6)
        p.grad = other[name]
        assert type(p.grad) is ShardTensor and p.grad.shape == p.shape
        same(p.grad, other[name])
        p.grad = p.grad * 2
        same(p.grad, other[name] * 2)
        p.grad = None
        assert p.grad is None
    for value in (torch.ones(3, 3), shards["cube"], torch.ones(4, 3, 3, 3, dtype=torch.float64)):
        with pytest.raises(NeedsGatherError, match="sharded image"):
            p.data = value
    for value in (torch.ones(3, 3), shards["cube"]):
        with pytest.raises(NeedsGatherError, match=r"\.grad of the sharded image"):
            p.grad = value
    assert not p.data.requires_grad and p.detach().to_local() is p.to_local()


OPTIMIZERS = [
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {"fused": True, "amsgrad": True}),
    (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (torch.optim.SGD, {"momentum": 0.5, "foreach": True, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.Adagrad, {"foreach": True}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.RMSprop, {"foreach": True}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
]


@ranks(2)
def test_torch_optimizers_step_on_shard_tensors_as_on_plain(rank, world_size):
    for kind, options in OPTIMIZERS:
        reference = {name: nn.Parameter(t) for name, t in values().items()}
        parameters = {name: nn.Parameter(t) for name, t in sharded(values(), rank, world_size).items()}
        plain = kind(reference.values(), lr=0.05, **options)
        shard = kind(parameters.values(), lr=0.05, **options)
        for step in range(3):
            for name, grad in values(seed=10 + step).items():
                reference[name].grad = grad
                parameters[name].grad = grad.clone()
            plain.step()
            shard.step()
            shard.zero_grad(set_to_none=step % 2 == 0)
        for name in SHAPES:
            same(parameters[name].detach(), reference[name].detach())
            for key, value in plain.state[reference[name]].items():
                found = shard.state[parameters[name]][key]
                if isinstance(value, torch.Tensor) and value.dim():
                    assert type(found) is ShardTensor, (kind, key)
                    same(found, value)


# -- what is refused ----------------------------------------------------------------------------------------------

REFUSED = [
    lambda p: p @ torch.ones(7, 2),
    lambda p: torch.ones(2, 5) @ p,
    lambda p: F.linear(torch.ones(2, 7), p),
    lambda p: F.embedding(torch.tensor([0]), p),
    lambda p: p[0],
    lambda p: p[:, 1],
    lambda p: p.t(),
    lambda p: p.view(-1),
    lambda p: p.flatten(),
    lambda p: p.sum(0),
    lambda p: p.mean(dim=1, keepdim=True),
    lambda p: p.norm(dim=0),
    lambda p: p.max(dim=0),
    lambda p: p.argmax(),
    lambda p: p.softmax(-1),
    lambda p: p.cumsum(0),
    lambda p: p.sort(),
    lambda p: p.median(),
    lambda p: torch.linalg.norm(p, 2),
    lambda p: torch.linalg.svdvals(p),
    lambda p: torch.stack([p, p]),
    lambda p: torch.cat([p, p]),
    lambda p: nn.utils.parameters_to_vector([p]),
    lambda p: list(p),
    lambda p: p.numpy(),
    lambda p: p.tolist(),
    lambda p: p.data_ptr(),
    lambda p: p.untyped_storage(),
    lambda p: p.__array__(),
    lambda p: nn.init.orthogonal_(p),
    lambda p: p.nonzero(),
    lambda p: torch.where(p.detach() > 0),
    lambda p: p[p > 0],
    lambda p: p.mul(torch.ones(2, 5, 7)),
    lambda p: torch.mul(torch.ones(5, 7), p.detach(), out=torch.empty(5, 7)),
    lambda p: torch.mvlgamma(p.detach() + 9, 2).sum(0),
    lambda p: p.cov(),
    lambda p: p.repeat(2, 1),
    lambda p: p.index_select(0, torch.tensor([0])),
    lambda p: p.unsqueeze(0),
]


def test_what_needs_the_whole_names_the_parameter_and_gathered():
    p = nn.Parameter(sharded({"head.weight": torch.randn(5, 7)}, 1, 2)["head.weight"])
    q = p.detach()
    for i, function in enumerate(REFUSED):
        for t in (p, q):
            with pytest.raises(NeedsGatherError, match=r"(?s)rank 1.*head\.weight.*engine\.gathered"):
                pytest.fail(f"case {i} gave {function(t)!r}")


def test_pickling_names_the_full_state_dict():
    p = nn.Parameter(sharded({"w": torch.randn(5, 7)}, 0, 2)["w"])
    for save in (pickle.dumps, lambda t: torch.save(t, io.BytesIO()), lambda t: torch.save({"w": t}, io.BytesIO())):
        with pytest.raises(ShardPicklingError, match=r'engine\.state_dict\(form="full"\)'):
            save(p)


def test_showing_one_is_not_collective():
    p = nn.Parameter(sharded({"w": torch.randn(5, 7), "s": torch.randn(())}, 1, 2, comm=None)["w"])
    s = sharded({"w": torch.randn(5, 7), "s": torch.randn(())}, 1, 2)["s"]
    text = f"{p} {p!r} {s} {[s]}"  # there is no process group here
    assert "w" in text and "(5, 7)" in text and "rank 1 of 2 holds [20, 35) of 35" in text


# -- copies and protocols -----------------------------------------------------------------------------------------


@ranks(2)
def test_deepcopy_is_independent_and_equal(rank, world_size):
    p = nn.Parameter(sharded(values(), rank, world_size)["matrix"])
    p.note = ["kept"]
    p.grad = values(seed=1)["matrix"]
    copied = copy.deepcopy({"a": p, "b": p})
    q = copied["a"]
    assert q is copied["b"] and q is not p and isinstance(q, nn.Parameter) and q.note == ["kept"]
    with torch.no_grad():
        p.zero_()
    same(q.detach(), values()["matrix"])
    same(q.grad, values(seed=1)["matrix"])
    with torch.no_grad():
        q.lerp_(p, 0.5)
    same(q.detach(), values()["matrix"] / 2)


@ranks(2, 3)
def test_inference_mode_reads_and_leaves_it_trainable(rank, world_size):
    p = nn.Parameter(sharded(values(), rank, world_size)["matrix"])
    w = values()["matrix"]
    with torch.inference_mode():
        same(p.norm(), w.norm())
        same(p.detach() * 2, w * 2)
        same(p.data, w)
        same(p.sum(), w.sum())
        assert p.shape == w.shape and p.isfinite().all()
        same(p.full_tensor().clone(), w)
    p.pow(2).sum().backward()
    same(p.grad, 2 * w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64])
@ranks(1, 3)
def test_full_tensor_is_exact_to_the_bit(rank, world_size, dtype):
    plain = values(dtype if not dtype.is_complex else torch.float32)
    plain = {name: t.to(dtype) for name, t in plain.items()}
    if dtype == torch.float32:
        plain["vector"][:4] = torch.tensor([-0.0, math.nan, math.inf, 5e-45])
    for name, shard in sharded(plain, rank, world_size).items():
        full = shard.full_tensor()
        assert type(full) is torch.Tensor and full.stride() == plain[name].stride() and not full.requires_grad
        a, b = (t.clone(memory_format=torch.contiguous_format).view(-1) for t in (full, plain[name]))
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@ranks(2)
def test_it_flattens_and_unflattens(rank, world_size):
    shard = sharded(values(), rank, world_size)["cube"]
    names, spec = shard.__tensor_flatten__()
    inner = {name: getattr(shard, name) for name in names}
    same(ShardTensor.__tensor_unflatten__(inner, spec, shard.shape, shard.stride()), values()["cube"])


@ranks(3)
def test_distributed_checkpoint_saves_and_loads_across_cuts(rank, world_size, tmp_path):
    import torch.distributed.checkpoint as dcp

    shards = sharded(values(), rank, world_size)
    dcp.save(dict(shards), checkpoint_id=tmp_path / "c")
    # Another cut: behind a further parameter. And plain tensors.
    moved = sharded({"first": torch.zeros(9), **values(seed=9)}, rank, world_size)
    moved.pop("first")
    dcp.load(dict(moved), checkpoint_id=tmp_path / "c")
    plain = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    dcp.load(plain, checkpoint_id=tmp_path / "c")
    for name, expected in values().items():
        same(moved[name], expected)
        torch.testing.assert_close(plain[name], expected, rtol=0, atol=0)
