"""The flat memory of one unit's parameters of one dtype: the shard, the full buffer, and the unsharded parameters."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..comm.one_sided.partners import Reading
from ..comm.quantized_collectives import QuantizedGather
from ..comm.work import Pending
from ..config.param_dtypes import Dtypes
from ..errors import UnitStateError
from ..layout.dtensor_placement import Placed, local_of
from ..layout.flat_layout import FlatLayout, slot_view
from ..numerics.block_quantizer import BlockQuantizer
from ..numerics.stochastic_rounding import Rounding
from ..offload.host_gradients import HostGradients
from ..offload.host_shard import Crossing, HostShard
from ..shard_tensor.aliases import leave_values
from ..shard_tensor.dtensor_classes import gathered_parameter, shard_class, unsharded_parameter
from ..shard_tensor.spec import ShardSpec
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import UnshardedParam, is_view, mark_of_unit, move, refuse_recorded_edit
from . import shard_reads
from .gradient_buffer import GradientBuffer
from .gradient_hooks import average_past_unit, take_grad
from .served_shard import ServedShard

if TYPE_CHECKING:
    from .unit import Unit

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a dtype that is compared bitwise

# References that C++ holds to a tensor, autograd's included; undocumented (torch 2.13).
_use_count: Any = torch.Tensor._use_count  # type: ignore[attr-defined]


class PlainGather(NamedTuple):
    """A gather of one flat buffer, which the caller starts together with others."""

    full: torch.Tensor
    sent: torch.Tensor
    stored: torch.Tensor | None  # the shard to cast into `sent` before; None if there is no cast


class FlatBuffer:
    """The flat memory of some parameters of one unit.

    These have equal dtypes, were all trainable or all frozen when they were sharded, and are all cut by tensor parallelism or all
    not.
    """

    def __init__(
        self,
        layout: FlatLayout,
        dtypes: Dtypes,
        shard: torch.Tensor,
        unit: Unit,
        placed: Sequence[Placed | None],
    ) -> None:
        """Make the buffers over `shard`. Until :meth:`compute_in_its_dtype` modules compute in ``dtypes.stored``.

        Args:
            layout: the place of each parameter, or of this rank's part of it under tensor parallelism.
            dtypes: the dtypes of storage, computation and gradients.
            shard: this rank's slot, 1-D, of ``dtypes.stored``.
            unit: the unit that the buffers belong to.
            placed: the distribution of each parameter by DTensor; None for a plain one.
        """
        self.layout, self.dtypes, self.collectives = layout, dtypes, unit.collectives
        self.memory = shard  # may still be written to in the background; see `shard`
        self.dtype = dtypes.stored
        self.rounding: Rounding | None = None  # set where optimizer steps are rounded stochastically
        self.unit = weakref.ref(unit)
        self.sharded = unit.sharded  # the shard group has several ranks
        self.placed = tuple(placed)
        self.distributed = any(self.placed)  # some parameters are DTensors
        # Tensor parallelism cuts all of them.
        self.split = any(p is not None and p.part is not None for p in self.placed)
        self.params: list[ShardTensor] = []
        self.host = HostShard(unit.host, shard, self.params) if unit.host is not None else None
        for index in range(len(layout.slots)):
            self.params.append(self._parameter(index))
        n = len(layout.slots)
        self.baseline: list[tuple[int, int]] = [(0, 0)] * n
        self.storage_baseline = 0
        self.versions = [0] * n
        self.fresh_version = -1  # the shard's version at the last unshard
        first, last = layout.rank_range(self.collectives.rank)
        self.gaps = [  # the padding within the shard
            (max(start, first) - first, min(stop, last) - first)
            for start, stop in layout.gaps()
            if start < last and stop > first
        ]
        gradients = None if self.host is None else HostGradients(self.host.host, layout.shard_numel, unit.index)
        self.gradients = GradientBuffer(layout, dtypes, self.params, self.collectives, gradients)
        self._build(self.dtype, None)

    @property
    def shard(self) -> torch.Tensor:
        """This rank's slot, 1-D, of the stored dtype. Reading it waits for an optimizer step that the host makes on it."""
        if self.host is not None:
            self.host.pending_writes.wait()
        return self.memory

    def wait_for_host(self) -> None:
        """Wait until nothing works in the background on the shard, its optimizer state or its gradients."""
        for part in (self.host, self.gradients.host):
            if part is not None:
                part.pending_writes.wait()

    def wait_for_step(self) -> None:
        """Wait for the host's step on the shard and its optimizer state."""
        if self.host is not None:
            self.host.pending_writes.wait_for_writes()

    @property
    def version(self) -> int:
        """The version counter of the shard. Reading it waits for background writes to the shard, not for reads of it."""
        if self.host is not None:
            self.host.pending_writes.wait_for_writes()
        return self.memory._version

    def _build(self, compute: torch.dtype, quantizer: BlockQuantizer | None) -> None:
        """Make the full buffer and the unsharded parameters, of dtype `compute`; `quantizer` quantizes what is sent, if given."""
        self.compute, self.quantizer = compute, quantizer
        self.casts = compute != self.dtype
        self.exact = not self.casts and quantizer is None  # modules compute with the stored values
        # After an unshard this rank's slot of the full buffer holds the shard, cast, or else the values of one of these two:
        self._sent: torch.Tensor | None = None  # the quantized values that were sent
        self._edited: torch.Tensor | None = None  # the values that a forward's edits have left
        # The unsharded parameters have memory of their own.
        self.gathers = self.sharded or self.casts or self.host is not None
        self.nbytes = self.layout.numel * compute.itemsize
        n = len(self.layout.slots)
        if self.gathers:
            self.full = torch.empty(self.layout.numel, dtype=compute, device=self.collectives.device)
        else:
            self.full = self.shard
        if self.host is not None:
            self.host.compute_in(compute, quantizer)
        # The secondary shard: kept between forward and backward, where fewer ranks than all share the unit then.
        self.secondary_shard: torch.Tensor | None = None
        if self.sharded and self.collectives.secondary_channel is not None:
            self.secondary_shard = torch.empty_like(self.collectives.secondary_part(self.full))
            self.secondary_shard.untyped_storage().resize_(0)
        self._take_views()
        self.unsharded_params: list[nn.Parameter] = [self._unsharded_param(i) for i in range(n)]
        if self.gathers:
            self.full.untyped_storage().resize_(0)
        self.edges: list[Any] = [None] * n  # keep the AccumulateGrad nodes alive, so that use counts are constant
        self.mirror(force=True)

    def _take_views(self) -> None:
        """Take the views of the full buffer that the all-gather needs. The buffer must have memory."""
        c = self.collectives
        mark_of_unit(self.full)
        self.own = self.own_slot(self.full)
        self.slots = c.slots_of(self.full)
        # A shard that is cast, or that comes from the host, is first put into its slot and sent from there.
        self.payload = c.payload(self.own if self.casts or self.host is not None else self.shard)

    def compute_in_its_dtype(self) -> None:
        """Let modules compute in ``dtypes.compute``, and shards be sent as ``dtypes.quantized`` says.

        Call before anybody has seen an unsharded parameter.
        """
        quantized, quantizer = self.dtypes.quantized, None
        if quantized is not None and self.sharded:
            quantizer = quantized.parameter_quantizer(self.dtypes, self.layout.shard_numel)
        if self.dtypes.casts or quantizer is not None:
            self._build(self.dtypes.compute, quantizer)

    def copy_for(self, unit: Unit) -> FlatBuffer:
        """Return a flat buffer of `unit`, a copy of this one's unit, with the same values and settings."""
        shard, host = self.shard.detach(), unit.host
        shard = shard.clone() if host is None else host.empty_shard(shard.numel(), shard.dtype, unit.name).copy_(shard)
        twin = FlatBuffer(self.layout, self.dtypes, shard, unit, self.placed)
        twin.rounding = copy.copy(self.rounding)
        return twin

    # -- tensors ------------------------------------------------------------------------------------------------
    def _parameter(self, index: int) -> ShardTensor:
        start, stop = self.layout.local_range(index, self.collectives.rank)
        placed, c = self.placed[index], self.collectives
        part = None if placed is None else placed.part
        spec = ShardSpec(self.layout, index, c.rank, c.scalar if part is None else c.full_model, part)
        cls = ShardTensor if placed is None else shard_class()
        return cls(self.memory.narrow(0, start, stop - start), spec, unit=self.unit())

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Return parameter `index` in its own shape and strides, as a view of `flat`, a buffer of the full layout.

        Under tensor parallelism this is the rank's part of the parameter.
        """
        return slot_view(flat, self.layout.slots[index])

    def parameter_over(self, values: torch.Tensor, index: int) -> nn.Parameter:
        """Return `values`, of the shape of :meth:`view`, as an ``nn.Parameter``; a DTensor where the user's parameter was one."""
        placed, values = self.placed[index], values.data
        return nn.Parameter(values, requires_grad=False) if placed is None else gathered_parameter(placed, values)

    def as_given(self, values: torch.Tensor, index: int) -> torch.Tensor:
        """Return `values`, of the shape of :meth:`view`, as a DTensor where parameter `index` was one."""
        placed = self.placed[index]
        return values if placed is None else placed.over(values)

    def part_of(self, values: torch.Tensor, index: int) -> torch.Tensor:
        """Return this rank's part of `values`, which are a DTensor where parameter `index` was one.

        This may communicate within a tensor-parallel group.
        """
        placed = self.placed[index]
        return values if placed is None else placed.local_grad(values, self.layout.slots[index].name)

    def _unsharded_param(self, index: int) -> nn.Parameter:
        # `.data` gives it a version counter of its own, so that an unshard into `full` is no in-place edit of the parameter.
        placed, view = self.placed[index], self.view(self.full, index).data
        unsharded: Any = (
            UnshardedParam(view, requires_grad=False) if placed is None else unsharded_parameter(placed, view)
        )
        unsharded._place = (weakref.ref(self), index)
        return unsharded  # type: ignore[no-any-return]

    def own_slot(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's slot of a buffer of the full layout."""
        n = self.layout.shard_numel
        return flat.narrow(0, self.collectives.rank * n, n)

    # -- unshard and reshard ------------------------------------------------------------------------------------
    def start_gather(self, what: str, batch: list[PlainGather] | None) -> Pending | QuantizedGather | Crossing | None:
        """Start to fill the full buffer, which has memory; return None if that is done already. Collective.

        With a `batch`, a plain gather is added there, and the caller starts it.
        """
        self.fresh_version = self.version
        if self.quantizer is not None:
            sent = torch.empty(self.quantizer.nbytes, dtype=torch.uint8, device=self.full.device)
            if self.host is None:
                with torch.no_grad():
                    self.quantizer.encode(self.shard.unsqueeze(0), sent.unsqueeze(0))
            else:
                self.host.copy_to(sent)
            self._sent, self._edited = sent, None
            return QuantizedGather(self.collectives, self.quantizer, sent, self.full, what)
        if self.host is not None:
            crossing = self.host.copy_to(self.own)
            if not self.sharded:
                return crossing
        elif self.casts and (batch is None or not self.sharded):
            self.own.copy_(self.shard)
        if not self.sharded:
            return None
        if batch is not None and self.full.numel():
            batch.append(PlainGather(self.full, self.payload, self.shard if self.casts and self.host is None else None))
            return None
        return self.collectives.all_gather(self.full, self.payload, what, self.slots)

    # -- one-sided reads ----------------------------------------------------------------------------------------
    def read(self, reading: Reading) -> None:
        """Fill the full buffer, which has memory, as :meth:`start_gather` does, with shards that the other ranks hand out."""
        self.fresh_version = self.version
        with torch.no_grad():
            if self.quantizer is None:
                shard_reads.fill(self, self.full, reading, "sent")
            else:
                size, nbytes = self.collectives.size, self.quantizer.nbytes
                payloads = torch.empty(size, nbytes, dtype=torch.uint8, device=self.full.device)
                shard_reads.fill(self, payloads.view(-1), reading, "sent")
                self._sent, self._edited = payloads[self.collectives.rank].clone(), None
                self.quantizer.decode(payloads, self.full.view(size, -1))
            shard_reads.put_own_values(self, self.full, reading)

    @property
    def served(self) -> ServedShard:
        """This rank's shard, as it is handed out to a rank that reads alone."""
        writes = None if self.host is None else self.host.pending_writes
        return ServedShard(self.memory, writes, self.compute, self.quantizer)

    def memory_before(self, shards: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a copy of this rank's slot in which parameters have other shards, given by name."""
        memory = self.memory.detach().clone()
        for i, slot in enumerate(self.layout.slots):
            if slot.name in shards:
                start, stop = self.layout.local_range(i, self.collectives.rank)
                memory[start:stop].copy_(shards[slot.name])
        return memory

    def keep_secondary_shard(self) -> None:
        """Copy the secondary shard out of the full buffer, which is freed next. Call under `gathering()`."""
        assert self.secondary_shard is not None
        # Hazard: compute must have ended on the full buffer; `gathering()` has joined its streams. The secondary shard is
        # allocated, filled, read and freed on the gather stream alone, so that no other stream has to wait for it.
        self.secondary_shard.untyped_storage().resize_(self.secondary_shard.nbytes)
        self.secondary_shard.copy_(self.collectives.secondary_part(self.full))

    def drop_secondary_shard(self) -> None:
        """Free the secondary shard. Call under `gathering()`, after the reads that were issued there."""
        if self.secondary_shard is not None:
            self.secondary_shard.untyped_storage().resize_(0)

    def gather_secondary(self, what: str) -> Pending:
        """Start to fill the full buffer, which has memory, from the ranks' secondary shards. Collective."""
        assert self.secondary_shard is not None
        if self.secondary_shard.untyped_storage().nbytes():  # else this rank has kept the full buffer
            self.collectives.secondary_part(self.full).copy_(self.secondary_shard)
            self.drop_secondary_shard()
        return self.collectives.all_gather_secondary(self.full, what)

    @property
    def gathered_bytes(self) -> int:
        """The bytes that are allocated for the full buffer and the secondary shard at this moment."""
        held = self.full.untyped_storage().nbytes()
        return held if self.secondary_shard is None else held + self.secondary_shard.untyped_storage().nbytes()

    def is_stale(self) -> bool:
        """Return True if a parameter was edited since the last unshard."""
        return self.gathers and self.fresh_version != self.version

    def edited_unseen(self) -> bool:
        """Return True if this rank's slot of the full buffer was edited since the unshard.

        This is slow: it compares all values, bitwise, so that a NaN equals itself.
        """
        return not torch.equal(self.own.view(torch.uint8), self._as_gathered().view(torch.uint8))

    def _as_gathered(self) -> torch.Tensor:
        """Return what this rank's slot of the full buffer holds unless it has been written to."""
        if self._edited is not None:
            return self._edited
        if self.quantizer is None:
            if self.host is not None and self.collectives.streams.exist:
                return torch.empty_like(self.own).copy_(self.shard)
            return self.shard.to(self.compute)
        # Quantizing the shard once more would not do: one edited element changes the codes of its block.
        assert self._sent is not None
        values = torch.empty_like(self.own)
        self.quantizer.decode(self._sent.unsqueeze(0), values.unsqueeze(0))
        return values

    def take_edits(self) -> None:
        """Copy what a forward has changed in the unsharded parameters to the shard; the other elements keep their precision."""
        with torch.no_grad():
            if self.exact:
                self.shard.copy_(self.own)
            else:
                integer = _INTEGERS[self.compute.itemsize]
                before, shard = self._as_gathered(), self.shard
                changed = self.own.view(integer) != before.view(integer)
                changed &= ~(self.own.isnan() & before.isnan())  # a cast alone may change the bits of a NaN
                torch.where(changed.to(shard.device), self.own.to(shard.device, self.dtype), shard, out=shard)
                if self.quantizer is not None:
                    self._edited = self.own.clone()
        self.fresh_version = self.shard._version
        self.note_versions()

    def free(self) -> None:
        """Free the memory of the full buffer."""
        if self.secondary_shard is None or not self.secondary_shard.untyped_storage().nbytes():
            self._sent = self._edited = None  # else the next unshard, from secondary shards, brings the same values
        storage = self.full.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
        else:  # a NumPy array that the user has taken keeps the memory
            self.renew()

    # -- unsharded parameters -------------------------------------------------------------------------------------------------
    def mirror(self, force: bool = False) -> None:
        """Let each unsharded parameter require a gradient exactly if the user's parameter does now."""
        with torch._C.DisableTorchFunctionSubclass():
            wanted = [param.requires_grad for param in self.params]
        if not force and wanted == [unsharded.requires_grad for unsharded in self.unsharded_params]:
            return
        if force:
            self._measure()
        for i, wants in enumerate(wanted):
            self.refuse_recorded_edit(i)
            self.unsharded_params[i].requires_grad_(wants)
            if wants and self.edges[i] is None:
                self._arm(i)

    def refuse_recorded_edit(self, i: int) -> None:
        """Raise if unsharded parameter `i` was edited in place with a value that records gradients."""
        refuse_recorded_edit(self.unsharded_params[i], self.layout.slots[i].name, self.collectives.world_rank)

    def renew(self) -> None:
        """Leave the full buffer to the objects that hold it, and point the unsharded parameters at a new one without memory."""
        with torch.inference_mode(False), torch.no_grad():
            self.full = torch.empty(self.layout.numel, dtype=self.compute, device=self.full.device)
            for i, unsharded in enumerate(self.unsharded_params):
                move(unsharded, self.view(self.full, i))
            self._take_views()
            self.full.untyped_storage().resize_(0)
        self._measure()

    def _arm(self, i: int) -> None:
        """Hook the gradient of unsharded parameter `i`, and add the references that the hook makes to the baseline.

        Measuring all references instead would also count those of a graph that is alive now.
        """
        unsharded, unit = self.unsharded_params[i], self.unit()
        assert unit is not None
        uses, references = self.baseline[i]
        before = _use_count(unsharded), sys.getrefcount(unsharded)
        self.edges[i] = torch.autograd.graph.get_gradient_edge(unsharded).node
        self.edges[i].register_prehook(partial(take_grad, weakref.ref(self), i))
        hooks = unit.tensor_hooks.get(self.layout.slots[i].name)
        if hooks:  # the dict itself, so that users' handles still remove their hooks
            unsharded._backward_hooks = hooks  # type: ignore[assignment]
        after = _use_count(unsharded), sys.getrefcount(unsharded)
        owns = before[0] > uses  # the C++ tensor owns its Python object already, see `references`
        self.baseline[i] = uses + after[0] - before[0], references + after[1] - before[1] + owns
        if not self.gradients.asked[i]:
            self.gradients.asked[i] = True
            with torch._C.DisableTorchFunctionSubclass():
                self.params[i].register_hook(partial(average_past_unit, weakref.ref(self), i))

    def put_back(self, i: int) -> None:
        """Point unsharded parameter `i` at its place in the full buffer again, after ``.data = `` gave it other memory."""
        # Where the other memory had another dtype, autograd has dropped its gradient node, and the hook with it.
        move(self.unsharded_params[i], self.view(self.full, i).data)
        if self.edges[i] is not None:
            self.edges[i] = None
            if self.unsharded_params[i].requires_grad:
                self._arm(i)
            self._measure()

    def _measure(self) -> None:
        """Count the engine's own references to the full buffer and the unsharded parameters."""
        storage = self.full.untyped_storage()
        self.storage = storage._cdata  # identifies the storage
        self.storage_baseline = torch._C._storage_Use_Count(storage._cdata)
        for i in range(len(self.unsharded_params)):
            self.baseline[i] = (_use_count(self.unsharded_params[i]), sys.getrefcount(self.unsharded_params[i]))

    def references(self) -> tuple[bool, list[tuple[int, int]], bool]:
        """Find out who refers to the unsharded parameters beside the engine.

        Returns:
            True if anything but the Python objects of the unsharded parameters refers to the full buffer; index and version of
            each parameter whose unsharded parameter, or a view of it, autograd has saved; True if Python code holds an
            unsharded parameter itself.
        """
        storage = torch._C._storage_Use_Count(self.full.untyped_storage()._cdata)
        params, saved, by_python = self.unsharded_params, [], False
        # A loop variable for the parameter would be a reference, too; `_measure` has none either.
        for i, (uses, references) in enumerate(self.baseline):
            more = _use_count(params[i]) > uses
            if more:
                saved.append((i, self.params[i]._version))
            # Autograd's first reference makes the C++ tensor own its Python object, which adds one reference. Where a
            # gradient is required, the baseline includes that reference.
            if sys.getrefcount(params[i]) > references + (more and self.edges[i] is None):
                by_python = True
        return storage > self.storage_baseline or bool(saved), saved, by_python

    def settle(self) -> None:
        """Copy what a forward has assigned to ``.data`` to the full buffer, which becomes the parameters' memory again.

        Raises:
            UnitStateError: an unsharded parameter was given another shape, dtype or device.
        """
        for i, param in enumerate(self.unsharded_params):
            view = self.view(self.full, i)
            if is_view(param, view):
                continue
            given = local_of(param)
            if (given.shape, given.dtype, given.device) != (view.shape, view.dtype, view.device):
                shape, where = tuple(given.shape), f"{given.dtype}, {given.device}"
                self.put_back(i)
                raise UnitStateError(
                    f"rank {self.collectives.world_rank}: .data of {self.layout.slots[i].name} was assigned another tensor "
                    f"inside a forward (shape {shape}, {where}, not shape {tuple(view.shape)}, {view.dtype}, {view.device}). "
                    "Assign one that is alike, or convert the model before shard()."
                )
            leave_values(self.params[i])
            view.data.copy_(given.detach())  # `.data`: an assignment does not increment the version
            move(param, view)

    def outdate_saved(self, i: int) -> None:
        """Make every backward that has saved unsharded parameter `i`, or a view of it, fail if its memory is overwritten.

        Call this when new values are assigned to ``p.data``. Plain torch leaves saved views as they are, and so does the engine
        where unsharded parameters have memory of their own.
        """
        if not self.gathers:
            torch.autograd.graph.increment_version(self.unsharded_params[i])

    def note_versions(self) -> None:
        """Remember the unsharded parameters' versions, to find in-place edits; call when they hold what the shard holds."""
        self.versions = self.unsharded_versions()

    def unsharded_versions(self) -> list[int]:
        """Return each unsharded parameter's version, which grows with in-place edits."""
        if not self.distributed:
            return [unsharded._version for unsharded in self.unsharded_params]
        # An edit of a DTensor counts on the DTensor; an edit of its to_local() counts on the local tensor.
        return [unsharded._version + local_of(unsharded)._version for unsharded in self.unsharded_params]
