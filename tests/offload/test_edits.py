"""What is read and done beside the host's work on gradients and its step ends as without offload, bit by bit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.offload.models import HALF, Training, alike, chosen, hold, inputs, loss_of, same
from tests.support.marks import one_at_a_time, quick
from tests.support.ranks import RankFailure, ranks


def scale(model, by):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(by)


def edit_all(t, number):
    with t.engine.gathered(write=True):
        scale(t.model, 1.01)


def edit_on_one_rank(t, number):
    with t.engine.gathered(t.model.blocks[1], write=True, ranks=1 % dist.get_world_size(), device="cpu"):
        if t.rank == 1 % dist.get_world_size():
            scale(t.model.blocks[1], 1.5)


def edit_nested(t, number):
    with t.engine.gathered(write=True):
        scale(t.model.blocks[0], 1.01)
        with t.engine.gathered(t.model.blocks[1], write=True):
            scale(t.model.blocks[1], 0.99)
        t.seen.append(t.model.blocks[1][1].weight.detach().clone())


def look_and_leave(t, number):
    with t.engine.gathered():
        scale(t.model, 3.0)  # kept by nobody


def edit_gradients(t, number):
    with t.engine.gathered(write=True, grads=True):
        for p in t.model.parameters():
            if p.grad is not None:
                p.grad *= 0.5


def apply(t, number):
    def damp(module):
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.mul_(0.999)

    t.engine.apply(damp)


def edit_slices(t, number):
    with torch.no_grad():
        for p in t.model.parameters():
            p.mul_(0.99)
            p.data.add_(1e-3)


def assign(t, number):
    p = t.model.blocks[2][1].weight
    p.data = torch.full_like(p.full_tensor() if isinstance(p, torch_shard.ShardTensor) else p.detach(), 0.01 * number)


def edit_memory(t, number):
    for p in t.model.parameters():
        if isinstance(p, torch_shard.ShardTensor):
            p.to_local().mul_(1.01)


def load(t, number):
    whole = t.engine.state_dict(form="full", rank0_only=False)
    t.model.load_state_dict({name: value * 0.9 for name, value in whole.items()})


def load_both(t, number):
    """An epoch back, in memory."""
    if number == 1:
        t.kept = (
            t.engine.state_dict(form="full", rank0_only=False),
            t.engine.optim_state_dict(t.optimizer, rank0_only=False),
        )
    if number == 3:
        t.engine.load_state_dict(t.kept[0])
        t.engine.load_optim_state_dict(t.optimizer, t.kept[1])


def freeze(t, number):
    t.model.blocks[number % 4].requires_grad_(number % 2 == 1)


def edit_state(t, number):
    for own in t.optimizer.state.values():
        for value in own.values():
            if value.dim():
                value.mul_(0.5)


def new_group(t, number):
    if number == 0:
        params = t.optimizer.param_groups[0]["params"]
        rest = [params.pop(), params.pop()]
        t.optimizer.add_param_group({"params": rest, "lr": 0.02})


def edit_counters(t, number):
    for n, own in enumerate(t.optimizer.state.values()):
        if n % 3 == 0 and "step" in own:
            own["step"].fill_(7.0 * (n % 2))


def change_options(t, number):
    for group in t.optimizer.param_groups:
        group["weight_decay"] = 0.5
        group["lr"] *= 1.2


def edit_unseen(t, number):
    """Through arrays, of which no version tells."""
    for p in t.model.parameters():
        for tensor in (p, p.grad):
            if tensor is not None:
                array = (tensor.to_local() if isinstance(tensor, torch_shard.ShardTensor) else tensor.detach()).numpy()
                array *= 0.5
                del array


def accumulate(t, number):
    loss_of(t.model, inputs(t.rank, 60 + number)).backward()


def clear(t, number):
    t.optimizer.zero_grad(set_to_none=number % 2 == 0)
    accumulate(t, number)


def clip_again(t, number):
    t.seen.append(t.engine.clip_grad_norm_(0.01))
    t.engine.clip_grad_value_(1e-3)


def read_gradients(t, number):
    for p in t.model.parameters():
        if p.grad is not None:
            t.seen += [
                p.grad.to_local().clone(),
                p.grad.detach().to_local().clone(),
                p.grad.norm(),
                p.grad.full_tensor(),
            ]


def read_parameters(t, number):
    first, last = (list(t.model.parameters())[i] for i in (0, -1))
    t.seen += [
        first.to_local().clone(),
        last.sum().detach(),
        t.model.state_dict()["blocks.2.1.weight"].to_local().clone(),
    ]
    with torch.no_grad():
        t.seen.append(loss_of(t.model, inputs(0, 7)))


def hold_aliases(t, number):
    """Of the step before, and for the next one: what shares memory sees the step."""
    t.seen += [alias.to_local().clone() for alias in getattr(t, "aliases", [])]
    weight = t.model.blocks[2][1].weight
    t.aliases = [
        x.detach() for x in (weight, *t.optimizer.state.get(weight, {}).values(), weight.grad) if x is not None
    ]
    t.aliases = [alias for alias in t.aliases if isinstance(alias, torch_shard.ShardTensor)]


def copied(t, number):
    other = copy.deepcopy(t.model)
    with torch.no_grad():
        t.seen.append(loss_of(other, inputs(t.rank, 77)).item())
        scale(other, 0.0)


EDITS = [
    edit_all, edit_slices, edit_on_one_rank, edit_nested, look_and_leave, edit_gradients, apply, assign, edit_memory, load,
    load_both, freeze, edit_state, edit_counters, new_group, change_options, edit_unseen, accumulate, clear, clip_again,
    read_gradients, read_parameters, hold_aliases, copied,
]  # fmt: skip


QUICK = [edit_all, edit_slices, edit_counters, edit_unseen, accumulate]


@pytest.mark.parametrize("edit", quick(EDITS, QUICK))
@one_at_a_time(precision=[HALF, None], offload=["kept", "cpu", "disk", "all on disk"], optimizer=["AdamW", "SGD"])
@ranks(2)
def test_edits_beside_the_hosts_work(rank, tmp_path, offload, optimizer, precision, edit):
    def train(offload):
        t = Training(rank, offload, optimizer, precision=precision)
        for number in range(4):
            loss = loss_of(t.model, inputs(rank, number))
            loss.backward()
            t.seen.append(loss.item())
            # When an edit comes, gradients are still to be scaled, or the step is still to be done.
            for work in (lambda: t.seen.append(t.engine.clip_grad_norm_(0.1)), t.optimizer.step):
                if offload is not None:
                    hold(t, 0.02)
                work()
                edit(t, number)
            t.scheduler.step()
            t.optimizer.zero_grad()
            t.read(number)
        return t.seen, *t.state()

    alike(train, chosen(offload, tmp_path))


def one_counter(rank, directory, offload, in_backward):
    def train(offload, shared):
        t = Training(rank, offload, lambda m: torch.optim.AdamW([*m.parameters()][::-1], lr=1e-2))
        if in_backward:
            t.engine.step_in_backward(t.optimizer)
        for number in range(5):
            t.step(number)
            states = [t.optimizer.state[block[1].weight] for block in t.model.blocks]
            if number == 1:
                one = torch.tensor(7.0)
                for own in states:
                    own["step"] = one if shared else one.clone()
            if number == 2:
                states[3]["step"] = states[0]["step"] if shared else states[0]["step"].clone()
            if number == 3:
                states[1]["step"] = states[2]["step"] if shared else states[2]["step"].clone()
        return t.seen, *t.state()

    wanted = train(None, False)
    same(train(None, True), wanted)
    same(train(chosen(offload, directory), True), wanted)


@one_at_a_time(offload=["cpu", "disk"])
@ranks(2)
def test_one_counter_for_parameters_of_several_units_counts_for_each(rank, tmp_path, offload):
    one_counter(rank, tmp_path, offload, in_backward=False)


@pytest.mark.exhaustive
@pytest.mark.xfail(strict=True, raises=RankFailure, reason="units that step by themselves all count in the one counter")
@ranks(2)
def test_one_counter_counts_for_each_where_the_backward_steps(rank, tmp_path):
    one_counter(rank, tmp_path, "cpu", in_backward=True)
