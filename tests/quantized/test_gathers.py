"""Parameters that are gathered as 8-bit codes: every rank computes with the decoded ones, what is stored stays exact."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.compat.harness import MLP, batch, loss_of, plain_backward
from tests.precision.harness import same_bits
from tests.quantized.harness import BF16, BLOCK, BOTH, PARAMETERS, SHARDED, SMALL, Reduced, as_gathered, inputs, sharded
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import Precision, Quantized
from torch_shard.errors import UnitStateError


@ranks(2, exhaustive=(3, 4, 5))  # five gather by an all-gather
@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_a_model_computes_with_the_decoded_weights_of_all_ranks(kind, strategy, rank):
    model, plain, engine = sharded(Quantized(kind, **SMALL), strategy=strategy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(3):
        x = inputs(rank, step)
        low = as_gathered(plain, engine, kind)
        out = model(x)
        same_bits(out, low(x))
        loss_of(out).backward()
        loss_of(low(x)).backward()
        world = dist.get_world_size()
        for name, p in plain.named_parameters():
            p.grad = low.get_parameter(name).grad * (1.0 / world)
            parts = [torch.empty_like(p.grad) for _ in range(world)]
            dist.all_gather(parts, p.grad)
            found, p.grad = model.get_parameter(name).grad, sum(parts[1:], parts[0])
            if world < 5:
                same_bits(found, p.grad, name)
            else:  # torch adds five shards in an order of its own
                torch.testing.assert_close(found.full_tensor(), p.grad, rtol=1e-6, atol=1e-7)
                p.grad = found.full_tensor()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        x = inputs(rank, 9)
        same_bits(model(x), as_gathered(plain, engine, kind)(x))
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        same_bits(p, q, name)  # stored in full precision


@ranks(2)
@pytest.mark.parametrize("kind", ["int8", *exhaustive("float8")])
def test_codes_are_made_of_the_stored_values_and_decoded_to_the_dtype_of_the_computation(kind, rank):
    quantized = Quantized(kind, **SMALL)
    model, plain, engine = sharded(quantized, precision=Precision(BF16))
    x = inputs(rank, 0)
    same_bits(model(x), as_gathered(plain, engine, kind, BF16)(x.to(BF16)))
    low, plain, engine = sharded(quantized, lambda: MLP().to(BF16))
    wide = copy.deepcopy(plain).float()
    same_bits(low(x.to(BF16)), as_gathered(wide, engine, kind, BF16)(x.to(BF16)))


class Noting(nn.Linear):
    """Keeps a copy of the weight that its forward computed with."""

    seen: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.weight.detach().clone()
        return super().forward(x)


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 20), Noting(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


@ranks(2, exhaustive=(3, 5))
def test_a_step_sends_the_bytes_that_the_formula_says(rank, world_size):
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(120, 120, bias=False) for _ in range(3)))

    quantized = Quantized("int8", "int8", block=256)
    model, _, engine = sharded(quantized, build, units=[nn.Linear])
    one = -(-(120 * 120 // world_size + 4 * math.ceil(120 * 120 / world_size / 256)) // 16) * 16
    exact, _, plainly = sharded(None, build, units=[nn.Linear])
    for step in range(3):
        sent = []
        for each, eng in ((model, engine), (exact, plainly)):
            before = eng.bytes_sent
            each(batch(rank, step, 4, 120).float()).pow(2).sum().backward()
            sent.append(eng.bytes_sent - before)
        # Three are gathered for forward and one more time for backward, which needs nothing of the first and finds the last
        # one there; three are reduced.
        assert sent[0] == 7 * (world_size - 1) * one
        assert sent[1] == 7 * (world_size - 1) * 120 * 120 * 4 // world_size
        assert sent[0] == pytest.approx(sent[1] * (1 + 4 / 256) / 4, rel=0.01)


@ranks(2)
def test_what_is_stored_is_read_and_saved_exactly(rank, tmp_path):
    model, plain, engine = sharded(BOTH)
    values = {name: p.detach().clone() for name, p in plain.named_parameters()}
    model(inputs(rank, 0))
    with engine.gathered():
        for name, p in model.named_parameters():
            same_bits(p.detach(), values[name], name)
    for name, value in engine.state_dict(form="full", rank0_only=False).items():
        same_bits(value, values[name], name)
    for name, p in model.named_parameters():
        same_bits(p.detach(), values[name], name)
    with engine.gathered(write=True), torch.no_grad():
        model.head.weight[0, 0] = 3.0
    values["head.weight"][0, 0] = 3.0
    engine.save(tmp_path / "saved")
    other, _, unquantized = sharded(None)
    unquantized.load(tmp_path / "saved")
    for name, p in other.named_parameters():
        same_bits(p.detach(), values[name], name)
    engine.load(tmp_path / "saved")
    engine.save_full(tmp_path / "full.pt")
    for name, value in torch.load(tmp_path / "full.pt", weights_only=True).items():
        same_bits(value, values[name], name)
    engine.close()
    for name, p in model.named_parameters():
        same_bits(p.detach(), values[name], name)


@ranks(2)
def test_a_backward_inside_gathered_is_an_error(rank):
    model, _, engine = sharded(PARAMETERS)
    with engine.gathered(), pytest.raises(UnitStateError, match=r"ShardConfig\.quantized"):
        plain_backward(model, inputs(rank, 0))


def in_place(weight: torch.Tensor) -> None:
    weight[::4] = 0.75


def through_data(weight: torch.Tensor) -> None:
    weight.data[::4] = 0.75


def moving_the_scale(weight: torch.Tensor) -> None:
    """The next codes of its block would be others."""
    weight[1, 1] = 50.0


class Edited(nn.Module):
    """Its forward edits some of its weights, and uses them twice."""

    def __init__(self, edit: Any = in_place) -> None:
        super().__init__()
        self.edit = edit
        self.layer, self.head = nn.Linear(5, 40), nn.Linear(40, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.edit(self.layer.weight)
        return self.head(torch.tanh(self.layer(self.layer(x)[:, :5])))


@ranks(2)
@pytest.mark.parametrize("edit", [in_place, through_data, moving_the_scale])
@pytest.mark.parametrize("dtype", [None, *exhaustive(BF16)])
@pytest.mark.parametrize("debug", [True, *exhaustive(False)])
def test_an_edit_in_a_forward_is_stored_exactly_and_alone(edit, dtype, debug, rank):
    """In debug mode every use is compared with what was gathered."""
    model, plain, _ = sharded(PARAMETERS, lambda: Edited(edit), precision=dtype, debug=debug, units=[nn.Linear])
    expected = plain.layer.weight.detach().clone()
    edit(expected)
    for step in range(3):  # the first is compared in any case; later ones find the edit of the first
        loss_of(model(inputs(rank, step))).backward()
        same_bits(model.layer.weight.detach(), expected)
        with torch.no_grad():
            model(inputs(rank, step))
        same_bits(model.layer.weight.detach(), expected)
    same_bits(model.head.weight.detach(), plain.head.weight.detach())


class Undecided(Edited):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.before = self.layer.weight[1, 1].clone()
            self.layer.weight[1, 1] = 50.0
            self.layer.weight[1, 1] = self.before
        return self.head(self.layer(x))


@ranks(2)
def test_an_edit_may_be_taken_back(rank):
    """To the very value that was gathered."""
    model, plain, _ = sharded(PARAMETERS, Undecided, units=[nn.Linear])
    model(inputs(rank, 0))
    expected = plain.layer.weight.detach().clone()
    assert model.before != expected[1, 1]
    expected[1, 1] = model.before
    same_bits(model.layer.weight.detach(), expected)


class Reaching(nn.Linear):
    """Its forward edits this rank's slice, past the weight that it computes with."""

    sharded: list[Any]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sharded[0].to_local()[0] = 50.0
        return super().forward(x)


@ranks(2)
def test_an_edit_of_slices_in_a_forward_changes_no_others(rank):
    """The block has another scale then, so that its codes would be others; they are compared in the first forwards."""
    model, _, _ = sharded(PARAMETERS, lambda: nn.Sequential(Reaching(5, 40), nn.Linear(40, 3)), units=[nn.Linear])
    model[0].sharded = [model[0].weight]
    expected = model[0].weight.to_local().clone()
    expected[0] = 50.0
    for step in range(2):
        with torch.no_grad():
            model(inputs(rank, step))
        same_bits(model[0].weight.to_local(), expected)


@ranks(2)
@pytest.mark.parametrize("precision", [None, Precision(BF16, keep=["second"])])
def test_outside_forwards_stored_values_are_read_and_edited(precision, rank):
    model, plain, _ = sharded(PARAMETERS, Watched, precision=precision, unit_bytes=1 << 20)
    with torch.no_grad():
        for each in (model, plain):
            each.second.weight.div_(each.second.weight.norm(dim=1, keepdim=True))
            each.first.weight[3:] = each.first.weight[:2].mean(0)
            each.second.weight.addmm_(torch.ones(3, 2), torch.ones(2, 20))
        x = batch(rank, 0, 4, 20).float()
        same_bits(*(nn.functional.linear(x, each.second.weight) for each in (model, plain)))
    same_bits(model.first.weight.detach(), plain.first.weight)
    # The norms of whole rows: nothing of a code is in them.
    same_bits(model.second.weight.detach(), plain.second.weight)


@ranks(2)
def test_a_weight_that_the_loss_computes_with_is_the_decoded_one(rank):
    model, plain, engine = sharded(PARAMETERS, Watched, units=[nn.Linear])
    low = as_gathered(plain, engine)
    x = inputs(rank, 0)
    losses = []
    for each in (model, low):
        loss = nn.functional.linear(torch.tanh(each.first(x)), each.second.weight, each.second.bias).pow(2).sum()
        loss.backward()
        losses.append(loss.detach())
    same_bits(*losses)
    mine = low.second.weight.grad * 0.5
    parts = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(parts, mine)
    same_bits(model.second.weight.grad, parts[0] + parts[1])


@ranks(2)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_a_weight_that_is_not_finite_shows_on_all_ranks(kind, bad, rank):
    model, _, engine = sharded(Quantized(kind, **SMALL), Watched)
    with engine.gathered(write=True), torch.no_grad():
        model.second.weight[1, 1] = bad
    assert not model(inputs(rank, 0))[:, 1].isfinite().any()
    assert not model.second.seen.view(-1)[BLOCK : 2 * BLOCK].isfinite().any()  # its whole block
    assert model.second.seen.view(-1)[:BLOCK].isfinite().all()
    assert model.second.weight.detach().isfinite().logical_not().sum() == 1  # stored as it was


@ranks(2)
@pytest.mark.parametrize("reentrant", [False, *exhaustive(True)])
def test_activation_checkpoints_compute_with_the_same_weights_again(reentrant, rank):
    model, plain, engine = sharded(PARAMETERS, Watched, units=[nn.Linear])
    low = as_gathered(plain, engine)
    x = inputs(rank, 0).requires_grad_()
    grads = []
    for each in (model, low):
        x.grad = None
        out = torch.utils.checkpoint.checkpoint(each, x, use_reentrant=reentrant)
        loss_of(out).backward()
        grads.append(x.grad)
    same_bits(*grads)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.blocks[0].requires_grad_(False)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding((x.abs() * 10).long() % 30)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


@ranks(2)
def test_tied_and_frozen_parameters_train_like_the_reference(rank):
    model, plain, engine = sharded(BOTH, Tied, units=[nn.Embedding, nn.Linear])
    assert model.head.weight is model.embedding.weight
    reduced = Reduced(engine)
    for step in range(3):
        low = as_gathered(plain, engine)
        low.head.weight = low.embedding.weight
        x = inputs(rank, step)
        loss_of(model(x)).backward()
        loss_of(low(x)).backward()
        for name, grad in reduced(low).items():
            ours = model.get_parameter(name).grad
            if ours is None:
                assert name.startswith("blocks.0")
                continue
            same_bits(ours, grad, name)
            with torch.no_grad():
                plain.get_parameter(name).sub_(0.1 * grad)
                model.get_parameter(name).sub_(0.1 * ours)
        model.zero_grad()
    same_bits(model.head.weight.detach(), plain.head.weight.detach())


@ranks(1)
def test_one_rank_computes_exactly(rank):
    model, plain, engine = sharded(Quantized("float8", "int8", **SMALL))
    for each in (model, plain):
        plain_backward(each, inputs(rank, 0))
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        same_bits(p.grad, q[1].grad, name)
    assert engine.bytes_sent == 0
