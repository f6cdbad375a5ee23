"""Where a model comes from and where it goes beside the host's steps: checkpoints, other ranks, files, averages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torch_shard
from tests.checkpoint.test_asynchronous import writing
from tests.offload.models import (
    HALF,
    OFFLOADS,
    OPTIMIZERS,
    Model,
    Training,
    alike,
    chosen,
    held_up,
    hold,
    inputs,
    loss_of,
    same,
    steps,
)
from tests.support.marks import one_at_a_time
from tests.support.ranks import ranks


@one_at_a_time(precision=[None, HALF], offload=OFFLOADS, optimizer=["AdamW", "SGD"])
@ranks(2, exhaustive=(1, 3))
def test_a_save_under_way_while_steps_are_queued_has_what_was_there_at_the_call(
    rank, tmp_path, offload, optimizer, precision
):
    t = Training(rank, chosen(offload, tmp_path / "disk"), optimizer, precision=precision)
    plain = Training(rank, None, optimizer, precision=precision)
    wanted = []
    for training in (t, plain):
        training.scheduler.step = lambda: None
    for number in range(4):
        plain.step(number)
        wanted.append(plain.state())
    with writing() as event:
        for number in range(2):
            t.step(number)
        loss_of(t.model, inputs(rank, 20)).backward()
        hold(t, 0.05)
        t.optimizer.step()
        pending = t.engine.save(tmp_path / "saved", optimizer=t.optimizer, asynchronous=True)
        t.optimizer.zero_grad()
        loss_of(t.model, inputs(rank, 30)).backward()
        with held_up(t):
            t.optimizer.step()
            assert not pending.done()
            event.set()
            pending.wait()  # what it writes is not what the host will write to
    again = Training(rank, None, optimizer, precision=precision)
    again.engine.load(tmp_path / "saved", optimizer=again.optimizer)
    same(again.state(), wanted[2])
    same(t.state(), wanted[3])


# -- other numbers of ranks -----------------------------------------------------------------------------------------------


WAYS = [("cpu", "kept"), ("kept", "cpu"), (None, "disk"), ("all on disk", "all on disk"), ("cpu", None)]


@one_at_a_time(way=WAYS, optimizer=["AdamW", "SGD"])
@ranks(3)
def test_a_checkpoint_goes_from_three_ranks_to_two_and_on(rank, tmp_path, optimizer, way):
    first, second = (chosen(name, tmp_path / f"disk {n}") for n, name in enumerate(way))

    def train(one, other, path):
        seen = []
        pair = dist.new_group([0, 1])
        for setting, count, mesh in (
            (one, 3, None),
            (other, 3, DeviceMesh.from_group(pair, "cpu") if rank < 2 else ()),
        ):
            if mesh == ():
                break
            model = Model()
            engine = torch_shard.shard(model, torch_shard.ShardConfig(offload=setting, precision=HALF), mesh=mesh)
            own = OPTIMIZERS[optimizer](model)
            if mesh is not None:
                engine.load(path, optimizer=own)
            for number in range(count):
                loss = loss_of(model, inputs(rank % 2, number))
                loss.backward()
                seen.append(loss.item())
                own.step()
                own.zero_grad()
            if mesh is None:
                engine.save(path, optimizer=own)
            else:
                return seen, engine.state_dict(form="full"), engine.optim_state_dict(own)
        return seen

    same(train(None, None, tmp_path / "plain"), train(first, second, tmp_path / "offloaded"))


# -- where a model comes from -------------------------------------------------------------------------------------------


@one_at_a_time(source=["files", "meta", "one rank's"], offload=OFFLOADS)
@ranks(2, exhaustive=(1, 3))
def test_a_model_without_memory(rank, tmp_path, offload, source):
    if rank == 0:
        torch.save({name: v.clone() for name, v in Model().state_dict().items()}, tmp_path / "model.pt")
    dist.barrier()

    def make():
        if source == "one rank's" and rank == 0:
            return Model()
        with torch.device("meta"):
            model = Model()
        if source == "files":
            torch_shard.from_files(model, tmp_path / "model.pt")
        return model

    def train(offload):
        torch.manual_seed(5)
        return steps(Training(rank, offload, make=make, precision=HALF), clip=0.5)

    alike(train, chosen(offload, tmp_path / "disk"))


# -- averages -------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@one_at_a_time(kind=["ema", "mean"], offload=OFFLOADS)
@ranks(2, exhaustive=(1,))
def test_torchs_averages_of_the_weights(rank, tmp_path, kind, offload):
    def train(offload):
        t = Training(rank, offload, precision=HALF)
        average = AveragedModel(t.model, multi_avg_fn=get_ema_multi_avg_fn(0.9) if kind == "ema" else None)
        for number in range(4):
            with torch.no_grad():
                t.seen.append(loss_of(average, inputs(rank, 50 + number)).item())
            t.step(number)
            average.update_parameters(t.model)  # while the host steps
        return t.seen, *t.state(), [p.full_tensor() for p in average.parameters()]

    alike(train, chosen(offload, tmp_path))
