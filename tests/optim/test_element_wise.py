"""Every element-wise optimizer of torch steps a sharded model as it steps a plain one, with every option; so do several."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.compat.harness import Pair, average_grads, batch, loss_of, plain_backward, same_params, whole
from tests.optim.helpers import MAKE, O, Odd, both, by_ndim, close, copy_grads, same_optimizers, trainable
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks

FOR_LOOP, FOREACH, NOT_FOREACH = {"foreach": False}, {"foreach": True}, {"foreach": None}
FUSED, NOT_FUSED = {"fused": True}, {"fused": False}
WAYS = [FOR_LOOP, FOREACH]
TENSOR_LR = {"lr": torch.tensor(0.01)}
TENSOR_BETAS = {"betas": (torch.tensor(0.8), torch.tensor(0.99))}

_ADAM = [
    {},
    {"betas": (0.7, 0.9), "eps": 1e-3},
    {"amsgrad": True, "weight_decay": 0.1},
    {"maximize": True, "weight_decay": 0.1},
    {"amsgrad": True, "maximize": True, "fused": True},
    TENSOR_LR,
    {**TENSOR_LR, **FUSED},
    {**TENSOR_LR, **TENSOR_BETAS, **FOR_LOOP},
    *({"weight_decay": 0.1, **way} for way in (*WAYS, FUSED, NOT_FUSED, {"foreach": None, "fused": None})),
    {"amsgrad": True, **FOREACH},
]
_SGD = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
OPTIONS = {
    "SGD": [
        {},
        {"weight_decay": torch.tensor(0.1)},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"momentum": 0.5, "maximize": True, "weight_decay": 0.1},
        {"momentum": 0.5, "maximize": True, "dampening": 0.3, **FUSED},
        {**TENSOR_LR, "momentum": 0.9},
        {**TENSOR_LR, "momentum": 0.9, **FUSED},
        FUSED,
        FOREACH,
        *({**_SGD, **way} for way in (*WAYS, FUSED, NOT_FUSED, {"foreach": None, "fused": None})),
    ],
    "Adam": [*_ADAM, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "AdamW": _ADAM,
    "NAdam": [
        {},
        {"momentum_decay": 0.1, "weight_decay": 0.1, "maximize": True},
        *({"weight_decay": 0.1, "decoupled_weight_decay": True, **way} for way in (*WAYS, NOT_FOREACH)),
    ],
    "RAdam": [
        {},
        # With a small beta2 the rectified branch begins within ten steps.
        {"betas": (0.8, 0.6), "weight_decay": 0.1, "maximize": True},
        *({"betas": (0.8, 0.6), "weight_decay": 0.1, "decoupled_weight_decay": True, **way} for way in WAYS),
    ],
    "Adamax": [{}, {"betas": (0.7, 0.9)}, *({"weight_decay": 0.1, "maximize": True, **way} for way in WAYS)],
    "Adagrad": [
        {},
        {"initial_accumulator_value": 0.5, "eps": 1e-3, "maximize": True},
        *({"lr_decay": 0.1, "weight_decay": 0.1, **way} for way in (*WAYS, FUSED, NOT_FUSED)),
        {"initial_accumulator_value": 0.5, "maximize": True, **FUSED},
    ],
    "Adadelta": [{}, {"rho": 0.5, "lr": 0.3}, *({"weight_decay": 0.1, "maximize": True, **way} for way in WAYS)],
    "RMSprop": [
        {},
        {"alpha": 0.5, "eps": 1e-3, "maximize": True},
        *({"momentum": 0.5, "centered": True, "weight_decay": 0.1, **way} for way in WAYS),
    ],
    "Rprop": [{}, {"etas": (0.3, 1.4), "step_sizes": (1e-4, 0.1)}, *({"maximize": True, **way} for way in WAYS)],
    # With a small t0 the averaging begins within ten steps.
    "ASGD": [
        {},
        {"lambd": 0.1, "alpha": 0.5, "maximize": True, "t0": 3},
        *({"weight_decay": 0.1, "t0": 3, **way} for way in WAYS),
    ],
}
if hasattr(O, "Lion"):  # not in torch 2.13
    OPTIONS["Lion"] = [{}, {"betas": (0.7, 0.9)}, *({"weight_decay": 0.1, "maximize": True, **way} for way in WAYS)]

RATES = {"SGD": 0.05, "Adagrad": 0.05, "Adadelta": 0.5, "ASGD": 0.05}


def _words(name, options):
    values = {k: "tensor" if "tensor" in repr(v) else repr(v).replace(" ", "") for k, v in options.items()}
    return " ".join([name, *(f"{key}={value}" for key, value in values.items())])


CASES = {_words(name, options): (name, options) for name, sets in OPTIONS.items() for options in sets}
# One of each class, and one of each way in which torch computes a step.
QUICK = [
    "SGD momentum=0.9 nesterov=True weight_decay=0.1 foreach=False",
    "Adam lr=tensor",
    "AdamW weight_decay=0.1 fused=True",
    "NAdam weight_decay=0.1 decoupled_weight_decay=True foreach=None",
    "ASGD weight_decay=0.1 t0=3 foreach=False",
]
DOUBLE, SINGLE, WHOLE = ("float64", "full_shard"), ("float32", "full_shard"), ("float64", "no_shard")
RUNS = [(*kind, case) for kind in (DOUBLE, SINGLE) for case in CASES] + [(*WHOLE, case) for case in QUICK]
QUICK_RUNS = [(*DOUBLE, case) for case in QUICK] + [(*SINGLE, case) for case in QUICK if "fused=True" in case]


def make(case, groups):
    """The optimizer of a case; of the groups the first takes its options, the others have some of their own."""
    name, options = CASES[case]
    # The same tensor in two optimizers would be changed twice by schedulers.
    options = {"lr": RATES.get(name, 0.01), **copy.deepcopy(options)}
    others = [{"params": p, "weight_decay": 0.02 * i, "lr": options["lr"] * 0.5} for i, p in enumerate(groups[1:])]
    return getattr(O, name)([{"params": groups[0]}, *others], **options)


def by_ndim_only(model):
    return [[p for p in trainable(model) if p.ndim >= 2], [p for p in trainable(model) if p.ndim < 2]]


def unfreeze(model, optimizer, name):
    model.late.requires_grad_(True)
    if name != "Adagrad":  # its new groups have no state, an error in plain torch as well
        optimizer.add_param_group({"params": list(model.late.parameters()), "weight_decay": 0.05})


def replace(optimizer, name):
    """Another optimizer, of other settings, that is given this one's state."""
    kind = type(optimizer)
    other = kind([{"params": list(group["params"])} for group in optimizer.param_groups], lr=0.7)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other


@pytest.mark.parametrize(("dtype", "strategy", "case"), quick(RUNS, QUICK_RUNS))
@ranks(3)
def test_ten_steps_with_all_that_happens_between_them_are_as_plain(rank, world_size, case, dtype, strategy):
    name, double = CASES[case][0], dtype == "float64"
    pair = Pair(
        Odd, rank, world_size, optimizer=lambda m: make(case, by_ndim_only(m)), double=double, strategy=strategy
    )
    # Kernels take a last part of a vector without FMA: where it begins depends on the cut, which shows in the last bit.
    tolerance = {} if double else {"rtol": 1e-6, "atol": 1e-6}
    before = copy.deepcopy(pair.plain)
    schedulers = [O.lr_scheduler.ExponentialLR(optimizer, 0.95) for _, optimizer in both(pair)]
    for step in range(10):
        for model, optimizer in both(pair):
            if step == 5:
                unfreeze(model, optimizer, name)
            model.leave_out = step == 7
            # In float32 the plain model computes no gradients of its own: an average of three in another order of
            # summation differs by more than this test allows, once Adam has divided it by its own root mean square.
            if model is pair.model or double:
                loss = loss_of(model(batch(rank, step).to(getattr(torch, dtype))))
                (-loss if optimizer.param_groups[0].get("maximize") else loss).backward()
        if double:
            average_grads(pair.plain)
        else:
            copy_grads(pair.model, pair.plain)
        for model, optimizer in both(pair):
            if step == 3:
                model.extra.grad = None
            assert (model.extra.grad is None) == (step in (3, 7))
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        same_optimizers(pair.optimizer, pair.plain_optimizer, **tolerance)
        if step == 6:
            pair.optimizer, pair.plain_optimizer = (replace(optimizer, name) for _, optimizer in both(pair))
            schedulers = [O.lr_scheduler.ExponentialLR(optimizer, 1.1) for _, optimizer in both(pair)]
            same_optimizers(pair.optimizer, pair.plain_optimizer, **tolerance)
    same_optimizers(pair.optimizer, pair.plain_optimizer, **tolerance, full=True)
    if double:
        same_params(pair.model, pair.plain)  # frozen ones too
    stepped = {id(p) for group in pair.plain_optimizer.param_groups for p in group["params"]}
    for (what, now), then in zip(pair.plain.named_parameters(), before.parameters(), strict=True):
        assert now.isfinite().all()
        assert now.numel() == 0 or torch.equal(now, then) == (id(now) not in stepped), what


@ranks(2, exhaustive=(3,))
def test_a_scheduler_that_changes_betas_too_counts_from_the_next_step(rank, world_size):
    pair = Pair(Odd, rank, world_size, optimizer=lambda m: O.AdamW(by_ndim(m), lr=0.01, amsgrad=True))
    cycle = {"max_lr": [0.02, 0.05], "total_steps": 10}
    schedulers = [O.lr_scheduler.OneCycleLR(optimizer, **cycle) for _, optimizer in both(pair)]
    seen = set()
    for step in range(8):
        pair.step(plain_backward, batch(rank, step))
        same_optimizers(pair.optimizer, pair.plain_optimizer)
        for scheduler in schedulers:
            scheduler.step()
        seen.add(pair.plain_optimizer.param_groups[0]["betas"][0])
    pair.check()
    assert len(seen) > 2


# -- several optimizers, and several dtypes ----------------------------------------------------------------------------


@pytest.mark.parametrize("unit_bytes", [500, *exhaustive(10**6)], ids=["several units", "one unit"])
@ranks(2, exhaustive=(3,))
def test_several_optimizers_over_disjoint_parts_of_a_unit_step_in_turn(rank, world_size, unit_bytes):
    def optimizers(model):
        parameters = trainable(model)
        return [
            O.AdamW(parameters[::3], lr=0.01),
            O.SGD(parameters[1::3], lr=0.1, momentum=0.9),
            O.AdamW(parameters[2::3], lr=0.02, fused=True),
        ]

    pair = Pair(Odd, rank, world_size, optimizer=optimizers, unit_bytes=unit_bytes)
    for step in range(6):
        for model, chosen in both(pair):
            plain_backward(model, batch(rank, step))
            if model is pair.plain:
                average_grads(model)
            for i, optimizer in enumerate(chosen):
                if step % (i + 1) == 0:
                    optimizer.step()
            model.zero_grad()
        pair.check()
        for ours, theirs in zip(pair.optimizer, pair.plain_optimizer, strict=True):
            same_optimizers(ours, theirs)


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7).float(), nn.Linear(7, 3).double()
        self.low = nn.Parameter(torch.randn(3).bfloat16())

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.float())).double()) * self.low.double()


@pytest.mark.parametrize(
    "name", [*exhaustive("SGD", "AdamW"), "AdamW foreach", *exhaustive("AdamW fused", "NAdam", "ASGD")]
)
@ranks(2, exhaustive=(3,))
def test_one_group_of_several_dtypes_beside_parameters_that_are_not_sharded(rank, world_size, name):
    outside = [nn.Parameter(torch.linspace(1, 2, 3, dtype=torch.float64)) for _ in range(2)]

    def optimizer(model):
        made = MAKE[name](model)
        made.param_groups[1]["params"].append(outside.pop())
        return made

    pair = Pair(TwoDtypes, rank, world_size, optimizer=optimizer, double=False, unit_bytes=10**6)
    plain_ones = [optimizer.param_groups[1]["params"][-1] for _, optimizer in both(pair)]
    for step in range(4):
        for model, optimizer in both(pair):
            optimizer.zero_grad()
            plain_backward(model, batch(rank, step))
        copy_grads(pair.model, pair.plain)
        for (_, optimizer), p in zip(both(pair), plain_ones, strict=True):
            p.grad = torch.full_like(p, 0.1 * step)
            optimizer.step()
    # bfloat16 has eight bits: parameters agree to the last one or two of them.
    for p, q in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-6, torch.bfloat16: 1e-2}[q.dtype]
        close(whole(p), q, p._spec.name, tolerance, tolerance)
        for key, value in pair.plain_optimizer.state[q].items():
            assert (
                pair.optimizer.state[p][key].dtype == value.dtype and pair.optimizer.state[p][key].shape == value.shape
            )
    close(*plain_ones, "a parameter outside the model")
    assert type(pair.optimizer.state[plain_ones[0]].get("exp_avg", plain_ones[0].data)) is torch.Tensor
