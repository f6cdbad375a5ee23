"""The values of parameters in files: when the model is sharded, each rank reads its shards.

The parameter itself knows where its values are, so that it may be moved to other modules and names before. Files are mapped, so
that only pages with this rank's shards are read, and values are copied straight to their place. Ranks that would read different
files are found before anything changes, so that no values have to be sent.
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


def refuse_altered(params: Mapping[str, nn.Parameter], rank: int) -> None:
    """Raise if the model has values in files, and a parameter was changed since, so that these values are wrong now.

    A parameter on meta without values is refused, too: it may be a copy, resized, or an adapter that a library has moved to meta
    after filling it, so that an initialisation would be silently wrong.
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
    """Return a text that is equal on ranks whose parameters wait for equal values. Not collective."""
    found = {name: deferred_of(p) for name, p in nn.Module.named_parameters(model)}
    waiting = {name: values for name, values in found.items() if values is not None}
    if not waiting:
        return "no parameter has values in files"
    digest = zlib.crc32("\n".join(f"{name}: {v.origin}: {v.casts}" for name, v in waiting.items()).encode())
    return f"{len(waiting)} parameters have values in files, with checksum {digest:08x}"


class Filler:
    """Reads the values of one model's parameters from files, once the parameters have memory. Not collective."""

    def __init__(self) -> None:
        self._waiting: list[tuple[nn.Parameter, torch.dtype, Deferred]] = []
        self._told: dict[Callable[[], None], None] = {}

    def note(self, param: nn.Parameter) -> None:
        """Note `param`, which is about to be sharded, for :meth:`fill`, if it waits for values."""
        values = deferred_of(param)
        if values is not None:
            self._waiting.append((param, param.dtype, values))

    def fill(self) -> None:
        """Read this rank's shards of the parameters that were noted since the last call, which are sharded by now.

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
                    # The values are rounded to the parameter's dtype even if it is stored in a wider one.
                    local.copy_(values.rounded(shard_of_full(values.full(), spec)).to(dtype))
            self._tell(values)

    def full(self, param: nn.Parameter, values: Deferred, device: torch.device) -> nn.Parameter:
        """Return a plain parameter with all values of `param`, which is not to be sharded.

        Raises:
            CheckpointError: the values can't be read, or have another shape.
        """
        with torch.no_grad(), _reading(values):
            full = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=device)
            full.copy_(values.rounded(values.full()))
        filled = nn.Parameter(full, requires_grad=param.requires_grad)
        filled.__dict__.update(attributes_of(param))
        self._tell(values)
        return filled

    def _tell(self, values: Deferred) -> None:
        if values.filled is not None:
            self._told[values.filled] = None

    def tell(self) -> None:
        """Call the ``filled`` functions of the values that were read."""
        for filled in self._told:
            filled()


@contextlib.contextmanager
def _reading(values: Deferred) -> Iterator[None]:
    """Raise errors of the block as a CheckpointError that says what was read."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise  # nothing is wrong with what was read
    except Exception as error:
        raise CheckpointError(
            f"{values.origin} can't be read ({type(error).__name__}: {error}). Nothing has changed; shard the model once the "
            "files are there, or build it again from complete ones."
        ) from error
