"""Tests that cannot hold for another strategy than DDP, and those where we differ on purpose; below Lightning's ``tests``."""

from __future__ import annotations

__all__ = ["EXCLUDED", "REFUSED"]

_MPS = "asserts the text that DDP is not for MPS; ours is refused there with another text"
_NAMES = "asserts the list of all registered names, and fails wherever a package registers more"
_START = "asserts how processes start by a private attribute of Fabric's DDPStrategy (_start_method)"
_UNUSED = "asserts that DDP refuses unused parameters, which are trained with here"

EXCLUDED: dict[str, str] = {
    "tests_fabric/strategies/test_registry.py::test_available_strategies_in_registry": _NAMES,
    "tests_fabric/test_cli.py::test_run_get_supported_strategies": _NAMES,
    "tests_fabric/test_connector.py::test_invalid_ddp_strategy_with_mps": _MPS,
    "tests_fabric/test_connector.py::test_multi_device_default_strategy": _START,
    "tests_fabric/test_connector.py::test_interactive_incompatible_backend_error": (
        "asserts the name of the strategy that Lightning takes by default, in an error that comes before ours is put there"
    ),
    "tests_fabric/test_connector.py::test_strategy_choice_ddp_fork_cpu": _START,
    "tests_fabric/test_connector.py::test_strategy_choice_ddp_fork_in_interactive": _START,
    "tests_fabric/test_connector.py::test_strategy_choice_ddp_spawn_cpu": _START,
    "tests_fabric/test_connector.py::test_unsupported_tpu_choice": "gives DDPStrategy XLAPrecision, which ours refuses first",
    "tests_fabric/test_fabric.py::test_setup_module": "asserts that DistributedDataParallel is made",
    "tests_pytorch/accelerators/test_common.py::test_pluggable_accelerator": (
        "gives DDPStrategy its accelerator without a name; here that place is the ShardConfig's, and the error says so"
    ),
    "tests_pytorch/accelerators/test_xla.py::test_strategy_choice_tpu_str_ddp_spawn": (
        "asserts Lightning's text that TPUs need its own strategies; ours refuses them first, with a text of its own"
    ),
    "tests_pytorch/strategies/test_ddp.py::test_ddp_kwargs_from_registry": "asserts DDP's own options (_ddp_kwargs)",
    "tests_pytorch/strategies/test_ddp_integration.py::test_find_unused_parameters_ddp_exception": _UNUSED,
    "tests_pytorch/strategies/test_ddp_integration.py::test_find_unused_parameters_ddp_spawn_raises": _UNUSED,
    "tests_pytorch/strategies/test_registry.py::test_ddp_find_unused_parameters_strategy_registry": (
        "asserts DDP's own options in the registry"
    ),
    "tests_pytorch/trainer/connectors/test_accelerator_connector.py::test_invalid_ddp_strategy_with_mps": _MPS,
    "tests_pytorch/trainer/connectors/test_accelerator_connector.py::test_unsupported_tpu_choice": (
        "gives DDPStrategy XLAPrecision, which ours refuses first"
    ),
}
"""By file and function: not run, since they assert DDP's own options, attributes or messages."""

REFUSED: dict[str, str] = {
    "tests_pytorch/callbacks/test_pruning.py::test_pruning_callback_ddp_cpu": (
        "ModelPruning replaces parameters while they are sharded: refused at set-up, with what to do instead"
    ),
    "tests_pytorch/strategies/launchers/test_multiprocessing.py::test_memory_sharing_disabled": (
        "reads data_ptr() of a sharded parameter, which has no whole memory: NeedsGatherError"
    ),
    "tests_pytorch/utilities/test_compile.py::test_trainer_compiled_model_ddp": (
        "Lightning takes torch.compile(module) for its own strategies only: compile in configure_model"
    ),
}
"""By file and function: run, and expected to fail here with an error that says what to do."""
