"""The initialisation of parameters on the meta device, one unit at a time.

Modules are initialised by `reset_parameters` or the user's `init_fn`, at first on the sharded parameters. There a constant fill
touches only this rank's shard, and a random fill draws the values of the full parameter and keeps the shard, so that a seed gives
the same values as in plain torch. An initialisation that needs full parameters (orthogonal, a zeroed padding row) is run again on
full ones, from the same state of the random generators.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..comm.broadcast_buffers import Coalesced, broadcast, broadcast_coalesced
from ..comm.collectives import Collectives
from ..comm.streams import streams_of
from ..config.shard_config import ShardConfig
from ..errors import NeedsGatherError, SetupError
from ..schedule.unit_state import State
from ..unit.flat_buffer import FlatBuffer
from ..unit.unit import Unit


class Materialiser:
    """Initialises the parameters of one model that are on the meta device."""

    def __init__(self, model: nn.Module, config: ShardConfig, collectives: Collectives, undo: ExitStack) -> None:
        self.config, self.collectives, self.undo = config, collectives, undo
        # The ids of parameters that have values, which an initialisation must not change.
        self.filled = {id(p) for p in model.parameters() if p.device.type != "meta"}
        self.order = {id(m): i for i, m in enumerate(model.modules())}
        self.done: set[int] = set()
        self.units: list[Unit] = []

    @property
    def sends(self) -> bool:
        """True if rank 0's values are sent, because an init_fn may load a file on rank 0 only."""
        return self.config.sync_module_states and self.config.init_fn is not None and self.collectives.world > 1

    def sends_all_of(self, unit: Unit) -> bool:
        """Return True if :meth:`keep` sends rank 0's values of a unit."""
        return self.sends or (self.config.sync_module_states and not unit.sharded and unit.distributed is None)

    def initialise(self, unit: Unit, owners: Iterable[nn.Module]) -> None:
        """Initialise the parameters of a unit whose shards have memory; :meth:`keep` comes next. Not collective."""
        modules = sorted(dict.fromkeys(owners), key=lambda m: self.order[id(m)])
        self.units.append(unit)
        distributed = unit.distributed
        if (unit.sharded or distributed is not None) and not self.sends:
            for flat in unit.flats:
                for param in flat.params:
                    _mark(param._local[:1])
            before, done = random_state(self.collectives.device), set(self.done)
            try:
                for module in modules:
                    self._run_one(module)
                return
            except NeedsGatherError as error:
                if distributed is not None:
                    raise SetupError(
                        f"parameter {distributed} is a DTensor on the meta device, and its unit's initialisation needs full "
                        f"parameters; initialise the model before shard(). ({error})"
                    ) from error
                set_random_state(self.collectives.device, before)
                self.done = done
        self._on_full(unit, modules)

    def keep(self, unit: Unit) -> None:
        """Keep this rank's shard of parameters that were initialised in full. Collective if rank 0's values are sent."""
        if self.sends_all_of(unit):
            for flat in unit.flats:
                broadcast_coalesced(self.collectives, [flat.full], f"the broadcast of unit {unit.name!r} from rank 0")
        if unit.gathers and unit.state is State.FULL:
            for flat in unit.flats:
                flat.shard.copy_(flat.own)
            unit.reshard()

    def fill_plain(self, params: dict[str, nn.Parameter], owners: Iterable[nn.Module]) -> None:
        """Initialise plain parameters that have memory and no values yet; parameters beside them keep their values."""
        firsts = {name: p.data.as_strided((min(p.numel(), 1),), (1,)) for name, p in params.items()}
        for first in firsts.values():
            _mark(first)
        for module in sorted(dict.fromkeys(owners), key=lambda m: self.order[id(m)]):
            self._run_one(module)
        for name, first in firsts.items():
            if _is_marked(first):
                raise _uninitialised(self.collectives.world_rank, name)

    def _on_full(self, unit: Unit, modules: list[nn.Module]) -> None:
        unit.allocate()
        for flat in unit.flats:
            for start, stop in flat.layout.gaps():
                flat.full[start:stop].zero_()
            _mark_shards(flat)
        unit.summon()
        unit.install()
        try:
            for module in modules:
                self._run_one(module)
        finally:
            unit.uninstall()
            unit.dismiss()

    def _run_one(self, module: nn.Module) -> None:
        """Initialise the parameters that `module` holds directly, unless it was done or one has no memory yet.

        Parameters that have values keep them.
        """
        if id(module) in self.done:
            return
        held = [p for p in module._parameters.values() if p is not None]
        if any(p.device.type == "meta" and id(p) not in self.filled for p in held):
            return
        self.done.add(id(module))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[name] = torch.zeros_like(buffer, device=self.collectives.device)
            elif buffer is not None:
                self.undo.callback(buffer.data.copy_, buffer.detach().clone())
        kept = [(p, p.detach().clone()) for p in held if id(p) in self.filled]
        with torch.no_grad():
            try:
                if self.config.init_fn is not None:
                    self.config.init_fn(module)
                elif hasattr(module, "reset_parameters"):
                    module.reset_parameters()  # type: ignore[operator]
            finally:
                for p, values in kept:
                    p.copy_(values)

    def rest(self, model: nn.Module) -> None:
        """Initialise modules that hold buffers on meta but no parameters on meta."""
        for name, module in model.named_modules():
            if any(p is not None and p.device.type == "meta" for p in module._parameters.values()):
                continue
            if any(b is not None and b.device.type == "meta" for b in module._buffers.values()):
                if self.config.init_fn is None and not hasattr(module, "reset_parameters"):
                    raise SetupError(
                        f"module {name} holds buffers on the meta device and has no reset_parameters(); pass init_fn=."
                    )
                self.filled |= {id(p) for p in module._parameters.values()}
                self._run_one(module)

    def check(self) -> None:
        """Raise for a parameter that no initialisation has filled."""
        for unit in self.units:
            for module, attribute, flat, index in unit.places:
                if _is_marked(flat.params[index]._local):
                    name = flat.layout.slots[index].name
                    raise _uninitialised(self.collectives.world_rank, name, type(module).__name__, attribute)


def _uninitialised(rank: int, name: str, module: str = "its module", attribute: str = "it") -> SetupError:
    return SetupError(
        f"rank {rank}: parameter {name} was on the meta device and is still uninitialised: {module} has no "
        f"reset_parameters() that fills {attribute!r}; pass ShardConfig(init_fn=...)."
    )


@contextmanager
def one_random_state(c: Collectives, shared: list[torch.Tensor], coalesced: Coalesced) -> Iterator[None]:
    """Let all ranks draw rank 0's random numbers inside; afterwards a rank that had another state gets that back.

    `shared` is this rank's state, which rank 0's overwrites, and `coalesced` the memory for that; nothing happens without it.
    """
    if not shared or c.world == 1:
        yield
        return
    own = random_state(c.device)
    broadcast(c, coalesced, "the broadcast of rank 0's random state")
    set_random_state(c.device, shared)
    try:
        yield
    finally:
        if not all(torch.equal(a, b) for a, b in zip(own, shared, strict=True)):
            set_random_state(c.device, own)


def random_state(device: torch.device) -> list[torch.Tensor]:
    """Return the state of the random generators that an initialisation draws from."""
    of_device = streams_of(device).random_state()
    return [torch.get_rng_state()] if of_device is None else [torch.get_rng_state(), of_device]


def set_random_state(device: torch.device, states: list[torch.Tensor]) -> None:
    """Set the state of the random generators to one that :func:`random_state` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        streams_of(device).set_random_state(states[1])


def _sentinel(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def _mark(first: torch.Tensor) -> None:
    """Write a value that no initialisation writes. (There is none for bools.)"""
    with torch.no_grad():
        first.fill_(_sentinel(first.dtype))


def _mark_shards(flat: FlatBuffer) -> None:
    """Mark the first element of every rank's shard of every parameter, because each rank looks at its own."""
    for index, slot in enumerate(flat.layout.slots):
        for rank in flat.layout.owners(index):
            start, stop = flat.layout.owned(index, rank)
            if stop > start:
                _mark(flat.full[slot.offset + start : slot.offset + start + 1])


def _is_marked(local: torch.Tensor) -> bool:
    if not local.numel() or local.dtype is torch.bool:
        return False
    first, sentinel = local[0], _sentinel(local.dtype)
    return bool(first.isnan() if math.isnan(sentinel) else first == sentinel)
