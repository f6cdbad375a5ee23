"""However a run ends, it ends on all ranks: with the error that was first, and with what was asked for on disk."""

from __future__ import annotations

import os
import signal
import stat
import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import ConcatDataset, DataLoader

import lightning_shard.trainer.sigterm
from tests.lightning.support import BATCHES, assert_same_state, loader, net_class, trainer
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from tests.support.run_python import run_python
from torch_shard import ShardConfig, ShardError
from torch_shard.frontend import any_rank


def same_batches(world_size):
    """One batch, again and again: Lightning begins anew with a loader that has no state, also in the middle of an epoch."""
    one = loader(world_size, batches=1)
    return DataLoader(ConcatDataset([one.dataset] * BATCHES), batch_size=one.batch_size)


# -- SLURM ends the job before its time ----------------------------------------------------------------------------------


def slurm(rank, world_size, tmp_path):
    """A SLURM environment, and what it would have set; its command writes down how it was called."""
    command = tmp_path / f"bin{rank}" / "scontrol"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\nls {tmp_path} > {tmp_path}/there\n')
    command.chmod(command.stat().st_mode | stat.S_IEXEC)
    values = {"NTASKS": world_size, "NTASKS_PER_NODE": world_size, "PROCID": rank, "LOCALID": rank, "NODEID": 0}
    variables = {f"SLURM_{name}": str(value) for name, value in {**values, "JOB_ID": 4321, "JOB_NAME": "tests"}.items()}
    patch = pytest.MonkeyPatch()
    for name, value in {**variables, "PATH": f"{command.parent}:{os.environ['PATH']}"}.items():
        patch.setenv(name, value)
    return patch, SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR2)


class Signals(Callback):
    """Sends this process a signal in the middle of a forward, on some ranks; those are not there at the same time."""

    def __init__(self, signum, receivers, stage="training"):
        self.signum, self.receivers, self.stage, self.sent = signum, receivers, stage, False

    def setup(self, trainer, module, stage):
        def send(*_):
            here = getattr(trainer, self.stage) and (self.stage != "training" or trainer.global_step == 2)
            if here and not self.sent and trainer.global_rank in self.receivers:
                self.sent = True
                time.sleep(0.05 * trainer.global_rank)
                os.kill(os.getpid(), self.signum)

        self.hook = module.blocks[1].register_forward_hook(send)

    def teardown(self, trainer, module, stage):
        self.hook.remove()


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["full", *exhaustive("sharded")])
@pytest.mark.parametrize("receivers", [*exhaustive(((0, 1),)), (1,), *exhaustive(((0,),))])
@ranks(2)
def test_slurms_signal_on_any_rank_saves_on_all_and_the_next_job_goes_on_from_there(
    rank, world_size, receivers, form, tmp_path
):
    patch, environment = slurm(rank, world_size, tmp_path)
    try:
        make, form = net_class("lightning"), lightning_shard.ShardStrategy(state_dict_type=form)
        options = {"plugins": [environment], "default_root_dir": tmp_path, "max_epochs": 2}
        first, second = make(), make()
        callbacks = [Signals(signal.SIGUSR2, receivers)]
        trainer("lightning", world_size, form, callbacks=callbacks, **options).fit(first, same_batches(world_size))
        assert (tmp_path / "requeued").read_text() == "requeue 4321\n"
        assert [path.name for path in tmp_path.glob("hpc*")] == ["hpc_ckpt_1.ckpt"]

        class Starts(Callback):
            def on_train_start(self, trainer, module):
                self.step = trainer.global_step

        starts = Starts()
        # Lightning looks for it by itself where SLURM has started the job.
        t = trainer("lightning", world_size, callbacks=[starts], **options)
        t.fit(second, same_batches(world_size))
        assert starts.step == 3 and t.global_step == 2 * BATCHES
        assert_same_state(second.state_dict(), first.state_dict())
    finally:
        patch.undo()


@ranks(2)
def test_slurms_signal_in_validation_is_answered_there(rank, world_size, tmp_path):
    patch, environment = slurm(rank, world_size, tmp_path)
    try:
        callbacks = [Signals(signal.SIGUSR2, (1,), "validating")]
        options = {"plugins": [environment], "default_root_dir": tmp_path, "callbacks": callbacks}
        t = trainer("lightning", world_size, **options)
        t.validate(net_class("lightning")(), loader(world_size), verbose=False)
        assert (tmp_path / "hpc_ckpt_1.ckpt").is_file()
        assert "_slurm_sigusr_handler_fn" not in vars(t._signal_connector)
    finally:
        patch.undo()


@pytest.mark.parametrize("what", [*exhaustive("test", "predict"), "fit"])
@ranks(2)
def test_slurms_signal_in_a_test_a_prediction_and_the_last_training_step_is_answered(rank, world_size, tmp_path, what):
    patch, environment = slurm(rank, world_size, tmp_path)

    class Net(net_class("lightning")):
        def late(self, index):
            if index == BATCHES - 1 and self.trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGUSR2)

        def training_step(self, batch, index):
            self.late(index)
            return super().training_step(batch, index)

        def test_step(self, batch, index):
            self.late(index)
            return super().test_step(batch, index)

        def predict_step(self, batch, index):
            self.late(index)
            return super().predict_step(batch, index)

    try:
        module, strategy = Net(), lightning_shard.ShardStrategy(state_dict_type="sharded", async_save=True)
        t = trainer("lightning", world_size, strategy, plugins=[environment], default_root_dir=tmp_path)
        getattr(t, what)(module, loader(world_size))
        assert (tmp_path / "requeued").read_text() == "requeue 4321\n"
        # A folder has its name when it is whole: not only after the job was requeued.
        assert "hpc_ckpt_1.ckpt" in (tmp_path / "there").read_text().split()
        assert "_slurm_sigusr_handler_fn" not in vars(t._signal_connector)
    finally:
        patch.undo()


@ranks(2)
def test_sigterm_on_all_ranks_ends_the_run_on_all_after_the_same_step(rank, world_size):
    module, steps = net_class("lightning")(), []

    class Notes(Callback):
        def on_exception(self, trainer, module, exception):
            steps.append((type(exception), trainer.global_step))

    t = trainer("lightning", world_size, callbacks=[Signals(signal.SIGTERM, (0, 1)), Notes()])
    with pytest.raises(SIGTERMException):
        t.fit(module, loader(world_size))
    assert steps == [(SIGTERMException, 3)]


@pytest.mark.parametrize("moment", ["training", *exhaustive("agreement", "validation")])
@pytest.mark.parametrize("victim", [1, *exhaustive(0)])
@ranks(2)
def test_sigterm_on_one_rank_ends_the_run_on_all_after_the_same_step(
    rank, world_size, victim, moment, tmp_path, monkeypatch
):
    """Only one machine is taken away, say. With DDP the rank that gets it and the others wait for each other."""
    steps: list[Any] = []

    class Net(net_class("lightning")):
        def training_step(self, batch, index):
            if (moment, rank, index) == ("training", victim, 2):
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, index)

        def on_validation_start(self):
            if (moment, rank) == ("validation", victim):
                os.kill(os.getpid(), signal.SIGTERM)

    class Notes(Callback):
        def on_exception(self, trainer, module, exception):
            steps.append((type(exception), trainer.global_step, str(trainer.state.stage)))

    def while_ranks_agree(*args: Any) -> bool:
        asked.append(args)
        if (moment, rank, len(asked)) == ("agreement", victim, 3):
            os.kill(os.getpid(), signal.SIGTERM)
        return any_rank(*args)

    asked: list[Any] = []
    monkeypatch.setattr(lightning_shard.trainer.sigterm, "any_rank", while_ranks_agree)
    module = Net()
    callbacks = [Notes(), OnExceptionCheckpoint(tmp_path)]
    t = trainer("lightning", world_size, callbacks=callbacks, max_epochs=2, enable_checkpointing=True)
    with pytest.raises(SIGTERMException):
        t.fit(module, same_batches(world_size), loader(world_size))
    during = "RunningStage.VALIDATING" if moment == "validation" else "RunningStage.TRAINING"
    assert steps == [(SIGTERMException, 6 if moment == "validation" else 3, during)]
    assert "_sigterm_notifier_fn" not in vars(t._signal_connector)
    if moment == "validation":
        return
    # What was saved then is whole.
    again, expected = net_class("lightning")(), net_class("lightning")()
    for each, path in ((again, tmp_path / "on_exception.ckpt"), (expected, None)):
        trainer("lightning", world_size, max_epochs=2).fit(each, same_batches(world_size), ckpt_path=path)
    assert_same_state(again.state_dict(), expected.state_dict())


# -- errors ---------------------------------------------------------------------------------------------------------------


class FailsIn(Callback):
    """Raises on one rank, in one hook."""

    def __init__(self, hook, rank):
        def fail(trainer, module, *args, **kwargs):
            if trainer.global_rank == rank and (trainer.global_step == 3 or "step" not in hook):
                raise ZeroDivisionError("on purpose")

        setattr(self, hook, fail)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "hook",
    ["on_save_checkpoint", *exhaustive("on_train_epoch_end", "on_before_optimizer_step", "on_fit_start", "setup")],
)
@pytest.mark.parametrize("failing", [1, *exhaustive(0)])
@ranks(2, fresh=True, group_timeout=20, timeout=90)
def test_an_error_on_one_rank_is_its_error_and_ends_the_others(rank, world_size, hook, failing, tmp_path):
    strategy = lightning_shard.ShardStrategy(ShardConfig(timeout=3.0))
    callbacks = [FailsIn(hook, failing), ModelCheckpoint(dirpath=tmp_path)]
    t = trainer("lightning", world_size, strategy, callbacks=callbacks, enable_checkpointing=True)
    started = time.monotonic()
    with pytest.raises(ZeroDivisionError if rank == failing else (ShardError, RuntimeError)):
        t.fit(net_class("lightning")(), loader(world_size))
    assert time.monotonic() - started < 60


@pytest.mark.exhaustive
@ranks(2, fresh=True, group_timeout=20, timeout=90)
def test_a_checkpoint_on_an_exception_of_one_rank_does_not_hide_the_exception(rank, world_size, tmp_path):
    class Fails(net_class("lightning")):
        def training_step(self, batch, index):
            if index == 2 and rank == 1:
                raise ZeroDivisionError("on purpose")
            return super().training_step(batch, index)

    strategy = lightning_shard.ShardStrategy(ShardConfig(timeout=3.0))
    t = trainer(
        "lightning", world_size, strategy, callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True
    )
    with pytest.raises((ZeroDivisionError, ShardError, RuntimeError)) as caught:
        t.fit(Fails(), loader(world_size))
    if rank == 1:
        errors, error = [], caught.value
        while error is not None:  # a traceback shows the first of them first
            errors.append(type(error))
            error = error.__context__
        assert ZeroDivisionError in errors, errors


@ranks(2)
def test_a_checkpoint_on_an_exception_of_all_ranks_is_written_and_resumed(world_size, tmp_path):
    class Fails(net_class("lightning")):
        failing = True

        def on_train_batch_end(self, outputs, batch, index):
            if index == 2 and self.failing:
                raise ZeroDivisionError("on purpose")

    module, expected = Fails(), net_class("lightning")()
    with pytest.raises(ZeroDivisionError):
        saving = [OnExceptionCheckpoint(tmp_path)]
        trainer("lightning", world_size, callbacks=saving, enable_checkpointing=True).fit(
            module, same_batches(world_size)
        )
    (path,) = tmp_path.iterdir()
    again = Fails()
    again.failing = False
    trainer("lightning", world_size).fit(again, same_batches(world_size), ckpt_path=path)
    trainer("lightning", world_size).fit(expected, same_batches(world_size))
    assert_same_state(again.state_dict(), expected.state_dict())


@pytest.mark.parametrize("step", ["validation_step", *exhaustive("training_step")])
@ranks(2)
def test_a_checkpoint_at_an_interrupt_within_a_step_is_that_of_ddp(world_size, step, tmp_path):
    def interrupted(self, batch, index):
        loss = self.loss(batch)
        if self.trainer.global_step == 6:
            raise KeyboardInterrupt
        return loss if step == "training_step" else None

    def run(strategy):
        module = type("Interrupted", (net_class("lightning"),), {step: interrupted})()
        options = {"callbacks": [OnExceptionCheckpoint(tmp_path / strategy)], "enable_checkpointing": True}
        t = trainer("lightning", world_size, strategy, max_epochs=3, **options)
        patch = pytest.MonkeyPatch()
        patch.setattr(t.strategy.launcher, "kill", lambda signum: None)
        with pytest.raises(SystemExit):
            t.fit(module, loader(world_size), loader(world_size, 2))
        assert t.interrupted
        with open(tmp_path / strategy / "on_exception.ckpt", "rb") as file:
            return torch.load(file, weights_only=False)

    handler = signal.getsignal(signal.SIGINT)
    try:
        expected, found = run("ddp"), run("shard")
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from there on
    assert found["global_step"] == expected["global_step"] == 6
    assert_same_state(found["state_dict"], expected["state_dict"])
    torch.testing.assert_close(found["optimizer_states"], expected["optimizer_states"])


# -- a script is interrupted ----------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
import lightning.pytorch as pl
import torch

what, victim = sys.argv[1], int(sys.argv[2])


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))

    def training_step(self, batch, index):
        if index == 3 and victim in (self.global_rank, -1):
            if what == "raise":
                raise ZeroDivisionError("on purpose")
            os.kill(os.getpid(), getattr(signal, what))
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Says(pl.Callback):
    def on_exception(self, trainer, module, exception):
        print("ENDED", trainer.global_rank, type(exception).__name__, flush=True)


if __name__ == "__main__":
    off = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    t = pl.Trainer(accelerator="cpu", devices=2, strategy=sys.argv[3], max_epochs=1, callbacks=[Says()], **off)
    t.fit(Net(), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=2))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("what", "victim", "first"),
    [
        ("raise", 1, "1 ZeroDivisionError"),
        ("raise", 0, "0 ZeroDivisionError"),
        ("SIGINT", 1, "1 KeyboardInterrupt"),
        ("SIGINT", 0, "0 KeyboardInterrupt"),
        ("SIGINT", -1, "KeyboardInterrupt"),
        ("SIGKILL", 1, ""),
    ],
)
def test_a_script_ends_on_all_ranks_with_a_failure_and_says_the_first_error_first(what, victim, first, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run_python(script, what, victim, "shard", folder=tmp_path, expected=None, timeout=300)
    assert done.returncode != 0
    said = [line.removeprefix("ENDED ") for line in done.stdout.splitlines() if line.startswith("ENDED ")]
    assert first in (said or [""])[0], said
    if what == "raise":
        assert "ZeroDivisionError: on purpose" in done.stderr
