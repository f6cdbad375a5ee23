"""How each engine wraps a model, steps, clips and saves: as its own documentation says."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["ENGINES", "Engine", "NotApplicable", "Options"]

Optimizer = torch.optim.Optimizer
MakesModel: TypeAlias = Callable[[], nn.Module]
MakesOptimizer: TypeAlias = Callable[[nn.Module], Optimizer]
Blocks: TypeAlias = tuple[type[nn.Module], ...]
Context: TypeAlias = contextlib.AbstractContextManager[Any]


class NotApplicable(Exception):
    """The engine has nothing that the case is about."""


@dataclass(frozen=True)
class Options:
    """What a script asks for beside the defaults.

    Attributes:
        offload: keep parameters and optimizer state in host memory.
        mixed: compute in bfloat16.
        find_unused: DDP's ``find_unused_parameters``; the others need no such setting.
        accumulates: the script runs several backwards before a step.
        clip: the limit that the script is going to give to :meth:`Engine.clip`.
    """

    offload: bool = False
    mixed: bool = False
    find_unused: bool = False
    accumulates: bool = False
    clip: float | None = None


class Engine:
    """What the engines have in common. By itself it is none: the plain run in one process.

    Attributes:
        label: the title of its column.
        dtype: of parameters and inputs.
        modules: what is imported once, before the processes of its ranks are forked.
    """

    label = "plain"
    dtype = torch.float64
    modules: tuple[str, ...] = ()

    def missing(self) -> str:
        """Return the package that is not installed; empty if all is there."""
        return ""

    def version(self) -> str:
        """Return the name and version of the package that it comes from."""
        return f"torch {torch.__version__}"

    def start(self) -> None:
        """Do what has to be done once. Call on all ranks, when there is a process group."""

    def prepare(
        self, model: nn.Module, optimizer: Optimizer | MakesOptimizer, blocks: Blocks, options: Options
    ) -> tuple[Any, Any]:
        """Wrap a model, and make its optimizer unless it is there already; return both."""
        wrapped = self.wrap(model, blocks, options)
        return wrapped, optimizer if isinstance(optimizer, Optimizer) else optimizer(wrapped)

    def wrap(self, model: nn.Module, blocks: Blocks, options: Options) -> nn.Module:
        return model

    def create(self, make: MakesModel, optimizer: MakesOptimizer, blocks: Blocks, file: str | None) -> tuple[Any, Any]:
        """Make a model on the device meta and :meth:`prepare` it, in the way for models that no rank has memory for, if any.

        Its values are those that ``reset_parameters`` draws, or those of a file with its state dict.
        """
        model = _on_meta(make)
        model.to_empty(device="cpu")
        if file is None:
            _reset(model)
        else:
            model.load_state_dict(_mapped(file))
        return self.prepare(model, optimizer, blocks, Options())

    def unwrapped(self, model: Any) -> Any:
        """Return what passes attributes and state dicts of the module on."""
        return model

    def backward(self, loss: Tensor, model: Any, **arguments: Any) -> None:
        loss.backward(**arguments)

    def no_sync(self, model: Any) -> Context:
        return contextlib.nullcontext()

    def clip(self, model: Any, limit: float) -> Any:
        return nn.utils.clip_grad_norm_(model.parameters(), limit)

    def state_dict(self, model: Any, offload: bool) -> dict[str, Any]:
        """Return the full state dict, on rank 0 at least. Call on all ranks."""
        return dict(model.state_dict())

    def parameters(self, model: nn.Module) -> dict[str, Tensor]:
        """Return full parameters under the names that the plain model has. Call on all ranks."""
        return {name.removeprefix("module."): _full(p).clone() for name, p in model.named_parameters()}


def _full(tensor: Any) -> Tensor:
    """Return a sharded tensor as a plain one, by the method that DTensor and this engine's parameters have."""
    tensor = tensor.detach()
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def _on_meta(make: MakesModel) -> nn.Module:
    """Make a model without memory. What is drawn for it later begins with one seed, however much was drawn for meta."""
    with torch.device("meta"):
        model = make()
    torch.manual_seed(0)
    return model


def _reset(model: nn.Module) -> None:
    """Initialise all layers in the order in which they were made."""
    for module in model.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()


def _mapped(file: str) -> dict[str, Tensor]:
    """Return a state dict whose tensors take no memory but the file's pages."""
    state: dict[str, Tensor] = torch.load(file, mmap=True)
    return state


class _OfTorch(Engine):
    """An engine of torch; one function makes the full state dicts of all of them."""

    modules = ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict")

    def state_dict(self, model: Any, offload: bool) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))


class DDP(_OfTorch):
    label = "DDP"

    def wrap(self, model: nn.Module, blocks: Blocks, options: Options) -> nn.Module:
        if options.offload or options.mixed:
            raise NotApplicable("DDP does not do this")
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=options.find_unused)

    def unwrapped(self, model: Any) -> Any:
        return model.module

    def no_sync(self, model: Any) -> Context:
        return model.no_sync()


class FSDP1(_OfTorch):
    label = "FSDP1"

    def wrap(
        self,
        model: nn.Module,
        blocks: Blocks,
        options: Options,
        param_init_fn: Callable[[nn.Module], None] | None = None,
    ) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        if options.offload:
            raise NotApplicable("FSDP1 offloads from an accelerator only")
        return FullyShardedDataParallel(
            model,
            use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy(blocks),
            mixed_precision=MixedPrecision(torch.bfloat16) if options.mixed else None,
            device_id=torch.device("cpu"),
            param_init_fn=param_init_fn,
        )

    def create(self, make: MakesModel, optimizer: MakesOptimizer, blocks: Blocks, file: str | None) -> tuple[Any, Any]:
        model = _on_meta(make)
        if file is None:  # it calls reset_parameters itself
            return self.prepare(model, optimizer, blocks, Options())
        state = _mapped(file)
        names = {module: name for name, module in model.named_modules()}

        def fill(module: nn.Module) -> None:
            module.to_empty(device="cpu", recurse=False)
            for name, p in module.named_parameters(recurse=False):
                p.data.copy_(state[f"{names[module]}.{name}".lstrip(".")])

        wrapped = self.wrap(model, blocks, Options(), fill)
        return wrapped, optimizer(wrapped)

    def no_sync(self, model: Any) -> Context:
        return model.no_sync()

    def clip(self, model: Any, limit: float) -> Any:
        return model.clip_grad_norm_(limit)

    def parameters(self, model: nn.Module) -> dict[str, Tensor]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {name: p.detach().clone() for name, p in model.named_parameters()}


class FSDP2(_OfTorch):
    label = "FSDP2"

    def wrap(self, model: nn.Module, blocks: Blocks, options: Options) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        policies: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (torch.distributed.get_world_size(),)),
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16 if options.mixed else None),
            "offload_policy": CPUOffloadPolicy(pin_memory=False) if options.offload else OffloadPolicy(),
        }
        for module in list(model.modules()):
            if isinstance(module, blocks) and module is not model:
                fully_shard(module, **policies)
        fully_shard(model, **policies)
        return model

    def create(self, make: MakesModel, optimizer: MakesOptimizer, blocks: Blocks, file: str | None) -> tuple[Any, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        model = self.wrap(_on_meta(make), blocks, Options())
        model.to_empty(device="cpu")
        if file is None:
            _reset(model)
        else:
            set_model_state_dict(model, _mapped(file), options=StateDictOptions(full_state_dict=True))
        return model, optimizer(model)

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)


class ZeRO3(Engine):
    """DeepSpeed, whose parameters have masters in float32 whatever they are in themselves."""

    label = "ZeRO-3"
    dtype = torch.float32
    modules = ("torch._inductor.compile_fx", "deepspeed")

    def missing(self) -> str:
        return "" if importlib.util.find_spec("deepspeed") else "deepspeed"

    def version(self) -> str:
        return f"DeepSpeed {version('deepspeed')}"

    def start(self) -> None:
        import deepspeed

        # The first time ever this compiles an extension.
        deepspeed.init_distributed("gloo")

    def prepare(
        self, model: nn.Module, optimizer: Optimizer | MakesOptimizer, blocks: Blocks, options: Options
    ) -> tuple[Any, Any]:
        import deepspeed

        # An optimizer of the user's own is made before the model is wrapped, and handed over.
        own = optimizer if isinstance(optimizer, Optimizer) else optimizer(model)
        engine, *_ = deepspeed.initialize(model=model, optimizer=own, config=self._config(options))
        return engine, _ZeROOptimizer(engine, own)

    def _config(self, options: Options) -> dict[str, Any]:
        zero: dict[str, Any] = {
            "stage": 3,
            # So small a model would not be sharded, or stay gathered once it was used.
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
        if options.offload:
            zero |= {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
        return {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "managed_gradient_accumulation": not options.accumulates,
            "gradient_clipping": options.clip or 0.0,
            "bf16": {"enabled": options.mixed},
        }

    def create(self, make: MakesModel, optimizer: MakesOptimizer, blocks: Blocks, file: str | None) -> tuple[Any, Any]:
        import deepspeed

        torch.manual_seed(0)
        # It has no use for meta: each layer is divided among the ranks once it has been made.
        with deepspeed.zero.Init(config_dict_or_path=self._config(Options())):
            model = make()
        state = {} if file is None else _mapped(file)
        for prefix, module in model.named_modules():
            own = dict(module.named_parameters(prefix, recurse=False))
            if own and state:
                with deepspeed.zero.GatheredParameters(list(own.values()), modifier_rank=0):
                    for name, p in own.items():
                        if torch.distributed.get_rank() == 0:
                            p.data.copy_(state[name])
        return self.prepare(model, optimizer, blocks, Options())

    def unwrapped(self, model: Any) -> Any:
        return model.module

    def backward(self, loss: Tensor, model: Any, **arguments: Any) -> None:
        model.backward(loss, **arguments)

    def no_sync(self, model: Any) -> Context:
        raise NotApplicable("ZeRO-3 reduces at every backward")

    def clip(self, model: Any, limit: float) -> Any:
        """Do nothing: engine.step() clips, by its configuration."""

    def state_dict(self, model: Any, offload: bool) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            model.save_16bit_model(folder)  # the name that it has in float32, too
            file = Path(folder, "pytorch_model.bin")
            return torch.load(file) if file.exists() else {}

    def parameters(self, model: nn.Module) -> dict[str, Tensor]:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            # With `bf16` the module's own are in bfloat16.
            return {name: p.float() for name, p in super().parameters(model).items()}


class _ZeROOptimizer:
    """What a script calls an optimizer: ``step()`` is DeepSpeed's ``engine.step()``, the rest is the user's own optimizer's."""

    def __init__(self, engine: Any, own: Optimizer) -> None:
        self._engine, self.own = engine, own

    def step(self) -> None:
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class This(Engine):
    label = "this"
    modules = ("torch_shard",)

    def version(self) -> str:
        return f"torch-shard-engine {version('torch-shard-engine')}"

    def wrap(self, model: nn.Module, blocks: Blocks, options: Options) -> nn.Module:
        import torch_shard

        # The peers' units. Planned by itself, so small a model would be one unit.
        units = blocks if any(isinstance(module, blocks) for module in model.modules()) else None
        precision = torch.bfloat16 if options.mixed else None
        torch_shard.shard(model, units=units, precision=precision, offload="cpu" if options.offload else None)
        return model

    def create(self, make: MakesModel, optimizer: MakesOptimizer, blocks: Blocks, file: str | None) -> tuple[Any, Any]:
        import torch_shard

        model = _on_meta(make)
        if file is not None:
            torch_shard.from_files(model, file)
        return self.prepare(model, optimizer, blocks, Options())

    def no_sync(self, model: Any) -> Context:
        return _engine_of(model).no_sync()

    def clip(self, model: Any, limit: float) -> Any:
        return _engine_of(model).clip_grad_norm_(limit)

    def state_dict(self, model: Any, offload: bool) -> dict[str, Any]:
        return dict(_engine_of(model).state_dict())


def _engine_of(model: nn.Module) -> Any:
    import torch_shard

    return torch_shard.engine_of(model)


ENGINES: dict[str, Engine] = {
    "plain": Engine(),
    "ddp": DDP(),
    "fsdp1": FSDP1(),
    "fsdp2": FSDP2(),
    "zero3": ZeRO3(),
    "ours": This(),
}
