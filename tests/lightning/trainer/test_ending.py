"""However a run ends, it ends on all ranks: with the error that was first, and with what was asked for on disk."""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import LayerSync, TorchCheckpointIO
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader

import lightning_shard.trainer.sigterm
import torch_shard
from tests.lightning.support import (
    BATCHES,
    Net,
    assert_same_state,
    both_forms,
    both_namespaces,
    fitted,
    late_class,
    loader,
    shard_strategy,
    trainer,
)
from tests.support.logs import captured_log
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from tests.support.run_python import run_python
from torch_shard import ShardConfig, ShardError, errors
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


@pytest.mark.exhaustive
@both_forms
@pytest.mark.parametrize("receivers", [(0, 1), (1,)])
@ranks(2)
def test_slurms_signal_on_any_rank_saves_on_all_and_the_next_job_goes_on_from_there(
    rank, world_size, receivers, form, tmp_path
):
    patch, environment = slurm(rank, world_size, tmp_path)
    try:

        class Signalled(Net):
            def training_step(self, batch, index):
                if self.trainer.global_step == 2 and rank in receivers and not self.seen:
                    self.seen.append("once")
                    time.sleep(0.05 * rank)  # The ranks are not there at the same time.
                    os.kill(os.getpid(), signal.SIGUSR2)
                return super().training_step(batch, index)

        first, second = Signalled(), Net()
        options = {"plugins": [environment], "default_root_dir": tmp_path, "max_epochs": 2}
        t = trainer("lightning", world_size, shard_strategy(state_dict_type=form), **options)
        t.fit(first, same_batches(world_size))
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


@pytest.mark.parametrize("what", ["validate", *exhaustive("test", "predict"), "fit"])
@ranks(2)
def test_slurms_signal_in_an_evaluation_and_in_the_last_training_step_is_answered(rank, world_size, tmp_path, what):
    patch, environment = slurm(rank, world_size, tmp_path)
    step = {"fit": "training", "validate": "validation"}.get(what, what) + "_step"

    def late(self: Any, batch: Any, index: int) -> Any:
        if index == BATCHES - 1 and self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        return getattr(Net, step)(self, batch, index)

    try:
        module = type("Late", (Net,), {step: late})()
        strategy = shard_strategy(state_dict_type="sharded", async_save=True)
        t = trainer("lightning", world_size, strategy, plugins=[environment], default_root_dir=tmp_path)
        getattr(t, what)(module, loader(world_size))
        assert (tmp_path / "requeued").read_text() == "requeue 4321\n"
        # A folder has its name when it is whole: not only after the job was requeued.
        assert "hpc_ckpt_1.ckpt" in (tmp_path / "there").read_text().split()
        assert "_slurm_sigusr_handler_fn" not in vars(t._signal_connector)
    finally:
        patch.undo()


@pytest.mark.parametrize("moment", ["training", *exhaustive("agreement", "validation")])
@pytest.mark.parametrize("victims", [(1,), (0, 1), *exhaustive(((0,),))])
@ranks(2)
def test_sigterm_on_any_rank_ends_the_run_on_all_after_the_same_step(
    rank, world_size, victims, moment, tmp_path, monkeypatch
):
    """Only one machine is taken away, say. With DDP the rank that gets it and the others wait for each other."""
    steps: list[Any] = []

    class Steps(Net):
        def training_step(self, batch, index):
            if moment == "training" and rank in victims and index == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, index)

        def on_validation_start(self):
            if moment == "validation" and rank in victims:
                os.kill(os.getpid(), signal.SIGTERM)

    class Notes(Callback):
        def on_exception(self, trainer, module, exception):
            steps.append((type(exception), trainer.global_step, str(trainer.state.stage)))

    def while_ranks_agree(*args: Any) -> bool:
        asked.append(args)
        if moment == "agreement" and rank in victims and len(asked) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return any_rank(*args)

    asked: list[Any] = []
    monkeypatch.setattr(lightning_shard.trainer.sigterm, "any_rank", while_ranks_agree)
    module = Steps()
    callbacks = [Notes(), OnExceptionCheckpoint(tmp_path)]
    t = trainer("lightning", world_size, callbacks=callbacks, max_epochs=2, enable_checkpointing=True)
    with pytest.raises(SIGTERMException) as caught:
        t.fit(module, same_batches(world_size), loader(world_size))
    assert caught.value.code == 143
    during = "RunningStage.VALIDATING" if moment == "validation" else "RunningStage.TRAINING"
    assert steps == [(SIGTERMException, 6 if moment == "validation" else 3, during)]
    assert "_sigterm_notifier_fn" not in vars(t._signal_connector)
    if moment == "validation":
        return
    # What was saved then is whole.
    again, expected = Net(), Net()
    for each, path in ((again, tmp_path / "on_exception.ckpt"), (expected, None)):
        trainer("lightning", world_size, max_epochs=2).fit(each, same_batches(world_size), ckpt_path=path)
    assert_same_state(again.state_dict(), expected.state_dict())


# -- errors ---------------------------------------------------------------------------------------------------------------


class FailsIn(Callback):
    """Raises on rank 1, in one hook."""

    def __init__(self, hook):
        def fail(trainer, module, *args, **kwargs):
            if trainer.global_rank == 1 and (trainer.global_step == 3 or "step" not in hook):
                raise ZeroDivisionError("on purpose")

        setattr(self, hook, fail)


HOOKS = ["on_before_optimizer_step", "on_train_epoch_end", "on_save_checkpoint", "on_fit_start", "setup"]


@pytest.mark.parametrize("hook", quick(HOOKS, HOOKS[:1]))
@ranks(2, fresh=True, group_timeout=20, timeout=90)
def test_an_error_on_one_rank_is_its_error_and_ends_the_others(rank, world_size, hook, tmp_path):
    """A checkpoint that the exception in a step leads to does not hide it."""
    strategy = shard_strategy(config=ShardConfig(timeout=3.0))
    callbacks = [FailsIn(hook), ModelCheckpoint(dirpath=tmp_path)]
    callbacks += [OnExceptionCheckpoint(tmp_path)] if "step" in hook else []
    t = trainer("lightning", world_size, strategy, callbacks=callbacks, enable_checkpointing=True)
    started = time.monotonic()
    with pytest.raises((ZeroDivisionError, ShardError, RuntimeError)) as caught:
        t.fit(Net(), loader(world_size))
    assert time.monotonic() - started < 60
    errors, error = [], caught.value
    while error is not None:  # a traceback shows the first of them first
        errors.append(error)
        error = error.__context__
    assert any(isinstance(error, ZeroDivisionError) for error in errors) == (rank == 1), errors
    if rank == 0 and hook == "on_before_optimizer_step":  # a line of the user's, none of Lightning
        assert any(re.search(r"at \S*tests/lightning/\S+\.py:\d+", str(error)) for error in errors), errors


@pytest.mark.parametrize("step", ["validation_step", *exhaustive("training_step")])
@ranks(2)
def test_a_checkpoint_at_an_interrupt_within_a_step_is_that_of_ddp(world_size, step, tmp_path):
    def interrupted(self, batch, index):
        loss = self.loss(batch)
        if self.trainer.global_step == 6:
            raise KeyboardInterrupt
        return loss if step == "training_step" else None

    def run(strategy):
        module = type("Interrupted", (Net,), {step: interrupted})()
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
    t = pl.Trainer(accelerator="cpu", devices=2, strategy="shard", max_epochs=1, callbacks=[Says()], **off)
    t.fit(Net(), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=2))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("what", "victim", "first"),
    [
        ("raise", 0, "0 ZeroDivisionError"),
        ("SIGINT", 1, "1 KeyboardInterrupt"),
        ("SIGINT", -1, "KeyboardInterrupt"),
        ("SIGKILL", 1, ""),
    ],
)
def test_a_script_ends_on_all_ranks_with_a_failure_and_says_the_first_error_first(what, victim, first, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run_python(tmp_path / "train.py", what, victim, folder=tmp_path, expected=None, timeout=300)
    assert done.returncode != 0
    said = [line.removeprefix("ENDED ") for line in done.stdout.splitlines() if line.startswith("ENDED ")]
    assert first in (said or [""])[0], said
    if what == "raise":
        assert "ZeroDivisionError: on purpose" in done.stderr


# -- set-up fails: its error is raised, whatever state that left the module in ---------------------------------------------


class Unfilled(nn.Module):
    """A parameter that nothing initialises: it has no reset_parameters()."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"extra\.bias was on the meta device"),  # half of it is sharded by then
        ({"ignore": ["extra.*"]}, r"ignored parameter extra\.bias is on the meta device"),  # and is on meta in the end
    ],
)
@both_namespaces
@ranks(1, 2)
def test_set_up_that_fails_half_way_is_the_error_that_is_raised(world_size, namespace, settings, message):
    module = late_class(namespace, Unfilled)()
    with pytest.raises(errors.SetupError, match=message):
        trainer(namespace, world_size, shard_strategy(namespace, **settings)).fit(module, loader(world_size))
    assert torch_shard.engine_of(module) is None


class Breaks(LayerSync):
    def apply(self, model):
        return model

    def revert(self, model):
        raise ZeroDivisionError("reverting")


class Files(TorchCheckpointIO):
    closed = False

    def teardown(self):
        self.closed = True


@ranks(2)
def test_what_fails_in_teardown_after_an_error_is_logged_and_the_rest_of_teardown_runs(rank, world_size):
    files = Files()
    t = trainer("lightning", world_size, plugins=[Breaks(), files])
    with captured_log() as messages, pytest.raises(errors.SetupError, match="was on the meta device"):
        t.fit(late_class("lightning", Unfilled)(), loader(world_size))
    # The other ranks log errors only.
    assert rank > 0 or any("ZeroDivisionError: reverting" in message for message in messages)
    assert files.closed


@ranks(2)
def test_what_fails_in_teardown_after_a_good_run_is_raised():
    with pytest.raises(ZeroDivisionError, match="reverting"):
        fitted(Net(), plugins=[Breaks()])
