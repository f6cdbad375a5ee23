"""Every row of the compatibility table in every mode; see modes.py. What is not equal under mixed precision is listed here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from tests.compat.modes import MODES, Mode
from tests.support import ranks as rank_pool

QUICK = {
    "test_a_plain_step_trains_like_the_plain_model",
    "test_accumulation_without_gradient_sync_trains_like_plain",
    "test_edits_of_another_modules_weight_in_forward_train_like_plain",
    "test_methods_beside_forward_validate_as_they_train",
    "test_a_gradient_penalty_trains_like_plain",
}
"""Rows that run every time under mixed precision, too, with ``full_shard``."""

QUICK_UNDER = {
    # Where parameters and what modules compute with share memory, nothing is written back: the places are compared.
    "test_data_of_another_shape_assigned_in_forward_is_an_error": {"no_shard"},
}
"""Rows that run every time under other strategies, too: those under which other code does what they check."""

_SUMS = "float32 sums of several terms, rounded in another order"
_OUTSIDE = "a term from outside the forward is added to the mean in float64, and in the oracle before it is rounded"
ROUNDED = {
    "test_a_gan_with_two_optimizers": _SUMS,
    "test_a_mask_of_each_ranks_own_on_a_parameter_outside_forward_trains_like_plain": _OUTSIDE,
    "test_a_loss_of_two_forwards_through_running_statistics_trains_as_under_ddp": _SUMS,
    "test_a_method_and_the_forward_in_one_loss_train_like_plain": _SUMS,
    "test_a_method_other_than_forward_trains_like_plain": _SUMS,
    "test_a_model_inside_a_reentrant_checkpoint_beside_another_one_trains_like_plain": _SUMS,
    "test_a_penalty_on_parameters_in_the_loss_trains_like_plain": _OUTSIDE,
    "test_a_penalty_on_the_gradients_of_parameters_trains_like_plain_on_the_whole_batch": _SUMS,
    "test_a_plain_checkpoints_state_loads_into_the_optimizer_of_a_sharded_model": _SUMS,
    "test_a_proximal_term_towards_earlier_weights_trains_like_plain": _OUTSIDE,
    "test_a_resnet_has_gradients_and_buffers_as_under_ddp": _SUMS,
    "test_a_view_of_another_modules_weight_that_is_only_read_trains_like_plain": _SUMS,
    "test_accumulation_with_gradient_sync_every_time_trains_like_plain": "each mean is rounded, in the oracle their sum",
    "test_an_l2_term_under_accumulation_without_sync_trains_like_plain": _OUTSIDE,
    "test_an_optimizer_built_before_sharding_trains_the_sharded_model": _SUMS,
    "test_an_optimizer_that_stepped_before_sharding_goes_on": _SUMS,
    "test_backward_twice_with_retain_graph_trains_like_plain": _SUMS,
    "test_buffers_are_those_of_ddp": _SUMS,
    "test_edits_of_another_modules_weight_in_forward_train_like_plain": "edits are rounded",
    "test_hooks_see_the_sum_of_an_l2_term_and_of_the_models_gradient": _OUTSIDE,
    "test_old_weight_norm": _SUMS,
    "test_one_loss_through_two_models_trains_like_plain": _SUMS,
    "test_parameters_clamped_inside_forward_train_like_plain": _SUMS,
    "test_recurrent_networks": _SUMS,
    "test_replaced_gradients_train_like_plain": _SUMS,
    "test_several_forwards_and_one_backward_train_like_plain": _SUMS,
    "test_sync_batch_norm_in_evaluation": _SUMS,
    "test_several_backwards_behind_a_frozen_reference_forward_train_like_plain": _SUMS,
    "test_the_output_fed_back_as_input_trains_like_plain": _SUMS,
    "test_two_forwards_and_then_a_backward_of_each_train_like_plain": _SUMS,
    "test_two_forwards_under_different_flags_in_one_loss_train_like_plain": _SUMS,
    "test_two_losses_that_share_a_graph_train_like_plain": _SUMS,
    "test_zero_dim_and_zero_element_parameters_train_like_plain": _SUMS,
}
"""Rows that agree to float32's last bits only, and why."""

_BUFFERS = "modules that compute with buffers in float64 must be kept, or get buffer_dtype (docs/precision.md, Limits)"
_MIX = r"must have the same dtype|to have the same dtype"
ERRORS = {
    "test_a_forward_inside_gathered_with_its_backward_outside_trains_like_plain": (
        r"a backward reached .* ShardConfig.precision or",
        "gradients of copies as stored can't be reduced (docs/precision.md, Limits)",
    ),
    "test_functional_call_with_other_values_gives_the_plain_results": (
        _MIX,
        "values that the user passes are not cast",
    ),
    "test_functional_call_with_some_values_trains_the_rest_like_plain[others]": (
        _MIX,
        "values that the user passes are not cast",
    ),
    "test_orthogonal_parametrization": (_MIX, _BUFFERS),
    "test_parametrizations_of_weights[spectral_norm]": (_MIX, _BUFFERS),
    "test_parametrizations_of_weights[old spectral_norm]": (_MIX, _BUFFERS),
}
"""Rows that are errors under mixed precision: what the error says, and why it is one."""

_PLAIN_OPERANDS = (
    "plain torch has no parameter in two dtypes, outside forwards; tests/precision/test_outside.py has these"
)
_PLAIN_OBJECTS = "what the plain model computes with inside a forward is a copy, and no parameter"
_DOUBLE = "the row itself mixes tensors in float64 with what is computed with"
WITHOUT_ORACLE = {
    "test_a_function_outside_forward_that_reads_its_weight_trains_like_plain": _PLAIN_OPERANDS,
    "test_a_hook_registered_on_a_parameter_inside_forward_is_called": _PLAIN_OBJECTS,
    "test_a_small_conv_net_gathers_nothing_before_it_is_needed": "a row about the plan, whose units are half as large",
    "test_backward_hooks_of_modules_compute_with_their_weights": _PLAIN_OPERANDS,
    "test_data_of_another_shape_assigned_in_forward_is_an_error": _DOUBLE,
    "test_direct_use_of_a_weight_outside_of_forward": _PLAIN_OPERANDS,
    "test_edits_of_another_modules_weight_in_forward_train_like_plain[True]": _PLAIN_OBJECTS,
    "test_gradients_read_and_cleared_in_forward_are_the_parameters_own": _PLAIN_OBJECTS,
    "test_results_on_slices_meet_a_ranks_own_tensor_in_training": "its values grow beyond float32's range",
    "test_tensor_hooks_compute_with_weights_of_any_layer": _DOUBLE,
}
"""Rows that the oracle can't stand for, and why; they don't run under mixed precision."""

_RELEASES = "a row about gathers and releases, of which there are none in a later step"
_KEEPS = "a row about releases in forward, which come later elsewhere"
STRATEGIES_OF = {
    "test_a_frozen_norm_is_released_after_use": ({"full_shard"}, _KEEPS),
    "test_a_small_conv_net_gathers_nothing_before_it_is_needed": ({"full_shard", "shard_grad_op"}, _RELEASES),
    "test_what_was_remembered_of_another_branch_does_no_harm": ({"full_shard", "shard_grad_op"}, _RELEASES),
}
"""Rows that say nothing under some strategies: those that they run under, and why."""


@pytest.fixture(autouse=True, params=[pytest.param(m, id=str(m)) for m in MODES])
def mode(request: pytest.FixtureRequest) -> Iterator[Mode]:
    found: Mode = request.param
    if found.mixed and request.node.originalname in ROUNDED:
        found = dataclasses.replace(found, rounded=True)
    rank_pool.within = None if found.is_usual else found.within
    yield found
    rank_pool.within = None


def _listed(item: Any, table: Any) -> Any:
    """The entry for a test, or for one of its parameters: ``name[parameter]``."""
    names = [item.originalname, *(f"{item.originalname}[{v}]" for v in item.callspec.params.values())]
    return next((table[name] for name in names if name in table), None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A row varies in one thing at a time: beside the usual mode it runs with its usual parameters only, and where it names a
    strategy itself, not under another one. Usual parameters that only ``make test-all`` runs are marked
    ``exhaustive(usual=True)``."""
    dropped = []
    for item in items:
        found = getattr(item, "callspec", None) and item.callspec.params.get("mode")
        if not isinstance(found, Mode) or found.is_usual:
            continue
        usual = MODES[0].strategy
        own = item.callspec.params.get("strategy", usual)
        if (
            any(not mark.kwargs.get("usual") for mark in item.iter_markers("exhaustive"))
            or own != usual
            or ("strategy" in item.callspec.params and found.strategy != usual)
            or (found.mixed and _listed(item, WITHOUT_ORACLE) is not None)
            or (found.is_hybrid and item.callspec.params.get("world_size") != 2)
            or found.strategy not in STRATEGIES_OF.get(item.originalname, ({found.strategy},))[0]
        ):
            dropped.append(item)
            continue
        if found.is_hybrid:
            item.callspec.params["world_size"] = 4
        elsewhere = found == Mode(found.strategy) and found.strategy in QUICK_UNDER.get(item.originalname, ())
        if not elsewhere and not (found.mixed and found.strategy == usual and item.originalname in QUICK):
            item.add_marker(pytest.mark.exhaustive)
    config.hook.pytest_deselected(items=dropped)
    gone = set(map(id, dropped))
    items[:] = [item for item in items if id(item) not in gone]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    found = pyfuncitem.callspec.params.get("mode") if hasattr(pyfuncitem, "callspec") else None
    expected = _listed(pyfuncitem, ERRORS) if isinstance(found, Mode) and found.mixed else None
    if expected is None:
        return (yield)
    said, why = expected
    with pytest.raises(rank_pool.RankFailure, match=said):
        yield
        pytest.fail(f"is listed as an error under mixed precision ({why}), but there was none")
    return True
