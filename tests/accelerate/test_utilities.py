"""What Accelerate does beside models is unchanged: metrics, samplers, trackers, seeds, triggers, helpers of the process."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import (
    DataLoaderConfiguration,
    ProfileKwargs,
    broadcast_object_list,
    find_executable_batch_size,
    gather_object,
    set_seed,
)
from torch import nn

from accelerate_shard import ShardPlugin
from tests.accelerate.helpers import (
    BOTH,
    FEATURES,
    OURS,
    STOCK,
    accelerator,
    assert_same,
    differs_between_ranks,
    loader,
    loss_of,
    net,
    sgd,
    train,
)
from tests.ranks import ranks
from torch_shard.errors import MissingRankError

UNEVEN = {"dataloader_config": DataLoaderConfiguration(even_batches=False)}


def evaluate(acc, model, data):
    model.eval()
    outputs, targets = [], []
    with torch.no_grad():
        for x, y in data:
            logits, labels = acc.gather_for_metrics((model(x), y))
            outputs.append(logits)
            targets.append(labels)
    return torch.cat(outputs), torch.cat(targets)


@ranks(2)
def test_gather_for_metrics_gives_each_example_once():
    """Before training, and with a last batch that is not full."""
    results = []
    for kind in BOTH:
        with accelerator(kind) as acc:
            model, data = acc.prepare(net(), loader(21))
            results.append(evaluate(acc, model, data))
    assert len(results[1][1]) == 21
    torch.testing.assert_close(results[1], results[0])


@ranks(2)
def test_skip_first_batches_goes_on_where_an_epoch_was_left():
    results = []
    for kind in BOTH:
        with accelerator(kind) as acc:
            model, data = acc.prepare(net(), loader(40))
            losses = [loss_of(model, batch).item() for batch in acc.skip_first_batches(data, 2)]
            results.append(losses)
    assert len(results[1]) == 3
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=0)


class Notes(GeneralTracker):
    """A tracker of the user's."""

    name = "notes"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[object] = []

    @property
    def tracker(self):
        return self.lines

    @on_main_process
    def store_init_configuration(self, values):
        self.lines.append(values)

    @on_main_process
    def log(self, values, step=None):
        self.lines.append((step, values))


@ranks(2)
def test_trackers_log_on_the_main_process(rank):
    notes = Notes()
    with accelerator(log_with=notes) as acc:
        acc.init_trackers("project", config={"lr": 0.1})
        model, data = acc.prepare(net(), loader(8))
        for step, batch in enumerate(data):
            acc.log({"loss": loss_of(model, batch).item()}, step=step)
        if acc.is_main_process:
            assert acc.get_tracker("notes", unwrap=True) is notes.lines
    assert len(notes.lines) == (2 if rank == 0 else 0)


@ranks(2)
def test_find_executable_batch_size_tries_again_with_fewer_examples():
    tried: list[int] = []
    with accelerator() as acc:

        @find_executable_batch_size(starting_batch_size=8)
        def fit(batch_size: int) -> float:
            tried.append(batch_size)
            acc.free_memory()
            model = net()
            model, optimizer, data = acc.prepare(model, sgd(model.parameters()), loader(16, batch_size))
            for batch in data:
                acc.backward(loss_of(model, batch))
                if batch_size > 2:
                    raise RuntimeError("CUDA out of memory. Tried to allocate more.")
                optimizer.step()
                optimizer.zero_grad()
            assert len(acc._models) == 1
            return batch_size

        assert fit() == tried[-1] <= 2 and len(tried) > 1


class Noisy(nn.Module):
    """Dropout, so that the generators show."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.dropout(x))


def noisy():
    set_seed(3, device_specific=False)
    return Noisy()


@ranks(2)
def test_set_seed_gives_the_same_random_numbers_as_under_ddp():
    assert_same(train(OURS, make=noisy), train(STOCK, make=noisy))
    with accelerator():
        set_seed(3, device_specific=True)
        assert differs_between_ranks(torch.rand(()).item())


@ranks(2)
def test_a_trigger_of_one_rank_is_seen_by_all(rank):
    with accelerator() as acc:
        model, data = acc.prepare(net(), loader())
        seen = []
        for step, batch in enumerate(data):
            acc.backward(loss_of(model, batch))
            if rank == 1 and step == 1:
                acc.set_trigger()
            seen.append(acc.check_trigger())
        assert seen == [False, True, False]


@pytest.mark.exhaustive
@ranks(2)
def test_profile_writes_a_trace_of_each_rank(rank, tmp_path):
    with accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))]) as acc:
        model, data = acc.prepare(net(), loader(8))
        with acc.profile() as profiler:
            acc.backward(loss_of(model, next(iter(data))))
        assert any("addmm" in event.key for event in profiler.key_averages())
        found = [f for f in Path(tmp_path).iterdir() if f"_{rank}." in f.name]
        assert len(found) == 1 and json.loads(found[0].read_text())["traceEvents"]


@ranks(2)
def test_helpers_of_the_process_are_unchanged(rank, tmp_path):
    with accelerator() as acc:
        state = PartialState()
        assert (acc.process_index, acc.num_processes, acc.is_main_process) == (rank, 2, rank == 0)
        assert acc.is_local_main_process == (rank == 0) and acc.is_last_process == (rank == 1)
        assert str(acc.distributed_type) == "DistributedType.MULTI_CPU" and acc.use_distributed
        with acc.split_between_processes([1, 2, 3], apply_padding=True) as mine:
            assert mine == ([1, 2] if rank == 0 else [3, 3])
        with acc.main_process_first():
            if rank == 0:
                (tmp_path / "first").touch()
            assert (tmp_path / "first").exists()
        done: list[int] = []
        acc.on_main_process(done.append)(0)
        acc.on_last_process(done.append)(1)
        acc.on_process(done.append, process_index=1)(2)
        assert done == ([0] if rank == 0 else [1, 2])
        assert acc.gather(torch.tensor([rank])).tolist() == [0, 1]
        assert acc.reduce(torch.tensor(rank + 1.0), "mean").item() == 1.5
        assert acc.pad_across_processes(torch.ones(rank + 1)).tolist() == ([1, 0] if rank == 0 else [1, 1])
        assert gather_object([rank]) == [0, 1]
        assert broadcast_object_list([rank]) == [0]
        state.wait_for_everyone()


@ranks(2)
def test_the_accelerator_copies_as_itself_and_pickles_as_stock_does():
    for kind in BOTH:
        with accelerator(kind) as acc:
            assert copy.deepcopy(acc) is acc
            again = pickle.loads(pickle.dumps(acc))
            assert type(again) is kind and again.num_processes == 2
            if kind is OURS:
                assert again.shard_plugin == acc.shard_plugin


@ranks(2)
def test_a_deep_copy_of_a_prepared_model_trains_on_its_own():
    results = []
    for kind in BOTH:
        with accelerator(kind, mixed_precision="no") as acc:
            model, data = acc.prepare(net(), loader())
            ema = copy.deepcopy(acc.unwrap_model(model))
            optimizer = acc.prepare(sgd(model.parameters()))
            for batch in data:
                acc.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for average, p in zip(ema.parameters(), acc.unwrap_model(model).parameters(), strict=True):
                        average.lerp_(p, 0.1)
            x = torch.ones(2, FEATURES)
            averaged = acc.prepare_model(ema, evaluation_mode=True)  # in its own right
            assert averaged is ema and len(acc._models) == 2
            results.append((ema(x).detach(), model(x).detach()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


@ranks(2)
def test_unwrap_model_takes_the_mixed_precision_off_as_stock_does():
    for kind in BOTH:
        with accelerator(kind, mixed_precision="bf16") as acc:
            model = net()
            plain_forward = model.forward.__func__
            prepared = acc.prepare(model)
            assert acc.unwrap_model(prepared) is model
            assert model.forward.__func__ is not plain_forward
            assert acc.unwrap_model(prepared, keep_fp32_wrapper=False) is model
            assert model.forward.__func__ is plain_forward
            assert model(torch.ones(2, FEATURES)).dtype == torch.float32


# -- different numbers of batches ---------------------------------------------------------------------------------------
@ranks(2)
def test_ranks_may_evaluate_different_numbers_of_batches_under_join_uneven_inputs(rank):
    results = []
    for kind in BOTH:
        with accelerator(kind, **UNEVEN) as acc:
            model, data = acc.prepare(net(), loader(20))
            model.eval()
            with acc.join_uneven_inputs([model]), torch.no_grad():
                found = [model(x) for x, _ in data]
            assert len(found) == (3 if rank == 0 else 2)
            results.append(torch.cat(found))
            if kind is OURS:
                assert type(model.head.weight) is not nn.Parameter
    torch.testing.assert_close(results[1], results[0])


class OnGPUs(OURS):
    """Where ``join_uneven_inputs`` overrides what dataloaders do."""

    multi_device = True


@ranks(2)
def test_join_uneven_inputs_sets_even_batches_inside_where_stock_does(rank):
    with accelerator(OnGPUs) as acc:
        model, data, other = acc.prepare(net(), loader(20), loader(16))
        model.eval()
        with acc.join_uneven_inputs([model], even_batches=False), torch.no_grad():
            assert len([model(x) for x, _ in data]) == (3 if rank == 0 else 2)
            assert type(model.head.weight) is nn.Parameter  # whole
        assert len(list(data)) == 3 and other.batch_sampler.even_batches is True
        model.train()
        with acc.join_uneven_inputs([model]):  # even ones: nothing to join
            for batch in data:
                acc.backward(loss_of(model, batch))
        with accelerator(OURS) as on_cpu:
            model, data = on_cpu.prepare(net(), loader(20))
            with on_cpu.join_uneven_inputs([model], even_batches=False):
                assert len([on_cpu.backward(loss_of(model, batch)) for batch in data]) == 3


@pytest.mark.exhaustive
@ranks(2, fresh=True)
def test_without_it_the_rank_that_goes_on_alone_gets_an_error_and_not_a_hang():
    with accelerator(shard_plugin=ShardPlugin(timeout=3.0), **UNEVEN) as acc:
        model, data = acc.prepare(net(), loader(20))
        model.eval()
        with torch.no_grad():
            if dist.get_rank() == 0:
                with pytest.raises(MissingRankError):
                    for x, _ in data:
                        model(x)
            else:
                for x, _ in data:
                    model(x)
