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


def test_a_partner_on_another_host_connects_to_the_address_in_the_network(service: Service) -> None:
    elsewhere = service.address._replace(host="another host")
    assert presence(elsewhere, elsewhere.secret)["issued"] == 0
    nowhere = elsewhere._replace(network="127.0.0.1", port=1)
    with pytest.raises(ConnectionRefusedError):
        presence(nowhere, nowhere.secret)


def test_the_address_in_the_network_is_that_of_the_route_to_the_first_host(
    several_hosts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Probe:
        """Stands for a socket of a host that has a route to the first host."""

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None: ...

        def connect(self, to: tuple[str, int]) -> None:
            asked.append(to[0])

        def getsockname(self) -> tuple[str, int]:
            return "192.0.2.7", 1

    real = socket.socket
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", lambda *kind: Probe() if socket.SOCK_DGRAM in kind[1:] else real(*kind))
        server, address = wire.listen()
    with server:
        assert (address.network, asked) == ("192.0.2.7", ["192.0.2.1"])


@ranks(2, fresh=True)
def test_a_rank_reads_alone_from_another_host(rank: int) -> None:
    """Rank 1 is on a host of which only the address in the network, a second one of this host, leads to it."""
    del os.environ["LOCAL_WORLD_SIZE"]
    if rank == 1:
        socket.gethostname = lambda: "127.0.0.2"
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
        assert hosts == ["127.0.0.2"]
    dist.barrier()
    assert engine.statistics().lone_reads == (rank == 0)
