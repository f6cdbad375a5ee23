"""A run that SIGTERM ends exits with 143, so that a scheduler does not take it for a run that has come to its end."""

from __future__ import annotations

import pytest

from tests.support.marks import exhaustive
from tests.support.run_python import run_python

SCRIPT = """
import os, signal, sys, time
import lightning.pytorch as pl
import torch

victim, late = map(int, sys.argv[1:])


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def training_step(self, batch, index):
        if (index, self.global_rank) == (3, victim):
            os.kill(os.getpid(), signal.SIGTERM)
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Ends(pl.Callback):
    def on_exception(self, trainer, module, exception):
        print("ENDED", trainer.global_rank, type(exception).__name__, flush=True)

    def teardown(self, trainer, module, stage):
        if trainer.is_global_zero:
            time.sleep(late)  # Lightning looks every 5 seconds whether the other process has ended


if __name__ == "__main__":
    off = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    t = pl.Trainer(accelerator="cpu", devices=2, strategy="shard", max_epochs=1, callbacks=[Ends()], **off)
    t.fit(Net(), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=2))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("victim", "late"), [(1, 12), *exhaustive((0, 0))])
def test_a_script_that_is_told_to_end_does_so_on_all_ranks_with_the_status_of_sigterm(tmp_path, victim, late):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run_python(script, victim, late, folder=tmp_path, expected=143, timeout=300)
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("ENDED "))
    assert said == ["ENDED 0 SIGTERMException", "ENDED 1 SIGTERMException"]
