"""``reshard_after_forward=2`` on four ranks: between forward and backward a unit is cut between neighbours only."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_shard
from tests.comm.test_traffic import Collectives
from tests.compat.harness import MLP, Block, Checkpointed, Pair, batch, loss_of, plain_backward, same_params, train_both
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError

TWO = {"reshard_after_forward": 2, "unit_bytes": 300}
HYBRID = {"strategy": "hybrid_shard", "shard_size": 4}


def parts(engine: torch_shard.Engine) -> int:
    """Bytes that this rank keeps between forward and backward."""
    flats = [flat for unit in engine.units for flat in unit.flats]
    shards = [flat.secondary_shard for flat in flats if flat.secondary_shard is not None]
    return sum(shard.untyped_storage().nbytes() for shard in shards)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings", [{}, *exhaustive(HYBRID, {"prefetch": 0}, {"prefetch": 3}, {"single_communicator": True})]
)
@ranks(4)
def test_it_trains_like_plain(settings, rank, world_size):
    pair = train_both(MLP, rank, world_size, steps=4, **{**TWO, **settings})
    assert parts(pair.engine) == 0


@ranks(4)
def test_gathers_of_backward_stay_among_neighbours(rank, world_size):
    model = MLP(width=40)
    engine = torch_shard.shard(model, reshard_after_forward=2, unit_bytes=20000, prefetch=0)
    x = batch(rank, 0).float()
    loss_of(model(x)).backward()
    unit = {u.name: sum(f.layout.numel * 4 for f in u.flats) for u in engine.units}
    sent = engine.bytes_sent
    loss = loss_of(model(x))
    assert engine.bytes_sent - sent == sum(unit.values()) * 3 // 4
    # All but the last, which backward begins with, are cut in two.
    kept = sum(unit.values()) - unit["head"]
    assert parts(engine) == kept // 2
    sent = engine.bytes_sent
    with Collectives() as calls:
        loss.backward()
    # Of the first, backward needs no values. Reductions are among all.
    assert engine.bytes_sent - sent == (kept - unit["inp"]) // 2 + sum(unit.values()) * 3 // 4
    gathers = calls.named("broadcast_", "_allgather_base_")
    members = {tuple(dist.get_process_group_ranks(_group(name))) for *_, name in gathers}
    assert members == {(0, 1) if rank < 2 else (2, 3)}


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)


class Odd(MLP):
    """Recomputes a block, edits a weight, and keeps one for a term of the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        with torch.no_grad():
            self.blocks[0].up.weight.mul_(0.99)
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if i == 1 else block(x)
        self.aux = self.blocks[2].down.weight
        return self.head(x)


@ranks(4)
def test_recomputation_edits_and_weights_that_are_kept(rank, world_size):
    def run(model: nn.Module, x: torch.Tensor) -> None:
        y = model(x)
        (loss_of(y) + y.mean() * (model.aux.detach() * 2.0).sum()).backward()
        model.aux = None

    train_both(Odd, rank, world_size, run=run, **TWO)


class KeepingBlock(Block):
    """Puts a weight aside while it is unsharded."""

    def __init__(self, width: int, keeps: bool) -> None:
        super().__init__(width)
        self.keeps = keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = [self.up.weight] if self.keeps else []
        return super().forward(x)


class Keeps(MLP):
    """One rank puts a weight of a block aside, and so keeps its unit."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.blocks[1] = KeepingBlock(7, keeps)


@ranks(4)
def test_a_rank_that_keeps_a_unit_takes_part_in_its_neighbours_gather(rank, world_size):
    train_both(lambda: Keeps(rank == 1), rank, world_size, **TWO)


@pytest.mark.exhaustive
@ranks(4)
def test_a_recomputation_computes_with_what_was_edited_since_forward(rank, world_size):
    def run(model: nn.Module, x: torch.Tensor) -> None:
        loss = loss_of(model(x))
        with torch.no_grad():
            for block in model.blocks:
                block.up.weight.mul_(0.5)
        loss.backward()

    train_both(Checkpointed, rank, world_size, run=run, **TWO)


@pytest.mark.parametrize("who", [(0, 1, 2, 3), *exhaustive(((1,),))], ids=str)
@ranks(4)
def test_a_step_between_forward_and_backward_ends_what_ranks_keep(who, rank, world_size):
    """Of a parameter that backward does not need, so that it is legal."""

    def run(model: nn.Module, x: torch.Tensor) -> None:
        loss = loss_of(model(x))
        optimizer = torch.optim.SGD([model.head.bias], lr=0.1)
        model.head.bias.grad = torch.ones_like(model.head.bias)
        optimizer.step()
        model.head.bias.grad = None
        loss.backward()

    train_both(lambda: Keeps(rank in who), rank, world_size, run=run, **TWO)


@ranks(4)
def test_a_model_that_gets_no_backward_keeps_nothing_between_steps(rank, world_size):
    teacher, student = MLP(width=32).requires_grad_(False), MLP()
    engine = torch_shard.shard(teacher, **TWO)
    torch_shard.shard(student, **TWO)
    for step in range(2):
        x = batch(rank, step).float()
        loss = (student(x) - teacher(x)).pow(2).mean()
        assert parts(engine) > 0
        assert engine.memory_summary()["gathered"] >= parts(engine)
        loss.backward()
        assert parts(engine) == 0


@pytest.mark.exhaustive
@ranks(4)
def test_evaluation_and_gathered_between_forward_and_backward(rank, world_size):
    pair = Pair(lambda: Keeps(rank == 1), rank, world_size, **TWO)

    def run(model: nn.Module, x: torch.Tensor) -> None:
        first, second = loss_of(model(x)), loss_of(model(x + 1))
        with torch.no_grad():
            model(x)
        if model is pair.model:
            with pair.engine.gathered():
                pass
            pair.engine.state_dict()
        first.backward()
        second.backward()

    pair.train(*range(3), run=run)
    assert parts(pair.engine) == 0


@ranks(4)
def test_a_part_is_not_used_after_a_step(rank, world_size):
    """A forward whose backward never comes, and then a step."""
    pair = Pair(MLP, rank, world_size, **TWO)
    for step in range(3):
        for model in (pair.model, pair.plain):
            model(batch(rank, 50 + step))
        pair.step(plain_backward, batch(rank, step))
    pair.check()


CODES = torch_shard.Quantized("int8", block=32, min_size=1)
KEPT = {
    "stored": (lambda: MLP(width=16), {"unit_bytes": 1000}, 4),
    "bfloat16": (lambda: MLP(width=16), {"unit_bytes": 1000, "precision": torch.bfloat16}, 2),
    # `debug` compares the edits of a recomputed forward with the right values.
    "decoded": (lambda: Odd(width=40), {"unit_bytes": 5000, "quantized": CODES, "debug": True}, 4),
}


@pytest.mark.parametrize("kind", ["stored", *exhaustive("bfloat16", "decoded")])
@ranks(4)
def test_parts_hold_what_modules_compute_with(kind, rank, world_size):
    """To the bit the same as without them, at the size of the computation's dtype."""
    build, settings, itemsize = KEPT[kind]
    trained = []
    for again in (2, None):
        torch.manual_seed(0)
        model = build()
        engine = torch_shard.shard(model, reshard_after_forward=again, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = loss_of(model(batch(rank, step).float()))
            if again:
                assert 0 < parts(engine) < sum(p.numel() for p in model.parameters()) * itemsize / 2
            loss.backward()
            model.aux = None
            optimizer.step()
            optimizer.zero_grad()
        trained.append(model)
    for p, q in zip(*(m.parameters() for m in trained), strict=True):
        assert torch.equal(p.to_local(), q.to_local())


@pytest.mark.exhaustive
@ranks(4)
def test_a_backward_that_fails_leaves_nothing_behind(rank, world_size):
    pair = Pair(MLP, rank, world_size, **TWO)
    pair.step(plain_backward, batch(rank, 0))

    def fail(_: torch.Tensor) -> None:
        raise KeyError("half-way")

    handle = pair.model.blocks[1].up.weight.register_hook(fail)
    with pytest.raises(KeyError):
        plain_backward(pair.model, batch(rank, 1))
    handle.remove()
    assert parts(pair.engine) == 0
    pair.step(plain_backward, batch(rank, 2))
    same_params(pair.model, pair.plain)


@ranks(4)
def test_sizes_that_do_not_fit_are_refused(rank):
    for settings, message in (
        ({"reshard_after_forward": 3}, "reshard_after_forward is 3, which does not divide the 4 ranks of a replica"),
        ({"reshard_after_forward": 1}, "reshard_after_forward must be an integer of at least 2"),
        ({"reshard_after_forward": True}, "reshard_after_forward must be an integer"),
        (
            {"reshard_after_forward": 2, "strategy": "shard_grad_op"},
            "reshard_after_forward is for strategies that reshard",
        ),
        (
            {"reshard_after_forward": 4, "strategy": "hybrid_shard", "shard_size": 2},
            "does not divide the 2 ranks of a replica",
        ),
        ({"reshard_after_forward": 2 if rank else None}, "reshard_after_forward differs between the ranks"),
    ):
        with pytest.raises(ConfigError, match=message):
            torch_shard.shard(MLP(), **settings)
    train_both(MLP, rank, 4, steps=2, reshard_after_forward=4)


@ranks(1)
def test_one_rank_alone_has_nothing_to_reshard(rank, world_size):
    train_both(MLP, rank, world_size, **TWO)
