"""The layer over streams and events: on the CPU there are none, and nothing has to be asked."""

from __future__ import annotations

import pytest
import torch

from torch_shard.comm.streams import accelerator, current_streams, orders_streams, streams_of

CPU = torch.device("cpu")


def test_on_the_cpu_there_are_no_streams():
    streams = streams_of(CPU)
    assert not streams.exist and streams is streams_of(torch.device("cpu"))
    assert streams.current() is None and streams.new(urgent=True) is None and streams.timing_event() is None
    event = streams.record()
    assert event is None
    streams.wait(event)
    streams.join(None, [None])
    with streams.use(None), streams.follow(None), streams.on_device():
        streams.finish()
        streams.synchronize()
    assert not streams.is_capturing() and streams.random_state() is None


@pytest.mark.parametrize("backend", ["nccl", "xccl", "hccl"])
def test_backends_of_accelerators_order_streams(backend):
    assert orders_streams(backend) and not orders_streams("gloo") and not orders_streams("")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_machine_without_accelerators_says_so():
    assert accelerator() == ""
    assert current_streams() is streams_of(CPU)
