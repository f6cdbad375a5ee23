"""Parameters used outside their modules' forward: gathered for one operation, by `ShardTensor.__torch_function__`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .errors import UnitStateError
from .outputs import tensors_in
from .shard_tensor import ShardTensor
from .use import Use, sequence_number
from .watch import caller_line

if TYPE_CHECKING:
    from .runtime import Runtime
    from .unit import Unit

_LAYERS = {
    "linear", "bilinear", "embedding", "embedding_bag", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm",
    "multi_head_attention_forward", "prelu", "lstm", "gru", "rnn_tanh", "rnn_relu",
}  # fmt: skip


class OnDemand:
    """Decides between the slice and the gathered parameter; one for each sharded model."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._uses: list[Use] = []  # of the operation that runs now
        # Copies handed out for views, with their versions: an edit of one would be lost.
        self._copies: list[tuple[torch.Tensor, int, str, str]] = []

    def leaf(self, unit: Unit, param: ShardTensor, func: Any, local_ok: bool) -> torch.Tensor | None:
        """The leaf to compute with in place of `param`, or None where the operation stays on the slices. Collective
        where the unit is not gathered yet."""
        self.check_copies()
        if unit.is_summoned:
            return unit.leaf_of(param)
        runtime = self.runtime
        inside, recording = runtime.in_forward, torch.is_grad_enabled()
        # Without gradients slices will do, except that what the unit's own forward computes with must be edited itself.
        if inside and local_ok and not recording and not unit.installed:
            return None
        differentiable = recording and param.requires_grad and not _creates(func)
        # User hooks see a gradient once, whole: what reaches the leaf and what reaches the slice must not be two.
        hooked = differentiable and bool(unit.leaf_of(param)._backward_hooks)
        # Replicated parameters are at hand: what records a gradient uses the leaf, whose gradient is averaged.
        replicated = not unit.sharded and differentiable
        if not (inside or hooked or replicated) and (local_ok or not (recording or _is_layer(func))):
            return None
        start = sequence_number()
        at_hand = (replicated and not inside) or (unit.installed and not recording)
        if not (local_ok and at_hand):
            runtime.demand(unit, runtime.phase())
        for flat in unit.flats:
            flat.mirror()
            if not unit.installed:
                flat.note_versions()
        unit.running += 1
        self._uses.append(Use(unit, start))
        return unit.leaf_of(param)

    def done(self, unit: Unit, result: Any, copies: list[torch.Tensor], name: str) -> None:
        """After the operation that :meth:`leaf` was asked for, also when it raised."""
        if copies:
            line = caller_line()
            self._copies += [(c, c._version, name, line) for c in copies if not c.requires_grad]
        if unit.is_summoned or not self._uses:
            return
        use = self._uses.pop()
        unit = use.unit
        unit.running -= 1
        if unit.sharded and not unit.installed:
            unit.write_back_edits()  # an in-place function wrote to the gathered values
        tensors = tensors_in(result)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            self.runtime.watch_outputs(use, tensors, forward=False)
        else:
            self.runtime.between_forwards()

    def check_copies(self) -> None:
        """Raise if a copy that stands in for a view was edited."""
        if not self._copies:
            return
        copies, self._copies = self._copies, []
        for copy, version, name, line in copies:
            if copy._version != version:
                raise UnitStateError(
                    f"rank {self.runtime.collectives.world_rank}: a view of {name}, taken at {line}, was "
                    "edited. It is a copy, because the gathered memory is released, so the edit would be lost. Edit the "
                    "parameter itself (weight.mul_(mask)), or the view inside engine.gathered(write=True) between steps."
                )


def _creates(func: Any) -> bool:
    """Whether the function only takes shape and dtype from its operand (`zeros_like`, `new_empty`)."""
    name = getattr(func, "__name__", "")
    return name.endswith("_like") or name.startswith("new_")


def _is_layer(func: Any) -> bool:
    return getattr(func, "__name__", "") in _LAYERS
