"""``torch.save`` of a state dict writes full tensors; of a module it is an error that says what the Trainer's user writes."""

from __future__ import annotations

import pytest
import torch

from tests.lightning.support import assert_same_state, loader, net_class, trainer
from tests.support.ranks import ranks
from torch_shard.errors import ShardPicklingError


class Saves(net_class("lightning")):
    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_train_epoch_end(self):
        with pytest.raises(ShardPicklingError, match=r"trainer\.strategy\.engine\.state_dict\(\)") as caught:
            torch.save(self.inner, self.path)
        assert "accelerator" not in str(caught.value)
        if self.trainer.is_global_zero:
            torch.save(self.state_dict(), self.path)
        self.trainer.strategy.barrier()


@ranks(2)
def test_torch_save_in_a_hook_writes_full_weights_on_one_rank(world_size, tmp_path):
    module = Saves(tmp_path / "weights.pt")
    trainer("lightning", world_size).fit(module, loader(world_size))
    assert_same_state(torch.load(tmp_path / "weights.pt"), module.state_dict())
