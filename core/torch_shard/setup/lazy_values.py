"""Parameters on the meta device whose values wait in files until the model is sharded: each rank then reads its slices.

What waits is kept on the parameter itself, so that it stays with it wherever the parameter goes: into another module, under
another name, into several modules at once. Values are mapped, so that of a file only the pages with this rank's slices are
read, and they are copied straight to where they belong. Ranks that would read other files are found before anything changes;
therefore nothing has to be sent.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from ..errors import CheckpointError, SetupError
from ..shard_tensor.spec import shard_of_full
from ..shard_tensor.tensor import ShardTensor
from .lazy_param import Deferred, attributes_of, deferred_of, forget, has_lost_values, is_altered

# -- what set-up asks -----------------------------------------------------------------------------------------------


def refuse_altered(params: Mapping[str, nn.Parameter], rank: int) -> None:
    """Raise where parameters of a model that has its values in files were changed since, so that others are wanted by now.

    Those that are on meta without values count, too: to initialise them would be wrong in silence, since they are copies,
    resized ones, or adapters that a library has moved to meta after it had filled them.
    """
    waiting = {name: p for name, p in params.items() if deferred_of(p) is not None}
    if not waiting and not any(map(has_lost_values, params.values())):
        return
    for name, p in params.items():
        what = None
        if name in waiting and is_altered(p):
            what = "was changed in place or resized since"
        elif has_lost_values(p):
            what = "is a copy on the meta device, which was made before and has none"
        elif name not in waiting and p.device.type == "meta":
            what = "was made or replaced on the meta device since, and has no values"
        if what is not None:
            raise SetupError(
                f"rank {rank}: the model's values are read from files when it is sharded, but {name} {what}. Make the change "
                "afterwards, inside engine.gathered(write=True); or load the model on the CPU and change that; or give the "
                "parameter memory and values before it is sharded."
            )


def described(model: nn.Module) -> str:
    """What the parameters wait for, in words that are equal on ranks where it is equal. Not collective."""
    found = {name: deferred_of(p) for name, p in nn.Module.named_parameters(model)}
    waiting = {name: values for name, values in found.items() if values is not None}
    if not waiting:
        return "no parameter has values in files"
    digest = zlib.crc32("\n".join(f"{name}: {v.origin}: {v.casts}" for name, v in waiting.items()).encode())
    return f"{len(waiting)} parameters have values in files, with checksum {digest:08x}"


class Filler:
    """Gives the deferred parameters of one model their values, once they have memory. Not collective."""

    def __init__(self) -> None:
        self._waiting: list[tuple[nn.Parameter, torch.dtype, Deferred]] = []
        self._told: dict[Callable[[], None], None] = {}

    def note(self, param: nn.Parameter) -> None:
        """Note `param`, which is about to be sharded, for :meth:`fill`, if it waits for values."""
        values = deferred_of(param)
        if values is not None:
            self._waiting.append((param, param.dtype, values))

    def fill(self) -> None:
        """Copy this rank's slices to the parameters that were noted since the last call, which are sharded by now.

        Raises:
            CheckpointError: values can't be read, or have another shape.
        """
        waiting, self._waiting = self._waiting, []
        for param, dtype, values in waiting:
            assert isinstance(param, ShardTensor)
            spec, local = param._spec, param._local
            forget(param)
            if spec.length:
                with torch.no_grad(), _reading(values):
                    # Through the parameter's dtype, where it is stored in a finer one.
                    local.copy_(values.rounded(shard_of_full(values.whole(), spec)).to(dtype))
            self._tell(values)

    def whole(self, param: nn.Parameter, values: Deferred, device: torch.device) -> nn.Parameter:
        """Return what `param`, which is not to be sharded, becomes: a plain parameter with all of its values.

        Raises:
            CheckpointError: as :meth:`fill`.
        """
        with torch.no_grad(), _reading(values):
            whole = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=device)
            whole.copy_(values.rounded(values.whole()))
        filled = nn.Parameter(whole, requires_grad=param.requires_grad)
        filled.__dict__.update(attributes_of(param))
        self._tell(values)
        return filled

    def _tell(self, values: Deferred) -> None:
        if values.filled is not None:
            self._told[values.filled] = None

    def tell(self) -> None:
        """Call what is to be called once the parameters have their values."""
        for filled in self._told:
            filled()


@contextlib.contextmanager
def _reading(values: Deferred) -> Iterator[None]:
    """What goes wrong inside is named."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{values.origin} can't be read ({type(error).__name__}: {error}). Nothing has changed; shard the model once the "
            "files are there, or build it again from whole ones."
        ) from error
