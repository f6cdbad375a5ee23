"""The checker is checked: without any one of these places, which order the device's work, a race shows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.simulated.scenarios import SCENARIOS
from tests.support.marks import quick
from tests.support.ranks import ranks

# Places by file and function, each with a scenario that needs it.
MISSED = {
    "comm/collectives.py _on": "full_shard, fp32",
    "comm/collectives.py _track": "full_shard, fp32",
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
    found = scenario.run("late", dropped=sites)
    races = torch.tensor([len(found.races)])
    dist.all_reduce(races)
    assert races.item()
