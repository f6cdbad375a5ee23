"""engine.gathered(...): full plain parameters for a while, in every combination of its arguments."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard
from tests.compat.harness import Pair, loss_of
from tests.compat.harness import batch as inputs
from tests.runtime.test_reshard import Keeps
from tests.support.marks import exhaustive, quick
from tests.support.odd_model import Net, assert_grads, assert_same, batch, build, reference_grads, trained
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError, NeedsGatherError, ReplacedParameterError, ShardError, UnitStateError


def sharded(**config: Any) -> tuple[Net, Net, torch_shard.Engine]:
    """A plain model, its sharded twin, and the engine."""
    plain, model = build(), build()
    return plain, model, torch_shard.shard(model, unit_bytes=config.pop("unit_bytes", 256), **config)


def full(model: nn.Module, engine: torch_shard.Engine) -> dict[str, torch.Tensor]:
    return engine.state_dict(rank0_only=False)


STRATEGIES = ["full_shard", "no_shard"]
FULL_SHARD = ["full_shard", *exhaustive("no_shard")]
PLACES = list(itertools.product([None, 0, 1, [1, 0], [1]], [None, "cpu"]))


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(1, 2, exhaustive=(3,))
def test_inside_the_modules_hold_full_plain_parameters(strategy: str, world_size: int) -> None:
    plain, model, engine = sharded(strategy=strategy)
    before = dict(model.named_parameters())
    with engine.gathered():
        for (name, p), (other, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert name == other and type(p) is nn.Parameter
            assert p.shape == q.shape and p.stride() == q.stride() and p.requires_grad == q.requires_grad
            assert torch.equal(p, q)
        assert model.head.weight is model.embed.weight
    after = dict(model.named_parameters())
    assert all(after[n] is p for n, p in before.items())


@pytest.mark.parametrize("strategy", FULL_SHARD)
@pytest.mark.parametrize(
    ("ranks_arg", "place"), quick(PLACES, [(None, None), (None, "cpu"), (1, "cpu"), ([1, 0], None)])
)
@pytest.mark.parametrize("write", [False, True])
@ranks(2)
def test_writing(strategy: str, ranks_arg: Any, place: Any, write: bool, rank: int) -> None:
    plain, model, engine = sharded(strategy=strategy)
    here = ranks_arg in (None, rank) or (isinstance(ranks_arg, list) and rank in ranks_arg)
    with engine.gathered(write=write, ranks=ranks_arg, device=place), torch.no_grad():
        assert (type(model.head.bias) is nn.Parameter) == here
        if here:
            for p in model.parameters():
                p.add_(3.0)
    if write:
        with torch.no_grad():
            for p in plain.parameters():
                p.add_(3.0)
    assert_same(full(model, engine), plain)


@pytest.mark.parametrize("strategy", quick(STRATEGIES, ["full_shard"]))
@ranks(3)
def test_the_lowest_named_rank_decides(strategy: str, rank: int) -> None:
    plain, model, engine = sharded(strategy=strategy)
    with engine.gathered(write=True, ranks=[2, 1]), torch.no_grad():
        if rank:
            model.head.bias.fill_(rank)
            model.conv.weight.fill_(rank)
    with torch.no_grad():
        plain.head.bias.fill_(1)
        plain.conv.weight.fill_(1)
    assert_same(full(model, engine), plain)


@pytest.mark.parametrize("strategy", FULL_SHARD)
@pytest.mark.parametrize(("ranks_arg", "place"), [(None, None), (1, "cpu"), *exhaustive((None, "cpu"), (1, None))])
@pytest.mark.parametrize("write", [*exhaustive(False), True])
@ranks(2)
def test_gradients(strategy: str, ranks_arg: Any, place: Any, write: bool, rank: int, world_size: int) -> None:
    plain, model, engine = trained(world_size, rank, strategy=strategy)
    with engine.gathered(grads=True, write=write, ranks=ranks_arg, device=place):
        if ranks_arg in (None, rank):
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), name
                if q.grad is not None:
                    torch.testing.assert_close(p.grad, q.grad, msg=name)
                    p.grad.mul_(2.0)
            model.scale.grad = None
            model.blocks[0][0].bias.grad = torch.ones(11)
    if write:
        for q in plain.parameters():
            if q.grad is not None:
                q.grad.mul_(2.0)
        plain.scale.grad = None
        plain.blocks[0][0].bias.grad = torch.ones(11)
    assert_grads(model, plain)


@pytest.mark.parametrize("target", ["module", "parameter", "list", "nothing"])
@ranks(2)
def test_targets(target: str) -> None:
    _, model, engine = sharded()
    chosen: Any = {
        "module": model.blocks[0],
        "parameter": model.blocks[0][0].weight,
        "list": [model.blocks[0][0].weight, model.blocks[0][2]],
        "nothing": [],
    }[target]
    with engine.gathered(chosen):
        assert (type(model.blocks[0][0].weight) is nn.Parameter) == (target != "nothing")
        assert isinstance(model.blocks[1][0].weight, torch_shard.ShardTensor)


@pytest.mark.parametrize("place", [None, *exhaustive("cpu")])
@pytest.mark.parametrize("ranks_arg", [None, 0])
@ranks(2)
def test_references_from_before_compute_with_the_full_values(place: Any, ranks_arg: Any, rank: int) -> None:
    plain, model, engine = sharded()
    weight, expected = model.blocks[0][0].weight, plain.blocks[0][0].weight
    with engine.gathered(device=place, ranks=ranks_arg, write=True), torch.no_grad():
        if ranks_arg in (None, rank):
            assert torch.equal(weight @ torch.eye(5), expected)
            assert weight[2, 3].item() == expected[2, 3].item()
            weight[1] = 4.0
            weight.mul_(2.0)
            assert torch.equal(model.blocks[0][0].weight[1], torch.full((5,), 8.0))
    with torch.no_grad():
        expected[1] = 4.0
        expected.mul_(2.0)
    assert_same(full(model, engine), plain)


@ranks(2)
def test_assigned_data_is_written_back(rank: int) -> None:
    plain, model, engine = sharded()
    with engine.gathered(write=True):
        layer = model.blocks[0][0]
        layer.weight.data = layer.weight.data * 2 + 1
    plain.blocks[0][0].weight.data = plain.blocks[0][0].weight.data * 2 + 1
    assert_same(full(model, engine), plain)
    with engine.gathered():
        model.blocks[0][0].weight.data = torch.zeros(11, 5)
    assert_same(full(model, engine), plain)
    torch.testing.assert_close(model(batch(rank)), plain(batch(rank)))


@pytest.mark.parametrize("strategy", FULL_SHARD)
@ranks(2)
def test_a_sharded_average_assigned_to_data_is_gathered_and_written_back(strategy: str) -> None:
    _, model, engine = sharded(strategy=strategy)
    params = list(model.parameters())
    averages, backups = [p.detach().clone() * 2 + 1 for p in params], [p.detach().clone() for p in params]
    before = full(model, engine)
    for sources, factor, term in ((averages, 2, 1), (backups, 1, 0)):
        with engine.gathered(write=True):
            for p, source in zip(params, sources, strict=True):
                p.data = source
            assert all(torch.equal(p, before[name] * factor + term) for name, p in model.named_parameters())
        after = full(model, engine)
        assert all(torch.equal(after[name], before[name] * factor + term) for name, _ in model.named_parameters())


@ranks(2)
def test_data_on_another_device_is_refused_and_changes_nothing() -> None:
    """Assigned to the sharded parameter, which an optimizer holds, say, while the module has the full one."""
    plain, model, engine = sharded()
    weight = model.blocks[0][0].weight
    with (
        engine.gathered(write=True),
        pytest.raises(NeedsGatherError, match=r"torch\.float32 on meta in place of torch\.float32 on cpu"),
    ):
        weight.data = torch.zeros(11, 5, device="meta")
    assert_same(full(model, engine), plain)


@ranks(2)
def test_what_cannot_be_written_back_is_refused() -> None:
    plain, model, engine = sharded()
    with pytest.raises(ShardError, match=r"blocks\.0\.0\.weight became torch\.float64"), engine.gathered(write=True):
        model.blocks[0][0].weight.data = model.blocks[0][0].weight.data.double()
    assert_same(full(model, engine), plain)


@ranks(2)
def test_nested_calls() -> None:
    plain, model, engine = sharded()
    with engine.gathered(), torch.no_grad():
        with engine.gathered(model.head, write=True):
            model.head.bias.add_(1.0)
        assert type(model.head.bias) is nn.Parameter
        assert torch.equal(model.head.bias, plain.head.bias + 1.0)
        with engine.gathered(device="cpu", ranks=[0, 1]):
            model.blocks[0][0].bias.zero_()
    with torch.no_grad():
        plain.head.bias.add_(1.0)
    # the inner call shares the outer values, and the outer call does not write
    assert_same(full(model, engine), plain)
    with engine.gathered(ranks=0), pytest.raises(UnitStateError, match="already gathered"), engine.gathered():
        pass
    assert isinstance(model.head.bias, torch_shard.ShardTensor)


@pytest.mark.parametrize("config", [{}, *exhaustive({"strategy": "no_shard"}, {"precision": torch.bfloat16})])
@pytest.mark.parametrize("outer_writes", [*exhaustive(False), True])
@pytest.mark.parametrize("inner_writes", [*exhaustive(False), True])
@pytest.mark.parametrize("shared", [False, *exhaustive(True)])
@ranks(2)
def test_a_nested_call_for_one_rank_gets_copies(
    config: dict[str, Any], outer_writes: bool, inner_writes: bool, shared: bool, rank: int
) -> None:
    plain, model, engine = sharded(**config)
    with engine.gathered(write=outer_writes), torch.no_grad():
        outer, frozen = model.head.bias, model.frozen
        outer.fill_(1.0)
        model.blocks[0][0].bias.data = torch.full((11,), 5.0)
        model.conv.weight.requires_grad_(False)
        outer.note = "the user's"
        between = engine.gathered(ranks=1, device="cpu") if shared else contextlib.nullcontext()
        sent = engine.bytes_sent
        with between, engine.gathered(ranks=1, device="cpu", write=inner_writes):
            assert engine.bytes_sent - sent < 100  # the ranks agree, and nothing is gathered
            assert (model.head.bias is not outer) == (rank == 1)
            assert (model.head.bias == 1.0).all() and (model.blocks[0][0].bias == 5.0).all()
            assert model.head.bias.note == "the user's" and not model.conv.weight.requires_grad
            if rank == 1:
                model.head.bias.add_(1.0)
        assert model.head.bias is outer and model.frozen is frozen
        assert (outer == (2.0 if inner_writes else 1.0)).all()
        assert not model.conv.weight.requires_grad
    with torch.no_grad():
        if inner_writes or outer_writes:
            plain.head.bias.fill_(2.0 if inner_writes else 1.0)
            plain.blocks[0][0].bias.fill_(5.0)
    assert_same(full(model, engine), plain)
    assert not model.conv.weight.requires_grad
    tolerance = {"rtol": 0.1, "atol": 0.1} if "precision" in config else {}
    torch.testing.assert_close(model(batch(rank)), plain(batch(rank)), check_dtype=False, **tolerance)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_an_exception_restores_and_writes_nothing(strategy: str, rank: int) -> None:
    plain, model, engine = sharded(strategy=strategy)
    with pytest.raises(KeyError), engine.gathered(write=True), torch.no_grad():
        model.head.bias.add_(1.0)
        raise KeyError("everywhere")
    assert_same(full(model, engine), plain)
    with pytest.raises(KeyError if rank == 1 else ShardError, match="one rank"), engine.gathered(write=True, ranks=0):
        if rank == 1:
            raise KeyError("one rank")
        with torch.no_grad():
            model.head.bias.add_(1.0)
    assert_same(full(model, engine), plain)
    model(batch(rank)).sum().backward()


@pytest.mark.parametrize("strategy", quick(STRATEGIES, ["full_shard"]))
@ranks(2)
def test_training_goes_on_before_inside_and_after(strategy: str, rank: int, world_size: int) -> None:
    plain, model, engine = sharded(strategy=strategy)
    # The loss grows without bounds here, and with it the rounding of a fused kernel.
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=False) for m in (plain, model)]
    for step in range(4):
        reference_grads(plain, world_size)
        loss = model(batch(rank)).pow(2).mean()
        if step == 1:
            with engine.gathered():
                pass
        if step == 2:
            with engine.gathered(ranks=0):
                if rank == 0:
                    with torch.no_grad():
                        torch.testing.assert_close(model(batch(0)), plain(batch(0)))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with engine.gathered():
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q)


STRATEGIES_THAT_SHARD = ["full_shard", *exhaustive("shard_grad_op", "shard_optim")]


@pytest.mark.parametrize("strategy", STRATEGIES_THAT_SHARD)
@ranks(2)
def test_between_forward_and_backward_a_unit_that_one_rank_keeps_has_its_values(strategy: str, rank: int) -> None:
    pair = Pair(lambda: Keeps(rank == 1), rank, 2, strategy=strategy, unit_bytes=300)

    def run(model: nn.Module, x: torch.Tensor) -> None:
        loss = loss_of(model(x))
        if model is pair.model:
            before = [kept.detach().clone() for kept in model.blocks[1].kept]
            with pair.engine.gathered():
                for p in model.parameters():
                    p.data.add_(1.0)  # undone at the end, and without a trace
            assert all(torch.equal(*values) for values in zip(model.blocks[1].kept, before, strict=True))
        loss.backward()

    pair.train(0)  # from now on the ranks know the order of units, and do not compare it
    pair.train(1, 2, run=run)


@pytest.mark.parametrize("strategy", STRATEGIES_THAT_SHARD)
@ranks(2)
def test_a_unit_that_one_rank_keeps_has_the_values_that_were_written(strategy: str, rank: int) -> None:
    pair = Pair(lambda: Keeps(rank == 1), rank, 2, strategy=strategy, unit_bytes=300)
    loss = loss_of(pair.model(inputs(rank, 0)))
    for place in (None, "cpu"):
        with pair.engine.gathered(), pair.engine.gathered(write=True, device=place), torch.no_grad():
            for p in pair.model.parameters():
                p.add_(1.0)
        written = full(pair.model, pair.engine)["blocks.1.up.weight"]
        assert all(torch.equal(kept, written) for kept in pair.model.blocks[1].kept)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace"):
        loss.backward()
    for p in pair.plain.parameters():
        p.data.add_(2.0)
    pair.train(0)


@ranks(2)
def test_one_rank_evaluates_alone_with_buffers(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    engine = torch_shard.shard(model, unit_bytes=16, timeout=3)
    model(torch.randn(5, 3)).sum().backward()
    with engine.gathered(ranks=0):
        if rank == 0:
            model.eval()
            with torch.no_grad():
                assert model(torch.randn(5, 3)).shape == (5, 2)
            model.train()
    model(torch.randn(5, 3)).sum().backward()


@ranks(2)
def test_a_backward_inside_is_reduced(rank: int, world_size: int) -> None:
    plain, model, engine = sharded()
    reference_grads(plain, world_size)
    with engine.gathered():
        model(batch(rank)).pow(2).mean().backward()
    assert_grads(model, plain)


@ranks(2)
def test_a_backward_that_cannot_be_reduced_is_refused(rank: int) -> None:
    _, model, engine = sharded()
    with engine.gathered(ranks=0):
        if rank == 0:
            with pytest.raises(UnitStateError, match="can't be reduced"):
                model(batch(rank)).sum().backward()


@ranks(2)
def test_frozen_inside_stays_frozen() -> None:
    _, model, engine = sharded()
    with engine.gathered():
        model.head.bias.requires_grad_(False)
        model.frozen.requires_grad_(True)
    assert not model.head.bias.requires_grad and model.frozen.requires_grad


@ranks(2)
def test_frozen_inside_stays_frozen_when_its_neighbour_is_differentiated_by() -> None:
    _, model, engine = sharded()
    layer = model.blocks[0][0]
    weight = layer.weight
    with engine.gathered():
        layer.bias.requires_grad_(False)
        (grad,) = torch.autograd.grad(layer.weight.sum(), weight)
        assert grad.eq(1).all() and not layer.bias.requires_grad
    assert not layer.bias.requires_grad


class Nosy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.engine: list[torch_shard.Engine] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.engine[0].gathered(self.layer.weight):
            return self.layer(x)


@ranks(2)
def test_inside_a_forward_of_the_unit_is_an_error() -> None:
    model = Nosy()
    engine = torch_shard.shard(model, units=lambda name, module: name == "")
    model.engine.append(engine)
    with pytest.raises(UnitStateError, match="inside a forward"):
        model(torch.randn(2, 3))


@ranks(2)
def test_wrong_arguments_are_named(rank: int) -> None:
    _, _, engine = sharded(alone_after=60.0)  # rank 0, whose arguments are right at the end, must not gather alone
    other = nn.Linear(2, 2)
    torch_shard.shard(other)
    for kwargs, message in [
        ({"ranks": 7}, "ranks: 7"),
        ({"ranks": []}, "ranks: .* must name one"),
        ({"ranks": True}, "ranks: True"),
        ({"ranks": "all"}, "ranks: 'all'"),
        ({"ranks": 0.5}, "ranks: 0.5"),
        ({"device": "gpu"}, "device: .*gpu"),
        ({"device": "meta"}, "device: the meta"),
        ({"target": "head"}, "target must be"),
        ({"target": other}, "target: weight"),
    ]:
        with pytest.raises(ConfigError, match=message), engine.gathered(**kwargs):
            pass
    with pytest.raises(ConfigError, match="ranks: 9"), engine.gathered(ranks=9 if rank else None):
        pass


@ranks(2)
def test_a_replaced_parameter_is_refused_on_all_ranks_and_breaks_nothing(rank: int) -> None:
    plain, model, engine = sharded(timeout=3)
    kept = model.blocks[1][0].weight
    for kwargs in ({}, {"write": True}, {"ranks": 0, "device": "cpu"}):
        if rank == 1:
            model.blocks[1][0].weight = nn.Parameter(torch.zeros_like(plain.blocks[1][0].weight))
        with pytest.raises(ReplacedParameterError, match="holds a different parameter"), engine.gathered(**kwargs):
            pass
        model.blocks[1][0].weight = kept
    assert_same(full(model, engine), plain)
    assert engine.statistics().gathered == 0
    torch.testing.assert_close(model(batch(rank)), plain(batch(rank)))


@ranks(2)
def test_a_gather_that_cannot_start_leaves_no_unit_gathered(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, engine = sharded()

    def out_of_memory() -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(engine.units[1], "unshard", out_of_memory)
        with pytest.raises(MemoryError), engine.gathered():
            pass
    assert engine.statistics().gathered == 0
    torch.testing.assert_close(model(batch(rank)), plain(batch(rank)))


@ranks(2)
def test_one_rank_alone_that_wants_to_write_hears_of_it(rank: int) -> None:
    _, model, engine = sharded(timeout=3)
    with pytest.raises(ShardError):
        if rank == 0:
            with engine.gathered(write=True):
                pass
        else:
            model(batch(rank))


@ranks(2)
def test_recurrent_layers(rank: int) -> None:
    model = nn.LSTM(3, 4)
    plain = copy.deepcopy(model)
    engine = torch_shard.shard(model)
    x = torch.randn(5, 2, 3)
    for where in (None, 0):
        with engine.gathered(ranks=where):
            if where in (None, rank):
                torch.testing.assert_close(model(x)[0], plain(x)[0])
    torch.testing.assert_close(model(x)[0], plain(x)[0])


# -- engine.apply -----------------------------------------------------------------------------------------------------


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        module.bias.data.fill_(0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight)
    elif isinstance(module, Net):
        for name, p in module.named_parameters():
            if name.endswith("2.weight"):
                nn.init.normal_(p, std=0.02)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_apply_is_module_apply(strategy: str) -> None:
    plain, model, engine = sharded(strategy=strategy)
    torch.manual_seed(5)
    plain.apply(_init)
    torch.manual_seed(5)
    engine.apply(_init)
    assert_same(full(model, engine), plain)
