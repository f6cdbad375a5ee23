"""What this engine refuses, by an error that says what to do: the model may not train on wrongly."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compare.case import Job, case
from compare.cases.forwards import routed
from tests.support.models import MLP, loss_of


class Expert(nn.Linear):
    """A unit by itself."""


class ExpertUnits(nn.Module):
    """Two experts, each a unit; a rank without rows for one does not call it."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.experts, self.head = nn.ModuleList([Expert(5, 5), Expert(5, 5)]), nn.Linear(5, 3)
        self.both = both

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.chain(group) for group in x.split(4)]))

    def chain(self, group: Tensor) -> Tensor:
        """The rows of one rank: through the expert that they belong to, or through both, theirs first."""
        first = 0 if group[0, 0] > 0 else 1
        group = self.experts[first](group)
        return self.experts[1 - first](torch.tanh(group)) if self.both else group


@case(
    "each rank calls a different one of two equal units",
    test="test_a_unit_that_only_one_rank_uses_is_an_error",
    note="DDP with `find_unused_parameters=True`.",
    refused=True,
)
def other_units(job: Job) -> None:
    model, optimizer = job.prepare(ExpertUnits(both=False), blocks=(Expert,), find_unused=True)
    for step in range(4):
        job.train(model, optimizer, routed(job, step))


@case(
    "each rank calls two equal units in a different order",
    test="test_ranks_that_run_different_units_are_an_error_before_the_step",
    refused=True,
)
def other_order(job: Job) -> None:
    model, optimizer = job.prepare(ExpertUnits(both=True), blocks=(Expert,))
    for step in range(4):
        job.train(model, optimizer, routed(job, step))


@case(
    "a layer replaced after sharding",
    test="test_a_head_replaced_after_sharding_is_an_error_that_names_it",
    refused=True,
)
def replaced_layer(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    head = nn.Linear(7, 2)
    getattr(model, "module", model).head = head
    optimizer.add_param_group({"params": list(head.parameters())})
    for x in job.batches(3):
        job.train(model, optimizer, x)


@case(
    "a parameter added after sharding",
    test="test_a_parameter_added_after_sharding_is_an_error_that_names_it",
    refused=True,
)
def added_parameter(job: Job) -> None:
    class Shifted(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (self.shift if hasattr(self, "shift") else 0.0)

    model, optimizer = job.prepare(Shifted())
    shift = nn.Parameter(torch.zeros(3))
    getattr(model, "module", model).shift = shift
    optimizer.add_param_group({"params": [shift]})
    for x in job.batches(3):
        job.train(model, optimizer, x)


@case(
    "two parameters that are views of the same memory",
    test="test_two_parameters_that_are_views_of_one_storage_are_an_error_that_names_both",
    refused=True,
)
def views(job: Job) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    both = torch.randn(7, 5)
    model[0].weight, model[1].weight = nn.Parameter(both[:5]), nn.Parameter(both[2:])
    model, optimizer = job.prepare(model, blocks=())
    for x in job.batches(3):
        job.train(model, optimizer, x)


@case(
    "`model.to(dtype)` after sharding",
    test="test_a_model_converted_after_sharding_is_not_run",
    refused=True,
    tolerance=(1e-4, 1e-5),
)
def converted(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    dtype = torch.float32 if torch.get_default_dtype() == torch.float64 else torch.float64
    model.to(dtype)
    for x in job.batches(3):
        job.train(model, optimizer, x.to(dtype))


@case(
    "`model.load_state_dict(state, assign=True)`",
    test="test_load_state_dict_with_assign_is_refused_by_name",
    refused=True,
    note="`model.module.load_state_dict` for DDP and ZeRO-3.",
)
def assigned(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    torch.manual_seed(8)
    inner = job.unwrapped(model)
    inner.load_state_dict(MLP().state_dict(), assign=True)
    optimizer.add_param_group({"params": list(inner.parameters())})
    for x in job.batches(3):
        job.backward(loss_of(model(x)), model)
        optimizer.step()
        optimizer.zero_grad()
