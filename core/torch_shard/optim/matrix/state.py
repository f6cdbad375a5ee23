"""The state of optimizers that step on full matrices: plain full tensors, on the owner of each parameter and nowhere else.

State may also come from before sharding or a plain ``load_state_dict`` (full, on every rank), from an optimizer that has
stepped on shards, or from this rank's own ``state_dict()`` (full, at the owner). In all cases the new owner of a parameter is a
rank that has its state.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from ...comm.collective_steps import broadcast, each
from ...comm.consensus import agree
from ...errors import ShardError, ShardPicklingError
from ...layout.dtensor_placement import is_dtensor
from ...plan.matrix_owners import Item, assign, choose, loads_of, work_of
from ...runtime.runtime import Runtime
from ...shard_tensor.tensor import ShardTensor
from ...unit.unit import unit_of
from ..engines_of_optimizer import open_runtime_of, params_of, runtimes_of
from ..registry import has_linear_work, kind_of_step
from ..state_tree import Sent, local, map_tensors, tensors_of

_SMALL = 4 << 20  # bytes of parameters; smaller units are exchanged together, because each message costs time
# The kinds of a parameter's state on a rank: there is none, it is full, it is sharded, or it holds DTensors that are cut.
_NONE, _FULL, _SHARDS, _CUT = 0, 1, 2, 3


class OwnedState(dict[Any, Any]):
    """The state in an optimizer's ``state_dict()`` on one rank, which lacks the matrices that other ranks own.

    It may be loaded again and copied, but not be pickled: nobody would miss what such a file lacks.
    """

    refusal = "a rank's part of the state of an optimizer that steps on full matrices can't be pickled (torch.save)"

    def copy(self) -> OwnedState:
        """Return a shallow copy."""
        return self._like(self)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnedState:
        return self._like(copy.deepcopy(dict(self), memo))

    def _like(self, values: Mapping[Any, Any]) -> OwnedState:
        other = OwnedState(values)
        other.refusal = self.refusal
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardPicklingError(self.refusal)


def is_matrix(runtime: Runtime, optimizer: Any) -> bool:
    """Return True if the state of this optimizer belongs to the owners. Not collective."""
    cls = type(optimizer)
    return kind_of_step(cls, getattr(cls, "step", None)) == "matrix" or optimizer in runtime.owners


def all_gather_bytes(runtime: Runtime, mine: Sequence[int], what: str) -> list[list[int]]:
    """Return `mine` of every rank, by rank: numbers below 256, as many on every rank. Collective."""
    c = runtime.collectives
    table = torch.zeros(c.world, len(mine), dtype=torch.uint8, device="cpu")
    table[c.world_rank] = torch.tensor(list(mine), dtype=torch.uint8, device="cpu")
    if c.world > 1 and len(mine):
        c.maximum(table, what)
    found: list[list[int]] = table.tolist()
    return found


# -- owners -----------------------------------------------------------------------------------------------------------


def give_owners(runtime: Runtime, optimizer: Any, params: Sequence[ShardTensor]) -> dict[str, int]:
    """Give an owner to those of `params`, which are the same on all ranks, that have none. Return all owners by name."""
    c = runtime.collectives
    owners = runtime.owners.setdefault(optimizer, {})
    new = [p for p in params if p._spec.name not in owners]
    if not new:
        return owners
    linear = has_linear_work(type(optimizer))
    work = {
        p._spec.name: work_of(p._spec.shape, linear)
        for p in params_of(optimizer)
        if open_runtime_of(p) is runtime  # names of several models may be the same
    }
    stages = stages_of(new, c.size)
    items = []
    for p in new:
        spec = p._spec
        held = [0] * c.size
        for rank in spec.layout.owners(spec.index):
            start, stop = spec.layout.owned(spec.index, rank)
            held[rank] = stop - start
        items.append(Item(work[spec.name], stages[id(p)], tuple(held)))
    for p, rank in zip(new, assign(items, c.size, loads_of(work, owners, c.size)), strict=True):
        owners[p._spec.name] = rank
    return owners


def owned_elsewhere(
    runtime: Runtime, optimizer: Any, names: Mapping[int, str], state: Mapping[str, Any]
) -> dict[int, bool]:
    """Return for each parameter whose full state lies at an owner, by its id, whether another rank is that owner.

    Parameters without an owner get one.

    Args:
        runtime: the runtime of an engine whose parameters the optimizer holds. It may hold those of other engines, too.
        optimizer: the optimizer.
        names: the parameters' names by id.
        state: state by name, with the same keys on all ranks.
    """
    if not any(is_matrix(held, optimizer) for held in (runtime, *runtimes_of(optimizer))):
        return {}
    loaded: dict[int, ShardTensor] = {}
    for p in params_of(optimizer):
        entries = state.get(names[id(p)])
        if isinstance(p, ShardTensor) and entries and _kind(entries) == _FULL:
            loaded[id(p)] = p
    found: dict[int, bool] = {}
    for held in runtimes_of(optimizer):
        own = {i: p for i, p in loaded.items() if open_runtime_of(p) is held}
        owners = give_owners(held, optimizer, list(own.values()))
        found.update((i, owners[p._spec.name] != held.collectives.rank) for i, p in own.items())
    return found


def stages_of(params: Sequence[ShardTensor], ranks: int) -> dict[int, int]:
    """Return the stage of each parameter, by id. The parameters of a stage are exchanged together, and stages follow each other.

    A step has three stages in memory at a time: messages both ways, values and gradients, eight times a rank's share of a
    stage, and more where owners differ. So with many units a stage is a sixteenth of all parameters, which is less than the
    rank's gradients. With few units or many ranks that would leave ranks without work. There a stage has so many units that
    the step takes the memory of about four units, no more than forward and backward take at another time.
    """
    size = [p._spec.numel * p._local.element_size() for p in params]
    units: dict[int, list[int]] = {}
    for i, p in enumerate(params):
        of = unit_of(p)
        units.setdefault(-1 if of is None else of.index, []).append(i)
    # The median, because one large embedding must not make all stages as large.
    totals = sorted(sum(size[i] for i in members) for members in units.values())
    usual = totals[len(totals) // 2] if totals else 0
    limit = max(_SMALL, min(sum(size) // 16, usual * ranks // 2), usual * ranks // 4)
    stage, filled = 0, 0
    stage_of: dict[int, int] = {}
    for _, members in sorted(units.items()):
        # A unit is divided only where it is much too large, because its matrices may differ in size.
        together = sum(size[i] for i in members) <= max(limit, sum(size) // 12)
        for run in [members] if together else [[i] for i in members]:
            more = sum(size[i] for i in run)
            if filled and filled + more > limit:
                stage, filled = stage + 1, 0
            stage_of.update((id(params[i]), stage) for i in run)
            filled += more
    return stage_of


def move_to_owners(runtime: Runtime, optimizer: Any, params: Sequence[ShardTensor], what: str) -> None:
    """Move state to the owners: they keep it, or get it in full, and the other ranks drop their shards. Collective.

    Args:
        runtime: the runtime of the parameters.
        optimizer: the optimizer whose ``state`` is changed.
        params: all its parameters of that runtime, in one order on all ranks.
        what: the name of the operation, for error messages.

    Raises:
        ShardError: on all ranks, before anything has changed: only some ranks have shards of a state, only some replicas have
            state, or state is a DTensor that is cut.
    """
    c = runtime.collectives
    state = optimizer.state
    kinds_of = all_gather_bytes(runtime, [_kind(state.get(p)) for p in params], what)
    for i, p in enumerate(params):
        _check_kinds(runtime, p, [kinds[i] for kinds in kinds_of], what)
    for p in params:
        own = state.get(p)
        for key, value in own.items() if own else ():  # values may be replaced in the loop, since the keys stay
            if any(map(is_dtensor, tensors_of(value))):  # replicated, from steps under tensor parallelism alone
                own[key] = local(value)
    table = [kinds_of[rank] for rank in c.topology.shard_group_of(c.world_rank)]
    owners = runtime.owners.setdefault(optimizer, {})
    sharded: list[ShardTensor] = []
    free: list[ShardTensor] = []
    chosen: dict[str, int] = {}
    for i, p in enumerate(params):
        kinds = [row[i] for row in table]
        if _SHARDS in kinds:
            sharded.append(p)
        holders = [rank for rank, kind in enumerate(kinds) if kind != _NONE]
        owner = choose(holders, owners.get(p._spec.name), c.size)
        if owner is not None:
            chosen[p._spec.name] = owner
        elif holders:
            free.append(p)
    keys = [(p._spec.name, [str(k) for k, v in state[p].items() if isinstance(v, ShardTensor)]) for p in sharded]
    agree(runtime, what, keys)
    owners.update(chosen)
    give_owners(runtime, optimizer, free)
    for p in sharded:
        own = state[p]
        for key, value in own.items():  # values may be replaced in the loop, since the keys stay
            if isinstance(value, ShardTensor):
                full = ShardTensor.full_tensor(value)
                if owners[p._spec.name] == c.rank:
                    own[key] = full
    for p in params:
        if p in state and owners.get(p._spec.name, c.rank) != c.rank:
            del state[p]


def _check_kinds(runtime: Runtime, p: ShardTensor, kinds: list[int], what: str) -> None:
    """Raise if a parameter's state can't be moved to its owners. `kinds` are by rank of the engine, so that all ranks raise."""
    topology = runtime.collectives.topology
    # Where each rank is a replica (`no_shard`), equal state is the user's responsibility, as with DDP.
    have = [any(kinds[rank] for rank in ranks) for ranks in topology.shard_groups] if topology.is_hybrid else []
    cut = [rank for rank, kind in enumerate(kinds) if kind == _CUT]
    if cut:
        raise ShardError(
            f"rank {runtime.collectives.world_rank}: {what}: ranks {cut} have only a part of the state of {p._spec.name}, as a "
            "DTensor. Replace it by tensor.full_tensor(), on every rank. Nothing was changed."
        )
    if (_SHARDS in kinds and min(kinds) != _SHARDS) or len(set(have)) > 1:
        having = [rank for rank, kind in enumerate(kinds) if kind]
        raise ShardError(
            f"rank {runtime.collectives.world_rank}: {what}: ranks {having} have state of {p._spec.name}, or shards of it, which "
            "the others lack. Load state on every rank, or drop it (`optimizer.state.pop(parameter)`) on every rank. Nothing was "
            "changed."
        )


def _kind(entries: Any) -> int:
    if not entries:
        return _NONE
    values = entries.values() if isinstance(entries, Mapping) else ()
    dtensors: list[Any] = [tensor for value in values for tensor in tensors_of(value) if is_dtensor(tensor)]
    if any(not placement.is_replicate() for dtensor in dtensors for placement in dtensor.placements):
        return _CUT
    return _SHARDS if any(isinstance(value, ShardTensor) for value in values) else _FULL


# -- saving -----------------------------------------------------------------------------------------------------------


def collect(
    runtime: Runtime, state: MutableMapping[int, Any], count: int, what: str, keep: Callable[[int, Any], Any]
) -> MutableMapping[int, Any]:
    """Send the state of parameters for which only some ranks have entries from the first of those ranks to all. Collective.

    Args:
        runtime: the runtime of the ranks.
        state: this rank's state, by the number of the parameter, which is below `count`.
        count: the number of parameters.
        what: the name of the operation, for error messages.
        keep: a function of the number and the entries of a parameter, on the CPU, that returns the entries for the result. A rank
            holds the state of one parameter at a time.

    Returns:
        `state` itself if all ranks have entries for the same parameters; else a new dict in the order of the numbers.
    """
    described = descriptions(runtime, state, count, what)
    if not described:
        return state
    complete = dict(state)
    for number, (source, description) in described.items():
        complete[number] = keep(number, sent(runtime, state, number, source, description, True, what))
    return dict(sorted(complete.items(), key=lambda item: (not isinstance(item[0], int), str(item[0]).zfill(12))))


def descriptions(runtime: Runtime, state: Mapping[int, Any], count: int, what: str) -> dict[int, tuple[int, Any]]:
    """Describe the state of parameters for which only some ranks have entries. Collective.

    Args:
        runtime, state, count, what: the arguments of :func:`collect`.

    Returns:
        On all ranks, by number: the first rank that has entries, and these with a :class:`~..state_tree.Sent` for each tensor.
    """
    c = runtime.collectives
    if c.world == 1 or c.backend == "fake":
        return {}
    table = all_gather_bytes(runtime, [int(bool(state.get(number))) for number in range(count)], what)
    source = {}
    for number, kinds in enumerate(zip(*table, strict=True)):
        if 0 < sum(kinds) < c.world:
            source[number] = kinds.index(1)
    if not source:
        return {}

    def describe() -> dict[int, Any]:
        own = [number for number, rank in source.items() if rank == c.world_rank]
        try:
            mine = {n: map_tensors(state[n], lambda t: Sent(torch.empty_like(t, device="meta"))) for n in own}
            pickle.dumps(mine)  # values of the optimizer's own kind are among them
        except Exception as error:
            raise ShardError(
                f"rank {c.world_rank}: {what}: the optimizer's state has values that can't be sent to other ranks: {error}"
            ) from error
        return mine

    mine = each(runtime, what, describe)
    found: dict[int, tuple[int, Any]] = {}
    for rank in sorted(set(source.values())):
        described: dict[int, Any] = broadcast(runtime, mine, what, rank)
        found.update((number, (rank, description)) for number, description in described.items())
    return found


def sent(
    runtime: Runtime, state: Mapping[int, Any], number: int, source: int, description: Any, wanted: bool, what: str
) -> Any:
    """Send one parameter's entries from the rank that :func:`descriptions` names. Collective.

    Returns:
        The entries, on the CPU; None where they are not `wanted`.
    """
    c = runtime.collectives
    places: list[Sent] = []
    map_tensors(description, places.append)
    tensors = iter(tensors_of(state[number])) if c.world_rank == source else None
    found = []
    for place in places:
        memory = torch.empty(place.nbytes, dtype=torch.uint8, device=c.device)
        if tensors is not None:
            dense = next(tensors).detach().clone()  # without gaps, as the description says
            memory.copy_(dense.as_strided((dense.numel(),), (1,), dense.storage_offset()).view(torch.uint8))
        if place.nbytes:
            c.broadcast(memory, source, what)
        if wanted:
            found.append(memory.cpu().view(place.dtype).as_strided(place.shape, place.stride))
    values = iter(found)
    return map_tensors(description, lambda _: next(values)) if wanted else None
