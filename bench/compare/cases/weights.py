"""What scripts do with parameters and gradients themselves, between steps and in the loss."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn

from compare.case import Job, case, sgd
from tests.support.models import MLP, loss_of


@case(
    "the optimizer built before sharding",
    test="test_an_optimizer_built_before_sharding_trains_the_sharded_model",
    note="FSDP2 wants it built afterwards.",
)
def optimizer_before(job: Job) -> None:
    model = MLP()
    model, optimizer = job.prepare(model, sgd(model, momentum=0.9))
    for x in job.batches(3):
        job.train(model, optimizer, x)


def _by_ndim(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.SGD([{"params": matrices, "weight_decay": 0.3}, {"params": rest, "lr": 0.02}], lr=0.1)


@case(
    "`p.shape`, `p.ndim`, `p.numel()`; groups of an optimizer chosen by `p.ndim`",
    test="test_weight_decay_groups_chosen_after_sharding",
)
def shapes(job: Job) -> None:
    model, optimizer = job.prepare(MLP(), _by_ndim)
    job.see("shapes", [(tuple(p.shape), p.ndim, p.numel()) for p in model.parameters()])
    for x in job.batches(3):
        job.train(model, optimizer, x)


@case(
    "`p.norm()`, `p.grad.norm()`",
    test="test_norms_of_parameters_and_gradients_are_those_of_the_plain_model",
    note="The script reads `p.norm().item()`; of FSDP2's DTensors, `p.norm().full_tensor()` is the norm of the whole.",
)
def norms(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for step, x in enumerate(job.batches(2)):
        job.backward(loss_of(model(x)), model)
        job.see(f"weights in step {step}", [p.norm().item() for p in model.parameters()])
        job.see(f"gradients in step {step}", [p.grad.norm().item() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()


@case(
    "parameters edited in place between steps", test="test_in_place_edits_of_parameters_between_steps_train_like_plain"
)
def edits(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for x in job.batches(3):
        job.train(model, optimizer, x)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)


@case(
    "parameters multiplied by a mask, a row added to them, between steps",
    test="test_a_mask_or_a_row_vector_combined_with_a_parameter_between_steps",
)
def masks(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    generator = torch.Generator().manual_seed(3)
    mask = (torch.rand(7, 5, generator=generator) > 0.5).to(torch.get_default_dtype())
    row = torch.rand(5, generator=generator).to(mask.dtype)
    for x in job.batches(3):
        job.train(model, optimizer, x)
        with torch.no_grad():
            weight = job.unwrapped(model).inp.weight
            weight.mul_(mask)
            weight.add_(row, alpha=0.01)


@case(
    "a moving average of the weights, by `copy.deepcopy` and `lerp_`",
    test="test_an_average_of_weights_by_deepcopy_and_lerp_equals_the_plain_one",
)
def average(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    averaged = copy.deepcopy(model)
    job.also(averaged)
    for x in job.batches(3):
        job.train(model, optimizer, x)
        with torch.no_grad():
            for a, p in zip(averaged.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 0.25)
    with torch.no_grad():
        job.see("output of the average", averaged(job.batch(50, shared=True)))


@case("`copy.deepcopy(model)`, then both train", test="test_deepcopy_and_then_training_both_copies")
def twins(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    job.train(model, optimizer, job.batch(0))
    twin = copy.deepcopy(model)
    job.also(twin)
    other = sgd(twin, lr=0.2)
    for step in range(1, 4):
        job.train(model, optimizer, job.batch(step))
        job.train(twin, other, job.batch(10 + step))


def _state_dict(job: Job, offload: bool) -> None:
    model, optimizer = job.prepare(MLP())
    job.train(model, optimizer, job.batch(0))
    state = job.state_dict(model, offload)
    if job.rank == 0:
        job.see("state", state)


@case(
    "full state dict by each engine's own call",
    test="test_the_full_state_dict_is_plain_torch",
    note="`get_model_state_dict` with `full_state_dict=True` for DDP, FSDP1 and FSDP2, `save_16bit_model` for ZeRO-3, "
    "`engine.state_dict()` for this engine. Names and values must be those of the plain model.",
)
def own_state_dict(job: Job) -> None:
    _state_dict(job, offload=False)


@case(
    "full state dict by each engine's own call, with `cpu_offload=True`",
    test="test_the_full_state_dict_is_plain_torch",
    note="For DDP, FSDP1 and FSDP2; the other two move it in any case. Here it is on the CPU from the start.",
)
def offloaded_state_dict(job: Job) -> None:
    _state_dict(job, offload=True)


@case(
    "`if rank == 0: torch.save(model.state_dict(), file)`, loaded into a plain model",
    test="test_a_rank_reads_alone_what_plain_torch_gives",
    note="`model.module.state_dict()` for DDP and ZeRO-3.",
)
def saved_by_one_rank(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    job.train(model, optimizer, job.batch(0))
    if job.rank == 0:
        file = io.BytesIO()
        torch.save(job.unwrapped(model).state_dict(), file)
        file.seek(0)
        plain = MLP()
        plain.load_state_dict(torch.load(file, weights_only=False))
        job.see("saved", dict(plain.state_dict()))
    job.train(model, optimizer, job.batch(1))


@case(
    "`model.load_state_dict(state)` of a plain state dict",
    test="test_load_state_dict_of_the_module_takes_whole_tensors",
    note="`model.module.load_state_dict` for DDP and ZeRO-3.",
)
def plain_state_loaded(job: Job) -> None:
    torch.manual_seed(8)
    state = MLP().state_dict()
    model, optimizer = job.prepare(MLP())
    job.train(model, optimizer, job.batch(0))
    job.unwrapped(model).load_state_dict(state)
    job.train(model, optimizer, job.batch(1))


@case(
    "`model.load_state_dict(state, strict=False)` with an entry that is missing and one that is not expected",
    test="test_load_state_dict_of_the_module_takes_whole_tensors",
    note="`model.module.load_state_dict` for DDP and ZeRO-3.",
)
def loaded_in_part(job: Job) -> None:
    torch.manual_seed(8)
    state = MLP().state_dict()
    del state["inp.weight"]
    state["new"] = torch.zeros(1)
    model, optimizer = job.prepare(MLP())
    job.train(model, optimizer, job.batch(0))
    result = job.unwrapped(model).load_state_dict(state, strict=False)
    job.see("keys", [list(result.missing_keys), list(result.unexpected_keys)])
    job.train(model, optimizer, job.batch(1))


class Odd(nn.Module):
    """A linear layer, and a parameter of an odd shape."""

    def __init__(self, odd: Tensor) -> None:
        super().__init__()
        self.linear, self.odd = nn.Linear(5, 3), nn.Parameter(odd)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.odd.sum()


def _odd(job: Job, odd: Tensor) -> None:
    model, optimizer = job.prepare(nn.Sequential(Odd(odd)), blocks=(Odd,))
    for x in job.batches(3):
        job.train(model, optimizer, x)


@case("a 0-dim parameter", test="test_zero_dim_and_zero_element_parameters_train_like_plain")
def no_dimension(job: Job) -> None:
    _odd(job, torch.tensor(1.5))


@case("a parameter without elements", test="test_zero_dim_and_zero_element_parameters_train_like_plain")
def no_element(job: Job) -> None:
    _odd(job, torch.zeros(0, 3))


@case(
    "a penalty on parameters in the loss, `p.pow(2).sum()`",
    test="test_a_penalty_on_parameters_in_the_loss_trains_like_plain",
)
def penalty(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for x in job.batches(3):
        job.backward(loss_of(model(x)) + 0.01 * sum(p.pow(2).sum() for p in model.parameters()), model)
        optimizer.step()
        optimizer.zero_grad()


@case("gradients of two losses projected and put back (PCGrad)", test="test_replaced_gradients_train_like_plain")
def pcgrad(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for x in job.batches(3):
        found = []
        for scale in (1.0, -0.5):
            model.zero_grad()
            job.backward(scale * loss_of(model(x * scale)), model)
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        total = found[0] - (found[0] @ found[1]) / found[1].norm() ** 2 * found[1]
        parameters = list(model.parameters())
        for p, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p).clone()
        optimizer.step()
        optimizer.zero_grad()


@case(
    "single gradients set to None, zeroed, scaled",
    test="test_gradients_set_to_none_zeroed_or_replaced_by_plain_tensors_train_like_plain",
)
def edited_gradients(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for x in job.batches(3):
        job.backward(loss_of(model(x)), model)
        inner = job.unwrapped(model)
        inner.inp.weight.grad = None
        inner.inp.bias.grad.zero_()
        inner.blocks[0].up.weight.grad.mul_(3)
        inner.blocks[1].up.weight.grad = inner.blocks[1].up.weight.grad * 0.5
        optimizer.step()
        optimizer.zero_grad()


def _scaled(model: Any) -> None:
    model.blocks[1].up.weight.register_hook(lambda grad: grad * 3)
    model.head.bias.register_hook(lambda grad: grad * 0.5)


_HOOKS = "test_gradient_hooks_that_scale_train_like_plain_until_they_are_removed"


@case("gradient hooks registered before sharding", test=_HOOKS)
def hooks_before(job: Job) -> None:
    model = MLP()
    _scaled(model)
    model, optimizer = job.prepare(model)
    for x in job.batches(3):
        job.train(model, optimizer, x)


@case("gradient hooks registered after sharding", test=_HOOKS)
def hooks_after(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    _scaled(job.unwrapped(model))
    for x in job.batches(3):
        job.train(model, optimizer, x)


@case(
    "post-accumulate hooks that look their parameter up",
    test="test_post_accumulate_hooks_keyed_by_parameter_find_their_parameter",
)
def post_accumulate(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    calls = dict.fromkeys(model.parameters(), 0)

    def count(p: Tensor) -> None:
        assert p.grad is not None
        calls[p] += 1

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(count)
    for x in job.batches(3):
        job.train(model, optimizer, x)
    job.see("calls", list(calls.values()))


@case(
    "layers initialised anew after sharding, from the same seed",
    test="test_initialisers_draw_the_values_of_the_plain_model",
)
def initialised(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    torch.manual_seed(11)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.uniform_(module.bias, -0.1, 0.1)
    job.train(model, optimizer, job.batch(0))
