"""Python runs this file at its start in each process of a program: its folder is on PYTHONPATH.

It records the loss of every backward, gives the same seeds to runs that set none, and loads stand-ins. A stand-in is a file with

    AFTER = "package.module"       # loaded once this module has been imported
    def apply(module): ...         # what it replaces there

Variables: OUTSIDE_RECORD, the folder for records, and OUTSIDE_STAND_INS, paths of files, separated by os.pathsep.
"""

from __future__ import annotations

import atexit
import functools
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

_calls: dict[str, list[Callable[[ModuleType], None]]] = {}
_recorded = False


class _Finder:
    """Calls what waits for a module once it has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _calls:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        @functools.wraps(load)
        def exec_module(module: ModuleType) -> None:
            load(module)
            for call in _calls.pop(name, ()):
                _or_stop(call, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _or_stop(call: Callable[..., None], *args: Any) -> None:
    try:
        call(*args)
    except Exception:  # Python only prints errors of this file, and a run without its stand-ins says nothing
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)


def _after(name: str, call: Callable[[ModuleType], None]) -> None:
    _calls.setdefault(name, []).append(call)


def _record(kind: str, value: Any) -> None:
    global _recorded
    _recorded = True
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    if (distributed := sys.modules.get("torch.distributed")) and distributed.is_initialized():  # Lightning has no RANK
        rank = str(distributed.get_rank())
    with open(os.path.join(os.environ["OUTSIDE_RECORD"], f"rank{rank}.jsonl"), "a") as file:
        file.write(json.dumps([kind, value]) + "\n")


def _record_end() -> None:
    if "RANK" in os.environ or _recorded:  # a launcher is no rank
        _record("end", "")


def _watch_torch(torch: ModuleType) -> None:
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def recorded(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else list(tensors):
            # Reentrant checkpointing calls it, too, with activations; to count operations is done on the device meta.
            if tensor.numel() == 1 and not tensor.is_meta:
                _record("loss", float(tensor.detach()))
        return backward(tensors, *args, **kwargs)

    torch.autograd.backward = recorded
    wrap = torch.nn.parallel.DistributedDataParallel.__init__

    @functools.wraps(wrap)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        wrap(self, *args, **kwargs)
        _record("model", "DDP")

    torch.nn.parallel.DistributedDataParallel.__init__ = wrapped


def _watch_engine(module: ModuleType) -> None:
    begin = module.Engine.__init__

    @functools.wraps(begin)
    def begun(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        _record("model", "shard")

    module.Engine.__init__ = begun


def _complete_torchvision(extension: ModuleType) -> None:
    """Let torchvision be imported where its compiled part was built for another build of torch (CUDA's beside a CPU's)."""
    if not extension._has_ops():
        import torch

        global _library  # torch forgets a library with its object
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _seed_numpy(numpy: ModuleType) -> None:
    numpy.random.seed(int(os.environ.get("RANK", "0")))


def _load(path: str) -> None:
    spec = importlib.util.spec_from_file_location("outside_" + os.path.basename(path)[:-3], path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _after(module.AFTER, module.apply)


def _start() -> None:
    _after("torchvision.extension", _complete_torchvision)
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    if "OUTSIDE_RECORD" not in os.environ:  # pytest's own process, which makes data
        return
    import random

    if multiprocessing.parent_process() is None:
        atexit.register(_record_end)  # the first to be registered is the last to be called
    # Not all programs set seeds, and these generators begin with random ones.
    random.seed(int(os.environ.get("RANK", "0")))
    _after("numpy", _seed_numpy)
    _after("torch", _watch_torch)
    _after("torch_shard.engine", _watch_engine)
    for path in filter(None, os.environ.get("OUTSIDE_STAND_INS", "").split(os.pathsep)):
        _load(path)


_or_stop(_start)
