"""A script that runs, instead of training, up to its first step, to plan that: ``torch-shard plan train.py``.

The script runs in a branch of the process, on the CPU, up to the place where it shards a model. There its step is traced in
further branches, see :mod:`torch_shard.plan.script_step`, settings are searched, and the script ends. To the script this process
is rank 0 of as many ranks as are planned for: collectives of torch's process group "fake" return at once.

DistributedDataParallel and FSDP count as sharding, as under the runners. A front end of a framework has an entry point in the
group ``torch_shard.planned_scripts``: a function without arguments that makes the framework's scripts shard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
import torch.testing._internal.distributed.fake_pg
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import engine
from ..activation_checkpointing import has_checkpointed_layers
from ..config.shard_config import ShardConfig
from ..engine import Engine
from ..errors import ShardError, TraceError
from ..frontend.launch import read_variables, run_script, values_of
from ..frontend.zero_redundancy_optimizer import replace_zero_redundancy_optimizer
from ..plan.hardware import Hardware
from ..plan.plan import Plan
from ..plan.script_step import OnlyEvaluated, ScriptStep, real_tensors, trace_script
from ..plan.search_results import Search
from ..plan.settings_search import search_with
from ..plan.step_trace import StepTrace
from ..plan.user_lines import line_of
from ..setup.auto_settings import PLANNING
from ..utils.branch import Branch, branch
from .on_host import OnHost
from .planned_engine import PlannedEngine
from .replace import replace_ddp, replace_fsdp
from .settings import RUNNER_SETTINGS, Overrides

_FRONT_ENDS = "torch_shard.planned_scripts"
_OF_FABRIC = ("LT_ACCELERATOR", "LT_DEVICES", "LT_NUM_NODES", "LT_STRATEGY")
# Prefixes of variables by which a program would find the ranks of a real launch.
_OF_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "PMI_", "OMPI_", *_OF_FABRIC)
# Collectives of objects. In the fake group every rank has this rank's objects.
_OF_OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
_RANK_0 = {"RANK": "0", "LOCAL_RANK": "0", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def plan_script(name: str, arguments: Sequence[str], hardware: Hardware, is_module: bool) -> Search:
    """Run a script until its first step is traced, and find settings for it. Not collective.

    Only files that the script has written by then remain. Its output goes to standard error.

    Args:
        name: the path of the script, or the name of a module.
        arguments: the script's own arguments.
        hardware: the machines that the step has to fit.
        is_module: True if `name` is a module's.

    Raises:
        TraceError: the script fails before its first step is over, or on fake tensors; or it shards no model.
        ConfigError, SetupError: the script's settings are wrong.
    """
    found = branch()
    if isinstance(found, Branch):
        _Script(found, hardware).run(name, arguments, is_module)
    result: Search = found
    return result


class _Script:
    """The script that runs in this process, a branch of the one that plans."""

    def __init__(self, own_branch: Branch, hardware: Hardware):
        self._branch = own_branch
        self._hardware = hardware
        self._step: ScriptStep | None = None  # the step that is traced, in a branch
        self._planned: nn.Module | None = None

    def run(self, name: str, arguments: Sequence[str], is_module: bool) -> NoReturn:
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        for variable in list(os.environ):
            if variable.startswith(_OF_LAUNCHERS):
                del os.environ[variable]
        ranks, of_node = self._hardware.ranks, self._hardware.ranks_per_node
        os.environ.update(_RANK_0, WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(of_node))
        os.environ.update({PLANNING: "1"}, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
        error: BaseException | None = None
        try:
            with _fake_group(ranks), OnHost():
                run_script("torch-shard plan", name, arguments, is_module, self._prepare)
        except BaseException as raised:
            error = raised
        if self._step is not None:
            if error is None or isinstance(error, SystemExit):
                self._step.script_ended()
            self._step.failed(error)
        if error is None or isinstance(error, SystemExit):
            self._branch.end(
                TraceError(
                    f"{name} has ended and sharded no model. What is planned is the first model that trains and that is given to "
                    "torch_shard.shard, DistributedDataParallel, FSDP, a Trainer or Fabric of Lightning, an Accelerator, or the "
                    "Trainer of transformers."
                )
            )
        if isinstance(error, ShardError):
            self._branch.end(error)
        traceback.print_exception(error)
        self._branch.end(
            TraceError(
                f"{name} fails before it shards a model, at {line_of(error.__traceback__)}: {type(error).__name__}: {error} (It "
                "runs on the CPU here.)"
            )
        )

    def _prepare(self) -> None:
        settings = values_of(read_variables(os.environ, RUNNER_SETTINGS))
        replace_zero_redundancy_optimizer()
        replace_ddp(Overrides(settings, on_host=True))
        replace_fsdp(Overrides({**settings, "fsdp": True}))
        for entry in importlib.metadata.entry_points(group=_FRONT_ENDS):
            entry.load()()
        engine.instead_of_sharding = self._shard

    def _shard(self, model: nn.Module, config: ShardConfig) -> Engine:
        """Search settings for the model and end, in place of ``torch_shard.shard``; in a branch, let the script go on."""
        if config.strategy == "auto":  # this is the plan that "auto" asks for
            config = dataclasses.replace(config, strategy="full_shard", memory=None)
        trains = any(p.requires_grad for p in model.parameters())
        if trains and self._planned is not None:
            raise TraceError(
                f"the script shards a second model that trains, a {type(model).__name__}, after a "
                f"{type(self._planned).__name__}: only steps of one model are planned."
            )
        with real_tensors():
            alone = dist.new_group([0]) if dist.is_initialized() else None
            planned = PlannedEngine(model, config, self._hardware.ranks, alone, self._engine_closes)
        if not trains:
            return planned  # such as a reference model, whose tensors are inputs of the step
        self._planned = model
        try:
            found = search_with(self._trace, model, config, self._hardware, recomputes=has_checkpointed_layers(model))
        except _GoOn:
            return planned
        except OnlyEvaluated:  # here the script goes on, up to the run that trains
            self._planned = None
            self._refuse_steps_without_engine(model)
            return planned
        except ShardError as error:
            self._branch.end(error)
        self._branch.end(found)

    def _engine_closes(self, model: nn.Module) -> None:
        if self._step is not None and model is self._planned:
            self._step.engine_closes()

    def _refuse_steps_without_engine(self, model: nn.Module) -> None:
        """Make an optimizer step of a model whose engine is closed end the script, which would train with real values."""
        own = {id(p) for p in model.parameters()}

        def refuse(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if self._step is None and any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                self._branch.end(TraceError("the script trains a model whose engine it has closed."))

        register_optimizer_step_pre_hook(refuse)

    def _trace(
        self, plan: Plan, config: ShardConfig, micro_batch: int | None, layers: list[nn.Module], offloaded: bool
    ) -> StepTrace:
        assert self._planned is not None
        on = self._hardware.on
        found = trace_script(self._planned, plan, config, device=on, checkpointed=layers, offloaded=offloaded)
        if isinstance(found, ScriptStep):
            self._step = found
            raise _GoOn
        return found


class _GoOn(BaseException):
    """The exception that lets the script go on in a branch, while the other process searches."""


@contextlib.contextmanager
def _fake_group(ranks: int) -> Iterator[None]:
    """Make each process group of the script, whatever its backend, a fake one of which this process is rank 0."""
    init = dist.init_process_group

    def fake(*args: Any, **kwargs: Any) -> None:
        init("fake", rank=0, world_size=ranks, store=HashStore())

    def outside(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def call(*args: Any, **kwargs: Any) -> Any:
            with real_tensors():  # objects are sent as bytes, which must have values
                return collective(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for module in (dist, device_mesh):  # init_device_mesh() makes a group if there is none
            stack.enter_context(patch.object(module, "init_process_group", fake))
        for name in _OF_OBJECTS:
            stack.enter_context(patch.object(dist, name, outside(getattr(dist, name))))
        yield
