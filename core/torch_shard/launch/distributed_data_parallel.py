"""torch's class DistributedDataParallel, its arguments and methods, over :func:`torch_shard.shard`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as _TorchDDP

from ..comm.streams import on_device
from ..config.precision import Precision
from ..engine import Engine, engine_of, shard
from ..errors import ConfigError, ShardError
from ..frontend import compress_gradients
from ..log import logger
from ..utils.pytree import map_tensors
from .settings import Overrides

# Arguments for torch's buckets of gradients. Here gradients of any subset of the parameters are reduced rightly.
_OF_BUCKETS = (
    "bucket_cap_mb", "find_unused_parameters", "check_reduction", "gradient_as_bucket_view", "static_graph",
    "delay_all_reduce_named_params", "param_to_hook_all_reduce", "skip_all_reduce_unused_params", "bucket_cap_mb_list",
    "batched_grad_copy",
)  # fmt: skip

_SIGNATURE = inspect.signature(_TorchDDP.__init__)
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
_DTYPES = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}

_overrides = Overrides({})


def use(overrides: Overrides) -> None:
    """Set the settings of the models that are wrapped from now on. Not collective."""
    global _overrides
    _overrides = overrides


class DistributedDataParallel(_TorchDDP):
    """torch's DistributedDataParallel, with its arguments and methods, over a sharded module. Collective.

    It wraps the module as torch's class does: ``.module`` is the given module, and the names of parameters and of the entries of
    a state dict begin with ``module.``. The module itself is sharded in place, and may be used without the wrapper, too. This is
    a subclass of torch's class so that torch and other libraries recognise it.

    Args:
        module: the module, on the device where it computes.
        device_ids: the GPU of this rank, to which inputs are moved; None moves nothing.
        output_device: has no effect, since it is that device.
        dim: must be 0.
        broadcast_buffers, forward_sync_buffers: send rank 0's buffers to all ranks before each training forward.
        init_sync: send rank 0's parameters and buffers to all ranks now.
        process_group, device_mesh: the ranks; all by default.
        mixed_precision: the dtypes of parameters, of the reduction and of buffers.

    The other arguments concern torch's buckets of gradients, and change nothing here.

    Raises:
        ConfigError: an argument asks for what the engine does not have.
        TypeError: there is no such argument.
        SetupError, UnavailableError: the model can't be sharded, as for :func:`torch_shard.shard`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        module = given["module"]
        nn.Module.__init__(self)  # not torch's own, which would allocate its buckets
        mesh, config = _request(module, given)
        device = None if _overrides.on_host else _device_of(given, module)
        with on_device(device):
            shard(module, mesh=mesh, **config)
        self.module = module
        self.device = self._engine.device
        self.device_type = self.device.type
        self.device_ids = None if device is None else [device.index]
        self.output_device = None if device is None else device.index
        self.dim = 0
        self.is_multi_device_module = False
        self.broadcast_buffers = self.forward_sync_buffers = config["broadcast_buffers"]
        self.require_forward_param_sync = True
        for name in ("find_unused_parameters", "gradient_as_bucket_view", "static_graph"):
            setattr(self, name, bool(given.get(name)))

    @property
    def _engine(self) -> Engine:
        engine = engine_of(self.module)
        if engine is None:
            raise ShardError("DistributedDataParallel: engine.close() has made this model a plain one.")
        return engine

    # -- training -----------------------------------------------------------------------------------------------
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module. Collective."""
        if self.device_ids is not None:
            inputs, kwargs = map_tensors((inputs, kwargs), self._moved)
        return self.module(*inputs, **kwargs)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        # The copy is not asynchronous, as in torch's class: the program may write to its own memory next.
        return tensor.to(self.device)

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if the backward of the next forward reduces gradients. Set it equally on all ranks."""
        return self._engine.require_backward_grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._engine.require_backward_grad_sync = bool(value)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients; the first forward and backward outside reduce their sum. See :meth:`Engine.no_sync`."""
        with self._engine.no_sync(hold=_overrides.defer_gradient_sync):
            yield

    def join(self, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing: ranks with equally many batches need none.

        Ranks with different numbers of batches get a DivergenceError or a MissingRankError from the first forward that not all
        of them have, since a sharded model is trained by all ranks together.
        """
        return contextlib.nullcontext()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce gradients as torch's ``allreduce_hook``, ``fp16_compress_hook`` or ``bf16_compress_hook`` do. Collective.

        Args:
            state: has no effect; the ranks are those of the module.
            hook: one of the three.

        Raises:
            ConfigError: `hook` is none of the three, and is made for DDP's buckets; or a hook is registered already.
        """
        name = getattr(hook, "__name__", type(hook).__name__)
        if getattr(hook, "__module__", None) != _HOOKS or name not in ("allreduce_hook", *_DTYPES):
            raise ConfigError(
                f"DistributedDataParallel.register_comm_hook: {name} is made for DDP's buckets. allreduce_hook, "
                "fp16_compress_hook and bf16_compress_hook are supported; for another one give engine.register_comm_hook a hook "
                "with FSDP's signature, or see ShardConfig.quantized."
            )
        if name in _DTYPES:
            compress_gradients(self._engine, _DTYPES[name])

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        name = getattr(comm_hook_type, "name", str(comm_hook_type))
        if name not in ("ALLREDUCE", "FP16_COMPRESS"):
            raise ConfigError(f"DistributedDataParallel: the built-in communication hook {name} is not known here.")
        if name == "FP16_COMPRESS":
            compress_gradients(self._engine, torch.float16)

    def _set_static_graph(self) -> None:
        self.static_graph = True

    # -- the wrapper as a module: torch's class handles its reducer here ----------------------------------------
    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)


def _request(module: Any, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the ranks, and the settings of the engine, that the arguments ask for."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"DistributedDataParallel: module must be a torch.nn.Module, not {type(module).__name__}.")
    if given.get("dim", 0) != 0:
        raise ConfigError(f"DistributedDataParallel: dim={given['dim']!r}: batches are not scattered here.")
    group, mesh = given.get("process_group"), given.get("device_mesh")
    if group is not None and mesh is not None:
        raise ConfigError(
            "DistributedDataParallel: process_group and device_mesh mean the same thing; pass one of them."
        )
    if changed := [name for name in _OF_BUCKETS if given.get(name)]:
        logger.info("DistributedDataParallel: without a meaning for sharded models: %s.", ", ".join(changed))
    buffers = given.get("forward_sync_buffers")
    buffers = given.get("broadcast_buffers") if buffers is None else buffers
    config = {
        "broadcast_buffers": True if buffers is None else bool(buffers),
        "sync_module_states": bool(given.get("init_sync", True)),
        "precision": _precision(given.get("mixed_precision")),
        "ignore": _ignored(module),
    }
    return mesh if group is None else group, _overrides.for_model(module, config)


def _precision(mixed: Any) -> Precision | None:
    if mixed is None:
        return None
    dtypes = {name: getattr(mixed, name) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")}
    return Precision(**dtypes, cast_inputs="root")


def _ignored(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """Return the parameters that torch's ``_set_params_and_buffers_to_ignore_for_model`` has named."""
    names = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    if buffers := sorted(name for name, _ in module.named_buffers() if name in names):
        raise ConfigError(
            f"DistributedDataParallel: the buffer {buffers[0]} is to be ignored, and single buffers can't be. Pass "
            "broadcast_buffers=False and init_sync=False, or shard the model with ShardConfig(ignore=[the module that holds it])."
        )
    return tuple(p for name, p in module.named_parameters() if name in names)


def _device_of(given: Mapping[str, Any], module: nn.Module) -> torch.device | None:
    ids = list(given.get("device_ids") or ())
    kind = next((p.device.type for p in module.parameters()), "cpu")
    if len(ids) > 1 or (ids and kind == "cpu"):
        raise ConfigError(
            f"DistributedDataParallel: device_ids={ids!r}: it must be the one GPU that the module is on, or None; this module "
            f"is on {kind}."
        )
    if not ids:
        return None
    return torch.device(kind, ids[0]) if isinstance(ids[0], int) else torch.device(ids[0])
