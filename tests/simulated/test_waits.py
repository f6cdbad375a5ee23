"""The checker is checked: without any one of these places, which order the device's work, a race shows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.simulated.process_group import SimulatedGroup
from tests.simulated.scenarios import SCENARIOS
from tests.support.marks import quick
from tests.support.ranks import ranks

# Places by file and function, each with a scenario that needs it.
MISSED = {
    "comm/collectives.py _on": "full_shard, fp32",
    "comm/collectives.py gathering": "streams apart",
    "comm/work.py _wait": "full_shard, fp32",
    "unit/unit.py wait": "two streams in bf16",
    "offload/host.py leaving": "offload of all, fp32",
    "offload/host_gradients.py work": "offload of all, bf16 summed in fp32",
    "activation_offload.py wait": "activations on the host",
    "activation_offload.py _run": "activations on the host",
    "checkpoint/sharded/host_snapshot.py snapshot": "saved in the background",
}


def place(site: str) -> str:
    """Return the file and the function of a place in the code."""
    file, _, function = site.partition(" ")
    return f"{file.partition(':')[0]} {function}"


@pytest.mark.parametrize("missed", quick(MISSED, ["comm/collectives.py _on", "unit/unit.py wait"]))
@ranks(2)
def test_a_race_shows_without_a_wait(rank, missed):
    scenario = SCENARIOS[MISSED[missed]]
    sites = tuple(site for site in scenario.run("late").sites if place(site) == missed)
    assert sites, "the scenario does not come there"
    assert races(scenario, sites)


@pytest.mark.exhaustive
@ranks(2)
def test_a_backend_that_keeps_to_its_own_streams_is_waited_for(rank, monkeypatch):
    monkeypatch.setattr(SimulatedGroup, "own_stream", True)
    scenario = SCENARIOS["full_shard, fp32"]
    sites = scenario.run("late").sites
    assert not races(scenario, ())
    assert races(scenario, tuple(site for site in sites if place(site) == "comm/collectives.py _track"))


def races(scenario, dropped):
    """Return how many races all ranks see where the places `dropped` order nothing. Collective."""
    found = torch.tensor([len(scenario.run("late", dropped=dropped).races)])
    dist.all_reduce(found)
    return found.item()
