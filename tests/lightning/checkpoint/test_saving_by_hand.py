"""``torch.save`` writes what it writes under DDP; what it can't write is an error that says what the Trainer's user writes."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.lightning.support import Net, assert_same_state, loader, net_class, trainer
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ShardPicklingError


class Saves(net_class("lightning")):
    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_train_epoch_end(self):
        self.inner.weight.grad = torch.ones(self.inner.weight.shape)
        with pytest.raises(ShardPicklingError, match=r"trainer\.strategy\.engine\.state_dict\(\)") as caught:
            torch.save(self.inner.weight.grad, self.path)
        assert "accelerator" not in str(caught.value)
        if self.trainer.is_global_zero:
            torch.save(self.state_dict(), self.path)
            torch.save(self, self.path.with_name("module.pt"))
        self.trainer.strategy.barrier()


@ranks(2)
def test_torch_save_in_a_hook_writes_full_weights_and_a_plain_module_on_one_rank(world_size, tmp_path):
    module = Saves(tmp_path / "weights.pt")
    trainer("lightning", world_size).fit(module, loader(world_size))
    assert_same_state(torch.load(tmp_path / "weights.pt"), module.state_dict())
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    assert type(loaded) is Saves and {type(p) for p in loaded.parameters()} == {torch.nn.Parameter}
    assert_same_state(loaded.state_dict(), module.state_dict())
    trainer("lightning", world_size, "ddp").validate(loaded, loader(world_size), verbose=False)


class Fails(Net):
    """Ends its run in a step."""

    error: type[BaseException] | None = None

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        if index == 3 and self.error is not None:
            raise self.error
        return loss


@pytest.mark.parametrize("error", [ZeroDivisionError, *exhaustive(KeyboardInterrupt)])
@ranks(2)
def test_the_script_saves_when_a_step_has_failed_as_under_ddp(rank, world_size, error, tmp_path):
    found, handler = [], signal.getsignal(signal.SIGINT)
    for strategy in ("ddp", "shard"):
        module, t = Fails(), trainer("lightning", world_size, strategy)
        module.error = error
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(t.strategy.launcher, "kill", lambda signum: None)
            try:
                t.fit(module, loader(world_size))
            except (ZeroDivisionError, SystemExit):  # Lightning makes the latter of a KeyboardInterrupt
                for savers in ([0], range(world_size)):
                    if rank in savers:
                        torch.save(module.state_dict(), tmp_path / f"{rank}.pt")
                        found.append(torch.load(tmp_path / f"{rank}.pt"))
                    torch.distributed.barrier()
    signal.signal(signal.SIGINT, handler)  # Lightning ignores it from there on
    half = len(found) // 2
    assert half == 2 - rank
    torch.testing.assert_close(found[half:], found[:half])
