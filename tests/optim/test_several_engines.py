"""One optimizer over the parameters of two sharded models: one step over all of them, as on plain models."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

import torch_shard
import torch_shard.optim
from tests.compat.harness import MLP, Pair, average_grads, batch, plain_backward, same, same_params
from tests.optim.helpers import Bare, Descent, O, Odd, same_optimizers, trainable
from tests.optim.matrix_optimizers import Shampoo
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError, ShardError, StateDictError, UnitStateError
from torch_shard.shard_tensor.tensor import ShardTensor

STRATEGIES = ["full_shard full_shard", "full_shard no_shard", "no_shard shard_grad_op"]


class Unknown(Descent):
    """Of no kind: a step of each parameter's norm along its gradient."""

    def update(self, p, group):
        sums = self.state[p].setdefault("sum", torch.zeros_like(p))
        sums.add_(p.grad)
        p.add_(sums * (p.norm() / (1 + sums.norm())), alpha=-group["lr"])


class Counted(Descent):
    """Counts its steps in the group, and the learning rate falls with them."""

    def begin(self, group):
        group["rounds"] += 1

    def update(self, p, group):
        p.add_(p.grad, alpha=-group["lr"] / group["rounds"])


torch_shard.optim.register(Counted, "elementwise")


class Decays:
    """Makes a class of no kind of one that is known, whose step it calls."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
        return super().step(closure)


class Decayed(Decays, torch.optim.AdamW):
    pass


class DecayedMuon(Decays, torch.optim.Muon):
    pass


def mixed_groups(models):
    """Two groups, both with parameters of both models, which alternate in them."""
    found = [p for some in itertools.zip_longest(*map(trainable, models)) for p in some if p is not None]
    return [{"params": [p for p in found if p.ndim >= 2]}, {"params": [p for p in found if p.ndim < 2], "lr": 0.02}]


def one_behind_the_other(models):
    return itertools.chain(*map(trainable, models))


def matrices(models):
    return [p for model in models for p in trainable(model) if p.ndim == 2 and p.numel()]


MAKE = {
    "SGD": lambda m: O.SGD(mixed_groups(m), lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda m: O.AdamW(one_behind_the_other(m), lr=0.01),
    "AdamW in groups": lambda m: O.AdamW(mixed_groups(m), lr=0.01),
    "AdamW foreach": lambda m: O.AdamW(mixed_groups(m), lr=0.01, foreach=True),
    "Counted": lambda m: Counted(mixed_groups(m), lr=0.1, rounds=0),
}
OTHERS = {
    "no kind": lambda m: Unknown(one_behind_the_other(m)),
    "super of AdamW": lambda m: Decayed(mixed_groups(m), lr=0.01),
    "super of Muon": lambda m: DecayedMuon(matrices(m), lr=0.02),
}
MATRIX = {
    "Muon": lambda m: O.Muon(matrices(m), lr=0.02),
    "Adafactor": lambda m: O.Adafactor([p for p in one_behind_the_other(m) if p.numel()], lr=0.02, weight_decay=0.1),
    "Shampoo": lambda m: Shampoo(matrices(m)),
}


class Two:
    """Two sharded models of different form and their plain copies, with one optimizer over the first and one over the others."""

    def __init__(self, rank, world_size, make, strategies=STRATEGIES[0], **settings):
        self.rank, self.make = rank, make
        self.pairs = [
            Pair(build, rank, world_size, strategy=strategy, unit_bytes=size, **settings)
            for build, strategy, size in zip((Odd, MLP), strategies.split(), (500, 900), strict=True)
        ]
        self.engines = [pair.engine for pair in self.pairs]
        self.models, self.plain = [pair.model for pair in self.pairs], [pair.plain for pair in self.pairs]
        self.optimizer, self.plain_optimizer = make(self.models), make(self.plain)

    def backward(self, step, which=(0, 1)):
        for models in (self.models, self.plain):
            for n in which:
                plain_backward(models[n], batch(self.rank, 10 * n + step))
        for model in self.plain:
            average_grads(model)

    def go(self, step, which=(0, 1)):
        """A step in which only these models have gradients."""
        self.backward(step, which)
        for optimizer in (self.optimizer, self.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def check(self):
        for model, plain in zip(self.models, self.plain, strict=True):
            same_params(model, plain)


def train_in_turns(two):
    """Both models, one of them, the other one: as the two of a GAN take turns."""
    for step, which in enumerate([(0, 1), (0, 1), (0,), (1,), (0, 1)]):
        two.go(step, which)
    two.check()


ALL = {**MAKE, **OTHERS, **MATRIX}


# -- the numbers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategies", quick(STRATEGIES, STRATEGIES[:1]))
@pytest.mark.parametrize("name", quick(ALL, ["AdamW", "no kind", "super of Muon", "Muon"]))
@ranks(2, exhaustive=(3,))
def test_steps_are_those_of_plain_models(rank, world_size, name, strategies):
    two = Two(rank, world_size, ALL[name], strategies)
    train_in_turns(two)
    if name in MAKE:
        same_optimizers(two.optimizer, two.plain_optimizer)
    rounds = [[g.get("rounds") for g in o.param_groups] for o in (two.optimizer, two.plain_optimizer)]
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize("through", [*exhaustive(((0,),), ((1,),)), (0, 1)], ids=["the first", "the second", "both"])
@ranks(2)
def test_an_attached_optimizer_steps_as_on_plain_models_whichever_engine_it_is_attached_to(rank, world_size, through):
    two = Two(rank, world_size, lambda m: Bare(one_behind_the_other(m)))
    for n in through:
        two.engines[n].attach(two.optimizer)
    train_in_turns(two)


@pytest.mark.parametrize("name", [*exhaustive("AdamW"), "Muon"])
@ranks(2)
def test_parameters_of_no_engine_are_stepped_once(rank, world_size, name):
    two = Two(rank, world_size, ALL[name])
    own = [nn.Parameter(torch.ones(3, 2, dtype=torch.float64)) for _ in range(2)]
    two.optimizer.add_param_group({"params": [own[0]]})
    two.plain_optimizer.add_param_group({"params": [own[1]]})
    for step in range(2):
        for p in own:
            p.grad = torch.arange(6, dtype=torch.float64).view(3, 2)
        two.go(step)
    two.check()
    same(own[0], own[1])


# -- precision ----------------------------------------------------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bf16", *exhaustive("stochastic")])
@ranks(2)
def test_engines_of_different_precision_step_as_with_an_optimizer_each(rank, world_size, precision):
    found = []
    for together in (True, False):
        torch.manual_seed(0)
        models = [MLP(), MLP(width=9)]
        if precision == "stochastic":
            models[0].bfloat16()
            own = torch_shard.Precision(stochastic_rounding=True)
        else:
            own = torch_shard.Precision(param_dtype=torch.bfloat16)
        torch_shard.shard(models[0], unit_bytes=500, timeout=20.0, precision=own)
        torch_shard.shard(models[1], unit_bytes=500, timeout=20.0)
        lists = [list(model.parameters()) for model in models]
        optimizers = [O.AdamW(params, lr=0.01) for params in ([itertools.chain(*lists)] if together else lists)]
        for step in range(3):
            for model in models:
                x = batch(rank, step).to(next(model.parameters()).dtype)
                model(x).float().square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found.append([p.detach().full_tensor() for params in lists for p in params])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.exhaustive
@ranks(2)
def test_a_gradscaler_skips_the_step_of_both_where_one_rank_overflows_in_one(rank, world_size):
    two = Two(rank, world_size, lambda m: O.SGD(one_behind_the_other(m), lr=0.1, momentum=0.9))
    scaler, plain_scaler = (torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2))
    for step in range(3):
        for n, (model, plain) in enumerate(zip(two.models, two.plain, strict=True)):
            factor = float("inf") if (step, n, rank) == (1, 1, 1) else 1.0
            for one, own in ((model, scaler), (plain, plain_scaler)):
                own.scale(one(batch(rank, step)).square().mean() * factor).backward()
            average_grads(plain)
        before = [p.detach().full_tensor() for model in two.models for p in model.parameters()]
        for optimizer, own in ((two.optimizer, scaler), (two.plain_optimizer, plain_scaler)):
            own.unscale_(optimizer)
            own.step(optimizer)
            own.update()
            optimizer.zero_grad()
        after = [p.detach().full_tensor() for model in two.models for p in model.parameters()]
        assert all(map(torch.equal, before, after)) == (step == 1)
        assert scaler.get_scale() == plain_scaler.get_scale() == (32.0 if step else 64.0)
    two.check()


# -- errors ---------------------------------------------------------------------------------------------------------------
@ranks(2, exhaustive=(3,))
def test_what_fails_at_one_owner_fails_on_all_ranks_and_leaves_none_waiting(rank, world_size):
    two = Two(rank, world_size, lambda m: Shampoo(matrices(m)))
    two.go(0)
    two.backward(1)
    two.optimizer.fails_at = (11, 7)  # of a matrix in the first model
    with pytest.raises((ArithmeticError, ShardError), match=r"no decomposition|ended early on rank"):
        two.optimizer.step()
    two.optimizer.fails_at = None
    two.optimizer.step()
    two.optimizer.zero_grad()
    two.backward(2)
    two.optimizer.step()


@pytest.mark.parametrize("name", ["AdamW", *exhaustive("Muon")])
@ranks(2)
def test_a_step_while_one_of_the_models_is_gathered_is_refused_for_both(rank, world_size, name):
    two = Two(rank, world_size, ALL[name])
    two.go(0)
    two.backward(1)
    before = [p.detach().full_tensor() for p in two.models[0].parameters()]
    with two.engines[1].gathered(), pytest.raises(UnitStateError, match="gathered"):
        two.optimizer.step()
    after = [p.detach().full_tensor() for p in two.models[0].parameters()]
    assert all(map(torch.equal, before, after))
    for optimizer in (two.optimizer, two.plain_optimizer):
        optimizer.step()
    two.check()


@ranks(2)
def test_it_can_not_step_in_the_backward_of_one_of_them(rank, world_size):
    two = Two(rank, world_size, MAKE["AdamW"])
    with pytest.raises(ConfigError, match=r"step_in_backward.*two sharded models.*optimizer for each"):
        two.engines[0].step_in_backward(two.optimizer)
    own = O.AdamW(two.models[0].parameters(), lr=0.01)
    two.engines[0].step_in_backward(own)
    own.add_param_group({"params": list(two.models[1].parameters())})
    with pytest.raises(ConfigError, match=r"step_in_backward.*two sharded models.*optimizer for each"):
        two.models[0](batch(rank, 0)).sum().backward()
    two.engines[0].step_in_backward(None)
    two.go(0)
    two.check()


# -- engines that come and go ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("first", [*exhaustive(0), 1])
@pytest.mark.parametrize("name", ["AdamW", "Muon"])
@ranks(2)
def test_a_closed_model_and_one_that_is_still_sharded_go_on_together(rank, world_size, name, first):
    two = Two(rank, world_size, ALL[name])
    two.go(0)
    for n in (first, 1 - first):
        two.engines[n].close(two.optimizer)
        assert not any(isinstance(p, ShardTensor) for p in two.models[n].parameters())
        for step in (1, 2):
            for models in (two.models, two.plain):
                for model in models:
                    plain_backward(model, batch(rank, step))
            for model in (*two.plain, *two.models):
                if not any(isinstance(p, ShardTensor) for p in model.parameters()):
                    average_grads(model)
            for optimizer in (two.optimizer, two.plain_optimizer):
                optimizer.step()
                optimizer.zero_grad()
        two.check()


@pytest.mark.parametrize("name", ["AdamW", *exhaustive("Muon")])
@ranks(2)
def test_a_closed_models_memory_is_free_though_the_optimizer_goes_on(rank, world_size, name):
    two = Two(rank, world_size, ALL[name])
    two.go(0)
    flats = [weakref.ref(flat) for unit in two.engines[1].units for flat in unit.flats]
    two.engines[1].close(two.optimizer)
    gc.collect()
    assert [ref() for ref in flats] == [None] * len(flats)


@ranks(2)
def test_a_copy_of_a_part_of_a_model_in_the_same_optimizer_is_stepped_too(rank, world_size):
    two = Two(rank, world_size, MAKE["SGD"])
    part, plain = copy.deepcopy(two.models[1].blocks[0]), copy.deepcopy(two.plain[1].blocks[0])
    optimizer, plain_optimizer = (MAKE["SGD"](some) for some in ([part, *two.models], [plain, *two.plain]))
    for step in range(2):
        two.backward(step)
        for block in (part, plain):
            block(batch(rank, step, 4, 7)).square().mean().backward()
        average_grads(plain)
        for some in (optimizer, plain_optimizer):
            some.step()
            some.zero_grad()
    two.check()
    for ours, theirs in zip(part.parameters(), plain.parameters(), strict=True):
        same(ours, theirs)


@ranks(2)
def test_a_model_closed_without_the_optimizer_of_matrices_is_an_error_though_another_one_is_sharded(rank, world_size):
    two = Two(rank, world_size, MATRIX["Muon"])
    two.go(0)
    two.engines[0].close()
    two.models[1](batch(rank, 1)).sum().backward()
    with pytest.raises(UnitStateError, match=r"close\(optimizer\)"):
        two.optimizer.step()


@pytest.mark.parametrize("name", [*exhaustive("AdamW"), "Muon"])
@ranks(2)
def test_a_model_that_is_sharded_later_takes_its_state_along(rank, world_size, name):
    torch.manual_seed(0)
    pairs = [[MLP().double() for _ in range(2)] for _ in range(2)]
    for model, plain in zip(*pairs, strict=True):
        plain.load_state_dict(model.state_dict())
    models, plain = pairs
    optimizer, plain_optimizer = (ALL[name](some) for some in pairs)
    for step in range(4):
        if step in (1, 2):
            torch_shard.shard(models[2 - step], unit_bytes=500, timeout=20.0)
        for some, own in ((models, optimizer), (plain, plain_optimizer)):
            for model in some:
                plain_backward(model, batch(rank, step))
                if not any(isinstance(p, ShardTensor) for p in model.parameters()):
                    average_grads(model)
            own.step()
            own.zero_grad()
    for ours, theirs in zip(models, plain, strict=True):
        same_params(ours, theirs)


# -- state ----------------------------------------------------------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["AdamW", *exhaustive("Muon")])
@ranks(2)
def test_it_is_saved_and_loaded_with_both_models(rank, world_size, name, tmp_path):
    make = ALL[name]
    two = Two(rank, world_size, make)
    two.go(0)
    two.go(1)
    two.engines[0].save(tmp_path / "c", two.optimizer, models={"other": two.engines[1]})
    again = Two(rank, world_size, make, "no_shard full_shard")
    again.engines[0].load(tmp_path / "c", again.optimizer, models={"other": again.engines[1]})
    again.plain, again.plain_optimizer = two.plain, two.plain_optimizer
    train_in_turns(again)


@ranks(2)
def test_its_state_by_one_models_names_is_an_error_that_says_how_to_save_it(rank, world_size, tmp_path):
    two = Two(rank, world_size, MAKE["AdamW"])
    two.go(0)
    engine = two.engines[0]
    for call in (
        lambda: engine.optim_state_dict(two.optimizer),
        lambda: engine.save_full(tmp_path / "c.pt", two.optimizer),
        lambda: torch_shard.optim_state.full_optim_state_dict(two.models[0], two.optimizer),
        lambda: torch_shard.optim_state.sharded_optim_state_dict(two.models[0], two.optimizer),
        lambda: engine.load_optim_state_dict(two.optimizer, {"state": {}, "param_groups": []}),
    ):
        with pytest.raises(StateDictError, match=r"another sharded model.*models="):
            call()
    with pytest.raises(StateDictError, match="models="):
        engine.save(tmp_path / "c", two.optimizer)
    two.go(1)
    two.check()
