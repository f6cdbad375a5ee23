"""The plan: which parameters travel together, and what triggers them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from torch_shard.config.shard_config import ShardConfig
from torch_shard.errors import ConfigError, SetupError
from torch_shard.plan import Plan
from torch_shard.plan.plan import flat_order
from torch_shard.plan.planner import make_plan

MIB = 1 << 20


class Convs(nn.Module):
    """Layers without any repetition."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout = nn.Dropout()
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = self.conv2(self.conv1(x).relu()).relu()
        x = self.dropout(nn.functional.max_pool2d(x, 2)).flatten(1)
        return self.fc2(self.fc1(x).relu())


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width))

    def forward(self, x):
        x = self.norm(x)
        return self.mlp(x + self.attn(x, x, x)[0])


class Gpt(nn.Module):
    def __init__(self, layers: int = 3, width: int = 8, tied: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(32, width)
        self.wpe = nn.Embedding(16, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 32, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[-1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def plan_of(model: nn.Module, world_size: int = 2, **options) -> Plan:
    plan = make_plan(model, ShardConfig(**options), world_size)
    check(model, plan)
    return plan


def check(model: nn.Module, plan: Plan) -> None:
    """What holds for every plan: all parameters once, units named once, triggers that exist."""
    placed = [p.name for p in plan.params]
    assert sorted([*placed, *plan.ignored]) == sorted(n for n, _ in model.named_parameters())
    assert len({u.name for u in plan.units}) == len(plan.units)
    modules = dict(model.named_modules())
    for unit in plan.units:
        assert unit.params and unit.triggers
        for trigger in unit.triggers:
            module = modules[trigger]
            assert trigger == "" or type(module).forward is not nn.Module.forward


def units(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {u.name: u.triggers for u in plan.units}


@pytest.mark.parametrize("unit_bytes", [1, 1000, 100_000, MIB, 4 * MIB])
def test_head_and_tail_never_share_a_unit_with_a_small_size_target(unit_bytes):
    plan = plan_of(Convs(), unit_bytes=unit_bytes)
    assert plan.unit_of("conv1.weight") is not plan.unit_of("fc2.weight")


def test_runs_are_consecutive_end_at_the_size_target_and_are_triggered_by_each_module():
    plan = plan_of(Convs(), unit_bytes=100_000)
    assert units(plan) == {
        "conv1..conv2": ("conv1", "conv2"),
        "fc1": ("fc1",),
        "fc2": ("fc2",),
    }
    assert list(units(plan_of(Convs()))) == ["conv1..fc2"]


def test_every_repeated_block_is_a_unit_and_no_run_crosses_the_stack():
    assert units(plan_of(Gpt())) == {
        "wte..wpe": ("wte", "wpe"),
        "layers.0": ("layers.0",),
        "layers.1": ("layers.1",),
        "layers.2": ("layers.2",),
        "norm..head": ("norm", "head"),
    }


def test_blocks_are_neither_merged_when_small_nor_split_when_large():
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(64)])
    assert list(units(plan_of(layers))) == [str(i) for i in range(64)]
    assert "layers.0" in units(plan_of(Gpt(), unit_bytes=1))


def test_tied_parameters_are_owned_once_and_trigger_from_every_module_that_holds_them():
    plan = plan_of(Gpt(tied=True))
    unit = plan.unit_of("head.weight")
    assert unit.triggers == ("wte", "head")
    (info,) = unit.params
    assert info.name == "wte.weight" and info.aliases == ("head.weight",)
    assert info.owners == (("wte", "weight"), ("head", "weight"))


def test_direct_parameters_are_a_unit_triggered_by_their_module():
    class Scaled(Gpt):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.more = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(2)])

    plan = plan_of(Scaled())
    assert plan.units[0].name == "(root)"
    assert plan.units[0].triggers == ("",)
    assert [p.name for p in plan.units[0].params] == ["scale", "more.0", "more.1"]


def test_atoms_are_never_split():
    class Atoms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(16, 2)
            self.rnn = nn.LSTM(16, 16, 2)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
            self.spectral = nn.utils.spectral_norm(nn.Linear(16, 16))

        def forward(self, x):
            return x

    triggers = {name: (name,) for name in ("attn", "rnn", "normed", "spectral")}
    assert units(plan_of(Atoms(), unit_bytes=1)) == triggers


def test_a_part_of_an_atom_in_a_group_of_its_own_is_triggered_by_the_atom():
    plan = plan_of(Gpt(), units=[["layers.1.attn.out_proj.weight", "norm.weight"]])
    assert plan.unit_of("norm.weight").triggers == ("layers.1.attn", "norm")
    assert plan.unit_of("layers.1.attn.out_proj.bias").name == "layers.1"


def test_stages_are_walked_to_their_blocks_and_blocks_are_not():
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(2)])
            self.down = nn.Linear(8, 8)

        def forward(self, x):
            return x

    model = nn.Sequential(Stage(), Stage())
    expected = ["0.blocks.0", "0.blocks.1", "0.down", "1.blocks.0", "1.blocks.1", "1.down"]
    assert list(units(plan_of(model))) == expected

    def conv() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))

    residual = nn.Sequential(*[nn.Sequential(conv(), conv()) for _ in range(3)])
    assert list(units(plan_of(residual))) == ["0", "1", "2"]


def test_experts_travel_with_the_module_that_routes():
    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.experts = nn.ModuleList([Block() for _ in range(4)])

        def forward(self, x):
            return x

    plan = plan_of(nn.Sequential(Moe(), Moe()))
    assert units(plan) == {"0": ("0",), "1": ("1",)}
    alone = plan_of(Moe(), unit_bytes=1)
    assert {alone.unit_of(f"experts.{i}.norm.weight").name for i in range(4)} == {"(root)"}


def test_classes_names_and_callables_choose_modules_and_the_rest_is_planned_around_them():
    by_class = plan_of(Gpt(), units=[nn.MultiheadAttention])
    assert by_class.unit_of("layers.0.attn.in_proj_weight").name == "layers.0.attn"
    assert by_class.unit_of("layers.0.norm.weight").triggers == ("layers.0",)
    by_name = plan_of(Gpt(), units=["layers.*.mlp", r"re:layers\.0"])
    assert by_name.unit_of("layers.2.mlp.0.weight").triggers == ("layers.2.mlp",)
    assert by_name.unit_of("layers.0.attn.in_proj_weight").triggers == ("layers.0",)
    by_function = plan_of(Gpt(), units=lambda name, module: name == "layers")
    assert by_function.unit_of("layers.2.norm.weight").triggers == tuple(f"layers.{i}" for i in range(3))
    whole = plan_of(Gpt(), units=lambda name, module: name == "")
    assert units(whole) == {"(root)": ("",)}


def test_groups_of_names_keep_their_order_and_know_tied_names():
    plan = plan_of(Gpt(tied=True), units=[["head.weight", "norm.bias"], ["wpe.weight"]])
    assert [p.name for p in plan.unit_of("norm.bias").params] == ["wte.weight", "norm.bias"]
    assert plan.unit_of("norm.bias").triggers == ("wte", "head", "norm")
    assert plan.unit_of("wpe.weight").name == "group 1"


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        (["layer.*"], r"units\[0\].*'layer\.\*'"),
        ([Block, nn.LSTM], r"units\[1\].*LSTM"),
        (["layers.0.attn", "layers.9"], r"units\[1\].*'layers\.9'"),
        ([["wte.weigth"]], r"units\[0\].*'wte\.weigth'.*Close.*'wte\.weight'"),
        ([["wte.weight"], ["head.weight"]], r"'wte\.weight' is in two groups"),
        (lambda name, module: False, "units chooses no module"),
    ],
)
def test_a_choice_of_units_that_fits_nothing_is_an_error_that_names_it(chosen, named):
    with pytest.raises(ConfigError, match=named):
        plan_of(Gpt(tied=True), units=chosen)


def test_ignored_parameters_are_left_out_by_module_parameter_or_name():
    model = Gpt()
    plan = plan_of(model, ignore=[model.norm, model.head.weight, "layers.0.mlp.*.bias"])
    assert plan.ignored == (
        "layers.0.mlp.0.bias",
        "layers.0.mlp.1.bias",
        "norm.weight",
        "norm.bias",
        "head.weight",
    )
    for wrong in ("nothing.*", nn.Linear(2, 2), nn.Parameter(torch.ones(3))):
        with pytest.raises(ConfigError, match=r"ignore\[0\]"):
            plan_of(model, ignore=[wrong])
    with pytest.raises(ConfigError, match="ignored parameter"):
        plan_of(model, ignore=[model.norm], units=[["norm.weight"]])


def test_a_lazy_parameter_is_an_error_that_names_it():
    with pytest.raises(SetupError, match=r"'1\.weight'"):
        plan_of(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)))


def test_units_are_ordered_trainable_first_then_dtype_then_matrices():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3).to(torch.bfloat16))
    model[0].weight.requires_grad_(False)
    (unit,) = plan_of(model).units
    assert [p.name for p in unit.params] == [
        "2.weight",
        "2.bias",
        "0.bias",
        "1.weight",
        "1.bias",
        "0.weight",
    ]
    assert flat_order(unit.params) == unit.params
    assert unit.dtypes == (torch.bfloat16, torch.float32)


def test_the_prediction_counts_trainable_parameters_once_and_adam_twice():
    model = Gpt(width=64)
    model.wte.requires_grad_(False)
    b = plan_of(model, 2).predicted
    size = 4 * sum(p.numel() for p in model.parameters())
    trainable = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert b.unsharded_total == size + 3 * trainable
    assert b.total == pytest.approx(b.unsharded_total / 2, rel=0.01)
    assert b.optimizer == 2 * b.gradients
    assert 0 < b.gathered_peak < size
    replicated = plan_of(model, 2, strategy="no_shard").predicted
    assert replicated.total == pytest.approx(b.unsharded_total, rel=0.01)


def test_the_table_names_every_unit_and_folds_equal_ones_when_there_are_many():
    text = plan_of(Gpt()).table()
    assert all(f"layers.{i}" in text for i in range(3))
    assert "total (5 units)" in text and "unsharded" in text
    assert len({len(line.rstrip()) for line in text.splitlines()[1:2]}) == 1
    folded = plan_of(Gpt(layers=50)).table()
    assert "layers.0 to layers.49 (50 units)" in folded
    assert len(folded.splitlines()) < 15


def test_the_digest_tells_plans_apart_and_the_lines_say_where():
    plan, same = plan_of(Gpt()), plan_of(Gpt())
    assert plan.digest() == same.digest() and 0 <= plan.digest() < 2**63
    other = Gpt()
    other.layers[1].norm = nn.LayerNorm(8, bias=False)
    differing = plan_of(other)
    assert differing.digest() != plan.digest()
    first = next(a for a, b in zip(plan.lines(), differing.lines(), strict=False) if a != b)
    assert "'layers.1.norm.bias'" in first
    assert dataclasses.replace(plan, world_size=3).digest() != plan.digest()


def test_planning_touches_no_data_and_leaves_the_model_alone():
    with torch.device("meta"):
        model = Gpt()
    before = dict(model.named_parameters())
    assert plan_of(model).digest() == plan_of(Gpt()).digest()
    assert dict(model.named_parameters()) == before


def test_a_model_without_parameters_has_no_units():
    plan = plan_of(nn.Sequential(nn.ReLU(), nn.Dropout()))
    assert plan.units == () and plan.predicted.total == 0
    assert "total (0 units)" in plan.table()


def test_buffers_are_listed_once():
    model = nn.Sequential(nn.BatchNorm1d(4))
    assert [b.name for b in plan_of(model).buffers] == [
        "0.running_mean",
        "0.running_var",
        "0.num_batches_tracked",
    ]
