"""How tensor parallelism (``parallelize_module``) has distributed a parameter, which is a DTensor then.

::

    user's parameter      ShardTensor of the DTensor's global shape, in the same object   between steps
    flat buffer           this rank's local tensors                                       sharded over a data-parallel group
    unsharded parameter   a DTensor over a view of the gathered buffer                    what modules compute with

Sharding cuts the local tensors, so that only ranks which have the same parts share them (a data-parallel group, see
:mod:`.rank_topology`). Computation is DTensor's own.

This module uses private names of torch: DTensor's constructor, its slots ``_local_tensor`` and ``_spec``, and
``DeviceMesh._get_root_mesh``.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import SetupError, ShardError
from .tensor_part import TensorPart, dense_stride, part_of_rank


def is_dtensor(value: Any) -> bool:
    """Return True for a DTensor, without importing its module, which would take a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, in the same memory, and any other tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def is_full(tensor: Any) -> bool:
    """Return True if each rank of the DTensor's mesh has the full tensor, and for any other tensor."""
    return not is_dtensor(tensor) or (
        tensor._local_tensor.shape == tensor.shape
        and all(
            placement.is_replicate() or (placement.is_shard() and tensor.device_mesh.size(dim) == 1)
            for dim, placement in enumerate(tensor.placements)
        )
    )


# -- one parameter ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Placed:
    """How DTensor has distributed a parameter.

    Attributes:
        mesh, placements: the mesh and the placements of the DTensor.
        shape, stride: the shape and the strides of the full tensor.
        part: this rank's part; None if every rank has the full tensor.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    part: TensorPart | None
    _specs: dict[torch.dtype, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return self.shape if self.part is None else self.part.sizes

    @property
    def own_stride(self) -> tuple[int, ...]:
        """The strides of this rank's part in a flat buffer."""
        return dense_stride(self.sizes, self.stride)

    def over(self, local: torch.Tensor, cls: Any = None) -> Any:
        """Return a DTensor over the memory of `local`, without a gradient; it is of the subclass `cls`, if that is given."""
        from torch.distributed.tensor import DTensor

        spec = self._specs.get(local.dtype)
        if spec is None:
            shape, stride = torch.Size(self.shape), self.stride
            made = DTensor.from_local(local.detach(), self.mesh, self.placements, shape=shape, stride=stride)
            spec = self._specs[local.dtype] = made._spec
        return DTensor.__new__(cls or DTensor, local, spec, requires_grad=False)

    def local_grad(self, grad: torch.Tensor, name: str) -> torch.Tensor:
        """Return this rank's part of a gradient that autograd has made.

        Collective over the tensor-parallel group if the gradient is distributed in another way than the parameter (a partial sum,
        under sequence parallelism).
        """
        if not is_dtensor(grad):
            raise ShardError(
                f"{name} is a DTensor and received a gradient that is a plain tensor of shape {tuple(grad.shape)}; its modules "
                "must compute with it as torch.distributed.tensor.parallel's do."
            )
        if grad.requires_grad:  # the caller refuses it; a redistribution would become part of its graph
            return grad
        found: Any = grad
        if tuple(found.placements) != self.placements:
            found = found.redistribute(self.mesh, self.placements)
        local: Any = found.to_local()
        # A collective of DTensor's may still run.
        return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full plain tensor, as a view."""
        part = self.part
        return full if part is None else full.narrow(part.dim, part.offsets[part.dim], part.sizes[part.dim])


def placed_of(param: torch.Tensor, name: str) -> Placed | None:
    """Return how `param` is distributed; None for a plain parameter.

    Raises:
        SetupError: the parameter is distributed in a way that can't be sharded on top.
    """
    if not is_dtensor(param):
        return None
    mesh, placements = param.device_mesh, tuple(param.placements)  # type: ignore[attr-defined]
    if mesh.ndim != 1:
        raise SetupError(
            f"parameter {name} is a DTensor over {mesh.ndim} dimensions of a mesh ({mesh.mesh_dim_names}); those over one, the "
            "tensor-parallel one, can be sharded. Is it sharded by fully_shard already? Leave that out."
        )
    (placement,) = placements
    shape, stride = tuple(param.shape), tuple(param.stride())
    part = None
    # _StridedShard, too, calls itself a shard.
    if type(placement).__name__ == "Shard":
        if mesh.size() > 1:
            part = part_of_rank(shape, stride, placement.dim % len(shape), mesh.get_local_rank(), tuple(ranks_in(mesh)))
    elif not placement.is_replicate():
        raise SetupError(
            f"parameter {name} is a DTensor with placement {placement}; parameters with Shard and Replicate can be sharded. "
            "Redistribute it, nn.Parameter(parameter.detach().redistribute(placements=[Replicate()])), before shard()."
        )
    found = Placed(mesh, placements, shape, stride, part)
    if tuple(local_of(param).shape) != found.sizes:
        raise SetupError(
            f"parameter {name} is a DTensor of shape {shape} of which this rank should have {found.sizes}, but it has "
            f"{tuple(local_of(param).shape)}; cut it as distribute_tensor does."
        )
    return found


# -- a model's mesh -----------------------------------------------------------------------------------------------------


def tensor_mesh(model: nn.Module) -> tuple[str, Any] | None:
    """Return the name of the first parameter that is distributed over several ranks, and its mesh; None if there is none.

    Raises:
        SetupError: the parameters are distributed over different meshes.
    """
    first: tuple[str, Any] | None = None
    for name, param in model.named_parameters():
        mesh = param.device_mesh if is_dtensor(param) else None  # type: ignore[attr-defined]
        # A mesh of more dimensions is an error later, unless the parameter is ignored.
        if mesh is None or mesh.ndim > 1 or mesh.size() == 1:
            continue
        if first is None:
            first = name, mesh
        elif mesh != first[1]:
            raise SetupError(
                f"parameters {first[0]} and {name} are DTensors over different meshes, {first[1]} and {mesh}; parallelize the "
                "model over one dimension of one mesh."
            )
    return first


def data_parallel_groups_of(mesh: Any, tensor_parallel: Any, name: str) -> list[list[int]]:
    """Return the global ranks of the data-parallel groups, one for each rank of this rank's tensor-parallel group.

    Args:
        mesh: a DeviceMesh, the dimensions over which parameters are sharded.
        tensor_parallel: the mesh of the DTensors, of one dimension.
        name: the name of a parameter there, for error messages.

    Returns:
        The groups. This rank's own is in ascending order, and the ranks at one index of all groups form a tensor-parallel group.

    Raises:
        SetupError: the two meshes are not different dimensions of one mesh.
    """
    own, others = sorted(ranks_in(mesh)), ranks_in(tensor_parallel)
    root = mesh._get_root_mesh().mesh
    at = dict(zip(root.flatten().tolist(), itertools.product(*map(range, root.shape)), strict=True))
    here = int(mesh.get_rank())
    if set(own) & set(others) != {here}:
        raise SetupError(
            f"parameter {name} is a DTensor over ranks {others}, and the mesh to shard over has ranks {own}: they must have only "
            "this rank in common. A parameter that fully_shard has sharded, or that is parallelized over this very dimension, "
            "can't be sharded over it once more; pass another dimension of the mesh, mesh['dp']."
        )
    if all(rank in at for rank in others):
        moved = [dim for dim in range(root.dim()) if len({at[rank][dim] for rank in others}) > 1]

        def beside(a: int, b: int) -> int:
            return int(root[tuple(at[b if dim in moved else a][dim] for dim in range(root.dim()))])

        groups = [[beside(a, b) for a in own] for b in others]
        different = {rank for group in groups for rank in group}
        fits = [beside(here, b) for b in others] == others and own in groups
        if fits and len(different) == len(own) * len(others):
            return groups
    raise SetupError(
        f"parameter {name} is a DTensor over ranks {others}, which is no dimension of the mesh that ranks {own} are one of, "
        f"{mesh._get_root_mesh()}. Make one mesh for both, init_device_mesh(device, (2, 4), mesh_dim_names=('dp', 'tp')); "
        "parallelize over mesh['tp'], and shard over mesh['dp']."
    )


def ranks_in(mesh: Any) -> list[int]:
    """Return the global ranks of a DeviceMesh, in its order."""
    return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def part_given(full: Any, part: TensorPart | None, name: str) -> torch.Tensor:
    """Return this rank's part, in the same memory, of a DTensor that is distributed as a parameter with this `part` is.

    Raises:
        ShardError: the DTensor is distributed in another way. All ranks raise, also those whose parts are the same both ways.
    """
    try:
        given = placed_of(full, name) if part is not None else None
    except SetupError:
        given = None
    if is_full(full) if part is None else given is not None and _cut(given.part) == _cut(part):
        return local_of(full)
    raise ShardError(
        f"{name} was given a DTensor with placements {tuple(full.placements)} over {full.device_mesh}, and is distributed in "
        "another way itself; give it the full tensor (full_tensor())."
    )


def _cut(part: TensorPart | None) -> object:
    return None if part is None else (part.dim, part.ranks, part.offsets, part.sizes)


def replicated_like(param: Any, full: torch.Tensor) -> torch.Tensor:
    """Return a DTensor in the memory of a full plain tensor, replicated over the mesh of the DTensor `param`."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(full, param.device_mesh, [Replicate()] * param.device_mesh.ndim, run_check=False)


def made_like(param: Any, full: torch.Tensor) -> torch.Tensor:
    """Return a DTensor with the values of a full plain tensor, distributed as the DTensor `param`, in new memory."""
    placed = placed_of(param, "")
    assert placed is not None
    own = torch.empty_strided(placed.sizes, placed.own_stride, dtype=full.dtype, device=local_of(param).device)
    own.copy_(placed.cut(full))
    return placed.over(own)  # type: ignore[no-any-return]
