"""One tensor in a file of a sharded checkpoint, as ``torch.save`` writes it, without a copy of its values.

Torch's DCP reader gives each entry of a file to ``torch.load``, so an entry has to be a zip archive of its own::

    head: pickle with shape and dtype, small members, header of the values, padding | values | tail: small members, directory

``torch.save`` makes head and tail: ``torch.serialization.skip_data`` has it leave out the values. The CRC-32 of the values in
the archive's directory stays 0. Torch compares none, and the manifest has checksums of the whole file.
"""

from __future__ import annotations

import functools

import torch

ALIGNMENT = 64
"""An alignment in bytes: if an entry begins at a multiple of it, so do the entry's values."""


class _AroundValues:
    """A file for ``torch.save``, which seeks over the place of the values."""

    def __init__(self) -> None:
        self.parts = [bytearray()]

    def write(self, data: memoryview) -> int:
        self.parts[-1] += data
        return len(data)

    def seek(self, offset: int, whence: int) -> None:
        self.parts.append(bytearray())

    def flush(self) -> None:
        pass


@functools.lru_cache(maxsize=4096)
def surroundings(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Return the bytes before and after the values of a row-major tensor on the CPU. Not collective."""
    # Memory that is never touched costs nothing; torch.empty may be told to fill it.
    values = torch.UntypedStorage(shape.numel() * dtype.itemsize)
    file = _AroundValues()
    with torch.serialization.skip_data():
        torch.save(torch.empty(0, dtype=dtype, device="cpu").set_(values, 0, shape), file)  # type: ignore[call-overload,arg-type]
    head, *tail = file.parts  # without values there is no tail
    return bytes(head), b"".join(tail)
