"""The stand-in for DistributedDataParallel does to a script what torch's class does."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

from tests.support.logs import captured_log
from tests.support.ranks import ranks
from torch_shard import ShardTensor, engine_of
from torch_shard.errors import ConfigError, SetupError
from torch_shard.fsdp import deferred_wrap, fully_shard
from torch_shard.launch import distributed_data_parallel
from torch_shard.launch.distributed_data_parallel import DistributedDataParallel as DDP
from torch_shard.launch.settings import Overrides


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(7, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)))) * scale


def batches(rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(6, 5, generator=generator, dtype=torch.float64) for _ in range(count)]


def trained(
    kind: type[TorchDDP], rank: int, accumulate: str = "", hook: Any = None, **arguments: Any
) -> dict[str, torch.Tensor]:
    """Return the state dict of the wrapper after some steps of a script that knows torch's class only."""
    model = kind(Net(seed=rank).double(), find_unused_parameters=True, **arguments)
    assert isinstance(model, TorchDDP) and type(model.module) is Net
    if isinstance(hook, dist.BuiltinCommHookType):
        model._register_builtin_comm_hook(hook)
    elif kind is TorchDDP and hook is default_hooks.bf16_compress_hook:
        dist._register_comm_hook(model.reducer, None, hook)  # not register_comm_hook, which wants NCCL for this one
    elif hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = batches(rank, 6)
    for step in range(0, 6, 2):
        for micro, x in enumerate(data[step : step + 2]):
            last = micro == 1
            if accumulate == "attribute":
                model.require_backward_grad_sync = last
            if accumulate == "no_sync" and not last:
                with model.no_sync():
                    model(x, scale=2.0).square().mean().backward()
            else:
                model(x, scale=2.0).square().mean().backward()
            if last or not accumulate:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(data[0])
    return full(model)


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict as a file of this rank has it."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    found: dict[str, torch.Tensor] = torch.load(file)
    return found


@ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": "no_sync"},
        {"accumulate": "attribute"},
        {"broadcast_buffers": False},
        {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1},
        {"hook": default_hooks.allreduce_hook},
        {"hook": default_hooks.fp16_compress_hook},
        {"hook": default_hooks.bf16_compress_hook},
        {"hook": dist.BuiltinCommHookType.ALLREDUCE},
        {"hook": dist.BuiltinCommHookType.FP16_COMPRESS},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_a_script_trains_to_the_weights_that_it_gets_with_torchs_class(rank, options):
    expected, found = trained(TorchDDP, rank, **options), trained(DDP, rank, **options)
    assert list(found) == list(expected) and all(name.startswith("module.") for name in found)
    # Hooks that compress round the ranks' gradients before the sum, of a mean that is computed in another order.
    hook, tolerance = str(options.get("hook")).lower(), {"rtol": 1e-12, "atol": 1e-12}
    if "16" in hook:
        tolerance = {"rtol": 2e-2, "atol": 2e-2 if "bf16" in hook else 2e-3}
    torch.testing.assert_close(found, expected, **tolerance)


@ranks(2)
def test_a_hook_that_compresses_changes_what_is_trained(rank):
    exact = trained(DDP, rank)
    for hook in (default_hooks.bf16_compress_hook, dist.BuiltinCommHookType.FP16_COMPRESS):
        assert not torch.equal(trained(DDP, rank, hook=hook)["module.first.weight"], exact["module.first.weight"])


@ranks(2)
def test_a_state_dict_with_the_wrappers_names_loads_into_a_second_wrapper(rank):
    saved = full(DDP(Net(seed=1)))
    for kind in (TorchDDP, DDP):
        model = kind(Net(seed=2), find_unused_parameters=True)
        assert str(model.load_state_dict(saved)) == "<All keys matched successfully>"
        torch.testing.assert_close(full(model), saved, rtol=0, atol=0)


@ranks(2)
def test_ranks_begin_with_the_values_of_rank_0_unless_init_sync_is_off(rank):
    expected = Net(seed=0).first.weight
    torch.testing.assert_close(full(DDP(Net(seed=rank)))["module.first.weight"], expected)
    module = Net(seed=rank)
    own = module.first.weight.detach().clone()
    shards = DDP(module, init_sync=False).module.first.weight
    assert isinstance(shards, ShardTensor)
    spec = shards._spec
    torch.testing.assert_close(shards._local, own.flatten()[spec.start : spec.stop])


@ranks(2)
def test_an_optimizer_built_before_the_wrapper_goes_on(rank):
    results = []
    for kind in (TorchDDP, DDP):
        module = Net().double()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        model = kind(module, find_unused_parameters=True)
        for x in batches(rank, 3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(full(model.module))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)


@ranks(2)
def test_parameters_to_ignore_are_left_alone(rank):
    module = Net(seed=rank)
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["unused.weight"])
    own = module.unused.weight
    DDP(module)
    assert module.unused.weight is own and type(own) is nn.Parameter
    other = Net()
    DDP._set_params_and_buffers_to_ignore_for_model(other, ["norm.running_mean"])
    with pytest.raises(ConfigError, match=r"the buffer norm\.running_mean is to be ignored"):
        DDP(other)


@ranks(2)
def test_a_copy_of_the_wrapper_trains_by_itself(rank):
    model = DDP(Net().double(), find_unused_parameters=True)
    other = copy.deepcopy(model)
    other(batches(rank, 1)[0]).square().mean().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    before, after = full(model), full(other)
    assert not torch.equal(before["module.first.weight"], after["module.first.weight"])
    torch.testing.assert_close(before["module.first.weight"], Net().double().first.weight.detach())


@ranks(2)
def test_groups_and_meshes_choose_the_ranks(rank):
    alone = [dist.new_group([each]) for each in range(2)][rank]
    assert engine_of(DDP(Net(), process_group=alone).module).world_size == 1
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    assert engine_of(DDP(Net(), device_mesh=mesh).module).world_size == 2
    with pytest.raises(ConfigError, match="process_group and device_mesh mean the same"):
        DDP(Net(), process_group=alone, device_mesh=mesh)


@ranks(2)
def test_mixed_precision_computes_and_reduces_in_its_dtypes():
    mixed = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    model = DDP(Net(), mixed_precision=mixed)
    assert model(torch.randn(4, 5)).dtype is torch.bfloat16
    precision = engine_of(model.module).config.precision
    assert (precision.param_dtype, precision.reduce_dtype) == (torch.bfloat16, torch.float32)


@ranks(2)
@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"dim": 1}, ConfigError, "dim=1: batches are not scattered"),
        ({"device_ids": [0]}, ConfigError, r"device_ids=\[0\].*this module is on cpu"),
        ({"device_ids": [0, 1]}, ConfigError, r"device_ids=\[0, 1\]"),
        ({"buckets": 1}, TypeError, "buckets"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sharded(arguments, error, said):
    module = Net()
    with pytest.raises(error, match=said):
        DDP(module, **arguments)
    assert type(module.first.weight) is nn.Parameter
    with pytest.raises(ConfigError, match=r"must be a torch\.nn\.Module, not str"):
        DDP("model")


@ranks(2)
def test_hooks_for_buckets_are_refused():
    model = DDP(Net())
    with pytest.raises(ConfigError, match="powerSGD_hook is made for DDP's buckets"):
        model.register_comm_hook(None, powerSGD_hook.powerSGD_hook)
    with pytest.raises(ConfigError, match="the built-in communication hook SOMETHING is not known"):
        model._register_builtin_comm_hook("SOMETHING")


@ranks(2)
def test_a_module_can_be_wrapped_once():
    module = Net()
    DDP(module)
    with pytest.raises(SetupError):
        DDP(module)


@ranks(2)
def test_settings_of_the_launch_come_before_the_scripts_own():
    distributed_data_parallel.use(Overrides({"strategy": "no_shard", "broadcast_buffers": True, "timeout": 12.0}))
    try:
        config = engine_of(DDP(Net(), broadcast_buffers=False).module).config
    finally:
        distributed_data_parallel.use(Overrides({}))
    assert (config.strategy, config.broadcast_buffers, config.timeout) == ("no_shard", True, 12.0)
    # Without a setting ranks may be as far apart as the process group lets them.
    default = engine_of(DDP(Net()).module).config.timeout
    assert (
        default
        == dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    )


@ranks(2)
def test_parameters_that_the_launch_ignores_come_beside_those_that_the_script_does():
    module = Net()
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["unused.weight"])
    distributed_data_parallel.use(Overrides({"ignore": ("last.*",)}))
    try:
        DDP(module)
    finally:
        distributed_data_parallel.use(Overrides({}))
    sharded = {name for name, p in module.named_parameters() if isinstance(p, ShardTensor)}
    assert sharded == {"first.weight", "first.bias", "norm.weight", "norm.bias", "unused.bias"}


@ranks(2)
def test_fully_shard_under_a_launch_leaves_what_either_ignores():
    module = Net()
    deferred_wrap.override_settings(Overrides({"ignore": ("last.*",)}).for_model)
    try:
        fully_shard(module, ignored_params={module.unused.weight})
        module.state_dict()
    finally:
        deferred_wrap.override_settings(lambda model, own: dict(own))
    sharded = {name for name, p in module.named_parameters() if isinstance(p, ShardTensor)}
    assert sharded == {"first.weight", "first.bias", "norm.weight", "norm.bias", "unused.bias"}


@ranks(2)
def test_arguments_without_a_meaning_are_named_in_the_log():
    with captured_log(level=10) as messages:
        DDP(Net(), bucket_cap_mb=4, static_graph=True)
    assert dist.get_rank() or any("bucket_cap_mb, static_graph" in text for text in messages)
