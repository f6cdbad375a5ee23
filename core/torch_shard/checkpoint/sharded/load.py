"""Loading a sharded checkpoint: everything is compared, and every byte verified, before anything is changed.

A checkpoint with checksums is read twice: once to verify it, which keeps nothing, and when all ranks have verified their part,
into the parameters and the optimizer's state themselves. The second time it comes from the page cache, which costs a fraction
of the new memory that a copy would need. A checkpoint without checksums (torch.distributed.checkpoint's own) is read into new
memory, since only reading it can tell what is damaged.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...comm.collective_steps import broadcast, each, uncollected
from ...errors import CheckpointError
from ...shard_tensor.tensor import ShardTensor
from ...state import model_state
from ...state.model_state import Mismatches
from ...state.optimizer_state import failed_optimizer
from ...utils.patterns import without_wrappers
from ..full.load import load_full
from ..full.open_files import is_full
from ..mismatches import OF_THIS, check_dtype, wrong_dtype
from ..ports import EnginePort
from .checkpoint_dir import Checkpoint
from .entries import EXTRA, Optimizers, Source, optimizers_of, sources_of
from .entry_tree import Stored, StoredObject, leaves, new_tensor, on_meta, tree_of
from .load_optimizer import OptimizerLoad
from .saved_model import SavedModel


@uncollected()
def load(
    engine: EnginePort,
    path: str | os.PathLike[str],
    optimizer: Any = None,
    *,
    dtype: torch.dtype | None = None,
    models: Mapping[str, Any] | None = None,
) -> Any:
    """Load into `engine`'s model; see :meth:`torch_shard.Engine.load`. Collective."""
    if is_full(path):  # ranks that see different things fail together: both ways begin with the same comparison
        return load_full(engine, path, optimizer, dtype=dtype, models=models)
    return _load(engine, path, lambda: sources_of(engine, models), None, optimizer, dtype, True)


@uncollected()
def load_contents(
    engine: EnginePort,
    path: str | os.PathLike[str],
    sources: Sequence[Source],
    optimizer: Any = None,
    *,
    named: Sequence[Source] | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
) -> Any:
    """Load what :func:`.save.save_contents` wrote, as :func:`load` does. Collective; for front ends.

    Args:
        engine: the engine whose ranks load.
        path, optimizer, dtype: the arguments of :meth:`torch_shard.Engine.load`.
        sources: the models that are loaded, with the paths of their entries.
        named: the models after which the optimizers' parameters are named; `sources` by default.
        strict: missing and unexpected entries of models are errors.
    """
    return _load(engine, path, lambda: list(sources), named, optimizer, dtype, strict)


def _load(
    engine: EnginePort,
    path: str | os.PathLike[str],
    models: Callable[[], list[Source]],
    named: Sequence[Source] | None,
    optimizer: Any,
    dtype: torch.dtype | None,
    strict: bool,
) -> Any:
    runtime, what = engine._runtime, "engine.load"

    def prepare() -> _Load:
        engine.finish_saving()
        check_dtype(dtype)
        sources = models()
        for source in sources:
            model_state.refuse_inside(source.runtime, what)
        checkpoint = Checkpoint.open(path)
        return _Load(checkpoint, sources, named or sources, optimizers_of(optimizer), dtype, strict)

    work = each(runtime, what, prepare, key=lambda found: (found.checkpoint.fingerprint, dtype, strict))
    nonce = broadcast(runtime, secrets.token_hex(8), what)
    each(runtime, what, work.compare, nonce=f"{nonce}/compare")
    # This also gives parameters owners, the same on all ranks, which does not change what is trained.
    each(runtime, what, work.verify, nonce=f"{nonce}/verify")
    try:
        each(runtime, what, work.fill, nonce=f"{nonce}/fill")
    except Exception:
        work.overwritten()  # on all ranks, whichever failed
        raise
    for model in work.models:
        values = model.state_dict({**work.known, **work.tensors})
        model_state.load_state_dict(model.source.model, model.source.runtime, values, strict)
    each(runtime, what, work.apply)
    return work.known.get(EXTRA)


class _Load:
    """One load, on one rank."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        sources: list[Source],
        named: Sequence[Source],
        optimizers: Optimizers,
        dtype: torch.dtype | None,
        strict: bool,
    ) -> None:
        self.checkpoint, self.dtype, self.strict = checkpoint, dtype, strict
        tree = tree_of(checkpoint)
        self.models = [SavedModel(checkpoint, tree, source) for source in sources]
        self.extra = tree.get(EXTRA)
        self.optimizers = [
            part for where, held in optimizers for part in OptimizerLoad.of(checkpoint, tree, named, where, held)
        ]
        # Values by the entries' names: what is small, and the tensors that are loaded.
        self.known: dict[str, Any] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    # -- comparing ----------------------------------------------------------------------------------------------
    def compare(self) -> None:
        """Read what is small, and raise if anything does not fit."""
        small = [leaf for part in self.optimizers for leaf in part.small()]
        small += [leaf for _, leaf in leaves([value for model in self.models for value in model.objects()])]
        small += [self.extra] if isinstance(self.extra, StoredObject) else []
        # There may be tensors among them, such as a learning rate.
        scalars = {
            leaf.name: torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
            for leaf in small
            if isinstance(leaf, Stored)
        }
        objects = dict.fromkeys(leaf.name for leaf in small if leaf.name not in scalars)
        self.known = {**self.checkpoint.read(scalars, objects), **scalars}
        found = Mismatches([], [], [])
        for model in self.models:
            proxies = model.state_dict(lambda leaf: self.known[leaf.name] if leaf.name in self.known else on_meta(leaf))
            found.add(model_state.load_on_meta(model.source.model, proxies, self.strict), model.source.prefix)
            for key, saved, live in model.tensors():
                name = model.source.prefix + key
                found.problems.extend(wrong_dtype(name, saved.dtype, live, self.dtype, "checkpoint"))
        for part in self.optimizers:
            part.compare(self.known, self.dtype, found)
        found.refuse(str(self.checkpoint.folder), OF_THIS)

    # -- reading ------------------------------------------------------------------------------------------------
    def verify(self) -> None:
        """Choose memory for this rank's shards, and verify them. What has no checksums is read now, into new memory."""
        with torch.inference_mode(False):
            in_place = self.checkpoint.manifest is not None
            dtypes: dict[str, torch.dtype] = {}
            for model in self.models:
                own = _own_places(model) if in_place else frozenset()
                for key, saved, live in model.tensors():
                    dtypes[model.source.prefix + key] = saved.dtype
                    if key in own:
                        self.tensors[saved.name] = ShardTensor(live._local.detach(), live._spec)
                    else:
                        dtype = live.dtype if isinstance(live, torch.Tensor) else None
                        self.tensors[saved.name] = new_tensor(saved, live, dtype)
            for part in self.optimizers:
                self.tensors.update(part.destinations(dtypes, self.dtype, in_place))
            if in_place:
                self.checkpoint.verify(self.tensors)
            else:
                self.checkpoint.read(self.tensors, ())

    def fill(self) -> None:
        """Read what has been verified. From here on the old values are lost."""
        if self.checkpoint.manifest is None:
            return
        try:
            self.checkpoint.read(self.tensors, ())
        except Exception as error:
            raise CheckpointError(
                f"{self.checkpoint.folder} was whole a moment ago and can't be read now ({type(error).__name__}: {error}): some "
                "parameters and optimizer state have been overwritten. Load a checkpoint before training goes on."
            ) from error

    def overwritten(self) -> None:
        """Tell autograd and the units that parameters were overwritten, so that no graph goes on with the old values."""
        for runtime in (model.source.runtime for model in self.models):
            for p in (p for unit in runtime.units for p in unit.params):
                torch.autograd.graph.increment_version((p, p._local))
            runtime.parameters_loaded()

    # -- applying -----------------------------------------------------------------------------------------------
    def apply(self) -> None:
        """Load the optimizers, after the models."""
        for part in self.optimizers:
            try:
                part.apply(self.known)
            except Exception as error:
                raise failed_optimizer(f"{self.checkpoint.folder}: {part.what}", error) from error


def _own_places(model: SavedModel) -> frozenset[str]:
    """Return the entries that are read into the model's own memory: the parameters that loading would copy them to."""
    if not _loads_plainly(model.source.model):
        return frozenset()
    named = model.source.model.named_parameters(remove_duplicate=False)
    params = {without_wrappers(name): p for name, p in named}
    found: list[tuple[str, int]] = []
    # Tied parameters may have been saved with different values, of which loading takes the last.
    places: dict[int, set[Any]] = {}
    for key, saved, live in model.tensors():
        param = params.get(key)
        if not (isinstance(live, ShardTensor) and isinstance(param, ShardTensor)):
            continue
        places.setdefault(id(live._spec), set()).add(saved.place)
        if live._spec is param._spec and live._local.data_ptr() == param._local.data_ptr():
            found.append((key, id(live._spec)))
    return frozenset(key for key, spec in found if len(places[spec]) == 1)


def _loads_plainly(model: torch.nn.Module) -> bool:
    """Return True if loading copies each entry to the parameter of its name.

    Hooks may exchange entries, so that filling one parameter would overwrite what another one is to get.
    """
    torchs_own = torch.nn.Module.load_state_dict
    return type(model).load_state_dict is torchs_own and all(
        not module._load_state_dict_pre_hooks
        and type(module)._load_from_state_dict.__module__.startswith("torch.nn.")
        and "_load_from_state_dict" not in module.__dict__
        for module in model.modules()
    )
