"""Which functions ask for the gathered parameter, and what happens with it."""

import weakref

import pytest
import torch
from torch import nn

from tests.support.shard_cases import NEEDS_FULL, REDUCTIONS, UNARY
from tests.support.shard_helpers import sharded
from torch_shard.comm.small_collectives import ScalarComm
from torch_shard.comm.watchdog import Watchdog
from torch_shard.errors import NeedsGatherError
from torch_shard.shard_tensor.tensor import ShardTensor

F = nn.functional


class AskedUnit:
    """Stands in for a unit and its runtime: notes what it is asked, and hands out the full parameter if told to."""

    in_forward = False

    def __init__(self, full):
        self.leaf = nn.Parameter(full)
        self.is_summoned = False
        self.gathers = self.casts = self.rounding = False
        self.host = None
        self.runtime = self.on_demand = self
        self.asked = []
        self.done = []

    def unsharded_param_of(self, param):
        return self.leaf

    def begin(self, unit, param, func, local_ok, dtypes):
        self.asked.append((getattr(func, "__name__", ""), local_ok))
        return self.leaf if self.is_summoned or (self.gathers and not local_ok) else None

    def end(self, unit, result, copies, name):
        self.done.append(result)

    def check_grad_reader(self):
        pass


@pytest.fixture
def unit():
    return AskedUnit(torch.randn(5, 7))


@pytest.fixture
def p(unit):
    param = nn.Parameter(sharded({"w": unit.leaf.detach()}, 0, 1, ScalarComm(Watchdog(0, [0], 30.0, "")))["w"])
    param._shard_state.unit_ref = weakref.ref(unit)
    return param


def test_arithmetic_and_scalar_reductions_are_told_to_be_local(unit, p):
    functions = [*UNARY, *REDUCTIONS, lambda a: torch._foreach_norm([a]), lambda a: nn.init.trunc_normal_(a.data)]
    for function in functions:
        with torch.no_grad():
            function(p)
    p.data.mul_(2).copy_(torch.ones(7))
    with torch.no_grad():
        p[p > 0] = 1.0
        torch.maximum(p, p * 2, out=p.data)
    assert unit.asked
    assert [name for name, local in unit.asked if not local] == []


def test_what_needs_the_full_parameter_is_told_to_be_not_local(unit, p):
    for function in NEEDS_FULL:
        unit.asked.clear()
        # Some first make another tensor, which has no unit to ask, or are refused without asking.
        if not _is_answered(function, p):
            told = {name: local for name, local in unit.asked if name not in ("new_empty", "gt", "add")}
            assert not all(told.values()) or not told
    row = torch.ones(7, requires_grad=True)
    unit.asked.clear()
    with pytest.raises(NeedsGatherError):
        p * row
    assert unit.asked == [("mul", False)]


def _is_answered(function, p):
    """Whether it asks for what was computed from the parameter, which can be gathered by itself."""
    try:
        result = function(p)
    except NeedsGatherError:
        return False
    plain = function(p.full_tensor())
    for ours, expected in zip(*(r if isinstance(r, tuple) else (r,) for r in (result, plain)), strict=True):
        assert type(ours) is torch.Tensor and torch.equal(ours, expected)
    return True


@pytest.mark.parametrize("recording", [True, False])
def test_a_plain_tensor_of_more_than_one_number_needs_the_full_parameter(unit, p, recording):
    x = torch.ones(7)
    out_of_place = [lambda: p * x, lambda: torch.where(x > 0, p, 0.0), lambda: p.detach().add(x), lambda: x - p]
    out_of_place += [
        lambda: torch._foreach_mul([p.detach()], [torch.ones(5, 7)]),
        lambda: torch.equal(p, p.full_tensor()),
    ]
    local = [lambda: p.data.mul_(x), lambda: p.detach().lerp_(torch.ones(5, 7), 0.5), lambda: p.data.copy_(x)]
    local += [lambda: p.detach() * torch.tensor(2.0), lambda: p.to(x), lambda: torch.zeros_like(p) * x]
    unit.gathers = True
    with torch.set_grad_enabled(recording):
        for functions, expected in ((out_of_place, False), (local, True)):
            for function in functions:
                unit.asked.clear()
                result = function()
                assert not unit.asked or unit.asked[-1][1] is expected
                assert unit.asked or expected
                assert (type(result) is ShardTensor) is expected


@pytest.mark.parametrize("recording", [True, False])
def test_what_was_computed_from_a_parameter_is_gathered_where_shards_will_not_do(unit, p, recording):
    w = p.full_tensor()
    x = torch.randn(5, 7)
    with torch.set_grad_enabled(recording):
        for compute in (lambda a: a * 2, lambda a: (a.detach() + 1).detach().abs(), lambda a: a.double().float().data):
            derived = compute(p)
            assert type(derived) is type(derived * 2) is ShardTensor
            for use in (lambda a: a @ x.t(), lambda a: a * x, lambda a: a.sum(0), lambda a: torch.cat([a, a])):
                result = use(derived)
                assert type(result) is torch.Tensor and torch.equal(result, use(compute(w)))
        # Gradients and state have no output computed with them: they stay on shards.
        state = torch.zeros_like(p).add_(1)
        assert type(state * x) is type(torch.addcmul(state, p.detach(), x)) is ShardTensor
        with pytest.raises(NeedsGatherError):
            (p.detach() * 2)[0] = 1.0


def test_functional_random_numbers_leave_the_parameter_alone(unit, p):
    unit.gathers = True
    before = p.full_tensor()
    with torch.no_grad():
        torch.manual_seed(0)
        drawn = [torch.bernoulli(p.sigmoid()), torch.normal(p, 1.0), torch.normal(p, p.abs())]
        torch.manual_seed(0)
        again = [torch.bernoulli(before.sigmoid()), torch.normal(before, 1.0), torch.normal(before, before.abs())]
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))
    assert torch.equal(p.full_tensor(), before)


def test_reading_metadata_asks_nothing(unit, p):
    _ = p.shape, p.dtype, p.device, p.ndim, p.requires_grad, p.grad, p.is_leaf, p.grad_fn, p.numel(), p.size(0), len(p)
    _ = p.data, p.detach(), p.is_floating_point(), hash(p), repr(p), p.stride(), p.is_contiguous(), p._version
    p.requires_grad_(False).requires_grad_()
    p.grad = torch.ones(5, 7)
    p.data = torch.ones(5, 7)
    x = torch.ones(5, 7, dtype=torch.float64)
    assert x.to(p).dtype == x.type_as(p).dtype == torch.result_type(p, 2) == torch.float32
    assert torch.ones(35).view_as(x).expand_as(p).reshape_as(p).shape == (5, 7)
    assert unit.asked == []


def test_the_gathered_parameter_takes_the_place_and_is_given_back(unit, p):
    unit.gathers = True
    x = torch.randn(2, 7)
    result = F.linear(x, p)
    assert torch.equal(result, F.linear(x, unit.leaf))
    assert len(unit.done) == 1 and unit.done[0] is result
    result.sum().backward()
    assert unit.leaf.grad is not None and p.grad is None
    # In lists, several at once, and by keyword.
    assert torch.cat([p, p]).shape == (10, 7) and F.linear(input=x, weight=p).shape == (2, 5)
    # A detached alias gets a detached leaf.
    assert not F.linear(x, p.detach()).requires_grad and not F.linear(x, p.data).requires_grad
    unit.done.clear()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        F.linear(torch.randn(2, 3), p)
    assert unit.done == [None]  # also when the function raised


def test_while_gathered_everything_runs_on_the_full_parameter(unit, p):
    unit.is_summoned = True
    with torch.no_grad():
        q = p
        q += 1
        assert q is p and p.mul_(2) is p  # so that `module.weight += 1` keeps the parameter
        assert p[0].shape == (7,) and isinstance(p.numpy().shape, tuple)
        p[0, 0] = 5.0
    assert unit.leaf[0, 0] == 5 and type(p.data) is torch.Tensor
    p.data = torch.zeros(5, 7)
    assert not unit.leaf.any()
    p.data.fill_(3)
    assert (unit.leaf == 3).all()
    unit.leaf.grad = torch.ones(5, 7)
    assert p.grad is unit.leaf.grad
    p.grad = None
    assert unit.leaf.grad is None


def test_hooks_are_forwarded_to_the_unit(unit, p):
    registered = []
    unit.register_grad_hook = lambda param, fn: registered.append((param, fn)) or weakref.finalize(unit, int)
    unit.register_post_accumulate_hook = lambda param, fn: registered.append((param, fn))
    seen = []
    p.register_hook(seen.append)
    p.register_post_accumulate_grad_hook(print)
    assert [fn for _, fn in registered] == [seen.append, print] and all(param is p for param, _ in registered)
    (p * 2).sum().backward()  # local arithmetic does not reach the leaf, where the unit's hook sits
    assert len(seen) == 1 and type(seen[0]) is ShardTensor


def test_a_unit_that_is_gone_is_not_asked(unit, p):
    p._shard_state.unit_ref = weakref.ref(AskedUnit(torch.ones(1)))
    assert (p * 2).shape == (5, 7)
    with pytest.raises(NeedsGatherError):
        p @ p
