"""The packages import anywhere; what is missing is said when it is needed. Also run on the wheel."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from importlib import metadata, resources
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import torch_shard
from tests.support.run_python import run_python
from torch_shard import errors, versions

pytestmark = pytest.mark.wheel

PACKAGES = ["torch_shard", "lightning_shard", "accelerate_shard"]

# What a build of torch without distributed lacks; `torch.distributed` then defines stubs only. Taken
# away when torch.distributed is about to run, and not called by anything before that.
WITHOUT_DISTRIBUTED = """
import importlib.abc, importlib.machinery, sys

class TakeAway(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch.distributed":
            for part in ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_faulty_agent_init"):
                vars(sys.modules["torch._C"]).pop(part, None)
        return None

sys.meta_path.insert(0, TakeAway())
import torch
assert not torch.distributed.is_available()
"""


def test_where_torch_has_no_distributed_the_packages_import_and_shard_says_so():
    code = WITHOUT_DISTRIBUTED + "".join(f"import {name}\n" for name in PACKAGES)
    code += "from torch_shard.comm.process_groups import group_timeout\n"  # which front ends ask before they shard
    code += "assert group_timeout(torch.device('cpu')) == 1800.0\n"
    result = run_python("-c", code + "torch_shard.shard(torch.nn.Linear(2, 2))", expected=1)
    assert "UnavailableError" in result.stderr.splitlines()[-1], result.stderr
    assert "torch.distributed" in result.stderr.splitlines()[-1]


def test_shard_says_that_a_launched_program_has_no_process_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # as a launcher sets it
    with pytest.raises(errors.UnavailableError, match="init_process_group"):
        torch_shard.shard(torch.nn.Linear(2, 2))


def test_a_program_without_a_launcher_is_one_rank_and_needs_no_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert torch_shard.shard(torch.nn.Linear(2, 2)).world_size == 1


def test_importing_torch_calls_the_entry_point_and_imports_neither_the_engine_nor_lightning():
    code = "import sys, torch; print(*{name.partition('.')[0] for name in sys.modules})"
    imported = set(run_python("-c", code).stdout.split())
    assert {"torch", "lightning_shard"} <= imported
    assert imported.isdisjoint({"torch_shard", "lightning", "pytorch_lightning"})


def test_torch_finds_the_entry_point_of_the_lightning_front_end():
    entries = {entry.name: entry for entry in metadata.entry_points(group="torch.backends")}
    assert callable(entries["lightning_shard"].load())


@pytest.mark.parametrize("package", PACKAGES)
def test_the_packages_are_typed(package):
    assert resources.files(package).joinpath("py.typed").is_file()


def test_accelerate_shard_names_what_is_missing_when_it_is_needed():
    code = """
import sys
sys.modules["accelerate"] = None
import accelerate_shard
try:
    accelerate_shard.Accelerator
except ImportError as error:
    assert "torch-shard-engine[accelerate]" in str(error), error
else:
    raise AssertionError("no error")
"""
    run_python("-c", code)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_of_the_distribution_imports(package):
    root = Path(importlib.import_module(package).__file__).parent
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        name = ".".join((package, *(part for part in parts if part != "__init__")))
        importlib.import_module(name)


def test_everything_that_torch_shard_exports_exists():
    for name in torch_shard.__all__:
        assert getattr(torch_shard, name) is not None


def test_completion_offers_what_is_imported_at_its_first_use():
    code = "import torch_shard; print(*{*torch_shard.__all__} - {*dir(torch_shard)})"
    assert run_python("-c", code).stdout.strip() == ""


# What the documentation named before the files lay in folders, by module.
EARLIER_NAMES = {
    "torch_shard": "shard engine_of from_files Engine ShardConfig Precision Quantized Offload make_plan Plan ShardTensor",
    "torch_shard.offload": "Offload",
    "torch_shard.versions": "check_torch",
    "torch_shard.fsdp.wrap": "ModuleWrapPolicy",
    "torch_shard.statistics": "Statistics",
    "torch_shard.precision": "norms_in",
    "torch_shard.checkpoint.full_files": "open_full",
    "torch_shard.plan": "UnitPlan ParamInfo BufferInfo PredictedBytes",
    "torch_shard.activation_checkpointing": "checkpointed_layers keep_activations offload_of",
    "torch_shard.activation_offload": "ActivationOffload",
    "torch_shard.optim": "register kind_of",
    "torch_shard.optim_state": "full_optim_state_dict sharded_optim_state_dict optim_state_dict optim_state_dict_to_load "
    "shard_full_optim_state_dict flatten_sharded_optim_state_dict scatter_full_optim_state_dict rekey_optim_state_dict",
    "torch_shard.state_dict_type": "set_state_dict_type get_state_dict_type state_dict_type",
    "torch_shard.fsdp": "FullyShardedDataParallel fully_shard FSDPModule UnshardHandle register_fsdp_forward_method "
    "share_comm_ctx",
    "torch_shard.fsdp.sharded_grad_scaler": "ShardedGradScaler",
    "torch_shard.errors": "ShardError ConfigError UnavailableError SetupError HostStepError LayoutError ReplacedParameterError "
    "NeedsGatherError ShardPicklingError StateDictError DivergenceError MissingRankError NonFiniteError UnitStateError "
    "CheckpointError HostMemoryError PinnedMemoryError DiskError",
    "lightning_shard": "ShardStrategy ShardMonitor ShardFabricStrategy",
    "accelerate_shard": "Accelerator ShardPlugin ShardTrainerMixin enable disable from_pretrained",
}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in EARLIER_NAMES.items() for name in names.split()]
)
def test_names_that_were_documented_keep_their_import_paths(module, name):
    assert callable(getattr(importlib.import_module(module), name))


def test_every_error_says_when_it_is_raised_and_what_to_do():
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, errors.ShardError)
        assert {"Raised:", "Remedy:"} <= set(inspect.getdoc(error).split()), name


def _is_users(requirement: Requirement) -> bool:
    """Return False for those of `make outside`, which has an environment of its own, with the versions that were measured."""
    return "outside" not in str(requirement.marker)


def test_the_floor_of_torch_is_that_of_the_requirements_and_what_is_tested_is_supported():
    required = [Requirement(text) for text in metadata.requires("torch-shard-engine")]
    assert {str(r.specifier) for r in required if r.name == "torch"} == {f">={versions.MIN_TORCH}"}
    for r in filter(_is_users, required):
        assert all(r.specifier.contains(version) for version in versions.TESTED.get(r.name, ())), r


def test_what_is_installed_is_supported():
    unsupported = []
    for requirement in filter(_is_users, map(Requirement, metadata.requires("torch-shard-engine"))):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found = metadata.version(requirement.name)
            if not requirement.specifier.contains(found, prereleases=True):
                unsupported.append(f"{requirement} {found}")
    assert unsupported == []


def test_nightly_builds_count_as_the_version_they_lead_to():
    assert versions._numbers("2.15.0.dev20260101+cpu") == versions._numbers("2.15.0")
    assert versions.at_least(versions.MIN_TORCH)
    assert not versions.at_least("99")


def test_a_torch_below_the_floor_is_refused(monkeypatch):
    monkeypatch.setattr(versions, "TORCH_VERSION", versions._numbers("2.10.1"))
    with pytest.raises(errors.UnavailableError, match=r"torch >= 2\.11"):
        versions.check_torch()


def test_the_log_level_comes_from_the_environment_and_the_rank_is_in_the_line():
    # The environment is read at the import. pytest's own logging would take the place of ours in this process.
    code = """
import contextlib, importlib, io, os, torch_shard.log
for level, rank in (("", "1"), ("", "0"), ("info", "1"), ("loud", "0")):
    os.environ.update(TORCH_SHARD_LOG=level, RANK=rank)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        logger = importlib.reload(torch_shard.log).logger
        logger.warning("careful")
        logger.info("by the way")
    print(repr(said.getvalue()))
"""
    quiet, first, verbose, unknown = run_python("-c", code).stdout.splitlines()
    assert quiet == "''"
    assert "rank 0: careful" in first and "by the way" not in first
    assert "rank 1: careful" in verbose and "rank 1: by the way" in verbose
    assert "TORCH_SHARD_LOG='loud' is not a level" in unknown and "rank 0: careful" in unknown


@pytest.mark.skipif("TORCH_SHARD_WHEEL" not in os.environ, reason="only against the built wheel")
def test_the_wheel_is_what_is_tested():
    for package in PACKAGES:
        root = Path(importlib.import_module(package).__file__).parent
        assert root.parent.name == "site-packages"
    assert not any(Path(folder, "core", "torch_shard").exists() for folder in sys.path)
