"""One rank reads the model alone, as under DDP, while the others do something else: values, errors, and nothing left behind."""

from __future__ import annotations

import io
import itertools
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.compat.harness import MLP, Pair, batch, loss_of
from tests.runtime.test_reshard import Keeps
from tests.support.inside import runtime_of
from tests.support.logs import captured_log
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import Precision
from torch_shard.errors import ConfigError, DivergenceError, UnitStateError

Read = Callable[[nn.Module, torch_shard.Engine], Any]


class Net(nn.Module):
    """Blocks, a tied head that is used outside its module, and a buffer that training changes."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3))
        self.norm = norm(8)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block, scale in zip(self.blocks, self.scale, strict=True):
            x = x + scale * block(x)
        return self.norm(x) @ self.embed.weight.T


TOKENS = torch.arange(9)
LIMIT = 10.0  # seconds that a rank waits for another one


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    model(TOKENS).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def made(
    strategy: str = "full_shard", norm: type[nn.Module] = nn.BatchNorm1d, **settings: Any
) -> tuple[nn.Module, torch_shard.Engine, nn.Module]:
    """Return a sharded model, its engine and a plain model, both trained for two steps."""
    torch.manual_seed(7)
    plain, sharded = Net(norm), Net(norm)
    engine = torch_shard.shard(sharded, strategy=strategy, units=["blocks.*"], **settings)
    for model in (plain, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            train(model, optimizer)
    return sharded, engine, plain


def values(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(TOKENS)


def file_of(model: nn.Module) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def without_gradients(read: Read) -> Read:
    def run(model: nn.Module, engine: torch_shard.Engine) -> Any:
        with torch.no_grad():
            return read(model, engine)

    return run


READS: dict[str, Read] = {
    "a forward": lambda m, e: values(m),
    "a part's forward": without_gradients(lambda m, e: m.blocks[1](torch.ones(2, 8))),
    "a norm": lambda m, e: m.blocks[0][0].weight.norm(),
    "a norm without gradients": without_gradients(lambda m, e: m.embed.weight.norm()),
    "an item": lambda m, e: m.scale[1].item(),
    "arithmetic": lambda m, e: m.embed.weight.detach() + torch.ones(11, 8),
    "a row": without_gradients(lambda m, e: m.embed.weight[3]),
    "a matrix product": without_gradients(lambda m, e: torch.ones(2, 8) @ m.embed.weight.T),
    "a matrix product with gradients": lambda m, e: (torch.ones(2, 8) @ m.embed.weight.T).detach(),
    "several norms": without_gradients(lambda m, e: torch.stack(torch._foreach_norm(list(m.parameters())))),
    "a plain average": without_gradients(lambda m, e: torch.zeros(11, 8).lerp_(m.embed.weight, 0.25)),
    "a file": lambda m, e: file_of(m),
}
SHARDED_ONLY: dict[str, tuple[Read, Callable[[nn.Module], Any]]] = {
    "full_tensor": (lambda m, e: m.embed.weight.full_tensor(), lambda m: m.embed.weight.detach()),
    "state_dict": (lambda m, e: e.state_dict(), lambda m: m.state_dict()),
    "gathered": (lambda m, e: gathered(m, e), lambda m: m.blocks[2][0].weight.detach().clone()),
}


def gathered(model: nn.Module, engine: torch_shard.Engine) -> torch.Tensor:
    with engine.gathered():
        return model.blocks[2][0].weight.detach().clone()


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        found, expected = dict(enumerate(found)), dict(enumerate(expected))
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            same(found[key], value)
    else:
        assert type(found) is type(expected)
        torch.testing.assert_close(found, expected)


def elsewhere(where: str) -> None:
    """What the other ranks do meanwhile, beside the step that follows."""
    if where == "in a barrier":
        dist.barrier()
    elif where == "computing":
        time.sleep(0.3)


@pytest.mark.parametrize("where", ["in the next step", *exhaustive("in a barrier", "computing")])
@pytest.mark.parametrize("read", [*READS, *SHARDED_ONLY])
@ranks(2, exhaustive=(3,))
def test_a_rank_reads_alone_what_plain_torch_gives(rank: int, read: str, where: str) -> None:
    sharded, engine, plain = made(alone_after=0.1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (sharded, plain)]
    for _ in range(2):
        if rank == 0 and read in READS:
            same(READS[read](sharded, engine), READS[read](plain, engine))
        elif rank == 0:
            mine, theirs = SHARDED_ONLY[read]
            same(mine(sharded, engine), theirs(plain))
        else:
            elsewhere(where)
        if where == "in a barrier" and rank == 0:
            dist.barrier()
        for model, optimizer in zip((sharded, plain), optimizers, strict=True):
            train(model, optimizer)
    same(engine.state_dict(rank0_only=False), plain.state_dict())
    assert engine.statistics().lone_reads > 0 or rank > 0


@ranks(2)
def test_a_rank_goes_on_reading_alone_with_and_without_gradients(rank: int) -> None:
    sharded, engine, plain = made(timeout=5)
    if rank == 0:
        for _ in range(2):
            for read in ("a forward", "a norm", "an item"):
                same(READS[read](sharded, engine), READS[read](plain, engine))
    dist.barrier()
    for model in (sharded, plain):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    same(engine.state_dict(rank0_only=False), plain.state_dict())


SETTINGS: dict[str, dict[str, Any]] = {
    "zero2": {"strategy": "shard_grad_op"},
    "zero1": {"strategy": "shard_optim"},
    "bf16": {"precision": Precision(torch.bfloat16)},
    "offload": {"offload": "cpu"},
    "quantized": {"quantized": torch_shard.Quantized("int8", block=32, min_size=1)},
    "secondary": {"reshard_after_forward": 2},
}


@pytest.mark.parametrize("settings", SETTINGS)
@ranks(2, exhaustive=(4,))
def test_a_lone_forward_gives_what_one_of_all_ranks_gives(rank: int, settings: str) -> None:
    if settings == "secondary" and dist.get_world_size() == 2:
        pytest.skip("needs more ranks than share secondary shards")
    sharded, engine, _ = made(norm=nn.LayerNorm, **SETTINGS[settings])
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    for _ in range(3):
        train(sharded, optimizer)
        alone = [values(sharded)] if rank == 0 else []
        loss = sharded(TOKENS).square().mean()
        alone += [values(sharded)] if rank == 0 else []  # between a forward and its backward
        loss.backward()
        optimizer.zero_grad()
        together = values(sharded)
        alone += [values(sharded)] if rank == 1 else []
        assert all(torch.equal(found, together) for found in alone)
    assert engine.statistics().lone_reads >= (3 if rank < 2 else 0)


@ranks(3)
def test_evaluations_of_different_length(rank: int) -> None:
    sharded, engine, plain = made()
    for _ in range(2):
        for number in range(2 + 2 * rank):
            same(values(sharded), values(plain)) if number % 2 else values(sharded)
        for model in (sharded, plain):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    same(engine.state_dict(rank0_only=False), plain.state_dict())


@ranks(2)
def test_a_read_after_the_others_have_stepped_is_an_error_that_names_both_lines(rank: int) -> None:
    sharded, engine, _ = made()
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    sharded(TOKENS).square().mean().backward()
    if rank == 1:
        optimizer.step()
    dist.barrier()
    if rank == 0:
        with pytest.raises(DivergenceError, match=r"rank 0 reads .*test_lone_reads.py.* rank 1 .*test_lone_reads.py"):
            values(sharded)
        optimizer.step()
    dist.barrier()
    torch.testing.assert_close(values(sharded).new_zeros(1), torch.zeros(1))  # all ranks go on
    assert len(engine.state_dict(rank0_only=False)) > 0


@ranks(2)
def test_a_read_that_is_refused_leaves_the_buffers_of_the_next_step_to_all_ranks(rank: int) -> None:
    sharded, engine, plain = made()
    for model in (sharded, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.train()
        model(TOKENS).square().mean().backward()
        if rank == 0 and model is sharded:
            dist.barrier()
            with pytest.raises(DivergenceError, match="rank 1 has already made the next one"):
                values(sharded)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1 and model is sharded:
            dist.barrier()
        train(model, optimizer)
    same(engine.state_dict(rank0_only=False), plain.state_dict())


@ranks(2)
def test_a_second_read_does_not_wait_for_a_partner_in_a_barrier_if_it_records_gradients(rank: int) -> None:
    sharded, engine, plain = made(alone_after=0.1)
    if rank == 0:
        same(values(sharded), values(plain))  # leaves a comparison that rank 1 has still to come to
        same(sharded.embed.weight.norm(), plain.embed.weight.norm())
        same(sharded.scale.norm(), plain.scale.norm())
    dist.barrier()
    for model in (sharded, plain):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    same(engine.state_dict(rank0_only=False), plain.state_dict())


@ranks(2)
def test_a_read_waits_for_partners_that_are_behind(rank: int) -> None:
    sharded, _, plain = made()
    for model in (sharded, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.train()
        model(TOKENS).square().mean().backward()
        if rank == 1 and model is sharded:
            time.sleep(0.5)
        optimizer.step()
    if rank == 0:
        same(sharded.embed.weight.detach() + torch.zeros(11, 8), plain.embed.weight.detach())
    dist.barrier()


@ranks(2)
def test_conversions_that_change_nothing_are_no_edits(rank: int) -> None:
    sharded, engine, plain = made(timeout=5)
    kept = runtime_of(engine).versions.finished
    if rank == 0:
        for model in (sharded, plain):
            # To torch "cpu:0" is another device than "cpu", so that it copies.
            model.to("cpu:0").to(torch.float32).cpu()
        assert runtime_of(engine).versions.finished == kept
        same(values(sharded), values(plain))
    dist.barrier()
    # An old value is an edit, though it comes from a conversion; so is a copy that was edited.
    weight, bias = sharded.blocks[0][0].weight, sharded.blocks[0][0].bias
    old, edited = weight.detach().to("cpu:0"), bias.detach().to("cpu:0")
    expected = old.full_tensor(), edited.full_tensor() + 1
    train(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))
    edited.copy_(bias.detach()).fill_(0).add_(expected[1])
    weight.data, bias.data = old, edited
    same((weight.full_tensor(), bias.full_tensor()), expected)


def edit(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)


CHANGES: dict[str, Callable[[nn.Module, torch_shard.Engine, torch.optim.Optimizer, dict[str, Any]], Any]] = {
    "step": lambda m, e, optimizer, other: optimizer.step(),
    "edit": lambda m, e, optimizer, other: edit(m),
    "engine.load_state_dict": lambda m, e, optimizer, other: e.load_state_dict(other),
    "model.load_state_dict": lambda m, e, optimizer, other: m.load_state_dict(other),
}


@pytest.mark.parametrize("change", CHANGES)
@ranks(2)
def test_a_change_waits_while_a_partner_reads(rank: int, change: str) -> None:
    sharded, engine, _ = made()
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    sharded(TOKENS).square().mean().backward()
    before = engine.state_dict(rank0_only=False)
    other = {key: value + 1 for key, value in before.items()}
    name, first, later = "blocks.0.0.weight", sharded.embed, sharded.blocks[0]
    if rank == 0:
        with engine.gathered(first):
            dist.barrier()
            time.sleep(0.3)
            # Not what was read before the other rank came to its change.
            size = engine.statistics().lone_bytes
            assert torch.equal(later[0].weight.full_tensor(), before[name])
            at = time.monotonic()
        assert engine.statistics().lone_bytes > size
    else:
        dist.barrier()  # rank 0 reads now
    CHANGES[change](sharded, engine, optimizer, other)
    if rank == 1:
        at = time.monotonic()
    mine = torch.tensor([at], dtype=torch.float64)  # one clock: all ranks are on one host
    both = [torch.empty_like(mine), torch.empty_like(mine)]
    dist.all_gather(both, mine)
    assert both[1] >= both[0]
    after = engine.state_dict(rank0_only=False)[name]
    assert not torch.equal(after, before[name])
    if change != "step":
        torch.testing.assert_close(after, before[name] * 2 if change == "edit" else other[name])


@ranks(2)
def test_a_rank_reads_alone_between_the_parts_of_a_training_forward(rank: int) -> None:
    sharded, engine, plain = made()
    x = torch.linspace(-1, 1, 16).view(2, 8)
    for _ in range(2):
        for model in (sharded, plain):
            hidden = model.blocks[0](x)
            if rank == 0 and model is sharded:
                with torch.no_grad():
                    same(sharded.blocks[2](x), plain.blocks[2](x))
                    same(sharded.embed.weight[2], plain.embed.weight[2])
            model.blocks[1](hidden).square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    same(engine.state_dict(rank0_only=False), plain.state_dict())


@pytest.mark.parametrize("keeps", [True, *exhaustive(False)])
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim")])
@pytest.mark.parametrize("place", ["before backward", *exhaustive("between micro-batches")])
@ranks(2)
def test_a_lone_gathered_leaves_units_as_the_other_ranks_expect_them(
    place: str, strategy: str, keeps: bool, rank: int
) -> None:
    """Unsharded for a backward or for the next micro-batch, or kept by this rank only."""
    pair = Pair(lambda: Keeps(keeps and rank == 0), rank, 2, strategy=strategy, unit_bytes=300)

    def run(model: nn.Module, x: torch.Tensor) -> None:
        for micro_batch in range(2):
            loss = loss_of(model(x + micro_batch))
            if place == "between micro-batches":
                loss.backward()
            if micro_batch == 0:
                if model is pair.model and rank == 0:
                    with pair.engine.gathered():
                        for p, q in zip(model.parameters(), pair.plain.parameters(), strict=True):
                            same(p.detach(), q.detach())
                            p.data.add_(1.0)  # undone at the end
                dist.barrier()
            if place == "before backward":
                loss.backward()

    pair.train(0)  # from now on the ranks know the order of units, and do not compare it
    pair.train(1, 2, run=run)
    assert pair.engine.statistics().lone_reads >= 2 or rank == 1


BOTH_SIDES: dict[str, Read] = {
    "a norm": lambda m, e: m.head.weight.detach().norm().item(),
    "a forward": without_gradients(lambda m, e: m(torch.ones(1, 5)).sum().item()),
    "gathered": lambda m, e: _sum_gathered(m, e),
    "a state dict": lambda m, e: e.state_dict(rank0_only=False)["head.weight"].sum().item(),
}


def _sum_gathered(model: nn.Module, engine: torch_shard.Engine) -> float:
    with engine.gathered(), torch.no_grad():
        return model.head.weight.sum().item()


@pytest.mark.parametrize("readers", ["0, then 0 1", *exhaustive("0, then 0", "0 1, then 0 1", "1, then 0")])
@pytest.mark.parametrize("read", ["a norm", "a forward", *exhaustive("gathered", "a state dict")])
@ranks(2, exhaustive=(3,))
def test_ranks_read_alone_one_after_the_other_on_both_sides_of_a_backward(
    rank: int, read: str, readers: tuple[tuple[int, ...], ...]
) -> None:
    torch.manual_seed(0)
    model = MLP()
    engine = torch_shard.shard(model, unit_bytes=300, timeout=LIMIT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):  # first until a backward ends without waiting for the other ranks
        loss = loss_of(model(batch(rank, step).float()))
        found = []
        for work, alone in zip((loss.backward, optimizer.step), readers.split(", then "), strict=True):
            for reader in map(int, alone.split()):
                if rank == reader and step > 1:
                    found.append(BOTH_SIDES[read](model, engine))
                dist.barrier()
            work()
        optimizer.zero_grad()
        assert len({*found}) <= 1, "the model has not changed between the two reads"


@pytest.mark.parametrize("reader", [1, *exhaustive(0)])
@ranks(2)
def test_a_lone_backward_is_an_error_on_the_rank_that_calls_it(rank: int, reader: int) -> None:
    sharded, _, plain = made()
    if rank == reader:
        norm = sharded.embed.weight.norm()
        where = rf"embed.weight .*alone.*test_lone_reads.py.*\(rank {1 - rank} "
        with pytest.raises(DivergenceError, match=where):
            norm.backward()
    for model in (sharded, plain):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    same(sharded.embed.weight.full_tensor(), plain.embed.weight.detach())


@ranks(2)
def test_alone_error_gives_the_error_to_all_ranks(rank: int) -> None:
    sharded, _, _ = made(alone="error")
    with pytest.raises(DivergenceError):
        values(sharded) if rank == 0 else train(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))


@ranks(1)
def test_without_other_ranks_a_file_has_what_plain_torch_writes(rank: int) -> None:
    sharded, _, plain = made()
    same(file_of(sharded), file_of(plain))


@ranks(1)
def test_without_other_ranks_a_read_that_is_refused_raises_its_own_error(rank: int) -> None:
    _, engine, _ = made()
    with pytest.raises(ConfigError, match="target must be"), engine.gathered(3):
        pass
    with engine.gathered(), pytest.raises(UnitStateError, match="gathered"):
        engine.state_dict()


@ranks(2)
def test_reads_are_logged_once_a_line_with_their_bytes_in_the_statistics(rank: int) -> None:
    sharded, engine, _ = made()
    before = engine.statistics()
    with captured_log(logging.INFO) as lines:
        for _ in range(3):
            if rank == 0:
                values(sharded)
            train(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))
    found = engine.statistics().since(before)
    own = [line for line in lines if "reads the model alone" in line]
    assert len(own) == (rank == 0)
    # Of the first read alone: all three read as much.
    assert all(f": {found.lone_bytes // 3:,} bytes from other ranks" in line for line in own), own
    assert found.lone_reads == (3 if rank == 0 else 0)
    size = sum(p.numel() * p.element_size() for p in Net().parameters())
    assert 3 * size / 2 - 3 * 256 <= found.lone_bytes <= 3 * size / 2 + 3 * 256 if rank == 0 else found.lone_bytes == 0


@ranks(2)
def test_a_read_that_fails_is_logged_with_what_it_has_read_until_then(rank: int) -> None:
    sharded, engine, _ = made()
    with captured_log(logging.INFO) as lines:
        if rank == 0:
            with pytest.raises(ZeroDivisionError), engine.gathered():
                assert not lines
                sharded.scale / (1 // 0)
            (line,), found = lines, engine.statistics().lone_bytes
            assert found > 0
            assert re.search(rf"test_lone_reads\.py:\d+ \(.*\): {found:,} bytes", line), line
    dist.barrier()


@ranks(2)
def test_a_lone_forward_holds_no_more_units_than_one_of_all_ranks(rank: int) -> None:
    sharded, engine, _ = made()
    peaks = []
    for reads in (True, rank == 0):
        engine.reset_peak_gathered()
        if reads:
            values(sharded)
        dist.barrier()
        peaks.append(engine.statistics().peak_gathered)
    together, alone = peaks
    assert engine.statistics().lone_reads == (rank == 0)
    assert 0 < alone <= together if rank == 0 else alone == 0
    assert together < sum(p.numel() * p.element_size() for p in Net().parameters())


def _peak(function: Callable[[], Any]) -> int:
    """Return the most bytes of tensors that `function` has held at once beside what was there, by torch's own profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    del kept
    return max(sizes, default=0)


@ranks(2)
def test_a_lone_state_dict_takes_memory_for_its_values_and_one_unit(rank: int) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))
    engine = torch_shard.shard(model, units=["*"])
    unit = 4 * 64 * 64
    if rank == 0:
        assert 12 * unit <= _peak(lambda: engine.state_dict(form="full")) <= 14 * unit
    dist.barrier()
    assert engine.statistics().lone_reads == (rank == 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(5))
@ranks(3, timeout=450)
def test_ranks_that_evaluate_seconds_apart_never_mix(rank: int, part: int) -> None:
    """Whether they meet or not: in all parts 500 evaluations, before each of which each rank is up to two seconds late."""
    sharded, engine, plain = made()
    late = torch.Generator().manual_seed(100 * part + rank)
    alone = [0]  # evaluations, in each of the parts between two steps
    for n in range(100):
        time.sleep(2 * torch.rand(1, generator=late).item())
        before = engine.statistics().lone_reads
        same(values(sharded), values(plain))
        alone[-1] += engine.statistics().lone_reads - before
        if n % 10 == 9:
            for model in (sharded, plain):
                train(model, torch.optim.SGD(model.parameters(), lr=0.01))
            alone.append(0)
    # All ranks meet in an evaluation, or none does: they can't have met in different numbers of evaluations.
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, alone)
    assert all(other == alone for other in everyone), everyone
    assert 5 <= sum(alone) <= 95, alone  # so that both really occur
