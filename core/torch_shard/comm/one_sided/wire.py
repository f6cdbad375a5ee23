"""Messages over a socket: a JSON object, followed by the bytes of a tensor where the object says so."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import struct
from typing import Any, NamedTuple

import torch

_LENGTH = struct.Struct("!I")
_LONGEST = 1 << 20  # bytes of a JSON object; a stranger that connects must not make us allocate more


class Address(NamedTuple):
    """The address of a rank's service: the host's address in the network of the ranks, the port, and a secret."""

    host: str
    port: int
    secret: str


def listen() -> tuple[socket.socket, Address]:
    """Open a socket on which partners may connect, and return it with its address."""
    one_host = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "-")
    server = socket.create_server(("127.0.0.1" if one_host else "", 0), backlog=128)
    host = "127.0.0.1" if one_host else _own_address()
    return server, Address(host, server.getsockname()[1], os.urandom(16).hex())


def _own_address() -> str:
    """Return the address that this host has in the network of the rendezvous, or else in that of its default route."""
    documentation = "192.0.2.1"  # an address that no host has: the route to it is the default
    for peer in (os.environ.get("MASTER_ADDR") or documentation, documentation):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 1))  # sends nothing: the system only chooses a route
            found: str = probe.getsockname()[0]
            if not found.startswith("127."):  # on the host of the rendezvous its name may stand for loopback
                return found
    return "127.0.0.1"


def connect(address: Address, seconds: float) -> socket.socket:
    """Connect to a partner's service.

    Raises:
        OSError: nobody listens there, or not within `seconds`.
    """
    link = socket.create_connection((address.host, address.port), timeout=seconds)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def send(link: socket.socket, message: dict[str, Any]) -> None:
    """Send a JSON object."""
    data = json.dumps(message).encode()
    link.sendall(_LENGTH.pack(len(data)) + data)


def receive(link: socket.socket) -> dict[str, Any]:
    """Receive a JSON object.

    Raises:
        EOFError: the other side has closed the connection.
    """
    header = bytearray(_LENGTH.size)
    _fill(link, memoryview(header))
    (length,) = _LENGTH.unpack(header)
    if length > _LONGEST:
        raise EOFError("the other side does not speak this protocol")
    data = bytearray(length)
    _fill(link, memoryview(data))
    message: dict[str, Any] = json.loads(data)
    return message


def send_tensor(link: socket.socket, tensor: torch.Tensor) -> None:
    """Send the memory of a contiguous CPU tensor."""
    if tensor.nbytes:
        link.sendall(_memory(tensor))


def receive_into(link: socket.socket, tensor: torch.Tensor) -> None:
    """Fill the memory of a contiguous CPU tensor.

    Raises:
        EOFError: the other side has closed the connection.
    """
    if tensor.nbytes:
        _fill(link, _memory(tensor))


def _memory(tensor: torch.Tensor) -> memoryview:
    # Not through NumPy, which knows no bfloat16; the caller keeps the tensor.
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _fill(link: socket.socket, memory: memoryview) -> None:
    at = 0
    while at < len(memory):
        count = link.recv_into(memory[at:])
        if not count:
            raise EOFError("the other side has closed the connection")
        at += count
