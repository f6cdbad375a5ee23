"""What a step changes beside parameters and state, and what it must look at anew: gradients, attributes, counters, memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_shard
from tests.compat.harness import MLP, Pair, average_grads, batch, plain_backward, same_grads, whole
from tests.optim.helpers import Odd, backward_both, both, go, same_optimizers, trainable
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard.shard_tensor.tensor import ShardTensor

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


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
@ranks(2)
def test_a_closure_can_put_back_by_data_what_the_step_has_perturbed_since_its_last_call(rank, world_size, strategy):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: Sharpness(m.parameters()), strategy=strategy)
    for step in range(3):
        for model, optimizer in both(pair):
            saved = []

            def closure(model=model, saved=saved, step=step):
                model.zero_grad()
                if saved:
                    for p, old in zip(model.parameters(), saved, strict=True):
                        p.data = old
                saved[:] = [p.detach().clone() for p in model.parameters()]
                loss = plain_backward(model, batch(rank, step))
                if model is pair.plain:
                    average_grads(model)
                return loss

            optimizer.step(closure)
        pair.check()


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
@ranks(2)
def test_a_closure_between_two_loops_sees_what_the_first_has_done(rank, world_size, strategy):
    pair = Pair(Odd, rank, world_size, optimizer=lambda m: Sharpness(trainable(m)), strategy=strategy)
    for step in range(3):
        losses = []
        for model, optimizer in both(pair):

            def closure(model=model, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                return plain_backward(model, batch(0, step))

            with torch.no_grad():  # what was gathered here is out of date behind the first loop
                model(batch(0, step))
            losses.append(optimizer.step(closure))
            optimizer.zero_grad()
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-10)
        pair.check()
    same_optimizers(pair.optimizer, pair.plain_optimizer)


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


@pytest.mark.parametrize("how", quick(WAYS, ["centred", "replaced", "zeroed", "zero_grad"]))
@ranks(2, exhaustive=(1, 3))
def test_what_a_step_does_to_gradients_is_there_after_it(rank, world_size, how):
    pair = Pair(Odd, rank, world_size, optimizer=lambda m: Gradients(trainable(m)))
    pair.optimizer.how = pair.plain_optimizer.how = how
    for step in range(3):  # without zero_grad(): what the step has left is added to
        pair.model.leave_out = pair.plain.leave_out = step == 1
        for model, optimizer in both(pair):
            plain_backward(model, batch(0, step))
            if step == 2:
                model.head.weight.grad = model.head.weight.grad * 3  # one of the user's own
            old = model.up.weight.grad
            before = whole(old).clone()
            optimizer.step()
            assert "replaced" not in how or torch.equal(whole(old), before)
        same_grads(pair.model, pair.plain)
        pair.check()


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


def _attribute_exchanged(model):
    del model.head.weight.lr_scale
    model.head.weight.more = [0.1]


def _attribute_edited(model):
    model.head.bias.more[0] = 0.1


@pytest.mark.parametrize("edit", [_attribute_added, _attribute_exchanged, *exhaustive(_attribute_edited)])
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


STATE = {
    "counter through data": lambda own: own["step"].data.fill_(7),
    "counter in other memory": lambda own: setattr(own["step"], "data", torch.tensor(7.0)),
    "counter of numpy": lambda own: own["step"].numpy().fill(7),
    "counter in double": lambda own: own.update(step=own["step"].double()),  # which a fused kernel does not take
    "values through data": lambda own: own["exp_avg"].data.mul_(0.5),
    "values exchanged": lambda own: own.update({key: value.clone() for key, value in own.items()}),
    "an entry of the user's": lambda own: own.update(note="kept", average=own["exp_avg"].clone()),
    "emptied": lambda own: own.clear(),
}
WHOSE = {
    "one": lambda model: [model.up.bias],
    "the first": lambda model: [model.inp.weight],
    "all but one": lambda model: trainable(model)[1:],
    "all": trainable,
}


@pytest.mark.parametrize("edit", quick(STATE, ["counter through data", "counter in double", "values through data"]))
@pytest.mark.parametrize("whose", quick(WHOSE, ["all but one"]))
@pytest.mark.parametrize("name", ["AdamW", *exhaustive("NAdam")])
@ranks(2)
def test_state_that_was_edited_counts_from_the_next_step(rank, world_size, name, whose, edit):
    """What shows by itself, and values in place, are edited in test_random_histories.py."""
    pair = Pair(Odd, rank, world_size, optimizer=lambda m: getattr(O, name)(trainable(m), lr=0.01))
    go(pair, 0, 2)  # so that the third one would find all as it was
    backward_both(pair, 2)
    for model, optimizer in both(pair):
        for p in WHOSE[whose](model):
            STATE[edit](optimizer.state[p])
    pair.update()
    go(pair, 3, 2)


def _laid_out_by_another(model, optimizer):
    """Another optimizer with the same state, which divides it otherwise."""
    other = type(optimizer)([{"params": trainable(model)[:3]}, {"params": trainable(model)[3:]}], lr=0.01)
    other.state = optimizer.state
    other.step()


def _state_in_another_dict(model, optimizer):
    old = optimizer.state
    optimizer.state = type(old)(dict)
    for p, state in old.items():
        optimizer.state[p] = dict(state)


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


INPUTS = [
    _laid_out_by_another, _state_in_another_dict, _group_divided, _parameter_left_out, _loops, _several_at_once,
    _lr_in_a_tensor,
]  # fmt: skip


@pytest.mark.parametrize("change", quick(INPUTS, [_group_divided, _parameter_left_out, _several_at_once]))
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


@pytest.mark.parametrize("edit", ["counter through data", *exhaustive("counter in other memory")])
@ranks(2)
def test_all_pieces_of_a_large_parameter_have_its_counter(rank, world_size, edit):
    def build():
        model = nn.Sequential()
        model.inp, model.up, model.head = nn.Linear(5, 2), nn.Linear(2, 300_000), nn.Linear(300_000, 3)
        return model

    pair = Pair(build, rank, world_size, optimizer=lambda m: O.NAdam(m.parameters(), lr=0.01), unit_bytes=10**6)
    go(pair, 0, 2)
    for model, optimizer in both(pair):
        for p in model.parameters():
            STATE[edit](optimizer.state[p])
    go(pair, 2, 2)


@ranks(2)
def test_one_counter_for_two_parameters_counts_for_each_from_then_on(rank, world_size):
    pair = Pair(Odd, rank, world_size, optimizer=lambda m: O.AdamW(trainable(m), lr=0.01))
    go(pair, 0, 2)
    state, model = pair.optimizer.state, pair.model
    state[model.up.bias]["step"] = state[model.head.bias]["step"] = torch.tensor(7.0)
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


# -- state that torch's for-loop takes, and its fused kernels do not ---------------------------------------------------


def _none_as_momentum(optimizer, params):
    optimizer.state[params[2]]["momentum_buffer"] = None


def _momentum_in_double(optimizer, params):
    for p in params[2:]:
        optimizer.state[p]["momentum_buffer"] = optimizer.state[p]["momentum_buffer"].double()


@pytest.mark.parametrize("edit", [*exhaustive(_none_as_momentum), _momentum_in_double])
@ranks(2)
def test_momentum_that_a_fused_kernel_does_not_take(rank, world_size, edit):
    make = lambda m: O.SGD(m.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    double = edit is not _momentum_in_double
    pair = Pair(MLP, rank, world_size, double=double, optimizer=make)
    x = [batch(rank, step).to(torch.float64 if double else torch.float32) for step in range(4)]
    tolerance = {} if double else {"rtol": 1e-5, "atol": 1e-6}
    for step in range(4):
        if step == 1:
            for _, optimizer in both(pair):
                edit(optimizer, optimizer.param_groups[0]["params"])
        pair.backward(plain_backward, x[step])
        pair.update()
        same_optimizers(pair.optimizer, pair.plain_optimizer, **tolerance)


@ranks(2)
def test_state_from_before_the_model_was_converted(rank, world_size):
    torch.manual_seed(0)
    model = MLP()
    plain = copy.deepcopy(model)
    optimizer, plain_optimizer = (O.Adagrad(m.parameters(), lr=0.1) for m in (model, plain))
    pair = Pair.__new__(Pair)  # of a model whose optimizer is older
    pair.rank, pair.world_size = rank, world_size
    pair.model, pair.plain = model.double(), plain.double()
    pair.optimizer, pair.plain_optimizer = optimizer, plain_optimizer
    torch_shard.shard(model, unit_bytes=500, timeout=20.0)
    for step in range(3):
        backward_both(pair, step)
        pair.update()
        same_optimizers(optimizer, plain_optimizer, rtol=1e-6, atol=1e-7)
