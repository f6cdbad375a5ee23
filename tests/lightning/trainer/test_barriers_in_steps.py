"""One rank alone reduces, gathers or waits within a step: an error at once, where under DDP it waits for ever."""

from __future__ import annotations

import time

import pytest

from tests.lightning.support import assert_same_state, loader, net_class, single, trainer
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import DivergenceError


def log(module, loss):
    module.log("train", loss, sync_dist=True, on_step=True)


def gather(module, loss):
    module.seen.append(float(module.all_gather(loss.detach()).mean()))


def wait(module, loss):
    module.trainer.strategy.barrier()


class Steps(net_class("lightning")):
    def __init__(self, call, ranks=None, within=False):
        super().__init__()
        self.call, self.ranks, self.within = call, ranks, within

    def forward(self, x):
        if self.within:  # in the middle of the forward, with gathers to come
            self.at(x.sum())
        return super().forward(x)

    def training_step(self, batch, index):
        self.index = index
        loss = self.loss(batch)
        if not self.within:
            self.at(loss)
        return loss

    def at(self, value):
        if self.ranks is None or (self.index == 3 and self.global_rank in self.ranks):
            self.call(self, value)


@pytest.mark.parametrize(
    ("call", "victim", "within"), [(log, 0, False), *exhaustive((gather, 1, False), (wait, 0, True), (gather, 0, True))]
)
@ranks(2, fresh=True, timeout=60)
def test_one_rank_alone_is_an_error_on_all_at_once(world_size, call, victim, within):
    started = time.monotonic()
    with pytest.raises(DivergenceError, match=r"test_barriers_in_steps\.py"):
        trainer("lightning", world_size).fit(Steps(call, (victim,), within), loader(world_size))
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("call", [gather, *exhaustive(log, wait)])
@ranks(2)
def test_all_ranks_together_train_like_plain(world_size, call):
    expected, module = Steps(call), Steps(call)
    single("lightning").fit(expected, loader(1))
    trainer("lightning", world_size).fit(module, loader(world_size))
    assert module.seen == pytest.approx(expected.seen, rel=1e-5)
    assert_same_state(module.state_dict(), expected.state_dict())
