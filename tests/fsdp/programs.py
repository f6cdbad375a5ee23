"""Small training programs that were written for torch's FSDP. Each takes the package that it imports everything from, and runs
with ``torch.distributed.fsdp`` and with ``torch_shard.fsdp`` alike.

A program returns its losses on this rank and the whole weights by name. ``plain`` is what it computes without FSDP: the same
steps on a plain model whose gradients are averaged over the ranks. All in float64 with SGD.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from tests.compat.harness import MLP, Block, average_grads, batch
from torch_shard.shard_tensor.tensor import ShardTensor

Result = tuple[list[float], dict[str, torch.Tensor]]
TORCH, OURS = "torch.distributed.fsdp", "torch_shard.fsdp"


def package(name: str) -> Any:
    """`name` with its submodules that programs import from."""
    for part in ("wrap", "api", "fully_sharded_data_parallel"):
        importlib.import_module(f"{name}.{part}")
    return importlib.import_module(name)


def build() -> nn.Module:
    """The same model on every rank."""
    torch.manual_seed(0)
    return MLP().double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


def whole(value: Any) -> Any:
    """Collective."""
    if isinstance(value, ShardTensor) or hasattr(value, "full_tensor"):
        return value.detach().full_tensor()
    return value.detach().clone()


def clean(name: str) -> str:
    """What is left of a name without the wrappers'."""
    for part in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(part, "")
    return name


def weights(f: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    """Collective."""
    fsdp = f.FullyShardedDataParallel
    if isinstance(model, fsdp):
        with fsdp.summon_full_params(model, writeback=False):
            return {clean(n): p.detach().clone() for n, p in model.named_parameters()}
    return {clean(n): whole(p) for n, p in model.named_parameters()}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: int = 3,
    clip: Callable[[], torch.Tensor] | None = None,
) -> list[float]:
    """Return the losses, each with the norm that `clip` returned behind it."""
    losses = []
    for step in range(steps):
        loss = loss_of(model, batch(rank, step))
        loss.backward()
        losses.append(loss.item())
        if clip is not None:
            losses.append(float(whole(clip())))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def accumulate(
    model: nn.Module, rank: int, sync: Callable[[bool], contextlib.AbstractContextManager[Any]]
) -> list[float]:
    """Take two steps of three backwards each, inside what `sync` returns for one that is the last of its step or is not."""
    optimizer, losses = sgd(model), []
    for step in range(2):
        for part in range(3):
            with sync(part == 2):
                loss = loss_of(model, batch(rank, 10 * step + part))
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


Program = Callable[[Any, int], Result]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """Add a program to :data:`PROGRAMS`."""
    PROGRAMS[function.__name__] = function
    return function


# -- FSDP2 ----------------------------------------------------------------------------------------------------------------


def fsdp2(f: Any, model: Any = None, **arguments: Any) -> Any:
    """Wrap the blocks of a model of :func:`build`, and all of it."""
    model = build() if model is None else model
    for block in model.blocks:
        f.fully_shard(block, **arguments)
    return f.fully_shard(model, **arguments)


@program
def layer_by_layer(f: Any, rank: int) -> Result:
    model = fsdp2(f)
    assert isinstance(model, f.FSDPModule) and isinstance(model.blocks[0], f.FSDPModule) and isinstance(model, MLP)
    return train(model, sgd(model), rank), weights(f, model)


@program
def root_only_and_kept(f: Any, rank: int) -> Result:
    model = f.fully_shard(build(), reshard_after_forward=False)
    return train(model, sgd(model), rank), weights(f, model)


@program
def accumulate_without_sync(f: Any, rank: int) -> Result:
    model = fsdp2(f, reshard_after_forward=True)

    def sync(last: bool) -> contextlib.AbstractContextManager[None]:
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        return contextlib.nullcontext()

    return accumulate(model, rank, sync), weights(f, model)


@program
def sync_is_decided_in_backward(f: Any, rank: int) -> Result:
    model = f.fully_shard(build())
    optimizer, losses = sgd(model), []
    for step in range(2):
        model.set_requires_gradient_sync(False)
        first = loss_of(model, batch(rank, 10 * step))
        first.backward()
        second = loss_of(model, batch(rank, 10 * step + 1))
        for module in model.modules():
            if isinstance(module, f.FSDPModule):
                module.set_requires_gradient_sync(True, recurse=False)
        second.backward()
        losses += [first.item(), second.item()]
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights(f, model)


@program
def clipped(f: Any, rank: int) -> Result:
    model = fsdp2(f)
    losses = train(model, sgd(model), rank, clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    return losses, weights(f, model)


@program
def gradients_summed(f: Any, rank: int) -> Result:
    """Divided by 1.5, in place of the number of ranks."""
    model = fsdp2(f)
    for module in model.modules():
        if isinstance(module, f.FSDPModule):
            module.set_gradient_divide_factor(1.5)
    return train(model, sgd(model), rank), weights(f, model)


@program
def checkpointed_blocks(f: Any, rank: int) -> Result:
    model = build()
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    fsdp2(f, model)
    return train(model, sgd(model), rank), weights(f, model)


@program
def meta_and_to_empty(f: Any, rank: int) -> Result:
    values = build().state_dict()
    with torch.device("meta"):
        model = fsdp2(f, MLP().double())
    model.to_empty(device="cpu")
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
    return train(model, sgd(model), rank), weights(f, model)


@program
def unsharded_between_steps(f: Any, rank: int) -> Result:
    model = fsdp2(f)
    optimizer, losses = sgd(model), []
    for step in range(2):
        block = model.blocks[1]
        block.unshard()
        assert block.up.weight.shape == (14, 7)
        losses.append(float(block.up.weight.detach().to(torch.float64).view(-1)[3]))
        block.reshard()
        handle = model.blocks[0].unshard(async_op=True)
        if step:
            handle.wait()
        losses += train(model, optimizer, rank, 1)
    return losses, weights(f, model)


@program
def frozen_and_ignored(f: Any, rank: int) -> Result:
    model = build()
    ignored = set(model.head.parameters())
    for p in (*model.blocks[0].parameters(), model.blocks[1].up.bias, *ignored):
        p.requires_grad_(False)
    fsdp2(f, model, ignored_params=ignored)
    assert not isinstance(model.head.weight, ShardTensor)
    return train(model, sgd(model), rank), weights(f, model)


@program
def prefetch_by_hand(f: Any, rank: int) -> Result:
    model = fsdp2(f)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1]])
    model.set_reshard_after_backward(False)
    model.set_reshard_after_forward(True)
    return train(model, sgd(model), rank), weights(f, model)


# -- FSDP1 ----------------------------------------------------------------------------------------------------------------

FSDP1 = {"use_orig_params": True, "device_id": torch.device("cpu")}


def fsdp1(f: Any, net: nn.Module | None = None, **arguments: Any) -> Any:
    return f.FullyShardedDataParallel(build() if net is None else net, **FSDP1, **arguments)


@program
def class_policy(f: Any, rank: int) -> Result:
    fsdp, net = f.FullyShardedDataParallel, build()
    policy = functools.partial(f.wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})
    model = fsdp1(f, net, auto_wrap_policy=policy)
    assert isinstance(model, fsdp) and isinstance(model.blocks[1], fsdp) and model.module is net
    return train(model, sgd(model), rank), weights(f, model)


@program
def module_wrap_policy(f: Any, rank: int) -> Result:
    strategy = f.ShardingStrategy.SHARD_GRAD_OP
    model = fsdp1(f, auto_wrap_policy=f.wrap.ModuleWrapPolicy({Block}), sharding_strategy=strategy)
    return train(model, sgd(model), rank, clip=lambda: model.clip_grad_norm_(0.05)), weights(f, model)


@program
def size_policy(f: Any, rank: int) -> Result:
    policy = functools.partial(f.wrap.size_based_auto_wrap_policy, min_num_params=100)
    model = fsdp1(f, auto_wrap_policy=policy)
    return train(model, sgd(model), rank), weights(f, model)


@program
def custom_policy(f: Any, rank: int) -> Result:
    def choose(module: nn.Module) -> Any:
        if isinstance(module, Block):
            return {"backward_prefetch": None}
        return isinstance(module, nn.Linear) and module.out_features == 3

    model = fsdp1(f, auto_wrap_policy=f.wrap.CustomPolicy(choose))
    return train(model, sgd(model), rank), weights(f, model)


class WrapsInside(MLP):
    """Wraps its layers in the constructor."""

    def __init__(self, f: Any) -> None:
        super().__init__()
        for i, block in enumerate(self.blocks):
            self.blocks[i] = f.wrap.wrap(block.double())
        self.double()


@program
def wrapped_in_the_constructor(f: Any, rank: int) -> Result:
    torch.manual_seed(0)
    with f.wrap.enable_wrap(wrapper_cls=f.FullyShardedDataParallel, **FSDP1):
        inner = WrapsInside(f)
    model = fsdp1(f, inner)
    return train(model, sgd(model), rank), weights(f, model)


@program
def no_sync(f: Any, rank: int) -> Result:
    model = fsdp1(f, auto_wrap_policy=f.wrap.ModuleWrapPolicy({Block}))
    losses = accumulate(model, rank, lambda last: contextlib.nullcontext() if last else model.no_sync())
    return losses, weights(f, model)


@program
def no_shard(f: Any, rank: int) -> Result:
    model = fsdp1(f, sharding_strategy=f.ShardingStrategy.NO_SHARD)
    return train(model, sgd(model), rank), weights(f, model)


@program
def checkpointed_afterwards(f: Any, rank: int) -> Result:
    model = fsdp1(f, auto_wrap_policy=f.wrap.ModuleWrapPolicy({Block}))
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    return train(model, sgd(model), rank), weights(f, model)


@program
def checkpointed_before(f: Any, rank: int) -> Result:
    net = build()
    apply_activation_checkpointing(net, check_fn=lambda m: isinstance(m, Block))
    model = fsdp1(f, net, auto_wrap_policy=f.wrap.ModuleWrapPolicy({Block}))
    return train(model, sgd(model), rank), weights(f, model)


@program
def edited_whole(f: Any, rank: int) -> Result:
    fsdp = f.FullyShardedDataParallel
    model = fsdp1(f, auto_wrap_policy=f.wrap.ModuleWrapPolicy({Block}))
    optimizer = sgd(model)
    losses = train(model, optimizer, rank, 1)
    with fsdp.summon_full_params(model), torch.no_grad():
        for name, p in model.named_parameters():
            if "weight" in name:
                p.view(-1)[::2] *= 0.5
    with fsdp.summon_full_params(model.blocks[0], writeback=False), torch.no_grad():
        model.blocks[0].up.weight.zero_()
    return losses + train(model, optimizer, rank, 2), weights(f, model)


# -- without FSDP ---------------------------------------------------------------------------------------------------------


def plain(rank: int, steps: int = 3, model: nn.Module | None = None) -> Result:
    """What ``train(model, ...)`` gives under DDP, with a model of :func:`build` by default."""
    model = build() if model is None else model
    optimizer, losses = sgd(model), []
    for step in range(steps):
        loss = loss_of(model, batch(rank, step))
        loss.backward()
        average_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def same_as_plain(
    model: nn.Module,
    rank: int,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    reference: nn.Module | None = None,
) -> None:
    """Assert that `model` trains as `reference` does under DDP, with what :func:`build` makes by default. Collective."""
    losses = train(model, sgd(model) if optimizer is None else optimizer, rank)
    wanted, expected = plain(rank, model=reference)
    torch.testing.assert_close(losses, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weights(package(OURS), model), expected, rtol=1e-9, atol=1e-10)
