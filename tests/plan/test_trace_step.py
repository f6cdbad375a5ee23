"""The traced step beside a real one: the same peak of memory, to the byte where kernels have no memory of their own."""

from __future__ import annotations

import dataclasses
import gc
import re
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from torch_shard.errors import TraceError
from torch_shard.plan.step_trace import (
    KINDS,
    Allocation,
    Free,
    GradientAccumulated,
    ModuleEnter,
    ModuleExit,
    Operator,
    PhaseStart,
    StepTrace,
)
from torch_shard.plan.trace_step import trace_step


def measured_peak(model: nn.Module, step) -> int:
    """Return the most bytes that a real step has allocated at one time, from the events of the CPU's allocator."""
    for p in model.parameters():
        p.grad = None
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(model)
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    for p in model.parameters():
        p.grad = None
    return peak


def traced_peak(trace: StepTrace) -> int:
    """Return the traced peak without what was there before the step."""
    before = sum(e.nbytes for e in trace.events if isinstance(e, Allocation) and e.kind in ("parameter", "buffer"))
    return trace.peak().total - before


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


class Gpt(nn.Module):
    def __init__(self, layers: int = 2, width: int = 64, tied: bool = False, reentrant: bool | None = None):
        super().__init__()
        self.tokens = nn.Embedding(100, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, 100, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.reentrant = reentrant

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                # The state of random numbers is 5 kB of host memory for each checkpoint, which no operator allocates.
                x = checkpoint(block, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        return self.head(x)


class Edits(nn.Module):
    """In-place operators, and views that outlive what they are of."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(32, 64)

    def forward(self, x):
        x = self.first(x).relu_()
        x = self.second(x[:, 32:]).mul_(2)
        x[:, :8] = 0
        return x.t().unsqueeze(0)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 64, 2, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        with torch.backends.mkldnn.flags(enabled=False):
            return self.head(self.lstm(x)[0][:, -1])


def mlp() -> nn.Module:
    return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(64, 64), nn.ReLU())))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def backward(*shape: int):
    def step(model: nn.Module) -> None:
        model(torch.randn(*shape)).pow(2).mean().backward()

    return step


def language(model: nn.Module) -> None:
    tokens = torch.randint(0, 100, (4, 32))
    F.cross_entropy(model(tokens).view(-1, 100), tokens.view(-1)).backward()


def stepping(kind: type[torch.optim.Optimizer], **options):
    def step(model: nn.Module) -> None:
        optimizer = kind(model.parameters(), **options)
        for _ in range(2):
            backward(16, 64)(model)
            optimizer.step()
            optimizer.zero_grad()

    return step


def clipping(model: nn.Module) -> None:
    backward(16, 64)(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def accumulating(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        backward(16, 64)(model)
    optimizer.step()


CASES = {
    "mlp": (mlp, backward(16, 64)),
    "transformer": (Gpt, language),
    "tied": (lambda: Gpt(tied=True), language),
    "reentrant checkpoints": (lambda: Gpt(4, reentrant=True), language),
    "checkpoints": (lambda: Gpt(4, reentrant=False), language),
    "lstm": (Recurrent, backward(8, 20, 32)),
    "edits and views": (Edits, backward(16, 64)),
    "adam": (mlp, stepping(torch.optim.Adam)),
    "adam foreach": (mlp, stepping(torch.optim.Adam, foreach=True)),
    "adamw fused": (mlp, stepping(torch.optim.AdamW, fused=True)),
    "sgd": (mlp, stepping(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "sgd foreach": (mlp, stepping(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)),
    "clipping": (mlp, clipping),
    "accumulation": (mlp, accumulating),
}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_that_of_a_real_step(name):
    make, step = CASES[name]
    model = make()
    trace = trace_step(model, step)
    check(trace)
    # Python numbers that meet tensors become 0-d tensors for a moment, which dispatch doesn't show.
    assert abs(traced_peak(trace) - measured_peak(model, step)) <= (16 if "adam" in name else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (conv_net, (4, 3, 32, 32)),
        (convolutions, (4, 16, 32, 32)),
        (lambda: nn.Conv2d(128, 192, 3, padding=1), (4, 128, 8, 8)),  # its weight is larger than its inputs
        (lambda: nn.Conv2d(3, 256, 16, stride=16), (4, 3, 112, 112)),  # patches, as vision transformers have them
    ],
)
def test_convolutions_hold_the_copies_that_their_kernels_reorder(make, shape, dtype):
    # oneDNN copies inputs, weights and results into layouts of its own, which depend on the processor.
    model = make().to(dtype)

    def step(model: nn.Module) -> None:
        model(torch.randn(shape, dtype=dtype)).pow(2).mean().backward()

    trace = trace_step(model, step)
    assert traced_peak(trace) == pytest.approx(measured_peak(model, step), rel=0.05)


def check(trace: StepTrace) -> None:
    """What holds for every trace."""
    alive, entered = {}, []
    for event in trace.events:
        if isinstance(event, Allocation):
            assert event.storage not in alive
            assert event.kind in KINDS
            alive[event.storage] = event
        elif isinstance(event, Free):
            del alive[event.storage]
        elif isinstance(event, ModuleEnter):
            entered.append((event.call, event.backward))
        elif isinstance(event, ModuleExit):
            entered.remove((event.call, event.backward))
    assert entered == []
    assert trace.peak().total == max(sum(kinds.values()) for _, kinds in trace.memory())
    starts = [e.phase for e in trace.events if isinstance(e, PhaseStart)]
    assert all(one != next for one, next in zip(starts, starts[1:], strict=False))


# -- what is recorded -------------------------------------------------------------------------------------------------


def of(trace: StepTrace, kind: type):
    return [event for event in trace.events if isinstance(event, kind)]


def readers(trace: StepTrace, parameter: str) -> list[Operator]:
    """Return the operators that take a parameter."""
    own = next(e.storage for e in of(trace, Allocation) if (e.kind, e.name) == ("parameter", parameter))
    return [operator for operator in of(trace, Operator) if own in operator.inputs]


def test_kinds_are_what_the_step_holds_at_its_peak_and_after_it():
    model = mlp()
    trace = trace_step(model, accumulating)
    nbytes, last = sum(p.nbytes for p in model.parameters()), trace.memory()[-1][1]
    assert last["parameter"] == last["gradient"] == nbytes
    _, at_step = max(trace.memory(), key=lambda pair: pair[1]["optimizer state"])
    assert at_step["optimizer state"] == nbytes
    _, at_loss = max(trace.memory(), key=lambda pair: pair[1]["activation"])
    # Each layer saves its result, the last one twice: for relu and for pow.
    assert at_loss["input"] == 16 * 64 * 4
    assert at_loss["activation"] >= 3 * 16 * 64 * 4
    names = {e.name for e in of(trace, Allocation) if e.kind == "gradient"}
    assert names == {name for name, _ in model.named_parameters()}


def test_gradients_come_in_the_order_of_a_real_backward():
    model, order = Gpt(), []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    language(model)
    real, order[:] = list(order), []
    trace = trace_step(model, language)
    assert [e.parameter for e in of(trace, GradientAccumulated)] == real
    assert order == real  # the user's own hooks run, too


def test_accumulation_adds_what_arrives_to_what_is_there():
    trace = trace_step(mlp(), accumulating)
    first, second = [e for e in of(trace, GradientAccumulated) if e.parameter == "0.weight"][:2]
    assert first.arrived == first.storage == second.storage
    assert second.arrived != second.storage


def test_modules_begin_and_end_in_the_order_of_a_real_step():
    model, order = Gpt(1), []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: order.append(name))
    language(model)
    trace = trace_step(model, language)
    enters = of(trace, ModuleEnter)
    assert [e.module for e in enters if not e.backward] == order[: len(order) // 2]
    backwards = [e.module for e in enters if e.backward]
    assert backwards[:2] == ["", "head"]
    assert [m for m in backwards if "." in m and m.count(".") == 2] == [
        "blocks.0.mlp", "blocks.0.proj", "blocks.0.qkv", "blocks.0.norm"
    ]  # fmt: skip
    assert backwards[-1] == "tokens"
    modules = [(o.name, o.module) for o in of(trace, Operator) if o.phase == "backward" and "layer_norm" in o.name]
    assert [m for _, m in modules] == ["blocks.0.mlp.0", "blocks.0.norm"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_seen_as_such(reentrant):
    trace = trace_step(Gpt(2, reentrant=reentrant), language)
    again = [e.module for e in of(trace, ModuleEnter) if e.recompute and e.module.count(".") == 1]
    assert again == ["blocks.1", "blocks.0"]
    recomputed = [o for o in of(trace, Operator) if o.recompute]
    assert {o.phase for o in recomputed} == {"backward"}
    assert all(o.module is not None and o.module.startswith("blocks.") for o in recomputed)
    plain = trace_step(Gpt(2), language)
    forward = sum(
        o.flops for o in of(plain, Operator) if o.phase == "forward" and (o.module or "").startswith("blocks")
    )
    # The last product of a block is not needed for its backward, which a checkpoint that isn't reentrant notices.
    assert forward / 2 < sum(o.flops for o in recomputed) <= forward
    bias = "blocks.0.qkv.bias"  # in backward only recomputation reads it
    assert {o.recompute for o in readers(trace, bias) if o.phase == "backward"} == {True}
    assert {o.phase for o in readers(plain, bias)} == {"forward"}


def test_floating_point_operations_are_those_of_torchs_counter():
    model = Gpt()
    with FlopCounterMode(display=False) as counter:
        language(model)
    trace = trace_step(model, language)
    attention = sum(o.flops for o in of(trace, Operator) if "attention" in o.name)
    assert attention > 0  # the counter has no formula for the CPU's kernel
    assert sum(o.flops for o in of(trace, Operator)) - attention == counter.get_total_flops()


def test_the_bytes_of_an_operator_are_those_of_its_tensors():
    trace = trace_step(nn.Linear(64, 32, bias=False), backward(16, 64))
    product = next(o for o in of(trace, Operator) if o.name == "aten.mm.default")
    assert (product.read, product.written) == (4 * (16 * 64 + 64 * 32), 4 * 16 * 32)
    assert (product.dtype, product.module, product.phase) == (torch.float32, "", "forward")
    assert readers(trace, "weight") == [product]


def test_a_meta_model_gives_the_same_trace_as_a_real_one():
    with torch.device("meta"):
        meta = Gpt()
    assert trace_step(meta, language) == trace_step(Gpt(), language)


# -- what the model and the program get back --------------------------------------------------------------------------


class Stateful(nn.Module):
    def __init__(self, fails: bool = False):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))
        self.scale = torch.full((8,), 2.0)
        self.kept: list[torch.Tensor] = []
        self.fails = fails

    def forward(self, x):
        self.seen.add_(1)
        self.seen = self.seen * 2
        self.last = self.linear(x) * self.scale
        self.kept.append(self.last)
        if self.fails:
            raise KeyError("no such thing")
        return self.last


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_given_back_unchanged(fails):
    model, state = Stateful(fails), torch.get_rng_state()
    before = {id(m): dict(m.__dict__) for m in model.modules()}
    tensors = [*model.parameters(), *model.buffers(), model.scale]
    values = [t.clone() for t in tensors]

    def step(model):
        torch.manual_seed(3)
        backward(4, 8)(model)

    if fails:
        with pytest.raises(TraceError, match=r"test_trace_step\.py:\d+ in forward: KeyError"):
            trace_step(model, step)
    else:
        trace_step(model, step)
    assert {id(m): dict(m.__dict__) for m in model.modules()} == before
    after = [*model.parameters(), *model.buffers(), model.scale]
    assert all(a is b for a, b in zip(after, tensors, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, values, strict=True))
    assert model.kept == []
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_an_optimizer_that_was_there_before_steps_and_is_given_back():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def step(model):
        optimizer.zero_grad()
        backward(16, 64)(model)
        optimizer.step()

    step(model)
    state = {id(p): {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    grads = [p.grad for p in model.parameters()]
    trace = trace_step(model, step, optimizers=[optimizer])
    moments = 2 * sum(p.nbytes for p in model.parameters())
    assert trace.memory()[-1][1]["optimizer state"] == moments + 6 * 4  # each parameter has a counter
    assert all(a is b.grad for a, b in zip(grads, model.parameters(), strict=True))
    held = optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert all(torch.equal(v, optimizer.state[p][k]) for p in model.parameters() for k, v in state[id(p)].items())
    with pytest.raises(TraceError, match=r"Adam that steps at .*name it in trace_step\(optimizers="):
        trace_step(model, step)


def test_inputs_from_outside_are_inputs():
    x = torch.randn(16, 64)
    trace = trace_step(mlp(), lambda model: model(x).sum().backward())
    assert [e.nbytes for e in of(trace, Allocation) if e.kind == "input"] == [x.nbytes]


# -- values -----------------------------------------------------------------------------------------------------------


def test_a_value_that_is_read_is_a_constant_with_a_note():
    got = []

    def step(model):
        loss = model(torch.randn(4, 64)).sum()
        got.extend([loss.item(), bool(loss > 0), (loss > 0).long().item(), torch.tensor(7).item()])
        loss.backward()

    trace = trace_step(mlp(), step)
    assert got == [1.0, True, 1, 7]
    assert [(n.operator, n.value) for n in trace.notes] == [
        ("aten._local_scalar_dense.default", v) for v in (1.0, True, 1)
    ]
    assert all(re.search(r"test_trace_step\.py:\d+ in step$", n.line) for n in trace.notes)


def nonzero(model):
    return model(torch.randn(4, 64)).nonzero()


def masked(model):
    out = model(torch.randn(4, 64))
    return out[out > 0]


def unique(model):
    return torch.unique(torch.randint(0, 9, (9,)))


def converted(model):
    return model(torch.randn(4, 64)).detach().numpy()


@pytest.mark.parametrize(
    ("step", "operator"),
    [
        (nonzero, r"aten\.nonzero"),
        (masked, r"aten\.(index|nonzero)"),
        (unique, r"aten\._?unique"),
        (converted, "the step"),
    ],
)
def test_what_needs_values_is_an_error_that_names_the_line(step, operator):
    with pytest.raises(TraceError, match=operator) as raised:
        trace_step(mlp(), step)
    line = step.__code__.co_firstlineno + (2 if step is masked else 1)
    assert f"test_trace_step.py:{line} in {step.__name__}" in str(raised.value)
    assert raised.value.__cause__ is not None


def test_parameters_that_have_no_fake_are_an_error():
    with pytest.raises(TraceError, match=r"weight has no shape yet"):
        trace_step(nn.LazyLinear(8), backward(4, 8))


# -- CUDA, on any machine ---------------------------------------------------------------------------------------------


def on_cuda(model):
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
    tokens = torch.randint(0, 100, (4, 32)).to("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(tokens.to("cuda")).view(-1, 100), tokens.view(-1))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def test_a_step_for_cuda_runs_what_cuda_runs():
    model = Gpt(reentrant=False)
    trace = trace_step(model, on_cuda, device="cuda")
    check(trace)
    operators = [(o.name, o.dtype) for o in of(trace, Operator)]
    assert ("aten._scaled_dot_product_flash_attention.default", torch.bfloat16) in operators
    assert ("aten.native_layer_norm.default", torch.float32) in operators
    assert any(name.startswith("aten._foreach_") and "addcdiv" in name for name, _ in operators)
    nbytes = sum(p.nbytes for p in model.parameters())
    most = {kind: max(kinds[kind] for _, kinds in trace.memory()) for kind in KINDS}
    assert (most["parameter"], most["gradient"], most["optimizer state"]) == (nbytes, nbytes, 2 * nbytes)
    # On the host are the tokens until they are copied, and the optimizer's counters.
    assert trace.peak("cpu").total == pytest.approx(4 * 32 * 8, abs=4 * len(list(model.parameters())))
    made = {e.storage: e for e in of(trace, Allocation)}
    casts = [o for o in readers(trace, "blocks.0.qkv.weight") if o.name == "aten._to_copy.default"]
    # What the forward casts ends with it; recomputation casts again.
    copies = [(cast.recompute, made[n].kind, made[n].nbytes) for cast in casts for n in cast.outputs]
    assert copies == [(False, "temporary", 64 * 192 * 2), (True, "activation", 64 * 192 * 2)]


def test_memory_that_kernels_take_for_themselves_counts_while_they_run():
    base = trace_step(mlp(), backward(16, 64))
    index = next(i for i, e in enumerate(base.events) if getattr(e, "name", "") == "aten.addmm.default")
    events = list(base.events)
    events[index] = dataclasses.replace(events[index], workspace=10**9)
    trace = StepTrace("cpu", tuple(events))
    peak = trace.peak()
    assert (peak.index, peak.kinds["temporary"] >= 10**9) == (index, True)
    assert trace.memory()[-1] == base.memory()[-1]


def test_nothing_keeps_the_model_after_the_trace():
    def traced() -> tuple[StepTrace, list[weakref.ref[nn.Parameter]]]:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())

        def step(model: nn.Module) -> None:
            model(torch.randn(2, 64)).sum().backward()
            optimizer.step()

        return trace_step(model, step, optimizers=[optimizer]), [weakref.ref(p) for p in model.parameters()]

    trace, weights = traced()
    gc.collect()
    assert trace.events
    assert all(weight() is None for weight in weights)
