"""ModelParallelStrategy, and the calls of ``fully_shard`` that programs make for it.

The program itself divides its model, in ``configure_model`` or in the function that it gives to Fabric's strategy. With a
tensor-parallel size of 1 that is FSDP2's ``fully_shard`` alone. Meanwhile these calls are noted here, and the strategy shards
the model as they say.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torch_shard import Offload, Precision, ShardConfig
from torch_shard.errors import ConfigError
from torch_shard.frontend.fsdp_settings import precision_of_policy
from torch_shard.frontend.launch import replace_everywhere

from .translation import Arguments, Translation


def from_model_parallel(given: dict[str, Any], defaults: dict[str, Any], devices: int, nodes: int) -> Translation:
    """Translate the arguments of ModelParallelStrategy. Not collective.

    Args:
        given: the arguments by name.
        defaults: the defaults of all.
        devices: the number of ranks of a node.
        nodes: the number of nodes.

    Raises:
        ConfigError: tensor parallelism, or sizes that do not make the number of ranks.
    """
    arguments, found = Arguments("ModelParallelStrategy", given, defaults), Translation(has_mesh=True)
    arguments.take_same(found)
    found.parallelize = arguments.take("parallelize_fn")
    found.options["state_dict_type"] = "sharded" if arguments.take("save_distributed_checkpoint") else "full"
    sizes = arguments.take("data_parallel_size"), arguments.take("tensor_parallel_size")
    data, tensor = (size if size != "auto" else auto for size, auto in zip(sizes, (nodes, devices), strict=True))
    arguments.end()
    if tensor != 1:
        auto = " (auto: the devices of a node)" if sizes[1] == "auto" else ""
        raise ConfigError(
            f"ModelParallelStrategy: tensor_parallel_size is {tensor}{auto}, and a Trainer or Fabric shards over all ranks here. "
            "Set tensor_parallel_size=1 and data_parallel_size to the number of ranks; for tensor parallelism call "
            "torch_shard.shard with the data-parallel mesh in a loop of your own (docs/tensor_parallel.md)."
        )
    if data != devices * nodes:
        raise ConfigError(
            f"ModelParallelStrategy: data_parallel_size is {data}, and there are {devices * nodes} ranks. Set it to that number."
        )
    return found


@dataclass
class Noted:
    """The calls of ``fully_shard`` that a program has made: each module with the arguments."""

    calls: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)

    def is_about(self, model: nn.Module) -> bool:
        """Return True if a module of `model` was given. Not collective."""
        inside = set(model.modules())
        return any(module in inside for module, _ in self.calls)

    def config(self, base: ShardConfig, ranks: int) -> dict[str, Any]:
        """Return the fields of ``ShardConfig`` that the calls stand for. Not collective.

        Raises:
            ConfigError: the calls differ in settings that hold for a whole model, or use a mesh of fewer ranks.
        """
        if not self.calls:
            return {}
        from torch.distributed.fsdp import CPUOffloadPolicy

        arguments = [call for _, call in self.calls]
        found: dict[str, Any] = {"units": _Given(frozenset(id(module) for module, _ in self.calls))}
        for mesh in filter(None, (call.get("mesh") for call in arguments)):
            if mesh.size() != ranks:
                raise ConfigError(
                    f"fully_shard: a mesh of {mesh.size()} ranks; a model is sharded over all {ranks} here. Pass "
                    'device_mesh["data_parallel"].'
                )
        precisions = {precision_of_policy(call["mp_policy"]) for call in arguments if call.get("mp_policy")}
        if len(precisions) > 1:
            raise ConfigError("fully_shard: the calls have several mp_policy; a model has one. Pass the same to all.")
        for precision in precisions - {Precision(cast_inputs=True)}:
            found["precision"] = precision
        for policy in (call.get("offload_policy") for call in arguments):
            if isinstance(policy, CPUOffloadPolicy):
                found["offload"] = Offload(pin_memory=bool(policy.pin_memory))
        # The outermost call says nothing about the others: FSDP2 keeps the root's parameters in any case.
        inner = [call.get("reshard_after_forward") for call in arguments[:-1]] or [None]
        if base.strategy == "full_shard" and all(value is False for value in inner):
            found["strategy"] = "shard_grad_op"
        ignored = tuple(param for call in arguments for param in call.get("ignored_params") or ())
        return {**found, "ignore": (*base.ignore, *ignored)} if ignored else found


@dataclass(frozen=True)
class _Given:
    """Units that the program has chosen one by one, as a function for ``ShardConfig.units``."""

    ids: frozenset[int]

    def __call__(self, name: str, module: nn.Module) -> bool:
        return id(module) in self.ids


_noting: list[Noted] = []
"""The records of the running :func:`noting` contexts; calls are noted in the last one."""


@contextlib.contextmanager
def noting(noted: Noted) -> Iterator[None]:
    """Note the calls of ``fully_shard`` inside in `noted`; the calls have no other effect."""
    _noting.append(noted)
    try:
        yield
    finally:
        _noting.remove(noted)


def note_fully_shard() -> None:
    """Make torch's ``fully_shard``, under all of its names, note its calls inside :func:`noting`. Not collective."""
    from torch.distributed.fsdp import fully_shard

    importlib.import_module("torch.distributed._composable.fsdp")  # it has the function under an old name

    if not hasattr(fully_shard, "_stock"):
        replace_everywhere(fully_shard, notable(fully_shard), ["torch_shard", "lightning_shard", "accelerate_shard"])


def notable(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's ``fully_shard``, `stock`, with calls inside :func:`noting` noted in place of made."""

    @functools.wraps(stock)
    def fully_shard(module: Any, **arguments: Any) -> Any:
        if not _noting:
            return stock(module, **arguments)
        for each in module if isinstance(module, (list, tuple)) else [module]:
            _noting[-1].calls.append((each, arguments))
        return module

    fully_shard._stock = stock  # type: ignore[attr-defined]
    return fully_shard
