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
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

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


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        loss = loss_of(model, batch(rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# -- FSDP2 ----------------------------------------------------------------------------------------------------------------


def layer_by_layer(f: Any, rank: int) -> Result:
    model = build()
    for block in model.blocks:
        f.fully_shard(block)
    f.fully_shard(model)
    assert isinstance(model, f.FSDPModule) and isinstance(model.blocks[0], f.FSDPModule) and isinstance(model, MLP)
    return train(model, sgd(model), rank), weights(f, model)


def root_only_and_kept(f: Any, rank: int) -> Result:
    model = build()
    f.fully_shard(model, reshard_after_forward=False)
    return train(model, sgd(model), rank), weights(f, model)


def accumulate_without_sync(f: Any, rank: int) -> Result:
    model = build()
    for block in model.blocks:
        f.fully_shard(block, reshard_after_forward=True)
    f.fully_shard(model)
    optimizer, losses = sgd(model), []
    for step in range(2):
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            model.set_is_last_backward(part == 2)
            loss = loss_of(model, batch(rank, 10 * step + part))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights(f, model)


def sync_is_decided_in_backward(f: Any, rank: int) -> Result:
    model = build()
    f.fully_shard(model)
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


def clipped(f: Any, rank: int) -> Result:
    model = build()
    for block in model.blocks:
        f.fully_shard(block)
    f.fully_shard(model)
    optimizer, losses = sgd(model), []
    for step in range(3):
        loss = loss_of(model, batch(rank, step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        losses += [loss.item(), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)]
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights(f, model)


def gradients_summed(f: Any, rank: int) -> Result:
    """Divided by 1.5, in place of the number of ranks."""
    model = build()
    for block in model.blocks:
        f.fully_shard(block)
    f.fully_shard(model)
    for module in model.modules():
        if isinstance(module, f.FSDPModule):
            module.set_gradient_divide_factor(1.5)
    return train(model, sgd(model), rank), weights(f, model)


def checkpointed_blocks(f: Any, rank: int) -> Result:
    model = build()
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    for block in model.blocks:
        f.fully_shard(block)
    f.fully_shard(model)
    return train(model, sgd(model), rank), weights(f, model)


def meta_and_to_empty(f: Any, rank: int) -> Result:
    values = build().state_dict()
    with torch.device("meta"):
        model = MLP().double()
    for block in model.blocks:
        f.fully_shard(block)
    f.fully_shard(model)
    model.to_empty(device="cpu")
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
    return train(model, sgd(model), rank), weights(f, model)


def unsharded_between_steps(f: Any, rank: int) -> Result:
    model = build()
    for block in model.blocks:
        f.fully_shard(block)
    f.fully_shard(model)
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


def frozen_and_ignored(f: Any, rank: int) -> Result:
    model = build()
    for p in model.blocks[0].parameters():
        p.requires_grad_(False)
    model.blocks[1].up.bias.requires_grad_(False)
    ignored = set(model.head.parameters())
    for p in ignored:
        p.requires_grad_(False)
    for block in model.blocks:
        f.fully_shard(block)
    f.fully_shard(model, ignored_params=ignored)
    assert not isinstance(model.head.weight, ShardTensor)
    return train(model, sgd(model), rank), weights(f, model)


def prefetch_by_hand(f: Any, rank: int) -> Result:
    model = build()
    for block in model.blocks:
        f.fully_shard(block)
    f.fully_shard(model)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1]])
    model.set_reshard_after_backward(False)
    model.set_reshard_after_forward(True)
    return train(model, sgd(model), rank), weights(f, model)


# -- FSDP1 ----------------------------------------------------------------------------------------------------------------


def class_policy(f: Any, rank: int) -> Result:
    fsdp = f.FullyShardedDataParallel
    net = build()
    policy = functools.partial(f.wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})
    model = fsdp(net, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))
    assert isinstance(model, fsdp) and isinstance(model.blocks[1], fsdp) and model.module is net
    return train(model, sgd(model), rank), weights(f, model)


def module_wrap_policy(f: Any, rank: int) -> Result:
    model = f.FullyShardedDataParallel(
        build(),
        auto_wrap_policy=f.wrap.ModuleWrapPolicy({Block}),
        sharding_strategy=f.ShardingStrategy.SHARD_GRAD_OP,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer, losses = sgd(model), []
    for step in range(3):
        loss = loss_of(model, batch(rank, step))
        loss.backward()
        losses += [loss.item(), model.clip_grad_norm_(0.05).item()]
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights(f, model)


def size_policy(f: Any, rank: int) -> Result:
    policy = functools.partial(f.wrap.size_based_auto_wrap_policy, min_num_params=100)
    model = f.FullyShardedDataParallel(
        build(), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    return train(model, sgd(model), rank), weights(f, model)


def custom_policy(f: Any, rank: int) -> Result:
    policy = f.wrap.CustomPolicy(
        lambda m: (
            {"backward_prefetch": None} if isinstance(m, Block) else isinstance(m, nn.Linear) and m.out_features == 3
        )
    )
    model = f.FullyShardedDataParallel(
        build(), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    return train(model, sgd(model), rank), weights(f, model)


class WrapsInside(MLP):
    """Wraps its layers in the constructor."""

    def __init__(self, f: Any) -> None:
        super().__init__()
        for i, block in enumerate(self.blocks):
            self.blocks[i] = f.wrap.wrap(block.double())
        self.double()


def wrapped_in_the_constructor(f: Any, rank: int) -> Result:
    fsdp = f.FullyShardedDataParallel
    settings = {"use_orig_params": True, "device_id": torch.device("cpu")}
    torch.manual_seed(0)
    with f.wrap.enable_wrap(wrapper_cls=fsdp, **settings):
        inner = WrapsInside(f)
    model = fsdp(inner, **settings)
    return train(model, sgd(model), rank), weights(f, model)


def no_sync(f: Any, rank: int) -> Result:
    fsdp = f.FullyShardedDataParallel
    policy = f.wrap.ModuleWrapPolicy({Block})
    model = fsdp(build(), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer, losses = sgd(model), []
    for step in range(2):
        for part in range(3):
            with model.no_sync() if part < 2 else contextlib.nullcontext():
                loss = loss_of(model, batch(rank, 10 * step + part))
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights(f, model)


def no_shard(f: Any, rank: int) -> Result:
    model = f.FullyShardedDataParallel(
        build(), sharding_strategy=f.ShardingStrategy.NO_SHARD, use_orig_params=True, device_id=torch.device("cpu")
    )
    return train(model, sgd(model), rank), weights(f, model)


def checkpointed_afterwards(f: Any, rank: int) -> Result:
    policy = f.wrap.ModuleWrapPolicy({Block})
    model = f.FullyShardedDataParallel(
        build(), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    return train(model, sgd(model), rank), weights(f, model)


def checkpointed_before(f: Any, rank: int) -> Result:
    net = build()
    apply_activation_checkpointing(net, check_fn=lambda m: isinstance(m, Block))
    policy = f.wrap.ModuleWrapPolicy({Block})
    model = f.FullyShardedDataParallel(
        net, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    return train(model, sgd(model), rank), weights(f, model)


def edited_whole(f: Any, rank: int) -> Result:
    fsdp = f.FullyShardedDataParallel
    model = fsdp(
        build(), auto_wrap_policy=f.wrap.ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = sgd(model)
    losses = train(model, optimizer, rank, 1)
    with fsdp.summon_full_params(model), torch.no_grad():
        for name, p in model.named_parameters():
            if "weight" in name:
                p.view(-1)[::2] *= 0.5
    with fsdp.summon_full_params(model.blocks[0], writeback=False), torch.no_grad():
        model.blocks[0].up.weight.zero_()
    return losses + train(model, optimizer, rank, 2), weights(f, model)


PROGRAMS: dict[str, Callable[[Any, int], Result]] = {
    p.__name__: p
    for p in (
        layer_by_layer,
        root_only_and_kept,
        accumulate_without_sync,
        sync_is_decided_in_backward,
        clipped,
        gradients_summed,
        checkpointed_blocks,
        meta_and_to_empty,
        unsharded_between_steps,
        frozen_and_ignored,
        prefetch_by_hand,
        class_policy,
        module_wrap_policy,
        size_policy,
        custom_policy,
        wrapped_in_the_constructor,
        no_sync,
        no_shard,
        checkpointed_afterwards,
        checkpointed_before,
        edited_whole,
    )
}


def plain(rank: int, steps: int = 3, divisor: float = 1.0) -> Result:
    """What ``train(build(), ...)`` gives under DDP."""
    model = build()
    optimizer, losses = sgd(model), []
    for step in range(steps):
        loss = loss_of(model, batch(rank, step))
        loss.backward()
        average_grads(model)
        for p in model.parameters():
            p.grad.mul_(divisor)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def same_as_plain(model: nn.Module, rank: int, steps: int = 3) -> None:
    """`model`, made of :func:`build`, trains as that does. Collective."""
    losses = train(model, sgd(model), rank, steps)
    wanted, expected = plain(rank, steps)
    torch.testing.assert_close(losses, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weights(package(OURS), model), expected, rtol=1e-9, atol=1e-10)


def everywhere(value: Any) -> list[Any]:
    """Each rank's value. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
