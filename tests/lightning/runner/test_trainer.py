"""Programs with a Trainer that name their strategy: under the runner they train sharded, with the numbers of DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.runner.support import RUNNER, TRAINER, run, script
from tests.lightning.support import assert_alike
from tests.support.marks import exhaustive

NAMES = ("ddp", "fsdp", "deepspeed_stage_2_offload", "auto")
INSTANCES = (
    'FSDPStrategy(auto_wrap_policy={torch.nn.Linear}, sharding_strategy="HYBRID_SHARD", device_mesh=(1, 2), cpu_offload=True)',
    "FSDPStrategy(activation_checkpointing_policy={torch.nn.Sequential}, limit_all_gathers=True)",
    "DDPStrategy(find_unused_parameters=True, static_graph=True)",
    "DeepSpeedStrategy(stage=3, offload_parameters=True)",
    "ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)",
)
OURS = {
    "lightning.pytorch": "lightning_shard.run.for_lightning",
    "pytorch_lightning": "lightning_shard.run.for_pytorch_lightning",
}


def assert_equal_but_for_the_class(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    left_out = {"class", "is"}
    assert_alike(
        {name: value for name, value in found.items() if name not in left_out},
        {name: value for name, value in wanted.items() if name not in left_out},
    )


def assert_same_checkpoints(folder: Path, other: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in other.iterdir()) and "last.ckpt" in names
    found, wanted = (torch.load(place / "last.ckpt", weights_only=False) for place in (folder, other))
    for key in ("state_dict", "optimizer_states", "loops", "lr_schedulers", "epoch", "global_step"):
        assert_alike(found[key], wanted[key], key)


@pytest.mark.exhaustive
@pytest.mark.parametrize("namespace", ["lightning.pytorch", *exhaustive("pytorch_lightning")])
def test_programs_train_with_the_numbers_checkpoints_and_answers_of_ddp(tmp_path, namespace):
    path = script(tmp_path, TRAINER, namespace=namespace)
    (wanted,) = run(path, tmp_path / "ddp", "ddp", folder=tmp_path)
    assert wanted["class"] == f"{namespace}.strategies.ddp" and wanted["ranks"] == 2
    all_found = run(*RUNNER, path, tmp_path / "ours", *NAMES, *INSTANCES, folder=tmp_path)
    assert len(all_found) == len(NAMES) + len(INSTANCES)
    for number, found in enumerate(all_found):
        assert found["class"] == OURS[namespace] and found["is"] == [True, False, False, False]
        assert_equal_but_for_the_class(found, wanted)
        assert_same_checkpoints(tmp_path / "ours" / str(number), tmp_path / "ddp" / "0")


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_ranks_that_multiprocessing_starts_give_the_answers_and_numbers_of_ddp(tmp_path, strategy):
    path = script(tmp_path, TRAINER, namespace="lightning.pytorch")
    (wanted,) = run(path, tmp_path / "ddp", strategy, folder=tmp_path)
    (found,) = run(*RUNNER, path, tmp_path / "ours", strategy, folder=tmp_path)
    assert found["class"] == OURS["lightning.pytorch"]
    assert_equal_but_for_the_class(found, wanted)
    assert_same_checkpoints(tmp_path / "ours" / "0", tmp_path / "ddp" / "0")


@pytest.mark.exhaustive
def test_under_torchrun_and_as_a_module_the_numbers_are_the_same(tmp_path):
    path = script(tmp_path, TRAINER, namespace="lightning.pytorch")
    (wanted,) = run(path, tmp_path / "ddp", "ddp", folder=tmp_path)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", 29741)
    (found,) = run(*torchrun, *RUNNER, path, tmp_path / "torchrun", "ddp", folder=tmp_path)
    assert_equal_but_for_the_class(found, wanted)
    (found,) = run(*RUNNER, "-m", "train", tmp_path / "module", "ddp", folder=tmp_path)
    assert found["class"] == OURS["lightning.pytorch"]
    assert_equal_but_for_the_class(found, wanted)


@pytest.mark.exhaustive
def test_a_compiled_module_trains_as_with_ddp(tmp_path):
    # Without self.log, which torch's compiler does not take in Lightning 2.6 either.
    text = TRAINER.replace("t.fit(net,", 't.fit(torch.compile(net, backend="eager"),').replace("self.log(", "str((")
    text = text.replace("sync_dist=True)", "True))").replace(
        "sync_dist=isinstance(self.trainer.strategy, DDPStrategy))", "0))"
    )
    text = text.replace(', monitor="val"', "").replace(', ckpt_path="last")[0]["val"]', ")")
    path = script(tmp_path, text, namespace="lightning.pytorch")
    (wanted,) = run(path, tmp_path / "ddp", "ddp", folder=tmp_path)
    (found,) = run(*RUNNER, path, tmp_path / "ours", "ddp", folder=tmp_path)
    assert found["class"] == OURS["lightning.pytorch"]
    assert_equal_but_for_the_class(found, wanted)
