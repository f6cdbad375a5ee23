"""What a forward does, and which parts of a model it uses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compare.case import Job, case
from tests.support.models import MLP, Block, Codebook, FrozenFirst, LoRA, WithEncode, loss_of


@case(
    "a method beside forward, `model.encode(x)`",
    test="test_a_method_other_than_forward_trains_like_plain",
    note="`model.module.encode(x)` for DDP and ZeRO-3. FSDP2 has `register_fsdp_forward_method` for it, which the script "
    "does not call.",
)
def a_method(job: Job) -> None:
    model, optimizer = job.prepare(WithEncode(), blocks=(nn.Linear,))
    for x in job.batches(3):
        job.backward(loss_of(job.unwrapped(model).encode(x)), model)
        optimizer.step()
        optimizer.zero_grad()


@case(
    "forwards of submodules one after the other, `h = model.inp(x)`",
    test="test_the_forward_of_a_submodule_trains_like_plain",
    note="`model.module.blocks` for DDP and ZeRO-3.",
)
def submodules(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for x in job.batches(3):
        inner = job.unwrapped(model)
        job.backward(loss_of(inner.blocks[1](inner.inp(x))), model)
        optimizer.step()
        optimizer.zero_grad()


def _half_frozen() -> MLP:
    model = MLP()
    for block in model.blocks:
        block.up.requires_grad_(False)
    return model


@case(
    "frozen and trainable parameters in one unit",
    test="test_frozen_and_trainable_parameters_in_one_unit_train_like_plain",
)
def half_frozen(job: Job) -> None:
    model, optimizer = job.prepare(_half_frozen())
    for x in job.batches(3):
        job.train(model, optimizer, x)


@case("LoRA", test="test_lora_trains_like_plain")
def lora(job: Job) -> None:
    model, optimizer = job.prepare(nn.Sequential(LoRA(5), LoRA(5), LoRA(5)), blocks=(LoRA,))
    for x in job.batches(3):
        job.train(model, optimizer, x)


@case(
    "a frozen layer first in a unit whose input needs a gradient",
    test="test_a_frozen_layer_first_in_a_unit_whose_input_needs_a_gradient_trains_like_plain",
)
def frozen_first(job: Job) -> None:
    model, optimizer = job.prepare(nn.Sequential(*(FrozenFirst() for _ in range(3))), blocks=(FrozenFirst,))
    for x in job.batches(3):
        job.train(model, optimizer, x.requires_grad_())


class Detached(nn.Module):
    """Computes with a weight of its own once more, without its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return F.linear(self.b(h), self.a.weight.detach(), self.b.bias.detach()) + F.linear(h, self.b.weight.data)


@case("`F.linear(x, self.a.weight.detach())`", test="test_linear_with_a_detached_weight_trains_like_plain")
def detached_weight(job: Job) -> None:
    model, optimizer = job.prepare(nn.Sequential(Detached(), Detached()), blocks=(Detached,))
    for x in job.batches(3):
        job.train(model, optimizer, x)


class Borrows(nn.Module):
    """Computes with the weight of a layer before it calls that layer, and with one that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mid, self.head = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x)) @ self.mid.weight
        return F.linear(self.mid(h), self.head.weight, self.head.bias)


@case("the weight of another unit, `F.linear(x, self.head.weight)`", test="test_direct_use_of_another_modules_weight")
def another_units_weight(job: Job) -> None:
    model, optimizer = job.prepare(Borrows(), blocks=(nn.Linear,))
    for x in job.batches(3):
        job.train(model, optimizer, x)


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 11, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = Embed(), nn.ModuleList([Block(7), Block(7)]), Head()
        self.head.linear.weight = self.embed.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _train_on_tokens(job: Job, model: nn.Module, **options: Any) -> None:
    model, optimizer = job.prepare(model, **options)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        job.train(model, optimizer, job.rows(torch.randint(11, (8, 3), generator=generator)))


_TIED = "test_tied_parameters_across_units_and_a_block_used_twice_train_like_plain"


@case("tied parameters in one unit", test=_TIED)
def tied_in_one_unit(job: Job) -> None:
    _train_on_tokens(job, Tied())


@case("tied parameters in two units", test=_TIED, note="FSDP1 and FSDP2 want them in one unit.")
def tied_across_units(job: Job) -> None:
    _train_on_tokens(job, Tied(), blocks=(Block, Embed, Head))


class Twice(MLP):
    """Runs its first block once more at the end."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


@case("a block used twice", test=_TIED)
def block_used_twice(job: Job) -> None:
    model, optimizer = job.prepare(Twice())
    for x in job.batches(3):
        job.train(model, optimizer, x)


class Partly(nn.Module):
    """Never uses one of its layers, and another one only in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.never = (nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return self.first((self.left if left else self.right)(x))


def _unused(job: Job, **options: Any) -> None:
    model, optimizer = job.prepare(Partly(), blocks=(nn.Linear,), **options)
    for step, x in enumerate(job.batches(4)):
        job.backward(loss_of(model(x, step % 2 == 0)), model)
        optimizer.step()
        optimizer.zero_grad()


@case("parameters unused in a step, on all ranks", test="test_parameters_unused_on_all_ranks_keep_no_gradient")
def unused(job: Job) -> None:
    _unused(job)


class Experts(nn.Module):
    """Two experts in one unit; a rank without rows for one leaves it out. A row's first feature says which is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert, mine in zip(self.experts, (x[:, 0] > 0, x[:, 0] <= 0), strict=True):
            if mine.any():
                out = out.index_put((mine,), expert(x[mine]))
        return out


def routed(job: Job, step: int) -> Tensor:
    """A batch of which one rank's rows all go to the first expert, and the other's to the second; the other way round in every
    second step."""
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step), dtype=torch.get_default_dtype())
    x[:, 0] = x[:, 0].abs() * torch.tensor([1.0, -1.0]).repeat_interleave(4) * (-1) ** step
    return job.rows(x)


def _routed(job: Job, model: nn.Module, **options: Any) -> None:
    model, optimizer = job.prepare(model, **options)
    for step in range(4):
        job.train(model, optimizer, routed(job, step))


class Routed(nn.Module):
    def __init__(self, experts: type[nn.Module]) -> None:
        super().__init__()
        self.experts, self.head = experts(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.experts(x))


@case("parameters unused in a step, on one rank", test="test_parameters_unused_on_some_ranks_train_like_plain")
def unused_on_one_rank(job: Job) -> None:
    _routed(job, Routed(Experts), blocks=(Experts,))


@case(
    "both kinds of unused parameters, with DDP's `find_unused_parameters=True`",
    test="test_parameters_unused_on_some_ranks_train_like_plain",
    note="DDP's documentation says to set it. The other engines run as before.",
)
def unused_and_found(job: Job) -> None:
    _unused(job, find_unused=True)
    _routed(job, Routed(Experts), blocks=(Experts,), find_unused=True)


class Noted(Block):
    """Keeps a term of the loss."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.term = self.up(out).pow(2).mean()
        return out


@case("an auxiliary loss kept on `self`", test="test_a_tensor_made_after_the_one_returned_trains_like_plain")
def kept_term(job: Job) -> None:
    model, optimizer = job.prepare(nn.Sequential(nn.Linear(5, 7), Noted(7), Noted(7)), blocks=(Noted,))
    for x in job.batches(3):
        out = model(x)
        terms = sum(module.term for module in model.modules() if isinstance(module, Noted))
        job.backward(loss_of(out) + 0.1 * terms, model)
        optimizer.step()
        optimizer.zero_grad()


class Clamped(nn.Linear):
    """Clips its own weight in forward, as a Wasserstein critic does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


@case("a weight clamped inside forward", test="test_parameters_clamped_inside_forward_train_like_plain")
def clamped(job: Job) -> None:
    model, optimizer = job.prepare(nn.Sequential(Clamped(5, 5), Clamped(5, 5)), blocks=(Clamped,))
    for x in job.batches(3):
        job.train(model, optimizer, x)


@case(
    "a codebook updated inside forward",
    test="test_a_codebook_updated_inside_forward_trains_like_plain",
    note="Both ranks see one batch, so that they update it alike.",
)
def codebook(job: Job) -> None:
    model, optimizer = job.prepare(nn.Sequential(Codebook(), nn.Linear(3, 3)), blocks=(Codebook,))
    for x in job.batches(3, shared=True):
        job.train(model, optimizer, x)
