"""``accelerate-shard config``: ask questions, and write a YAML that ``accelerate launch`` reads.

The file is one of Accelerate's own, with ``distributed_type: FSDP``, which starts processes on GPUs and CPUs alike. Settings for
which FSDP has a key are written with that key, so that Accelerate alone could run the file too. The others are in ``fsdp_config``
as ``shard_*``: Accelerate's loader ignores them, and the runner reads them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_shard import Offload
from torch_shard.errors import ConfigError
from torch_shard.frontend.deepspeed_settings import read_config
from torch_shard.frontend.launch import one_of, text_of_offload

from ..settings.config_file import read_launch_file
from ..settings.from_deepspeed import fields_of, of_yaml
from ..settings.from_environment import SETTINGS
from ..settings.plugin import ShardPlugin

_DEFAULT_FILE = "accelerate_shard.yaml"
_PRECISIONS = ("no", "bf16", "fp16")
_SETTINGS = {setting.field: setting for setting in SETTINGS}
# Keys of a YAML that describe the machines, about which there are no questions.
_MACHINES = ("num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network")


@dataclass(frozen=True)
class Question:
    """A question, which an option of the command line answers too.

    Attributes:
        name: the name of the option and of the answer.
        text: the question's text.
        default: a function from the answers so far to the default.
        read: a function from the typed text to the answer, which may raise ValueError.
        form: a description of what can be typed.
    """

    name: str
    text: str
    default: Callable[[dict[str, Any]], Any]
    read: Callable[[str], Any]
    form: str


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _usual_precision(answers: dict[str, Any]) -> str:
    return "bf16" if not answers["cpu"] and torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"


def _setting(field: str, text: str, default: Any, like: str = "") -> Question:
    """Return the question for a field of the plugin, answered as its environment variable is written."""
    setting = _SETTINGS[like or field]
    return Question(field, text, lambda answers: default, setting.read, setting.form)


_FLAG = _SETTINGS["debug"]
QUESTIONS = (
    Question("cpu", "Train on CPUs?", lambda a: not torch.accelerator.is_available(), _FLAG.read, _FLAG.form),
    Question(
        "num_processes", "How many processes, on all machines together?",
        lambda a: 2 if a["cpu"] else max(1, torch.accelerator.device_count()), _count, "a number, 1 or more",
    ),
    _setting("strategy", "What is sharded? full_shard is ZeRO-3, shard_grad_op ZeRO-2, shard_optim ZeRO-1.", "full_shard"),
    _setting("offload", "What is in host memory? cpu: parameters and optimizer state; params=false: the latter alone.", None),
    _setting("layer_classes", "Which modules are gathered together? Nothing: the automatic plan.", ()),
    Question("mixed_precision", "Mixed precision?", _usual_precision, one_of(*_PRECISIONS), ", ".join(_PRECISIONS)),
    _setting("fp32_masters", "Keep 16-bit models in fp32 between steps?", True),
    _setting("activation_checkpointing", "Recompute the layers' activations in backward, to save memory?", False, "debug"),
    _setting("activation_offload", "Have the layers' inputs wait for that in host memory, to save more?", False, "debug"),
    _setting("state_dict_type", "How does save_state write models? sharded: each rank; full: files as under DDP.", "sharded"),
)  # fmt: skip


def add_to(commands: Any) -> None:
    """Add the command ``config`` to a parser's `commands`."""
    parser = commands.add_parser("config", help="ask what is wanted, and write a YAML for accelerate launch")
    parser.add_argument("--config_file", default=_DEFAULT_FILE, help=f"where to write it; {_DEFAULT_FILE} by default")
    parser.add_argument("--deepspeed", metavar="FILE", help="take what a YAML for DeepSpeed says as defaults")
    parser.add_argument("--yes", action="store_true", help="take the defaults where no option says otherwise")
    parser.add_argument("--force", action="store_true", help="replace the file where there is one")
    for question in QUESTIONS:
        parser.add_argument(f"--{question.name}", metavar="ANSWER", help=f"{question.text} ({question.form})")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask the questions, write the YAML, print how to launch a script with it, and return the exit code."""
    from accelerate.commands.config.config_args import ClusterConfig

    path = Path(arguments.config_file)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--config_file {path}: Accelerate reads YAML from files that end in .yaml.")
    if path.exists() and not arguments.force:
        raise ConfigError(f"{path} is there already; --force replaces it.")
    given = {question.name: getattr(arguments, question.name) for question in QUESTIONS}
    defaults = {} if arguments.deepspeed is None else _from_deepspeed(Path(arguments.deepspeed))
    contents = contents_of(_answers(given, not arguments.yes, defaults))
    contents.update({key: defaults[key] for key in _MACHINES if key in defaults})
    path.parent.mkdir(parents=True, exist_ok=True)
    ClusterConfig(**contents).to_yaml_file(str(path))
    print(f"Wrote {path}. Run a script with it:")
    print(f"  accelerate launch --config_file {path} -m accelerate_shard train.py")
    return 0


def _from_deepspeed(path: Path) -> dict[str, Any]:
    """Return the answers that a YAML for DeepSpeed gives, and its entries of :data:`_MACHINES`."""
    contents = read_launch_file(path)
    if contents.get("distributed_type") != "DEEPSPEED":
        raise ConfigError(f"--deepspeed {path}: its distributed_type is {contents.get('distributed_type')}.")
    try:
        answers = fields_of(of_yaml(contents))
    except ConfigError as error:
        raise ConfigError(f"--deepspeed {path}: {error}") from None
    precision = _own_precision(contents) or contents.get("mixed_precision") or "no"  # the launcher's order
    if precision in _PRECISIONS:
        answers["mixed_precision"] = precision
    answers.update({key: contents[key] for key in _MACHINES if contents.get(key) is not None})
    return {**answers, "cpu": contents.get("use_cpu") is True, "num_processes": int(contents.get("num_processes") or 1)}


def _own_precision(contents: Mapping[str, Any]) -> str | None:
    """Return the precision that the YAML's file for DeepSpeed itself sets; None if it leaves that to Accelerate."""
    path = (contents.get("deepspeed_config") or {}).get("deepspeed_config_file")
    config = {} if path is None else read_config(path, "deepspeed_config_file")
    sections = {name: config.get(name) for name in ("bf16", "fp16")}
    enabled = {name: part.get("enabled") for name, part in sections.items() if isinstance(part, Mapping)}
    for name, value in enabled.items():
        if value is True:
            return name
    return None if not enabled or "auto" in enabled.values() else "no"


def _answers(given: Mapping[str, str | None], ask: bool, defaults: Mapping[str, Any]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for question in QUESTIONS:
        text = given[question.name]
        default = defaults[question.name] if question.name in defaults else question.default(answers)
        if text is not None:
            try:
                answers[question.name] = question.read(text)
            except ValueError:
                raise ConfigError(f"--{question.name} must be {question.form}; not {text!r}.") from None
        else:
            answers[question.name] = _asked(question, default) if ask else default
    return answers


def _asked(question: Question, default: Any) -> Any:
    default_text = text_of_offload(default) if question.name == "offload" else default
    while True:
        text = input(f"{question.text}\n  {question.form} [{default_text}]: ").strip()
        try:
            return question.read(text) if text else default
        except ValueError:
            print(f"  Please answer: {question.form}.")


def contents_of(answers: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of the YAML, by Accelerate's keys, for answers to :data:`QUESTIONS`."""
    # ShardPlugin checks the combination.
    fields = ("strategy", "layer_classes", "state_dict_type", "offload")
    ShardPlugin(**{field: answers[field] for field in fields})
    offload: Offload | None = answers["offload"]
    fsdp = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": answers["strategy"] in ("full_shard", "hybrid_shard"),
        "fsdp_offload_params": offload == Offload(),
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": f"{answers['state_dict_type']}_state_dict".upper(),
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_activation_checkpointing": answers["activation_checkpointing"],
        "shard_activation_offload": answers["activation_offload"],
        "shard_strategy": answers["strategy"],
        "shard_fp32_masters": answers["fp32_masters"],
    }
    if offload not in (None, Offload()):
        fsdp["shard_offload"] = text_of_offload(offload)
    if answers["layer_classes"]:
        fsdp["fsdp_transformer_layer_cls_to_wrap"] = ",".join(answers["layer_classes"])
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": answers["mixed_precision"],
        "use_cpu": answers["cpu"],
        "debug": False,
        "num_processes": answers["num_processes"],
        "num_machines": 1,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "fsdp_config": fsdp,
    }
