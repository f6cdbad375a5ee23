"""What Accelerate's documentation does not promise of its launcher; as :mod:`accelerate_shard._private` for everything else.

- ``accelerate.commands.launch``: ``launch_command_parser`` with the launcher's options; ``_validate_launch_command`` fills in
  what a file says;
- ``accelerate.utils.launch``: ``prepare_multi_gpu_env`` and ``prepare_simple_launcher_cmd_env`` give what is exported.
"""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any


def parsed_launch(arguments: list[str]) -> Any:
    """Return the options of an ``accelerate launch`` command line; None if this version does not know them."""
    from accelerate.commands.launch import launch_command_parser

    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return launch_command_parser().parse_args(arguments)
        except SystemExit:
            return None


def launch_environment(config_file: str) -> dict[str, str]:
    """Return the variables that ``accelerate launch --config_file ...`` exports to its processes.

    Raises:
        ValueError: Accelerate does not take the file.
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    args = launch_command_parser().parse_args(["--config_file", config_file, "--main_process_port", "0", "train.py"])
    args, _, _ = _validate_launch_command(args)
    if args.use_deepspeed:
        return {"ACCELERATE_USE_DEEPSPEED": "true"}
    if args.use_fsdp or args.multi_gpu or args.use_megatron_lm:
        exported = prepare_multi_gpu_env(args)
    else:
        _, exported = prepare_simple_launcher_cmd_env(args)
    return {name: value for name, value in exported.items() if os.environ.get(name) != value}
