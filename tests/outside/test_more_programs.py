"""More programs: ranks with work of their own, several models, optimizers that change weights, losses with parameters.

``schedule_free`` needs the package schedulefree, and Lightning's programs of reinforcement learning need gymnasium.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .support import makers
from .support.makers import words
from .support.program import ACCELERATE, Program, Tolerance
from .support.sources import Fetched
from .test_accelerate import KEYS, example, on_paraphrases, paraphrases
from .test_diffusers import INSTANCES, instances, text_to_image
from .test_diffusers import example as diffusers_example
from .test_lightning import FABRIC, LIGHTNING
from .test_sentence_transformers import RANKED, WRITTEN_TWICE, similarity
from .test_sentence_transformers import example as sentences_example


def lightning(path: str, digest: str) -> Fetched:
    return Fetched("Lightning-AI/pytorch-lightning", "2.6.5", f"examples/{path}", digest)


def book(folder: Path) -> None:
    """Make WikiText2 as Lightning's demos read it: of its 4080 blocks of 35 words programs keep 4000 for evaluations."""
    (folder / "work/data").mkdir(parents=True)
    (folder / "work/data/wikitext-2.txt").write_text("\n".join(words(n, 34) for n in range(4081)))


def pets(folder: Path) -> None:
    """Make many copies of one picture, so that both ranks see one batch.

    DDP averages no gradients of parameters that were frozen when it was made: each rank trains its own, once they thaw.
    """
    for part in ("train", "validation"):
        found = folder / f"work/data/cats_and_dogs_filtered/{part}/cats"
        makers.images(found, 12)
        for path in found.glob("*.png"):
            path.write_bytes((found / "000.png").read_bytes())


def old_gym(folder: Path) -> None:
    """Make a module `gym` whose environments are gymnasium's behind the interface of gym before 0.26."""
    (folder / "work").mkdir()
    (folder / "work/gym.py").write_text(
        """import gymnasium
from gymnasium import Env, spaces

class _Old(gymnasium.Wrapper):
    begun = False

    def reset(self):
        seed, self.begun = None if self.begun else 0, True
        if seed is not None:
            self.action_space.seed(seed)
        return self.env.reset(seed=seed)[0]

    def step(self, action):
        state, reward, terminated, truncated, info = self.env.step(action)
        return state, reward, terminated or truncated, info

def make(name):
    return _Old(gymnasium.make(name.replace("-v0", "-v1")))
"""
    )


def quantized(folder: Path) -> None:
    makers.images(folder / "images", 16)
    channels = {"block_out_channels": [32, 32], "norm_num_groups": 32, "num_vq_embeddings": 32, "vq_embed_dim": 4}
    model = {
        **channels, "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2,
        "in_channels": 3, "out_channels": 3, "latent_channels": 4, "layers_per_block": 1, "norm_type": "spatial",
    }  # fmt: skip
    makers.json_file(folder / "model/config.json", {"_class_name": "VQModel", **model})
    found = {"_class_name": "Discriminator", "in_channels": 3, "cond_channels": 0, "hidden_channels": 64, "depth": 4}
    makers.json_file(folder / "discriminator/config.json", found)


def one_picture(folder: Path) -> None:
    """Make many copies of one picture, so that both ranks see one batch: see below."""
    instances(folder)
    for path in (folder / "images").glob("*.png"):
        path.write_bytes((folder / "images/000.png").read_bytes())


def classified(folder: Path) -> None:
    similarity(folder, rows=8)
    makers.bert(folder / "work/google-bert/bert-base-uncased")
    for split, count in (("train", 10000), ("dev", 1000)):
        found = [{"premise": words(n), "hypothesis": words(n + n % 3), "label": n % 3} for n in range(count)]
        makers.rows(folder / f"work/sentence-transformers/all-nli/pair-class/{split}.jsonl", found)
    lines = "".join(f"  - split: {split}\n    path: pair-class/{split}.jsonl\n" for split in ("train", "dev"))
    readme = f"---\nconfigs:\n- config_name: pair-class\n  data_files:\n{lines}---\n"
    (folder / "work/sentence-transformers/all-nli/README.md").write_text(readme)


# The programs of Lightning name devices themselves.
_FABRIC_OF_TWO = {"LT_ACCELERATOR": "cpu", "LT_DEVICES": "2", "LT_STRATEGY": "ddp"}


def trainer(strategy: str = "ddp", **settings: object) -> dict[str, str]:
    """Return the variables that give a Trainer settings, besides those of the stand-in `two_cpus`."""
    return {"TWO_CPUS": strategy, **{f"PL_TRAINER_{name.upper()}": str(value) for name, value in settings.items()}}


PROGRAMS = [
    on_paraphrases(
        "accelerate by_feature/local_sgd",
        example("by_feature/local_sgd.py", "683186d8d415d78b"),
        refused="LocalSGD: each rank trains a copy of its own between two averages",
    ),
    Program(
        "accelerate by_feature/schedule_free",
        example("by_feature/schedule_free.py", "2abb18fe5e6f4107", needs=["schedulefree"]),
        (), ACCELERATE, prepare=paraphrases, stand_ins=["local_metrics"], tolerance=KEYS, imports_from=["."],
    ),
    on_paraphrases(
        "accelerate by_feature/profiler", example("by_feature/profiler.py", "a0262ea7d0852b17"), "--cpu", "--record_shapes"
    ),
    on_paraphrases(
        "accelerate by_feature/checkpointing, then resumed",
        example("by_feature/checkpointing.py", "f0923cb0e95de00d"),
        "--checkpointing_steps=epoch", "--output_dir=out",
        then=[["--resume_from_checkpoint=out/epoch_1", "--output_dir=out"]],
    ),
    on_paraphrases(
        "accelerate by_feature/automatic_gradient_accumulation",
        example("by_feature/automatic_gradient_accumulation.py", "45b6ca8096f0adba"),
    ),
    on_paraphrases(
        "accelerate by_feature/multi_process_metrics", example("by_feature/multi_process_metrics.py", "ba2d02f099ecc3e6")
    ),
    on_paraphrases(
        "accelerate by_feature/tracking",
        example("by_feature/tracking.py", "b53b5c1e0e186d5a"), "--with_tracking", "--project_dir=logs",
    ),
    Program(
        "diffusers train_vqgan: gradients of one weight, a penalty on gradients, spectral norm, an average, rank 0 saves",
        diffusers_example("vqgan/train_vqgan.py", "fa266f6500d44585"),
        (
            "--train_data_dir={data}/images", "--model_config_name_or_path={data}/model",
            "--discriminator_config_name_or_path={data}/discriminator", "--validation_images", "{data}/images/000.png",
            "--output_dir=out", "--resolution=32", "--train_batch_size=2", "--max_train_steps=8", "--learning_rate=1e-3",
            "--discr_learning_rate=1e-3", "--lr_warmup_steps=0", "--use_ema", "--checkpointing_steps=4",
            "--validation_steps=4", "--log_steps=2", "--log_grad_norm_steps=3", "--timm_model_backend=test_resnet",
            "--timm_model_layers=layer1", "--timm_model_offset=3",
        ),
        ACCELERATE, prepare=quantized, stand_ins=["untrained_timm"],
        refused="waits in linalg_vector_norm of the sharded",  # it logs norms of gradients on rank 0 alone
    ),
    Program(
        "diffusers train_custom_diffusion: model.module, of a model that is not wrapped here",
        diffusers_example("custom_diffusion/train_custom_diffusion.py", "b9e4a85acdeefe7a"),
        text_to_image(
            "--instance_prompt=a <c> b", "--modifier_token=<c>", "--initializer_token=a", "--dataloader_num_workers=0",
            "--noaug", "--lr_warmup_steps=0", data=INSTANCES,
        ),
        ACCELERATE, prepare=one_picture, refused="object has no attribute 'module'",
    ),
    Program(
        "sentence-transformers training_nli (SoftmaxLoss, whose own parameters no wrapper averages)",
        sentences_example("sentence_transformer/training/nli/training_nli.py", "c8837c9a6ebd87c5"),
        (), ACCELERATE, names_folders_by_second=True, not_compared=WRITTEN_TWICE, prepare=classified,
        stand_ins=["no_uploads", "no_fp16"], tolerance=RANKED,
    ),
    Program(
        "sentence-transformers adaptive_layer_sts (AdaptiveLayerLoss, which calls layers of the model by itself)",
        sentences_example("sentence_transformer/training/adaptive_layer/adaptive_layer_sts.py", "6cece036ca619bf6"),
        (), ACCELERATE, names_folders_by_second=True, not_compared=WRITTEN_TWICE, prepare=similarity,
        stand_ins=["no_uploads", "no_fp16"], tolerance=RANKED,
    ),
    Program(
        "Lightning's dcgan/train_fabric.py: two models, gradients of one kept through the other's backward",
        lightning("fabric/dcgan/train_fabric.py", "2d272936ab867407"),
        (), LIGHTNING, stand_ins=["made_faces", "script_clock"], environment={**_FABRIC_OF_TWO, "MADE_FACES": "120"},
        tolerance=Tolerance(
            losses=(0.0, 0.05), pixels=16,
            reason="a GAN amplifies rounding: on two threads in place of one, DDP's losses differ by 0.02, its pixels by 9",
        ),
    ),
    Program(
        "Lightning's kfold_cv/train_fabric.py: five models",
        lightning("fabric/kfold_cv/train_fabric.py", "8a9a19347c06cd7c"),
        ("--batch-size=50", "--epochs=2", "--save-model"),
        FABRIC, stand_ins=["made_mnist"], environment={"MADE_MNIST": "500"},
    ),
    Program(
        "Lightning's language_model/train.py: gradients clipped",
        lightning("fabric/language_model/train.py", "80f1547b28d91690"), (), FABRIC, prepare=book,
    ),
    Program(
        "Lightning's basics/transformer.py: gradients clipped, tested",
        lightning("pytorch/basics/transformer.py", "417e7ceb2e0611d7"),
        # Its steps amplify rounding: on two threads in place of one, DDP's losses differ by 0.002 after 12 steps.
        (), LIGHTNING, stand_ins=["two_cpus"], environment=trainer(limit_val_batches=3, max_steps=4), prepare=book,
        tolerance=Tolerance(files=(1e-5, 1e-5), reason="the steps amplify rounding"),
    ),
    Program(
        "Lightning's generative_adversarial_net.py: optimizers toggled by hand, images on every rank",
        lightning("pytorch/domain_templates/generative_adversarial_net.py", "47dba983b4f5fca1"),
        (), LIGHTNING, stand_ins=["two_cpus", "made_mnist"],
        environment={
            "MADE_MNIST": "5600", **trainer("ddp_find_unused_parameters_true", max_epochs=2, limit_train_batches=4)
        },
        tolerance=Tolerance(
            noise={"*generator.model.[258].bias": 1e-4, "*.running_mean": 1e-4}, reason="Adam, and biases before normalizations"
        ),
    ),
    Program(
        "Lightning's reinforce_learn_Qnet.py: a target network that is never trained, loaded within the training step",
        lightning("pytorch/domain_templates/reinforce_learn_Qnet.py", "97c9bcb38efab2cb"),
        (), LIGHTNING, stand_ins=["two_cpus"], imports_from=["."], prepare=old_gym,
        environment=trainer("ddp_find_unused_parameters_true", max_epochs=4),
    ),
    Program(
        "Lightning's reinforce_learn_ppo.py: trajectories played while batches are loaded",
        lightning("pytorch/domain_templates/reinforce_learn_ppo.py", "d656b5744a69a92f"),
        ("--steps_per_epoch=256", "--batch_size=64"),
        LIGHTNING, stand_ins=["two_cpus"], imports_from=["."], prepare=old_gym,
        environment=trainer("ddp_find_unused_parameters_true", max_epochs=3),
    ),
    Program(
        "Lightning's computer_vision_fine_tuning.py: parameters thawed and added to the optimizer in the middle",
        lightning("pytorch/domain_templates/computer_vision_fine_tuning.py", "a8070a4d188e9d03"),
        (
            "fit", "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.max_epochs=3",
            "--finetuning.milestones=[1,2]", "--data.batch_size=2", "--model.lr=1e-5", "--trainer.log_every_n_steps=1",
        ),
        LIGHTNING, stand_ins=["untrained", "no_archives"], prepare=pets,
        tolerance=Tolerance(
            files=(1e-4, 1e-5), noise={"*optimizer_states*": 0.02},
            reason="gradients of a new ResNet-50 amplify rounding: on two threads in place of one, DDP's differ by twice as much",
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_program(program, outside):
    outside.check(program)
