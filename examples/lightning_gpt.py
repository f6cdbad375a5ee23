"""Train a byte-level GPT on the text of Python's standard library, sharded with one argument.

    python examples/lightning_gpt.py                       two CPU ranks, or all GPUs
    python examples/lightning_gpt.py --preset 350M --strategy ddp     for comparison

The training runs on all ranks up to the last tenth of its steps and saves one ordinary Lightning
checkpoint. A second launch, on another number of ranks, resumes from it, finishes, measures the
held-out loss and writes some text. Exits with 1 unless that loss beats a table of byte pairs of
the same text by at least 0.3 nats per byte.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from gpt import GPT, PRESETS
from stdlib_text import StdlibText, bigram_loss
from torch import Tensor
from torch.utils.data import DataLoader

GLOBAL_BATCH = 16  # windows per step, whatever the number of ranks
HELD_OUT_WINDOWS = 512
MARGIN = 0.3  # nats per byte


class TrainBatches:
    """One rank's batches of the whole run: a loader whose position Lightning can restore."""

    def __init__(self, text: StdlibText, steps: int, rank: int, size: int, context: int) -> None:
        self.text, self.steps, self.rank, self.size = text, steps, rank, size
        self.context = context
        self.step = 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.step < self.steps:
            self.step += 1
            yield self.text.batch(self.step - 1, self.rank, self.size, self.context)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class LitGPT(L.LightningModule):
    """An ordinary LightningModule: nothing in it knows which strategy runs it."""

    def __init__(self, preset: str, steps: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.steps = steps
        self.model = GPT(PRESETS[preset])
        self.text = StdlibText()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss: Tensor = self.model(*batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        loss = self.model(*batch)
        self.log("val_loss", loss, prog_bar=True, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1)
        warm_up = max(1, self.steps // 10)

        def rate(step: int) -> float:
            cosine = 0.55 + 0.45 * math.cos(math.pi * step / self.steps)
            return min((step + 1) / warm_up, cosine)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def train_dataloader(self) -> TrainBatches:
        size = max(1, GLOBAL_BATCH // self.trainer.world_size)
        context = self.model.config.context
        return TrainBatches(self.text, self.steps, self.global_rank, size, context)

    def val_dataloader(self) -> DataLoader[Any]:
        # This rank's share, equal on all ranks: every rank makes the same number of forwards.
        windows = self.text.held_out_windows(HELD_OUT_WINDOWS, self.model.config.context)
        size = max(1, GLOBAL_BATCH // self.trainer.world_size)
        mine = (w[self.global_rank :: self.trainer.world_size].split(size) for w in windows)
        return DataLoader(list(zip(*mine, strict=True)), batch_size=None)

    def predict_step(self, batch: Tensor, _: int) -> Tensor:
        return self.model.generate(batch, 300)

    def predict_dataloader(self) -> DataLoader[Any]:
        # The same prompt on all ranks: a sharded forward is collective.
        return DataLoader([torch.tensor([list(b"def main(")])], batch_size=None)


class Report(L.Callback):
    """Prints the plan before training, then speed, and what every rank holds after a step."""

    def __init__(self) -> None:
        self.began = 0.0
        self.first = 0
        self.held = torch.zeros(3)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        engine = getattr(trainer.strategy, "engine", None)
        if engine is not None and trainer.is_global_zero:
            print(engine.plan.table(), flush=True)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        assert isinstance(module, LitGPT)
        if not self.began:  # the first step also warms up
            self.began, self.first = time.perf_counter(), trainer.global_step
            return
        done = trainer.global_step - self.first
        if trainer.global_step % 50 == 0 or trainer.global_step == trainer.max_steps:
            windows = batch[0].shape[0] * trainer.world_size
            speed = done * windows * module.model.config.context / (time.perf_counter() - self.began)
            loss = trainer.callback_metrics["loss"].item()
            if trainer.is_global_zero:
                # A line of its own: the progress bar rewrites the current one.
                print(
                    f"\nstep {trainer.global_step}: loss {loss:.3f} nats per byte, {speed:,.0f} tokens/s",
                    flush=True,
                )
        if trainer.global_step == trainer.max_steps:
            self.report_memory(trainer, module)

    def report_memory(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Print what every rank holds right after a step, gradients included. Call on all ranks."""
        parameters = list(module.parameters())
        held = [
            held_bytes(parameters),
            held_bytes([p.grad for p in parameters if p.grad is not None]),
            held_bytes(
                [
                    value
                    for optimizer in trainer.optimizers
                    for state in optimizer.state.values()
                    for value in state.values()
                    if isinstance(value, Tensor)
                ]
            ),
        ]
        ranks = [held] * trainer.world_size
        if dist.is_initialized():
            dist.all_gather_object(ranks, held)
        if not trainer.is_global_zero:
            return
        replica = sum(p.numel() * p.element_size() for p in parameters)
        rows = [(f"rank {rank}", row) for rank, row in enumerate(ranks)]
        rows.append(("DDP, every rank", [replica, replica, 2 * replica]))
        print("\nMiB held after a step  parameters  gradients  optimizer    total")
        for name, row in rows:
            mib = [b / 2**20 for b in (*row, sum(row))]
            print(f"{name:<21}{mib[0]:>12.2f}{mib[1]:>11.2f}{mib[2]:>11.2f}{mib[3]:>9.2f}")
        print(flush=True)


def held_bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of memory behind `tensors` on this rank, shared memory counted once."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def make_trainer(args: argparse.Namespace, last: int) -> L.Trainer:
    return L.Trainer(
        strategy=args.strategy,
        accelerator=args.accelerator,
        devices=args.devices,
        max_steps=last,
        use_distributed_sampler=False,  # the loaders above give each rank its own share
        gradient_clip_val=1.0,
        callbacks=[Report()],
        log_every_n_steps=10,
        num_sanity_val_steps=0,
        limit_val_batches=0 if args.phase == "train" else 1.0,
        enable_checkpointing=False,
        logger=False,
        default_root_dir=args.dir,
    )


def train(args: argparse.Namespace, last: int, checkpoint: Path) -> int:
    """First launch: train on all ranks and save."""
    trainer = make_trainer(args, last)
    trainer.fit(LitGPT(args.preset, args.steps))
    trainer.save_checkpoint(checkpoint)
    if trainer.is_global_zero:
        size = checkpoint.stat().st_size / 2**20
        print(f"saved step {trainer.global_step} from {trainer.world_size} rank(s): {size:.1f} MiB")
    return 0


def resume(args: argparse.Namespace, checkpoint: Path) -> int:
    """Second launch: finish on another number of ranks, judge the result, write some text."""
    trainer = make_trainer(args, args.steps)
    module = LitGPT(args.preset, args.steps)
    trainer.fit(module, ckpt_path=checkpoint)
    held_out = trainer.callback_metrics["val_loss"].item()
    (sample,) = trainer.predict(module)
    if not trainer.is_global_zero:
        return 0
    print(f"\nsample:\n{bytes(sample[0].tolist()).decode(errors='replace')}\n")
    windows = module.text.held_out_windows(HELD_OUT_WINDOWS, module.model.config.context)
    bigram = bigram_loss(module.text.bigram, *windows)
    better = bigram - held_out
    print(
        f"held-out loss {held_out:.3f} nats per byte, byte bigram {bigram:.3f}: "
        f"{better:.3f} better; {'at least' if better >= MARGIN else 'LESS THAN'} {MARGIN}"
    )
    return 0 if better >= MARGIN else 1


def launch(args: argparse.Namespace) -> int:
    """Run both launches, each in processes of its own."""
    gpus = torch.cuda.device_count()
    devices = args.devices or gpus or 2
    accelerator = "gpu" if gpus else "cpu"
    other = 1 if devices > 1 else 2
    phases = [("train", accelerator, devices)]
    # Two ranks need two devices: with a single GPU the resumed ranks run on the CPU.
    phases.append(("resume", accelerator if other <= max(gpus, 1) else "cpu", other))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for phase, where, ranks in phases:
            print(f"\n== {phase}: {ranks} rank(s), {where}, strategy {args.strategy!r}", flush=True)
            threads = max(1, (os.cpu_count() or 1) // ranks)
            code = subprocess.run(
                [
                    *(sys.executable, __file__, "--phase", phase, "--dir", folder),
                    *("--accelerator", where, "--devices", str(ranks), "--preset", args.preset),
                    *("--steps", str(args.steps), "--strategy", args.strategy),
                ],
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            ).returncode
            if code:
                return code
    print(f"done in {time.perf_counter() - began:.0f} s")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--devices", type=int, help="ranks to train on; default all GPUs, or 2")
    parser.add_argument("--strategy", default="shard", help="any of Lightning's, to compare")
    parser.add_argument("--phase", choices=["train", "resume"], help=argparse.SUPPRESS)
    parser.add_argument("--dir", help=argparse.SUPPRESS)
    parser.add_argument("--accelerator", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase is None:
        return launch(args)
    torch.set_float32_matmul_precision("high")
    L.seed_everything(0, verbose=False)
    checkpoint = Path(args.dir) / "gpt.ckpt"
    if args.phase == "train":
        return train(args, args.steps - max(1, args.steps // 10), checkpoint)
    return resume(args, checkpoint)


if __name__ == "__main__":
    sys.exit(main())
