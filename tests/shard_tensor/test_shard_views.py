"""Gradients and optimizer state: their views are shards in the same memory, and what needs all elements is computed from copies,
as under plain DDP. Nothing that is written is lost."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torch_shard
from tests.compat.harness import MLP, Pair, batch, plain_backward, same_grads
from tests.support.bad_input_helpers import Net, small, step
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from tests.support.shard_cases import COPIED_OUT, GATHERED, REFUSED, VIEWED
from tests.support.shard_helpers import GroupComm, join, placed, same, sharded, values
from torch_shard.errors import DivergenceError, NeedsGatherError
from torch_shard.shard_tensor.spec import ShardSpec
from torch_shard.shard_tensor.tensor import ShardTensor

# -- views, as properties over any number of ranks ------------------------------------------------------------------------


@st.composite
def view_of(draw, t):
    """A function that gives a view of a tensor like `t`."""
    dims = list(range(t.dim()))
    ways = ["flatten", "unsqueeze", "squeeze", "permute"] + (["select", "slice", "split", "mean"] if dims else [])
    way = draw(st.sampled_from(ways))
    if way == "flatten":
        return lambda a: a.view(-1)
    if way == "unsqueeze":
        dim = draw(st.integers(0, t.dim()))
        return lambda a: a.unsqueeze(dim)
    if way == "squeeze":
        return lambda a: a.squeeze()
    if way == "permute":
        order = draw(st.permutations(dims))
        return lambda a: a.permute(order)
    dim = draw(st.sampled_from([0, *dims]))
    if way == "split":
        size = draw(st.integers(1, 3))
        return lambda a: a.split(size, dim)[-1]
    first = draw(st.integers(0, max(t.shape[dim] - 1, 0)))
    if way == "select" and t.shape[dim]:
        return lambda a: a.select(dim, first)
    length = draw(st.integers(0, t.shape[dim] - min(first, t.shape[dim])))
    return lambda a: a.narrow(dim, min(first, t.shape[dim]), length)


@given(placed(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_view_is_cut_from_the_shards_or_refused_and_an_edit_of_it_is_one_of_the_tensor(case, data):
    full, layout = case
    ranks_ = layout.owners(1) or range(1)
    shards = [ShardTensor.from_full(full, ShardSpec(layout, 1, r, GroupComm(layout.world_size, r))) for r in ranks_]
    plain, views = full, shards
    for _ in range(data.draw(st.integers(1, 3))):
        way = data.draw(view_of(plain))
        try:
            plain = way(plain)
        except RuntimeError as error:
            for one in views:
                with pytest.raises(RuntimeError, match=str(error)[:30]):
                    way(one)
            return
        if not without_gaps(plain):
            with torch._C.DisableTorchFunctionSubclass(), pytest.raises(NeedsGatherError, match="sharded w"):
                way(views[0])
            return
        views = [way(one) for one in views]
    for one in views:
        assert type(one) is ShardTensor and one.shape == plain.shape and one.stride() == plain.stride()
    assert torch.equal(join([one.to_local() for one in views], plain), plain)
    versions = [(t._version, t.to_local()._version) for t in shards]
    for one in (plain, *views):
        one.mul_(3).add_(1)
    assert torch.equal(join([t.to_local() for t in shards], full), full)
    for t, (outer, inner) in zip(shards, versions, strict=True):
        assert t._version == outer + 2 and t.to_local()._version == inner + 2


def without_gaps(t):
    memory = torch.arange(t.untyped_storage().nbytes() // t.element_size())
    places = memory.as_strided(t.shape, t.stride(), t.storage_offset()).flatten().sort().values
    return torch.equal(places, places[:1] + torch.arange(t.numel()))


# -- what each function gives ---------------------------------------------------------------------------------------------


def equal(ours, plain, kind):
    """Assert equality of results, nested ones too, in which sharded tensors are of class `kind`."""
    if isinstance(plain, (tuple, list)):
        assert len(ours) == len(plain)
        for one, other in zip(ours, plain, strict=True):
            equal(one, other, kind)
    else:
        assert type(ours) is kind
        same(ours, plain)


@ranks(2, exhaustive=(1, 3))
def test_views_are_sharded_and_what_is_new_in_plain_torch_is_plain(rank, world_size):
    plain = values()["matrix"]
    shard = sharded(values(), rank, world_size)["matrix"]
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            for function in VIEWED:
                equal(function(shard), function(plain), ShardTensor)
            for function in GATHERED:
                equal(function(shard), function(plain), torch.Tensor)
            for function in COPIED_OUT:
                torch.testing.assert_close(function(shard), function(plain), rtol=0, atol=0)
    same(shard, plain)


@ranks(2)
def test_what_no_shards_have_is_refused_and_nothing_changes(rank, world_size):
    plain = values()["matrix"]
    shard = sharded(values(), rank, world_size)["matrix"]
    edits = [
        lambda a: a[:, 0].zero_(),
        lambda a: nn.functional.embedding(torch.tensor([0, 1]), a, max_norm=0.1),
        lambda a: a[1::2].mul_(2),
    ]
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for i, function in enumerate([*REFUSED, *edits]):
            with mode(), pytest.raises(NeedsGatherError, match=r"sharded matrix.*gathered"):
                pytest.fail(f"case {i} gave {function(shard)!r}")
    same(shard, plain)


@ranks(2, 3)
def test_one_element_is_read_and_written_like_a_plain_one(rank, world_size):
    for name in ("matrix", "vector", "cube"):
        a, w = sharded(values(), rank, world_size)[name], values()[name]
        for place in (0, 3, w.numel() - 1):
            one, number = a.view(-1)[place], w.view(-1)[place]
            assert float(one) == one.item() == number.item() and one.shape == ()
            assert (one > 0) == (number > 0) and bool(one < 1) == bool(number < 1) and f"{one:.2f}" == f"{number:.2f}"
            torch.testing.assert_close(one, number)
            assert torch.equal(one * torch.ones(2), number * torch.ones(2))
        for t in (a, w):
            t.view(-1)[1] *= 2
            t.view(-1)[2:5] -= t.view(-1)[0]
            t[-1] = t[0]
            t[0].zero_()
            t[1].fill_(3.0)[..., None].add_(t[1, ..., None])
            t -= t[1].clone()
            t[t > t.view(-1)[4]] = 0.25
        same(a, w)


@ranks(2)
def test_a_plain_tensor_with_a_gradient_gets_that_of_plain_torch(rank, world_size):
    a, w = sharded(values(), rank, world_size)["matrix"], values()["matrix"]
    x, y = (torch.linspace(-1, 1, 35).view(5, 7).requires_grad_() for _ in range(2))
    for t, own in ((a, x), (w, y)):
        ((own * t).sum() * t.view(-1)[0] + (own @ t.t()).pow(2).sum()).backward()
    same(x.grad, y.grad)
    with pytest.raises(NeedsGatherError):  # it would be recorded
        a[0] = x[0]
    same(a, w)


@ranks(2)
def test_many_tensors_are_gathered_in_one_message_from_each_rank(rank, world_size):
    comm = GroupComm(world_size, rank)
    shards, plain = sharded(values(), rank, world_size, comm), values()
    del shards["image"], plain["image"]  # whose elements would have to be reordered
    same(torch.cat([t.reshape(-1) for t in shards.values()]), torch.cat([t.reshape(-1) for t in plain.values()]))
    assert comm.calls == 1 + world_size
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        a, w = shards["matrix"].to(dtype), plain["matrix"].to(dtype)
        same(a.view(-1) @ (a * 2).view(-1), w.view(-1) @ (w * 2).view(-1))
        same(torch.vdot(a[1], a[1] + 1), torch.vdot(w[1], w[1] + 1))


# -- of an engine ---------------------------------------------------------------------------------------------------------


def grads_of(model):
    return [p.grad for p in model.parameters()]


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0)


READS = {
    "vector": lambda m: torch.cat([g.view(-1) for g in grads_of(m)]),
    "parameters_to_vector": lambda m: nn.utils.parameters_to_vector(grads_of(m)),
    "norms": lambda m: torch.stack([g.reshape(-1).norm() for g in grads_of(m)]),
    "norms of rows": lambda m: torch.cat([g.flatten(1).norm(dim=1) for g in grads_of(m) if g.dim() > 1]),
    "rows": lambda m: torch.stack([row.abs().max() for g in grads_of(m) for row in g]),
    "numbers": lambda m: torch.tensor(
        [[float(g.view(-1)[0]), g.flatten()[-1].item(), g[0].sum()] for g in grads_of(m)]
    ),
    "cosines": lambda m: torch.stack([cosine(g, g.sign() + g) for g in grads_of(m)]),
    "covariance": lambda m: m.head.weight.grad @ m.head.weight.grad.T,
    "histogram": lambda m: m.inp.weight.grad.histc(5) + m.inp.weight.grad.quantile(0.5),
    "with its parameter": lambda m: torch.dot(m.inp.weight.detach().flatten(), m.inp.weight.grad.flatten()),
    "noise scale": lambda m: torch.stack([g.var(dim=0).sum() / g.mean(dim=0).pow(2).sum() for g in grads_of(m)[::4]]),
}


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_optim", "no_shard", "hybrid_shard")])
@ranks(2)
def test_what_is_read_from_gradients_is_what_plain_ddp_gives(rank, world_size, strategy):
    pair = Pair(MLP, rank, world_size, strategy=strategy, **({"shard_size": 1} if "hybrid" in strategy else {}))
    for number in range(2):
        pair.backward(plain_backward, batch(rank, number))
        for name, read in READS.items():
            ours, plain = pair.each(read)
            torch.testing.assert_close(ours, plain, msg=lambda text, name=name: f"{name}: {text}")
        same_grads(pair.model, pair.plain)
        pair.update()
    pair.check()


def edit(model):
    block = model.blocks[0]
    model.inp.weight.grad[0].zero_()
    model.head.weight.grad[1:3] *= 0.5
    model.head.bias.grad.view(-1)[0] *= 2
    block.up.weight.grad[2] = torch.arange(7.0, dtype=torch.float64)
    block.up.weight.grad.t().mul_(1.5)
    block.down.weight.grad[0] = block.down.weight.grad[-1]
    block.norm.weight.grad -= block.norm.weight.grad[0].clone()
    vector = nn.utils.parameters_to_vector(p.grad for p in model.blocks[1].parameters())
    vector -= vector.mean()
    nn.utils.vector_to_parameters(vector, [p.grad for p in model.blocks[1].parameters()])
    model.blocks[2].up.weight.grad = model.blocks[2].up.weight.grad.view(-1).mul(3).view_as(model.blocks[2].up.weight)
    for row in model.blocks[2].down.weight.grad:
        row.div_(row.norm())


@pytest.mark.parametrize("offload", [None, "cpu"])
@ranks(2, exhaustive=(3,))
def test_edits_of_views_count_in_clipping_and_in_the_step(rank, world_size, offload):
    adamw = lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)  # noqa: E731
    pair = Pair(MLP, rank, world_size, optimizer=adamw, offload=offload)
    for number in range(3):
        pair.backward(plain_backward, batch(rank, number))
        pair.engine.clip_grad_norm_(1e9)  # the norm that there was is known by now
        pair.each(edit)
        same_grads(pair.model, pair.plain)
        norm = pair.engine.clip_grad_norm_(0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1))
        pair.update()
        for model, optimizer in ((pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer)):
            optimizer.state[model.head.weight]["exp_avg"][0].zero_()
            optimizer.state[model.inp.weight]["exp_avg_sq"].view(-1)[3:9] = 0.5
    pair.check()


@ranks(2)
def test_a_view_keeps_a_gradient_that_was_cleared(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    kept = []
    for number in range(3):
        pair.backward(plain_backward, batch(rank, number))
        kept.append(pair.each(lambda m: [p.grad.view(-1)[1:] for p in m.parameters()]))
        pair.update()
    for ours, plain in kept:
        for one, other in zip(ours, plain, strict=True):
            same(one, other, rtol=1e-9, atol=1e-10)


@ranks(2)
def test_gradients_that_are_not_reduced_have_no_views(rank, world_size):
    model = Net()
    engine = torch_shard.shard(model, **small)
    with engine.no_sync():
        step(model)
    for read in (lambda g: g.view(-1), lambda g: g[0], lambda g: g[:, 0], lambda g: g.t()):
        with pytest.raises(NeedsGatherError, match=r"left\.weight"):
            read(model.left.weight.grad)
    grad = model.left.weight.grad
    same(torch.cat([grad, grad]), torch.cat([grad.full_tensor()] * 2))
    step(model)
    assert type(model.left.weight.grad[0]) is ShardTensor


ROWS = torch.tensor([True, False, True, True])
INDEXED = {
    "rows by a mask": lambda g: g.data.__setitem__((ROWS, slice(None)), g.data[ROWS, :].fill_(0)),
    "a column": lambda g: g.__setitem__((slice(None), 1), 4.0),
    "rows by numbers": lambda g: g.__setitem__([0, 2], 7.0),
    "elements": lambda g: g.__setitem__(
        (torch.tensor([0, 3]), torch.tensor([1, 2])), torch.tensor([5.0, 6.0]).to(g.dtype)
    ),
    "of a view": lambda g: g.view(-1).__setitem__(torch.tensor([2, 9]), 0.0),
    "index_fill_": lambda g: g.index_fill_(1, torch.tensor([1]), 3.0),
    "scatter_add_": lambda g: g.scatter_add_(0, torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4).to(g.dtype)),
    "masked_scatter_": lambda g: g.masked_scatter_(g > 0, torch.arange(16).to(g.dtype)),
}


@pytest.mark.parametrize("edit", INDEXED)
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_optim", "no_shard")])
@ranks(2, exhaustive=(3,))
def test_elements_of_a_gradient_that_indices_choose_are_edited(rank, world_size, strategy, edit):
    model = Net()
    plain = copy.deepcopy(model)
    torch_shard.shard(model, strategy=strategy, **small)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    for _ in range(2):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            step(m)
            INDEXED[edit](m.left.weight.grad)
            INDEXED[edit](m.right.weight.grad)
            optimizer.step()
            optimizer.zero_grad()
    for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
        same(ours.full_tensor(), other)
    INDEXED[edit](optimizers[0].state[model.left.weight]["momentum_buffer"])
    INDEXED[edit](optimizers[1].state[plain.left.weight]["momentum_buffer"])
    same(
        optimizers[0].state[model.left.weight]["momentum_buffer"].full_tensor(),
        optimizers[1].state[plain.left.weight]["momentum_buffer"],
    )


class Rows(torch.optim.Optimizer):
    """Steps on rows; no engine knows it."""

    def __init__(self, params, use):
        super().__init__(params, {})
        self.use = use

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.5)
                self.use(p, p.grad)


@ranks(2)
def test_an_optimizer_that_the_engine_does_not_know_is_to_be_declared(rank, world_size):
    model = Net()
    torch_shard.shard(model, **small)
    step(model)
    for use in (lambda p, g: p.view(-1).sub_(g.view(-1)), lambda p, g: p.sub_(g[0]), lambda p, g: p.sub_(g.sum(0))):
        with pytest.raises(NeedsGatherError, match=r"Rows.*register"):
            Rows(model.parameters(), use).step()
        assert type(model.left.weight.grad[0]) is ShardTensor  # outside of the step


@ranks(2)
def test_ranks_that_gather_different_gradients_are_an_error(rank, world_size):
    model = Net()
    torch_shard.shard(model, **small)
    step(model)
    grad = (model.left if rank else model.right).weight.grad
    with pytest.raises(DivergenceError, match=r"rank \d: cat of the sharded .*collective"):
        torch.cat([grad, grad])


@ranks(2)
def test_a_copy_of_a_view_is_its_own(rank, world_size):
    shard = sharded(values(), rank, world_size)["matrix"]
    for other in (copy.deepcopy(shard[2]), shard[2].clone(), shard[2] * 1):
        other.zero_()
    same(shard, values()["matrix"])
    assert "matrix" in repr(shard[2]) and shard[2].full_tensor().shape == (7,)
