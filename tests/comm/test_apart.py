"""Ranks that part ways, and come together again: every exchange has a limit, and groups are made anew on all or on none."""

from __future__ import annotations

import copy
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.support.inside import runtime_of
from tests.support.marks import quick
from tests.support.ranks import ranks, run
from torch_shard.comm.work import FIRST_TICK, caller_line
from torch_shard.errors import ConfigError, DivergenceError, MissingRankError, SetupError, ShardError

SHORT = 3.0  # seconds that a rank waits for a partner in these tests
small = {"units": [nn.Linear], "timeout": SHORT}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def step(model):
    model(torch.ones(2, 4)).sum().backward()


def trains(model):
    """Whether a step gives the numbers of plain training."""
    plain = net()
    model.zero_grad()
    step(model)
    step(plain)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def a_new_one_trains(**settings):
    """Shard a new model, and compare a step of it with plain training."""
    model = net()
    torch_shard.shard(model, **{**small, **settings})
    trains(model)


def stepped(**settings):
    """A sharded model after one step, and its engine."""
    model = net()
    engine = torch_shard.shard(model, **{**small, **settings})
    step(model)
    return model, engine


LONELY = {
    "forward": (lambda e, m: m(torch.ones(2, 4)), "forward"),
    "evaluation": (lambda e, m: torch.no_grad()(m)(torch.ones(2, 4)), "forward"),
    "norm": (lambda e, m: m[0].weight.norm(), r"0\.weight"),
    "grad_norm": (lambda e, m: m[0].weight.grad.norm(), r"0\.weight"),
    "grad_cat": (lambda e, m: torch.cat([m[0].bias.grad, m[2].bias.grad]), r"cat of the sharded 0\.bias and 1 more"),
    "clip": (lambda e, m: e.clip_grad_norm_(1.0), "norm"),
    "full_tensor": (lambda e, m: m[0].weight.full_tensor(), r"full_tensor of 0\.weight"),
    "gathered": (lambda e, m: e.gathered(m[0]).__enter__(), "gathered"),
    "save": (lambda e, m: e.state_dict(), "state_dict"),
}


def lonely(rank, model, engine, what):
    """Run an operation on rank 0 alone, which is an error in time that names it."""
    operation, named = LONELY[what]
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(MissingRankError, match=named) as caught:
            operation(engine, model)
        assert time.monotonic() - begin < SHORT + 3
        assert "rank 1" in str(caught.value) and f"{__file__}:" in str(caught.value)
    dist.barrier()  # the user's own process group is as it was


# -- the error on the other rank ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", quick(LONELY, ["forward"]))
@ranks(2, exhaustive=(3,), timeout=40)
def test_an_operation_that_one_rank_alone_runs_is_an_error_in_time_and_then_on_all_ranks_at_once(rank, what):
    model, engine = stepped(alone="error")
    lonely(rank, model, engine, what)
    begin = time.monotonic()
    with pytest.raises(ShardError, match="shard a new model") as caught:
        step(model)
        step(model)
    assert time.monotonic() - begin < SHORT + 1
    assert "rank 0 waited 3 s" in str(caught.value), "what rank 0 had been doing"
    assert __file__ in str(caught.value)
    assert "must be followed by a torch.distributed.barrier()" in str(caught.value)
    with pytest.raises(DivergenceError, match="earlier error"):
        step(model)


def dies_in_comparison(rank, world_size):
    engine = torch_shard.shard(net(), **small)
    operations = runtime_of(engine).operations
    operations.note(rank, f"rank {rank}'s own way")
    if rank == 1:
        operations.collectives.watchdog.exchange = lambda *_: os._exit(1)
    begin = time.monotonic()
    try:
        operations.check("a check")
    except ShardError as error:
        return type(error).__name__, str(error), time.monotonic() - begin


@pytest.mark.exhaustive
def test_a_rank_that_dies_before_the_comparison_does_not_hang_the_other():
    (kind, text, seconds), _ = run(2, dies_in_comparison, may_die=(1,), timeout=40)
    assert kind == "MissingRankError" and "rank 1 did not come" in text and "rank 0's own way" in text
    assert seconds < SHORT + 2


@ranks(2)
def test_both_sides_of_a_comparison_still_name_the_first_difference(rank):
    model = net()
    engine = torch_shard.shard(model, alone="error", **small)
    if rank == 0:  # a collective that carries no parameters and no gradients, so that nothing can pair with it wrongly
        runtime_of(engine).collectives.watchdog.channels["host barrier"].count()
    with pytest.raises(DivergenceError, match=r"rank 0: .*; rank 1: "):
        if rank == 0:
            model(torch.ones(2, 4))
        else:
            with torch.no_grad():
                model(torch.ones(2, 4))
    step(model)  # no rank was left alone, so the engine goes on


@ranks(2)
def test_a_difference_that_is_found_while_a_forward_runs_names_both_sides_and_changes_no_parameter(rank):
    """Where forwards repeat, no rank waits for the others before it begins the next."""
    model, engine = stepped()
    optimizer = torch.optim.Muon([model[0].weight, model[2].weight], lr=0.1)
    optimizer.step()
    step(model)
    kept = [p.detach().to_local().clone() for p in model.parameters()]
    with pytest.raises(DivergenceError, match=r"rank 0: begins a forward .*rank 1: engine\.optim_state_dict"):
        if rank == 0:
            step(model)
        else:
            engine.optim_state_dict(optimizer)
        optimizer.step()
    assert all(torch.equal(p.detach().to_local(), before) for p, before in zip(model.parameters(), kept, strict=True))


@pytest.mark.exhaustive
@ranks(2, timeout=40)
def test_a_barrier_lets_one_rank_write_a_checkpoint_for_longer_than_the_timeout(rank, tmp_path):
    model, engine = stepped(timeout=2.0)
    state = engine.state_dict()
    if rank == 0:
        time.sleep(4.0)
        torch.save(state, tmp_path / "model.pt")
    dist.barrier()
    trains(model)


@ranks(2)
def test_a_rank_that_comes_late_is_waited_for(rank):
    model = net()
    torch_shard.shard(model, **{**small, "timeout": 60.0})
    if rank == 1:
        time.sleep(FIRST_TICK + 1.0)
    trains(model)


# -- the line that a message names --------------------------------------------------------------------------------------


def function_of(module):
    """A function that calls its argument, of a module of that name."""
    return eval(compile("lambda function: function()", f"<{module}>", "eval"), {"__name__": module})


@pytest.mark.parametrize(
    "module",
    ["lightning.pytorch.core.module", "pytorch_lightning.loops", "transformers.trainer", "contextlib", "torch.nn"],
)
def test_a_message_names_the_users_line_and_not_a_frameworks(module):
    assert function_of(module)(caller_line).startswith(f"{__file__}:")
    users = partial(function_of("train"), partial(function_of(module), caller_line))
    assert function_of(module)(users) == "<train>:1"


def test_where_there_is_no_line_of_the_users_a_message_names_the_innermost_one_of_a_framework():
    inner, outer = function_of("lightning.pytorch.core.module"), function_of("lightning.fabric.launchers")
    with ThreadPoolExecutor() as pool:
        assert pool.submit(outer, partial(inner, caller_line)).result() == "<lightning.pytorch.core.module>:1"
        assert pool.submit(caller_line).result() == "unknown line"


# -- sharding a new model -----------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("subgroup", [False, True])
@ranks(2, timeout=40)
def test_a_new_model_can_be_sharded_after_an_error_on_one_rank(rank, subgroup):
    settings = {"mesh": dist.new_group([0, 1], use_local_synchronization=True)} if subgroup else {}
    for _ in range(2):
        model, engine = stepped(alone="error", **settings)
        lonely(rank, model, engine, "evaluation")
    again = net()
    begin = time.monotonic()
    torch_shard.shard(again, **small, **settings)
    assert time.monotonic() - begin < SHORT
    trains(again)
    if rank == 1:
        with pytest.raises(ShardError):
            step(model)  # the old one stays apart
            step(model)
    dist.barrier()
    trains(again)


@ranks(3, timeout=40)
def test_subgroups_that_overlap_can_be_sharded_over_in_turn(rank):
    pairs = [[0, 1], [0, 2], [1, 2]]
    for pair, group in [(pair, dist.new_group(pair)) for pair in pairs]:
        if rank in pair:
            a_new_one_trains(mesh=group)


@ranks(2)
def test_groups_that_one_rank_has_destroyed_are_made_anew_on_all(rank):
    engine = torch_shard.shard(net(), **small)
    if rank == 1:
        dist.destroy_process_group(runtime_of(engine).collectives.scalar.channel.group)
    a_new_one_trains()


@pytest.mark.exhaustive
@ranks(2, timeout=40)
def test_a_rank_that_tries_again_after_nobody_came_meets_the_other(rank):
    group = dist.new_group([0, 1])
    for _ in range(2):  # the first use of the group, and a later one
        if rank == 0:
            with pytest.raises(MissingRankError, match=r"shard\(\) at .* for ranks \[1\]"):
                torch_shard.shard(net(), mesh=group, **small)
        else:
            time.sleep(SHORT + 1)
        a_new_one_trains(mesh=group)


@pytest.mark.exhaustive
@ranks(2, timeout=40)
def test_a_rank_that_shards_while_the_other_trains_is_an_error_that_says_so(rank):
    model, _engine = stepped()
    dist.barrier()
    with pytest.raises(MissingRankError) as caught:
        if rank == 0:
            torch_shard.shard(net(), **{**small, "timeout": SHORT + 1})
        else:
            time.sleep(0.5)
            step(model)
    assert (
        rank == 0
        or "rank 0 is not waiting in an operation of the engine (it runs other code, perhaps shard()"
        in str(caught.value)
    )
    dist.barrier()
    a_new_one_trains()


@ranks(2)
def test_engines_over_one_group_share_their_process_groups(rank):
    torch_shard.shard(net(), **small)
    dist.barrier()
    made = len(dist.distributed_c10d._world.pg_map)
    for _ in range(2):
        a_new_one_trains()
    assert len(dist.distributed_c10d._world.pg_map) == made


# -- settings -----------------------------------------------------------------------------------------------------------

DIFFERENT = {
    "strategy": ("full_shard", "no_shard"),
    "unit_bytes": (100, 1000),
    "prefetch": (1, 2),
    "sync_module_states": (True, False),
    "broadcast_buffers": (True, False),
    "single_communicator": (True, False),
}
PLANS = {"units": ([["0.weight", "0.bias"]], [["0.weight", "2.bias"]]), "ignore": (["0.bias"], ["2.bias"])}


@pytest.mark.parametrize("field", DIFFERENT)
@ranks(2)
def test_settings_that_differ_are_an_error_that_names_the_field_and_the_values(rank, field):
    values = DIFFERENT[field]
    shown = [re.escape(str(v)) for v in values]
    with pytest.raises(ConfigError, match=rf"^{field}.*ranks?.*{shown[0]}.*ranks?.*{shown[1]}"):
        torch_shard.shard(net(), timeout=SHORT, **{field: values[rank]})
    a_new_one_trains()


@pytest.mark.parametrize("field", PLANS)
@ranks(2)
def test_plans_that_differ_are_an_error_that_names_the_first_parameter(rank, field):
    with pytest.raises(SetupError, match=r"the first difference is parameter '(0\.weight|2\.bias)'.*rank 1"):
        torch_shard.shard(net(), timeout=SHORT, **{field: PLANS[field][rank]})
    a_new_one_trains()


@ranks(2)
def test_settings_that_are_a_ranks_own_affair_may_differ(rank):
    model = net()
    torch_shard.shard(model, timeout=20.0 + rank, debug=bool(rank), units=[nn.Linear] if rank else ["0", "2"])
    trains(model)


def test_a_config_or_model_of_the_wrong_type_is_an_error_that_names_the_argument():
    with pytest.raises(ConfigError, match=r"^config must be a ShardConfig, not dict; .*\*\*config"):
        torch_shard.shard(net(), {"strategy": "no_shard"})
    with pytest.raises(ConfigError, match=r"^config must be a ShardConfig, not str"):
        torch_shard.shard(net(), "no_shard")
    with pytest.raises(ConfigError, match=r"^config"):
        torch_shard.shard(net(), {}, prefetch=2)
    for wrong in ([1, 2], nn.Linear, None):
        with pytest.raises(SetupError, match=r"^model must be a torch\.nn\.Module, not"):
            torch_shard.shard(wrong)
    with pytest.raises(SetupError, match=r"^mesh must be"):
        torch_shard.shard(net(), mesh=[0, 1])


# -- torch's own load_state_dict ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["model", "layer"])
@ranks(2)
def test_a_state_dict_that_one_rank_alone_loads_is_an_error_in_the_next_forward(rank, part):
    model, engine = stepped()
    state = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
    if rank == 0:
        if part == "model":
            model.load_state_dict(state)
        else:
            model[2].load_state_dict({"weight": state["2.weight"], "bias": state["2.bias"]})
    with (
        pytest.raises(DivergenceError, match=r"did not load alike.*rank 0: loads a state dict into '[02]'.*every rank"),
        torch.no_grad(),
    ):
        model(torch.ones(2, 4))
    model.load_state_dict(state)
    assert all((v == 1).all() for v in engine.state_dict(rank0_only=False).values())
    step(model)


@ranks(2)
def test_an_edit_on_one_rank_alone_is_an_error_also_where_only_a_submodule_is_trained(rank):
    model, _ = stepped()
    step(model[0])
    if rank == 0:
        with torch.no_grad():
            model[2].weight.mul_(2)
    with pytest.raises(DivergenceError, match="not made the same changes"):
        model[0](torch.ones(2, 4))


@ranks(2)
def test_loading_on_all_ranks_or_inside_gathered_is_no_difference(rank):
    model = net()
    engine = torch_shard.shard(model, **small)
    state = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
    model.load_state_dict(state)
    step(model)
    engine.load_state_dict(state)
    step(model)
    with engine.gathered(ranks=0, write=True):
        if rank == 0:
            model.load_state_dict({name: 2 * value for name, value in state.items()})
    step(model)
    assert all((v == 2).all() for v in engine.state_dict(rank0_only=False).values())
    if rank == 1:
        del state["0.bias"]
    with pytest.raises(ShardError, match=r"0\.bias"):  # found before anything is loaded: no difference either
        engine.load_state_dict(state)
    step(model)


@ranks(2)
def test_a_copy_that_one_rank_alone_loads_into_is_an_error_in_its_next_forward(rank):
    model = net()
    torch_shard.shard(model, **small)
    twin = copy.deepcopy(model)
    if rank == 0:
        twin.load_state_dict({name: torch.ones(p.shape) for name, p in model.named_parameters()})
    step(model)  # only the copy differs
    with pytest.raises(DivergenceError, match="did not load alike"):
        step(twin)
