"""The structure of the code: rooms import downwards only, front ends see public names only, ``comm`` alone communicates.

Read from the syntax trees, so that imports inside functions and under ``TYPE_CHECKING`` count as much as others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "torch_shard"

# Each room of core/torch_shard may import those before it. "ground" and "engine" are files that lie flat.
ORDER = (
    "ground", "utils", "layout", "numerics", "config", "comm", "schedule", "plan", "offload", "shard_tensor", "unit", "runtime",
    "unshard", "setup", "grad_clip", "optim", "state", "checkpoint", "engine", "frontend", "fsdp", "launch", "selftest", "cli",
)  # fmt: skip
GROUND = {"errors", "log", "versions"}
ENGINE = {
    "activation_checkpointing", "activation_offload", "close", "deferred_init", "engine", "optim_state", "precision",
    "state_dict_type", "statistics",
}  # fmt: skip
TOP = {"__init__", "__main__"}

# What front ends may import of the engine: these, and names of `torch_shard` itself.
PUBLIC = {
    "activation_checkpointing", "activation_offload", "errors", "frontend", "log", "optim", "optim_state", "versions",
}  # fmt: skip
FRONT_ENDS = ("lightning_shard", "accelerate_shard")

# Attributes of engines and of sharded tensors that are the engine's own.
PRIVATE = {
    "_abandon", "_ignored", "_let_go", "_local", "_model", "_pending", "_runtime", "_shard_state", "_spec", "_staging", "_unit",
    "_unit_ref", "_watch",
}  # fmt: skip

# Of torch.distributed, what rooms other than comm may import: types and file formats, no collectives. "*" is for modules that
# have no others.
TYPES = {
    "torch.distributed.tensor": {"DTensor", "Replicate"},
    "torch.distributed.checkpoint.default_planner": {
        "DefaultLoadPlanner", "DefaultSavePlanner", "create_default_local_load_plan",
    },
    "torch.distributed.checkpoint.filesystem": {"FileSystemReader"},
    "torch.distributed.checkpoint.metadata": {"*"},
    "torch.distributed.checkpoint.planner": {"*"},
    "torch.distributed.checkpoint.storage": {"*"},
    "torch.distributed.fsdp": {
        "CPUOffload", "BackwardPrefetch", "CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecision", "MixedPrecisionPolicy",
        "OffloadPolicy", "ShardingStrategy",
        "StateDictConfig", "FullStateDictConfig", "LocalStateDictConfig", "ShardedStateDictConfig",
        "OptimStateDictConfig", "FullOptimStateDictConfig", "LocalOptimStateDictConfig", "ShardedOptimStateDictConfig",
        "StateDictSettings", "StateDictType",
    },
    "torch.distributed.fsdp.api": {"*"},
    "torch.distributed.fsdp.wrap": {"*"},
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": {"ActivationWrapper"},
}  # fmt: skip
# Modules of torch.distributed that a file has as a whole, to hand their names on or to replace some of them.
MODULES = {
    "checkpoint/format/dcp_metadata.py": {
        "torch.distributed.checkpoint.filesystem",
        "torch.distributed.checkpoint.metadata",
    },
    "fsdp/__init__.py": {"torch.distributed.fsdp"},
    "fsdp/dcp_patch.py": {"torch.distributed.checkpoint.state_dict"},
    "launch/replace.py": {"torch.distributed.fsdp"},
}
# And what any room may ask.
STATE = ("is_available", "is_initialized", "is_nccl_available", "get_rank", "get_world_size")
# Of torch, what only comm/streams.py asks for devices; and what else does, for more than streams and events.
DEVICES = {"cuda", "xpu", "accelerator", "get_device_module"}
ASK_DEVICES = {
    "comm/streams.py",
    "comm/mesh.py",  # how many there are
    "config/precision.py",  # which dtypes they have
    "config/quantization.py",
    "offload/pinned.py",  # page-locks memory through CUDA's own functions
    "selftest/devices.py",  # their names, and what their allocator says
}
EXCEPTIONS = {
    # Maps the user's own calls of torch.distributed to what they mean for a sharded tensor; calls none itself.
    "shard_tensor/c10d_functions.py",
    # Stands where a user's program stands: makes the default process group, which DDP and FSDP2 need beside the engine, and tells
    # other ranks what it has found without the code that it checks.
    "selftest/ranks.py",
    # Is torchrun, which starts such a program.
    "selftest/launcher.py",
    # Trains the same model under FSDP2, to compare.
    "selftest/speed.py",
    # Stands where torchrun stands: gives a script that is planned the process group of a rank whose others don't exist.
    "launch/planned_script.py",
}
# Methods through which DTensors communicate, and the file that may call them: it brings a gradient that tensor parallelism has
# distributed in another way into the way of its parameter, over the tensor-parallel group, which is the user's.
DTENSOR_COLLECTIVES = {"redistribute"}
REDISTRIBUTES = {"layout/dtensor_placement.py"}


class Import(NamedTuple):
    """One imported name."""

    file: Path
    line: int
    module: str  # absolute
    name: str  # "" for `import module`

    @property
    def target(self) -> str:
        """The module, with the name if that is a module, too."""
        path = ROOT / ("core" if self.module.startswith("torch_shard") else "") / self.module.replace(".", "/")
        is_module = self.name and ((path / self.name).is_dir() or (path / f"{self.name}.py").is_file())
        return f"{self.module}.{self.name}" if is_module else self.module

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.name or 'it all'} of {self.module}"


def imports_of(file: Path, source: str | None = None) -> Iterator[Import]:
    """Yield every import of a file, wherever it stands in it."""
    base = ROOT / "core" if file.is_relative_to(CORE) else ROOT
    package = list(file.relative_to(base).parts[:-1])
    for node in ast.walk(ast.parse(file.read_text() if source is None else source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, "")
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(file, node.lineno, module, alias.name)


def room_of(module: str) -> str:
    """Return the room of a module of torch_shard; "" for the package itself, which only hands names on."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1] in TOP:
        return ""
    if parts[1] in GROUND:
        return "ground"
    return "engine" if parts[1] in ENGINE else parts[1]


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT / "core").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def upward(file: Path, source: str | None = None) -> list[str]:
    """Return the imports of a file of core that do not point down."""
    own = room_of(module_of(file))
    if not own:
        return []
    found = []
    for each in imports_of(file, source):
        if each.module.split(".")[0] == "torch_shard":
            room = room_of(each.target)
            if not room or ORDER.index(room) > ORDER.index(own):
                found.append(str(each))
    return found


def beyond_public(file: Path, source: str | None = None) -> list[str]:
    """Return the imports of a front end's file that reach into the engine."""
    found = []
    for each in imports_of(file, source):
        parts = each.target.split(".")
        if parts[0] == "torch_shard" and len(parts) > 1 and parts[1] not in PUBLIC:
            found.append(str(each))
    return found


def takes_private(file: Path, source: str | None = None) -> list[str]:
    """Return the imports of names that begin with an underscore, hence belong to the file that defines them.

    Files may have such names: their names then say that the file wraps what is private elsewhere.
    """
    return [
        str(each)
        for each in imports_of(file, source)
        if each.module.split(".")[0] in ("torch_shard", *FRONT_ENDS)
        if each.name.startswith("_") and each.name != "__version__" and each.target == each.module
    ]


def reads_private(file: Path, source: str | None = None) -> list[str]:
    """Return where a front end's file uses a private attribute of the engine."""
    tree = ast.parse(file.read_text() if source is None else source)
    return [
        f"{file.relative_to(ROOT)}:{node.lineno} uses .{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE
        if not (isinstance(node.value, ast.Name) and node.value.id == "self")  # the front end's own
    ]


def communicates(file: Path, source: str | None = None) -> list[str]:
    """Return the imports and attributes through which a file could call torch.distributed, or DTensor's collectives."""
    tree = ast.parse(file.read_text() if source is None else source)
    own = str(file.relative_to(CORE))
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in attributes}
    found = []
    for node in attributes:
        name = _dotted(node)
        if name.startswith("torch.distributed.") and id(node) not in inner and not _is_type(own, name):
            found.append(f"{file.relative_to(ROOT)}:{node.lineno} uses {name}")
        if node.attr in DTENSOR_COLLECTIVES and own not in REDISTRIBUTES:
            found.append(f"{file.relative_to(ROOT)}:{node.lineno} calls .{node.attr}")
    for each in imports_of(file, source):
        full = f"{each.module}.{each.name}" if each.name else each.module
        if (full + ".").startswith("torch.distributed.") and not _is_type(own, full):
            found.append(str(each))
    return found


def _dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` as it is written; "" for an attribute of anything but a name."""
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return node.id if isinstance(node, ast.Name) else ""


def _is_type(file: str, name: str) -> bool:
    """Return whether a file of a room other than comm may have this name of torch.distributed, or attributes of it."""
    parts = name.split(".")
    for end in range(3, len(parts) + 1):
        module, last = ".".join(parts[: end - 1]), parts[end - 1]
        if {last, "*"} & TYPES.get(module, set()) or (module == "torch.distributed" and last in STATE):
            return True
        if f"{module}.{last}" in MODULES.get(file, ()):
            return True
    return False


def asks_devices(file: Path, source: str | None = None) -> list[str]:
    """Return where a file asks torch for devices, streams or events."""
    tree = ast.parse(file.read_text() if source is None else source)
    return [
        f"{file.relative_to(ROOT)}:{node.lineno} uses torch.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in DEVICES
        if isinstance(node.value, ast.Name) and node.value.id == "torch"
    ]


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def test_every_file_of_core_is_in_a_known_room():
    unknown = [str(file) for file in files_of(CORE) if (room := room_of(module_of(file))) and room not in ORDER]
    assert unknown == []
    flat = {file.stem for file in CORE.glob("*.py")}
    assert flat == GROUND | ENGINE | TOP


def test_rooms_import_downwards_only():
    assert [line for file in files_of(CORE) for line in upward(file)] == []


def test_no_file_imports_a_name_with_an_underscore_from_another():
    files = [file for folder in (CORE, *(ROOT / name for name in FRONT_ENDS)) for file in files_of(folder)]
    assert [line for file in files for line in takes_private(file)] == []


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_front_ends_import_public_names_and_the_frontend_only(front_end):
    assert [line for file in files_of(ROOT / front_end) for line in beyond_public(file)] == []


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_front_ends_use_no_private_attribute_of_the_engine(front_end):
    assert [line for file in files_of(ROOT / front_end) for line in reads_private(file)] == []


def test_only_comm_can_call_torch_distributed():
    outside = [
        file
        for file in files_of(CORE)
        if room_of(module_of(file)) != "comm" and str(file.relative_to(CORE)) not in EXCEPTIONS
    ]
    assert [line for file in outside for line in communicates(file)] == []


def test_streams_and_events_come_from_one_place():
    others = [file for file in files_of(CORE) if str(file.relative_to(CORE)) not in ASK_DEVICES]
    assert [line for file in others for line in asks_devices(file)] == []


# -- that these tests can fail ----------------------------------------------------------------------------------------


WRONG = [
    (upward, "core/torch_shard/layout/flat_layout.py", "from ..unit.unit import Unit", 1),
    (upward, "core/torch_shard/comm/collectives.py", "def f():\n    from ..runtime.runtime import Runtime", 1),
    (upward, "core/torch_shard/unit/unit.py", "if TYPE_CHECKING:\n    from ..runtime import runtime", 1),
    (upward, "core/torch_shard/errors.py", "import torch_shard.log\nfrom .utils import pytree", 1),
    (upward, "core/torch_shard/state/model_state.py", "from torch_shard import Engine", 1),
    (upward, "core/torch_shard/optim/matrix/step.py", "from ...engine import Engine", 1),
    (asks_devices, "core/torch_shard/unit/unit.py", "import torch\n\nhere = torch.cuda.current_stream()", 1),
    (beyond_public, "lightning_shard/__init__.py", "from torch_shard.unit.unit import Unit", 1),
    (beyond_public, "lightning_shard/__init__.py", "from torch_shard import runtime, Engine", 1),
    (beyond_public, "lightning_shard/__init__.py", "import torch_shard.comm", 1),
    (takes_private, "core/torch_shard/unit/unit.py", "from .flat_buffer import FlatBuffer, _free", 1),
    (
        takes_private,
        "accelerate_shard/accelerator.py",
        "from . import _private\nfrom ._private import PREPARED_LISTS",
        0,
    ),
    (reads_private, "lightning_shard/__init__.py", "engine._runtime.units[0].params[0]._local", 2),
    (reads_private, "lightning_shard/__init__.py", "engine._model() is engine._ignored()", 2),
    (communicates, "core/torch_shard/unit/unit.py", "import torch.distributed as dist", 1),
    (communicates, "core/torch_shard/unit/unit.py", "from torch import distributed", 1),
    (communicates, "core/torch_shard/unit/unit.py", "from torch.distributed import all_reduce", 1),
    (communicates, "core/torch_shard/unit/unit.py", "import torch\n\ntorch.distributed.all_reduce(x)", 1),
    (communicates, "core/torch_shard/unit/unit.py", "import torch\n\ntorch.distributed.tensor.distribute_tensor(x)", 1),
    (communicates, "core/torch_shard/unit/unit.py", "from torch.distributed.tensor import distribute_tensor", 1),
    (communicates, "core/torch_shard/unit/unit.py", "from torch.distributed.checkpoint import save", 1),
    (communicates, "core/torch_shard/unit/unit.py", "from torch.distributed import checkpoint", 1),
    (communicates, "core/torch_shard/unit/unit.py", "import torch.distributed.tensor", 1),
    (communicates, "core/torch_shard/unit/unit.py", "p.redistribute(placements=[Replicate()])", 1),
    (communicates, "core/torch_shard/unit/unit.py", "from torch.distributed.tensor import DTensor", 0),
    (communicates, "core/torch_shard/unit/unit.py", "from torch.distributed.checkpoint.metadata import Metadata", 0),
    (
        communicates,
        "core/torch_shard/unit/unit.py",
        "import torch\n\ntorch.distributed.fsdp.ShardingStrategy.NO_SHARD",
        0,
    ),
    (communicates, "core/torch_shard/unit/unit.py", "import torch\n\ntorch.distributed.is_initialized()", 0),
]


@pytest.mark.parametrize(("check", "file", "source", "count"), WRONG)
def test_what_is_wrong_is_found(check, file, source, count):
    assert len(check(ROOT / file, source)) == count
