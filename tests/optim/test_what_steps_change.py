"""What a step changes beside parameters and state, and what it must look at anew: gradients, attributes, counters, memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_shard
from tests.compat.harness import MLP, Pair, batch, plain_backward, same_grads
from tests.optim.helpers import Odd, backward_both, both, go, in_strides_of, same_optimizers, trainable
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard.shard_tensor.tensor import ShardTensor
from torch_shard.shard_tensor.unsharded_param import own_grad

O = torch.optim


class Declared(torch.optim.Optimizer):
    def __init_subclass__(cls):
        torch_shard.optim.register(cls, kind="elementwise")

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def present(self):
        return [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]


class Sharpness(Declared):
    """SAM: to the worst point near by, and from the gradient there back and down."""

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old"] = p.detach().clone()
                    p.add_(p.grad.sign(), alpha=0.1)
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(self.state[p]["old"]).sub_(p.grad, alpha=group["lr"])
        return loss


class InTurns(Declared):
    """Two loops, the second one by what the first has collected; and it clears gradients itself between closures."""

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        for group, p in self.present():
            p.sub_(p.grad, alpha=group["lr"])
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for group, p in self.present():
            p.sub_(p.grad, alpha=group["lr"])
        for group, p in self.present():
            p.mul_(1 - group["lr"])
        return loss


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
@pytest.mark.parametrize("kind", [Sharpness, *exhaustive(InTurns)])
@ranks(2)
def test_a_closure_between_two_loops_sees_what_the_first_has_done(rank, world_size, kind, strategy):
    pair = Pair(Odd, rank, world_size, optimizer=lambda m: kind(trainable(m)), strategy=strategy)
    for step in range(3):
        losses = []
        for model, optimizer in both(pair):

            def closure(model=model, optimizer=optimizer, step=step):
                if kind is Sharpness:
                    optimizer.zero_grad()
                return plain_backward(model, batch(0, step))

            with torch.no_grad():  # what was gathered here is out of date behind the first loop
                model(batch(0, step))
            losses.append(optimizer.step(closure))
            optimizer.zero_grad()
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-10)
        pair.check()
    same_optimizers(pair.optimizer, pair.plain_optimizer)


class Breaks(Declared):
    """Two loops; an exception in the second one."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.5)
                p.grad.mul_(0.25)
        for group in self.param_groups:
            for p in group["params"]:
                raise ArithmeticError(p.shape)


class Counting(Declared):
    """Goes through the groups within a loop over them, and counts."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            present = sum(p.grad is not None for other in self.param_groups for p in other["params"])
            for p in group["params"]:
                if present and p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["step"])


@ranks(2)
def test_loops_within_loops_and_counters_of_groups(rank, world_size):
    pair = Pair(Odd, rank, world_size, optimizer=lambda m: Counting([{"params": [p]} for p in trainable(m)]))
    go(pair, 0, 3)
    assert {group["step"] for group in pair.optimizer.param_groups} == {3}


@ranks(2)
def test_what_a_loop_has_done_before_an_exception_in_the_next_is_there(rank, world_size):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: Breaks(m.parameters()))
    pair.backward(plain_backward, batch(rank, 0))
    for _, optimizer in both(pair):
        with pytest.raises(ArithmeticError):
            optimizer.step()
    pair.check()
    same_grads(pair.model, pair.plain)


# -- gradients --------------------------------------------------------------------------------------------------


class Gradients(Declared):
    """Does something to the gradients, too."""

    how = ""

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.present():
            if self.how == "centred":
                p.grad.add_(p, alpha=0.5)
            if self.how == "through .data":
                p.grad.data.mul_(0.5)
            if self.how == "replaced":
                p.grad = p.grad.sign()
            p.sub_(p.grad, alpha=group["lr"])
            if self.how == "zeroed":
                p.grad.zero_()
            if self.how == "freed":
                p.grad = None
            if self.how == "replaced, then edited":
                p.grad = p.grad * 2
                p.grad.add_(1)
        if self.how == "zero_grad":
            self.zero_grad()
        if self.how == "zero_grad to zeros":
            self.zero_grad(set_to_none=False)


WAYS = [
    "centred",
    "through .data",
    "replaced",
    "replaced, then edited",
    "zeroed",
    "freed",
    "zero_grad",
    "zero_grad to zeros",
]


class Even(MLP):
    """Without padding between its parameters."""

    def __init__(self):
        super().__init__(width=8)
        self.leave_out = False


@pytest.mark.parametrize("build", [Odd, *exhaustive(Even)])
@pytest.mark.parametrize("how", quick(WAYS, ["centred", "replaced", "zeroed", "zero_grad"]))
@ranks(2, exhaustive=(1, 3))
def test_what_a_step_does_to_gradients_is_there_after_it(rank, world_size, build, how):
    pair = Pair(build, rank, world_size, optimizer=lambda m: Gradients(trainable(m)))
    pair.optimizer.how = pair.plain_optimizer.how = how
    for step in range(3):  # without zero_grad(): what the step has left is added to
        pair.model.leave_out = pair.plain.leave_out = step == 1
        plain_backward(pair.model, batch(0, step))
        plain_backward(pair.plain, batch(0, step))
        for _, optimizer in both(pair):
            optimizer.step()
        same_grads(pair.model, pair.plain)
        pair.check()


@ranks(2)
def test_gradients_of_the_users_own_are_changed_as_well(rank, world_size):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: Gradients(m.parameters()))
    pair.optimizer.how = pair.plain_optimizer.how = "centred"
    for step in range(2):
        pair.backward(plain_backward, batch(rank, step))
        for model, optimizer in both(pair):
            model.head.weight.grad = model.head.weight.grad * 3
            optimizer.step()
        same_grads(pair.model, pair.plain)
    pair.check()


@ranks(2)
def test_a_gradient_that_was_replaced_leaves_the_old_one_as_it_was(rank, world_size):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: Gradients(m.parameters()))
    pair.optimizer.how = "replaced"
    plain_backward(pair.model, batch(rank, 0))
    grad = pair.model.head.weight.grad
    before = grad.to_local().clone()
    pair.optimizer.step()
    assert torch.equal(grad.to_local(), before)
    with torch._C.DisableTorchFunctionSubclass():
        assert own_grad(pair.model.head.weight) is not grad


@pytest.mark.parametrize("name", ["AdamW", *exhaustive("SGD", "Adagrad")])
@ranks(2)
def test_a_fused_kernel_leaves_gradients_unscaled_as_on_the_plain_model(rank, world_size, name):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: getattr(O, name)(m.parameters(), lr=0.01, fused=True))
    for step in range(3):
        for model, optimizer in both(pair):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            scaler.scale(model(batch(0, step)).pow(2).mean()).backward()
            if step == 1:
                model.head.weight.grad = model.head.weight.grad * torch.inf  # skipped
            scaler.step(optimizer)
        same_grads(pair.model, pair.plain)
        pair.check()
        for _, optimizer in both(pair):
            optimizer.zero_grad()


# -- attributes -------------------------------------------------------------------------------------------------


class Scaled(Declared):
    """Looks at what the user has written to parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.present():
            p.sub_(p.grad, alpha=group["lr"] * getattr(p, "lr_scale", 1.0) * getattr(p, "more", [1.0])[0])


def _attribute_added(model):
    model.up.weight.lr_scale = 0.5


def _attribute_changed(model):
    model.head.weight.lr_scale = 0.25


def _attribute_removed(model):
    del model.head.weight.lr_scale


def _attribute_exchanged(model):
    del model.head.weight.lr_scale
    model.head.weight.more = [0.1]


def _attribute_edited(model):
    model.head.bias.more[0] = 0.1


@pytest.mark.parametrize(
    "edit",
    [
        _attribute_added,
        *exhaustive(_attribute_changed, _attribute_removed),
        _attribute_exchanged,
        *exhaustive(_attribute_edited),
    ],
)
@ranks(2)
def test_attributes_of_parameters_are_those_of_now(rank, world_size, edit):
    pair = Pair(Odd, rank, world_size, optimizer=lambda m: Scaled(trainable(m)))
    for model, _ in both(pair):
        model.head.weight.lr_scale, model.head.bias.more = 0.5, [2.0]
    go(pair, 0, 2)
    backward_both(pair, 2)
    pair.each(edit)
    pair.update()
    pair.check()


# -- each thing that an arrangement of parameters is made from ----------------------------------------------------


def _gradient_missing(model, optimizer):
    model.up.weight.grad = None


def _gradient_again(model, optimizer):
    model.up.weight.grad = model.up.weight.grad.clone()


def _gradient_edited(model, optimizer):
    model.up.weight.grad.mul_(0.5)


def _counter_filled(model, optimizer):
    optimizer.state[model.up.bias]["step"].fill_(7)


def _counter_through_data(model, optimizer):
    optimizer.state[model.up.bias]["step"].data.fill_(7)


def _first_counter_through_data(model, optimizer):
    optimizer.state[model.inp.weight]["step"].data.fill_(7)


def _counters_through_data(model, optimizer):
    for state in optimizer.state.values():
        state["step"].data.fill_(50)


def _counter_in_other_memory(model, optimizer):
    optimizer.state[model.up.bias]["step"].data = torch.tensor(7.0)


def _counter_of_numpy(model, optimizer):
    optimizer.state[model.up.bias]["step"].numpy()[...] = 7


def _counter_shared(model, optimizer):
    optimizer.state[model.up.bias]["step"] = optimizer.state[model.head.bias]["step"] = torch.tensor(7.0)


def _entry_exchanged(model, optimizer):
    optimizer.state[model.up.bias] = {k: v.clone() for k, v in optimizer.state[model.up.bias].items()}


def _value_exchanged(model, optimizer):
    optimizer.state[model.up.bias]["exp_avg"] = optimizer.state[model.up.bias]["exp_avg"] * 0.5


def _values_edited(model, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].data.mul_(0.5)


def _state_exchanged(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _laid_out_by_another(model, optimizer):
    """Another optimizer with the same state, which divides it otherwise."""
    other = type(optimizer)([{"params": trainable(model)[:3]}, {"params": trainable(model)[3:]}], lr=0.01)
    other.state = optimizer.state
    other.step()


def _whole_values(model, optimizer):
    for p in (model.up.weight, model.turned, model.column):
        optimizer.state[p]["exp_avg"] = in_strides_of(p, torch.linspace(-0.1, 0.1, p.numel()).view(p.shape))


def _state_cleared(model, optimizer):
    optimizer.state.clear()


def _entry_emptied(model, optimizer):
    optimizer.state[model.up.weight] = {}
    del optimizer.state[model.one]


def _state_in_another_dict(model, optimizer):
    old = optimizer.state
    optimizer.state = type(old)(dict)
    for p, state in old.items():
        optimizer.state[p] = dict(state)


def _an_entry_of_the_users(model, optimizer):
    optimizer.state[model.up.weight]["note"] = "kept"
    optimizer.state[model.up.weight]["average"] = model.up.weight.detach().clone()


def _group_divided(model, optimizer):
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = params[::2]
    optimizer.add_param_group({"params": params[1::2], "lr": 0.1})


def _parameter_left_out(model, optimizer):
    del optimizer.param_groups[0]["params"][3]


def _loops(model, optimizer):
    optimizer.param_groups[0]["foreach"] = False


def _several_at_once(model, optimizer):
    optimizer.param_groups[0]["foreach"] = True


def _lr_in_a_tensor(model, optimizer):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.3)


def _lr(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.3


INPUTS = [
    _gradient_missing, _gradient_again, _gradient_edited, _counter_filled, _counter_through_data,
    _first_counter_through_data, _counters_through_data, _counter_in_other_memory, _counter_of_numpy, _entry_exchanged,
    _value_exchanged, _values_edited, _state_exchanged, _laid_out_by_another, _group_divided, _parameter_left_out, _loops,
    _several_at_once, _lr_in_a_tensor, _lr, _whole_values, _state_cleared, _entry_emptied, _state_in_another_dict,
    _an_entry_of_the_users,
]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    quick(
        INPUTS,
        [
            _gradient_missing,
            _counters_through_data,
            _values_edited,
            _group_divided,
            _parameter_left_out,
            _several_at_once,
        ],
    ),
)
@pytest.mark.parametrize("name", ["AdamW", *exhaustive("NAdam")])
@ranks(2)
def test_what_changed_since_the_last_step_counts_from_the_next_one(rank, world_size, name, change):
    if name == "NAdam" and change is _lr_in_a_tensor:
        pytest.skip("NAdam takes none with foreach")
    pair = Pair(Odd, rank, world_size, optimizer=lambda m: getattr(O, name)(trainable(m), lr=0.01))
    go(pair, 0, 2)  # so that the third one would find all as it was
    backward_both(pair, 2)
    for model, optimizer in both(pair):
        change(model, optimizer)
    pair.update()
    go(pair, 3, 2)


@pytest.mark.parametrize(
    "edit", [*exhaustive(_counter_filled), _counters_through_data, *exhaustive(_counter_in_other_memory)]
)
@ranks(2)
def test_all_pieces_of_a_large_parameter_have_its_counter(rank, world_size, edit):
    def build():
        model = nn.Sequential()
        model.inp, model.up, model.head = nn.Linear(5, 2), nn.Linear(2, 300_000), nn.Linear(300_000, 3)
        return model

    pair = Pair(build, rank, world_size, optimizer=lambda m: O.NAdam(m.parameters(), lr=0.01), unit_bytes=10**6)
    go(pair, 0, 2)
    for model, optimizer in both(pair):
        edit(model, optimizer)
    go(pair, 2, 2)


@ranks(2)
def test_one_counter_for_two_parameters_counts_for_each_from_then_on(rank, world_size):
    pair = Pair(Odd, rank, world_size, optimizer=lambda m: O.AdamW(trainable(m), lr=0.01))
    go(pair, 0, 2)
    _counter_shared(pair.model, pair.optimizer)
    model, optimizer = pair.plain, pair.plain_optimizer
    for p in (model.up.bias, model.head.bias):
        optimizer.state[p]["step"] = torch.tensor(7.0)
    go(pair, 2, 3)


@ranks(2)
def test_counters_can_be_saved_and_copied_one_by_one(rank, world_size, tmp_path):
    pair = Pair(Odd, rank, world_size, optimizer=lambda m: O.AdamW(trainable(m), lr=0.01))
    go(pair, 0, 2)
    state = pair.optimizer.state[pair.model.up.bias]
    kept, reference = copy.deepcopy(state["step"]), state["step"]
    torch.save(state["step"], tmp_path / f"{rank}.pt")
    go(pair, 2, 2)
    assert state["step"] is reference and float(reference) == 4
    assert float(kept) == float(torch.load(tmp_path / f"{rank}.pt")) == 2
    assert not any(isinstance(s["step"], ShardTensor) for s in pair.optimizer.state.values())
