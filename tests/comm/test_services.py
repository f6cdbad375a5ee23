"""Who may ask a rank's service for its shards, and from where: ranks on several hosts have to reach it, strangers must not."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.support.ranks import ranks
from torch_shard.comm.one_sided import wire
from torch_shard.comm.one_sided.service import Service


@pytest.fixture
def several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is one of two ranks, of which only one is on this host."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.fixture
def service(several_hosts: None) -> Service:
    return Service(0)


def presence(address: wire.Address, secret: str) -> dict[str, object]:
    with wire.connect(address, 5.0) as link:
        wire.send(link, {"secret": secret, "rank": 1})
        wire.send(link, {"ask": "presence"})
        return wire.receive(link)


@pytest.mark.parametrize("secret", ["x", ""])
def test_who_does_not_know_the_secret_gets_no_answer(service: Service, secret: str) -> None:
    with pytest.raises((EOFError, ConnectionError)):
        presence(service.address, secret)
    assert presence(service.address, service.address.secret)["issued"] == 0


DEFAULT_ROUTE = "192.0.2.1"  # an address that no host has


@pytest.mark.parametrize(
    ("routes", "asked", "found"),
    [
        ({"198.51.100.1": "198.51.100.7", DEFAULT_ROUTE: "203.0.113.7"}, 1, "198.51.100.7"),
        ({"198.51.100.1": "127.0.1.1", DEFAULT_ROUTE: "203.0.113.7"}, 2, "203.0.113.7"),
        ({DEFAULT_ROUTE: "203.0.113.7"}, 2, "203.0.113.7"),
        ({}, 2, "127.0.0.1"),
    ],
    ids=["a route to the first host", "the first host, by its own name", "an unknown first host", "no network"],
)
def test_the_address_in_the_network_is_that_of_the_route_to_the_first_host_or_of_the_default_route(
    several_hosts: None, monkeypatch: pytest.MonkeyPatch, routes: dict[str, str], asked: int, found: str
) -> None:
    to: list[str] = []

    class Probe:
        """Stands for a socket of a host that has `routes`."""

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None: ...

        def connect(self, peer: tuple[str, int]) -> None:
            to.append(peer[0])
            if peer[0] not in routes:
                raise OSError("Network is unreachable")

        def getsockname(self) -> tuple[str, int]:
            return routes[to[-1]], 1

    real = socket.socket
    monkeypatch.setenv("MASTER_ADDR", "198.51.100.1")
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", lambda *kind: Probe() if socket.SOCK_DGRAM in kind[1:] else real(*kind))
        server, address = wire.listen()
    with server:
        assert address.host == found
        assert to == ["198.51.100.1", DEFAULT_ROUTE][:asked]


@pytest.mark.parametrize(
    ("own", "connects_to"),
    [(("127.0.0.1", "127.0.0.2"), "127.0.0.2"), (("203.0.113.7", "203.0.113.7"), "127.0.0.1")],
    ids=["another host of the same name, as containers may have", "this host, whose address has changed since"],
)
@ranks(2, fresh=True)
def test_a_rank_reads_alone_from(rank: int, own: tuple[str, str], connects_to: str) -> None:
    del os.environ["LOCAL_WORLD_SIZE"]
    wire._own_address = lambda: own[rank]
    connect, hosts = wire.connect, []

    def noted(*args: Any) -> socket.socket:
        link = connect(*args)
        hosts.append(link.getpeername()[0])
        return link

    wire.connect = noted
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    expected = model.weight.norm().item()
    engine = torch_shard.shard(model)
    if rank == 0:
        with torch.no_grad():
            assert model.weight.norm().item() == pytest.approx(expected)
        assert hosts == [connects_to]
    dist.barrier()
    assert engine.statistics().lone_reads == (rank == 0)
