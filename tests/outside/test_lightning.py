"""Lightning's own examples, and lightning-hydra-template, a widely copied layout of a project."""

from __future__ import annotations

import pytest

from .support.program import Program, Switch
from .support.sources import Fetched, Outside

# The programs start their other ranks themselves, as Lightning does without torchrun.
LIGHTNING = Switch("-m lightning_shard", (), ("-m", "lightning_shard"))
_FABRIC_RUN = ("--accelerator=cpu", "--devices={ranks}", "--strategy=ddp")
FABRIC = Switch(
    "-m lightning_shard fabric run",
    ("-m", "lightning.fabric.cli", *_FABRIC_RUN),
    ("-m", "lightning_shard", "fabric", "run", *_FABRIC_RUN),
)
_TRAINER = (
    "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.max_epochs=2",
    "--trainer.limit_train_batches=6", "--trainer.limit_val_batches=3", "--trainer.limit_test_batches=3",
    "--trainer.limit_predict_batches=2", "--trainer.log_every_n_steps=1",
)  # fmt: skip
TEMPLATE = Fetched("ashleve/lightning-hydra-template", "bddbc24b82ab", "src/train.py", "5427c445366be021")
# The example's own paths lie beside its source; its model has a bias before each batch normalization, of which Adam with a larger
# epsilon makes no steps.
_TEMPLATE = (
    "data.train_val_test_split=[1000,200,200]", "data.batch_size=64", "trainer.max_epochs=2", "seed=1",
    "paths.data_dir=.", "hydra.run.dir=out", "+model.optimizer.eps=1e-3", "+trainer.limit_train_batches=8",
)  # fmt: skip
# It is older than torch.load's weights_only, and its checkpoints hold the functions that have made its optimizer.
_OLD = {"MADE_MNIST": "1200", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}

PROGRAMS = [
    Program(
        "Lightning's autoencoder.py: images sampled on rank 0, tested with the best checkpoint",
        Outside("lightning/autoencoder.py", "fbd691666054c1ac"),
        (*_TRAINER, "--model.learning_rate=1e-3"),
        LIGHTNING,
        stand_ins=["made_mnist"],
    ),
    Program(
        "Lightning's backbone_image_classifier.py: metrics of all ranks, tested with the best checkpoint",
        Outside("lightning/backbone_image_classifier.py", "a34c1eda8065de16"),
        _TRAINER,
        LIGHTNING,
        stand_ins=["made_mnist"],
    ),
    Program(
        "Lightning's train_fabric.py: rank 0 goes first, metrics, saved",
        Outside("lightning/train_fabric.py", "4b9430c1975b7058"),
        ("--batch-size=25", "--epochs=2", "--save-model", "--log-interval=1"),
        FABRIC,
        stand_ins=["made_mnist"],
        environment={"MADE_MNIST": "600"},
    ),
    Program(
        "lightning-hydra-template's train.py, trainer=ddp_sim: ranks are spawned",
        TEMPLATE,
        (*_TEMPLATE, "trainer=ddp_sim", "logger=tensorboard"),
        LIGHTNING,
        stand_ins=["made_mnist"],
        environment=_OLD,
    ),
    Program(
        "lightning-hydra-template's train.py, trainer.strategy=ddp: Hydra in each rank",
        TEMPLATE,
        (*_TEMPLATE, "logger=csv", "trainer=cpu", "trainer.devices=2", "+trainer.strategy=ddp"),
        LIGHTNING,
        stand_ins=["made_mnist"],
        environment=_OLD,
    ),
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_program(program, outside):
    outside.check(program)
