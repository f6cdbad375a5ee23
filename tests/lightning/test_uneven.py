"""Ranks with different numbers of batches to evaluate."""

from __future__ import annotations

import pytest

from tests.lightning.helpers import loader, net_class, trainer
from tests.marks import exhaustive
from tests.ranks import ranks
from torch_shard.errors import DivergenceError


@pytest.mark.parametrize("what", ["validate", *exhaustive("test", "predict", "fit")])
@ranks(2)
def test_ranks_with_different_numbers_of_batches_are_told_so_on_all_ranks_at_once(rank, world_size, what):
    module, t = net_class("lightning")(), trainer("lightning", world_size, max_epochs=2)
    uneven = loader(world_size, 2 + rank)
    with pytest.raises(DivergenceError, match=r"different numbers of batches.*rank 0: computes with the last batch"):
        if what == "fit":
            t.fit(module, loader(world_size), uneven)
        else:
            getattr(t, what)(module, uneven)
