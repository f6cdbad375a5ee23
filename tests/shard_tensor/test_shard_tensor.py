"""ShardTensor: what it answers is what plain torch answers for the full tensor, or it raises."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.ranks import ranks
from tests.support.shard_cases import NEEDS_FULL, UNARY
from tests.support.shard_helpers import SHAPES, GroupComm, join, placed, same, sharded, values
from torch_shard.errors import NeedsGatherError, ShardPicklingError
from torch_shard.layout.flat_layout import FlatLayout, ParamMeta
from torch_shard.shard_tensor.spec import ShardSpec, broadcast_shard, same_cut, shard_of_full
from torch_shard.shard_tensor.tensor import ShardTensor

# -- slicing, as properties over any number of ranks --------------------------------------------------------------


@given(placed())
@settings(max_examples=100, deadline=None)
def test_the_ranks_shards_together_are_the_tensor(case):
    full, layout = case
    ranks_ = layout.owners(1) or range(1)
    specs = [ShardSpec(layout, 1, rank, GroupComm(layout.world_size, rank)) for rank in ranks_]
    assert torch.equal(join([shard_of_full(full, spec) for spec in specs], full), full)
    # Strides of the operand do not matter, only its elements.
    other = full.clone(memory_format=torch.contiguous_format)
    assert torch.equal(join([shard_of_full(other, spec) for spec in specs], full), full)


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
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises(NeedsGatherError, match="sharded w"):
            shards[0] + operand
        return
    results = [shard + operand for shard in shards]
    assert all(isinstance(r, ShardTensor) and r.shape == full.shape for r in results)
    assert results[0].dtype == expected.dtype
    assert torch.equal(join([r.to_local() for r in results], full), expected)


def test_slicing_an_expanded_operand_does_not_materialise_it():
    layout = FlatLayout.build([ParamMeta("w", (1 << 20, 1 << 20), (1 << 20, 1))], 4, 4096)
    spec = ShardSpec(layout, 0, 17, GroupComm(4096, 17))
    assert shard_of_full(torch.ones(()).expand(spec.shape), spec).untyped_storage().nbytes() == 4
    assert broadcast_shard(torch.tensor(2.0), spec, "mul").dim() == 0


# -- arithmetic ---------------------------------------------------------------------------------------------------


@ranks(1, 2, exhaustive=(3,))
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


@ranks(2)
def test_a_tensor_or_a_part_by_a_mask_is_filled_with_a_plain_number_of_any_dtype(rank, world_size):
    plain, mask = values(), values(seed=1)
    shards = sharded(plain, rank, world_size)
    for name in ("matrix", "cube", "image", "none", "scalar"):
        for number in (torch.tensor(7.5), torch.tensor(2.5, dtype=torch.float64), torch.tensor(3)):
            if name != "scalar":  # a mask of no dimension is no index in torch
                for a in (plain[name], shards[name]):
                    a[mask[name] > number / 10] = number
                same(shards[name], plain[name])
            for fill in (lambda a, n=number: a.masked_fill(a < 2, n), lambda a, n=number: a.fill_(2 * n)):
                same(fill(shards[name]), fill(plain[name]))


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
def test_two_shard_tensors_that_are_cut_differently_are_not_mixed(rank, world_size):
    comm = GroupComm(world_size, rank)
    plain = {"first": torch.randn(6, 5), "second": torch.randn(6, 5)}
    shards = sharded(plain, rank, world_size, comm)
    again = sharded(plain, rank, world_size, comm)
    assert not same_cut(shards["first"]._spec, shards["second"]._spec)
    same(shards["first"] + again["first"], plain["first"] * 2)
    calls = comm.calls
    for function in (torch.add, torch.equal, lambda a, b: a.copy_(b), lambda a, b: torch._foreach_add_([a], [b])):
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises(NeedsGatherError, match="sharded first"):
            function(shards["first"], shards["second"])
    with pytest.raises(NeedsGatherError, match="sharded first"):
        torch._foreach_add_([shards["first"]], [shards["second"]])
    assert comm.calls == calls
    same(shards["first"], plain["first"])


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
    for result, expected in zip(torch._foreach_pow(2.0, a), torch._foreach_pow(2.0, c), strict=True):
        same(result, expected)
    mixed = torch._foreach_mul([shards["matrix"], torch.ones(3)], [torch.full((5, 7), 2.0), torch.ones(3)])
    same(mixed[0], plain["matrix"] * 2)
    assert type(mixed[1]) is torch.Tensor


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


@ranks(1, 2, exhaustive=(3,))
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


# -- what is refused ----------------------------------------------------------------------------------------------


def test_what_needs_the_full_parameter_names_it_and_gathered():
    p = nn.Parameter(sharded({"head.weight": torch.randn(5, 7)}, 1, 2)["head.weight"])
    for i, function in enumerate(NEEDS_FULL):
        with pytest.raises(NeedsGatherError, match=r"(?s)rank 1.*head\.weight.*engine\.gathered"):
            pytest.fail(f"case {i} gave {function(p)!r}")


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
