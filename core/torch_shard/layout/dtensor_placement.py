"""All that is known of torch's DTensor: parameters that tensor parallelism (``parallelize_module``) has distributed.

::

    user's parameter   ShardTensor of the DTensor's global shape, in the same object      between steps
    flat buffer        this rank's local tensors                                          sharded over the plane
    leaf               a DTensor over a view of the gathered buffer                       what modules compute with

Sharding goes on top: it cuts the local tensors, so that only ranks which have the same parts share them (a *plane*; see
:mod:`.rank_topology`). Computation is DTensor's own.

Private names of torch that this rests on: DTensor's constructor, its slots ``_local_tensor`` and ``_spec``, and
``DeviceMesh._get_root_mesh``. Tested on torch 2.13.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import SetupError, ShardError, UnavailableError
from .tensor_part import TensorPart, dense_stride, part_of_rank

__all__ = [
    "Placed",
    "is_dtensor",
    "is_whole",
    "local_of",
    "made_like",
    "part_given",
    "placed_of",
    "planes_of",
    "replicated_like",
    "tensor_mesh",
]


def is_dtensor(value: Any) -> bool:
    """Whether it is one, without importing what takes a second to import."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, shared memory; any other tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def is_whole(tensor: Any) -> bool:
    """Whether each rank of a DTensor's mesh has all of it; of any other tensor True."""
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
        mesh, placements: the DTensor's.
        shape, stride: of the whole.
        part: this rank's; None where every rank has all of it.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    part: TensorPart | None
    _specs: dict[torch.dtype, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of what this rank has."""
        return self.shape if self.part is None else self.part.sizes

    @property
    def own_stride(self) -> tuple[int, ...]:
        """Strides of it in a flat buffer."""
        return dense_stride(self.sizes, self.stride)

    def over(self, local: torch.Tensor, cls: Any = None) -> Any:
        """A DTensor over the memory of `local`, without a gradient; of `cls`, a subclass, if it is given."""
        from torch.distributed.tensor import DTensor

        spec = self._specs.get(local.dtype)
        if spec is None:
            shape, stride = torch.Size(self.shape), self.stride
            made = DTensor.from_local(local.detach(), self.mesh, self.placements, shape=shape, stride=stride)
            spec = self._specs[local.dtype] = made._spec
        return DTensor.__new__(cls or DTensor, local, spec, requires_grad=False)

    def local_grad(self, grad: torch.Tensor, name: str) -> torch.Tensor:
        """This rank's part of a gradient that autograd has made. Communicates within the tensor-parallel group where the gradient
        is distributed otherwise than the parameter (a partial sum, under sequence parallelism)."""
        if not is_dtensor(grad):
            raise ShardError(
                f"{name} is a DTensor and received a gradient that is a plain tensor of shape {tuple(grad.shape)}; its modules "
                "must compute with it as torch.distributed.tensor.parallel's do."
            )
        if grad.requires_grad:  # which is refused; a redistribution would become part of that graph
            return grad
        found: Any = grad
        if tuple(found.placements) != self.placements:
            found = found.redistribute(self.mesh, self.placements)
        local: Any = found.to_local()
        # What a collective of DTensor's has returned may still be on its way.
        return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole plain tensor; a view."""
        part = self.part
        for dim, size in enumerate(self.sizes):
            if part is not None and size != whole.shape[dim]:
                whole = whole.narrow(dim, part.offsets[dim], size)
        return whole


def placed_of(param: torch.Tensor, name: str) -> Placed | None:
    """How `param` is distributed; None for a plain one.

    Raises:
        SetupError: in a way that can't be sharded on top.
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
            part = part_of_rank(shape, stride, placement.dim % len(shape), mesh.get_local_rank(), tuple(_ranks(mesh)))
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
    """The name of the first parameter that is distributed over several ranks, and its mesh; None without any.

    Raises:
        SetupError: some parameters are on another mesh than others.
    """
    first: tuple[str, Any] | None = None
    for name, param in model.named_parameters():
        mesh = param.device_mesh if is_dtensor(param) else None  # type: ignore[attr-defined]
        if (
            mesh is None or mesh.ndim > 1 or mesh.size() == 1
        ):  # more dimensions are refused for a parameter that is not ignored
            continue
        if first is None:
            first = name, mesh
        elif mesh != first[1]:
            raise SetupError(
                f"parameters {first[0]} and {name} are DTensors over different meshes, {first[1]} and {mesh}; parallelize the "
                "model over one dimension of one mesh."
            )
    return first


def planes_of(mesh: Any, tensor_parallel: Any, name: str) -> list[list[int]]:
    """The global ranks that share the parameters: of each rank of a tensor-parallel group those in its place of `mesh`.

    Args:
        mesh: a DeviceMesh, the dimensions over which parameters are sharded.
        tensor_parallel: that of the DTensors, of one dimension.
        name: of a parameter there, for messages.

    Returns:
        For each rank of the tensor-parallel group a list in the order of ``mesh.mesh.flatten()``.

    Raises:
        SetupError: the two are not different dimensions of one mesh.
    """
    own, others = _ranks(mesh), _ranks(tensor_parallel)
    if not hasattr(mesh, "_get_root_mesh"):
        raise UnavailableError(
            f"parameter {name} is a DTensor, and this version of torch does not say which mesh {mesh} is a part of; sharding on "
            "top of tensor parallelism was made for torch 2.13."
        )
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
            place = tuple(at[b if dim in moved else a][dim] for dim in range(root.dim()))
            return int(root[place])

        planes = [[beside(a, b) for a in own] for b in others]
        everyone = [rank for plane in planes for rank in plane]
        fits = [beside(here, b) for b in others] == others and own in planes
        if fits and len(set(everyone)) == len(everyone):
            return planes
    raise SetupError(
        f"parameter {name} is a DTensor over ranks {others}, which is no dimension of the mesh that ranks {own} are one of, "
        f"{mesh._get_root_mesh()}. Make one mesh for both, init_device_mesh(device, (2, 4), mesh_dim_names=('dp', 'tp')); "
        "parallelize over mesh['tp'], and shard over mesh['dp']."
    )


def _ranks(mesh: Any) -> list[int]:
    return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def part_given(whole: Any, part: TensorPart | None, name: str) -> torch.Tensor:
    """This rank's part of a DTensor that is distributed as a parameter with this `part` is, shared memory. Not collective.

    Raises:
        ShardError: it is distributed in another way. On all ranks, also on those whose parts are the same in both ways.
    """
    try:
        given = placed_of(whole, name) if part is not None else None
    except SetupError:
        given = None
    if is_whole(whole) if part is None else given is not None and _cut(given.part) == _cut(part):
        return local_of(whole)
    raise ShardError(
        f"{name} was given a DTensor with placements {tuple(whole.placements)} over {whole.device_mesh}, and is distributed in "
        "another way itself; give it the whole tensor (full_tensor())."
    )


def _cut(part: TensorPart | None) -> object:
    return None if part is None else (part.dim, part.ranks, part.offsets, part.sizes)


def replicated_like(param: Any, whole: torch.Tensor) -> torch.Tensor:
    """A DTensor of a whole plain tensor, its memory shared, of which every rank of the DTensor `param`'s mesh has all. Not
    collective."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(whole, param.device_mesh, [Replicate()] * param.device_mesh.ndim, run_check=False)


def made_like(param: Any, whole: torch.Tensor) -> torch.Tensor:
    """A DTensor of a whole plain tensor, distributed as the DTensor `param`, in new memory. Not collective."""
    placed = placed_of(param, "")
    assert placed is not None
    own = torch.empty_strided(placed.sizes, placed.own_stride, dtype=whole.dtype, device=local_of(param).device)
    own.copy_(placed.cut(whole))
    return placed.over(own)  # type: ignore[no-any-return]
