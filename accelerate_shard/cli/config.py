"""``accelerate-shard config``: asks our questions, and writes a YAML that ``accelerate launch`` reads.

The file is one of Accelerate's own, with ``distributed_type: FSDP``: it starts processes on GPUs and CPUs alike. What FSDP has a
key for is said by that key, so that Accelerate alone would run it too; what it has none for is in ``fsdp_config`` as ``shard_*``,
which Accelerate's loader lets through and the runner reads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from torch_shard import Offload
from torch_shard.errors import ConfigError
from torch_shard.frontend import Strategy

from ..settings import from_deepspeed
from ..settings.config_file import read_launch_file
from ..settings.offload_text import FIELDS, read_offload, text_of
from ..settings.plugin import ShardPlugin, StateDictType

__all__ = ["QUESTIONS", "Question", "add_to", "contents_of", "write"]

DEFAULT_FILE = "accelerate_shard.yaml"
_YES, _NO = ("y", "yes", "true", "1"), ("n", "no", "false", "0")


@dataclass(frozen=True)
class Question:
    """A question, which an option of the command line answers too.

    Attributes:
        name: of the option and of the answer.
        text: what is asked.
        read: from what is typed to the answer; raises ValueError.
        default: of the answers so far.
        form: what can be typed.
        asked: whether it is, of the answers so far.
    """

    name: str
    text: str
    read: Callable[[str], Any]
    default: Callable[[dict[str, Any]], Any]
    form: str
    asked: Callable[[dict[str, Any]], bool] = lambda answers: True


def _yes_no(text: str) -> bool:
    if text.lower() not in _YES + _NO:
        raise ValueError
    return text.lower() in _YES


def _one_of(*known: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.isdecimal() and int(text) < len(known):
            return known[int(text)]
        if text.lower() not in known:
            raise ValueError
        return text.lower()

    return read


def _menu(*known: str) -> str:
    return ", ".join(f"{index} {name}" for index, name in enumerate(known))


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _classes(text: str) -> tuple[str, ...]:
    return () if text.lower() == "auto" else tuple(name.strip() for name in text.split(",") if name.strip())


def _offload(text: str) -> Offload | None:
    if text.isdecimal() and int(text) < len(_OFFLOADS):
        text = _OFFLOADS[int(text)]
    return Offload(params=False) if text.lower() == "optimizer" else read_offload(text)


def _devices(answers: dict[str, Any]) -> int:
    return 2 if answers["cpu"] else max(1, torch.accelerator.device_count())


def _precision(answers: dict[str, Any]) -> str:
    return "bf16" if not answers["cpu"] and torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"


_OFFLOADS = ("none", "cpu", "optimizer")
_STRATEGIES, _FORMS, _PRECISIONS = get_args(Strategy), get_args(StateDictType), ("no", "bf16", "fp16")
QUESTIONS = (
    Question("cpu", "Train on CPUs?", _yes_no, lambda a: not torch.accelerator.is_available(), "yes or no"),
    Question("num_processes", "How many processes on this machine?", _count, _devices, "a number, 1 or more"),
    Question(
        "strategy", "What is sharded? full_shard is ZeRO-3, shard_grad_op ZeRO-2, shard_optim ZeRO-1, no_shard what DDP does.",
        _one_of(*_STRATEGIES), lambda a: "full_shard", _menu(*_STRATEGIES),
    ),
    Question(
        "offload", "What lies in host memory, for models too large for the devices? cpu: parameters and optimizer state; "
        "optimizer: that alone; or Offload's fields, as in nvme=/local_disk.",
        _offload, lambda a: None, f"{_menu(*_OFFLOADS)}, or {', '.join(f'{name}=...' for name in FIELDS)}",
    ),
    Question(
        "layer_classes", "Which modules are gathered together? Names of layer classes, separated by commas, or auto.",
        _classes, lambda a: (), "names of classes, or auto",
    ),
    Question("mixed_precision", "Mixed precision?", _one_of(*_PRECISIONS), _precision, _menu(*_PRECISIONS)),
    Question(
        "fp32_masters", "Keep 16-bit models in fp32 between steps?", _yes_no, lambda a: True, "yes or no",
        lambda a: a["mixed_precision"] != "no",
    ),
    Question(
        "activation_checkpointing", "Compute the layers' activations again in backward, to save memory?", _yes_no,
        lambda a: False, "yes or no",
    ),
    Question(
        "activation_offload", "Have the layers' inputs wait for that in host memory, to save more?", _yes_no,
        lambda a: False, "yes or no", lambda a: a["activation_checkpointing"],
    ),
    Question(
        "state_dict_type", "How does save_state write models? sharded: each rank its part; full: files as under DDP.",
        _one_of(*_FORMS), lambda a: "sharded", _menu(*_FORMS),
    ),
)  # fmt: skip


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser("config", help="ask what is wanted, and write a YAML for accelerate launch")
    parser.add_argument("--config_file", default=DEFAULT_FILE, help=f"where to write it; {DEFAULT_FILE} by default")
    parser.add_argument("--deepspeed", metavar="FILE", help="take what a YAML for DeepSpeed says as defaults")
    parser.add_argument("--yes", action="store_true", help="take the defaults where no option says otherwise")
    parser.add_argument("--force", action="store_true", help="replace the file where there is one")
    for question in QUESTIONS:
        parser.add_argument(f"--{question.name}", metavar="ANSWER", help=f"{question.text} ({question.form})")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask, write, and say how to run it."""
    path = Path(arguments.config_file)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--config_file {path}: Accelerate reads YAML from files that end in .yaml.")
    if path.exists() and not arguments.force:
        raise ConfigError(f"{path} is there already; --force replaces it.")
    given = {q.name: getattr(arguments, q.name) for q in QUESTIONS}
    told, hints = ({}, []) if arguments.deepspeed is None else _told(Path(arguments.deepspeed))
    answers = _answers(given, ask=not arguments.yes, told=told)
    write(path, contents_of(answers))
    for hint in hints:
        print(f"No setting stands for {hint}")
    print(f"Wrote {path}. Run a script with it:")
    print(f"  accelerate launch --config_file {path} -m accelerate_shard train.py")
    print(f"Try it: accelerate-shard test --config_file {path}")
    return 0


def _told(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Answers that a YAML for DeepSpeed gives, and what to do about the rest of it."""
    contents = read_launch_file(path)
    if contents.get("distributed_type") != "DEEPSPEED":
        raise ConfigError(f"--deepspeed {path}: its distributed_type is {contents.get('distributed_type')}.")
    said = from_deepspeed.of_yaml(contents)
    try:
        answers = from_deepspeed.answers_of(said)
    except ConfigError as error:
        raise ConfigError(f"--deepspeed {path}: {error}") from None
    if contents.get("mixed_precision") in _PRECISIONS:
        answers["mixed_precision"] = contents["mixed_precision"]
    answers |= {"cpu": contents.get("use_cpu") is True, "num_processes": int(contents.get("num_processes") or 1)}
    hints = from_deepspeed.by_hand(said)
    if contents.get("num_machines", 1) != 1:
        hints.append(f"num_machines ({contents['num_machines']}): set it, machine_rank and main_process_ip in the file")
    return answers, hints


def _answers(given: dict[str, str | None], ask: bool, told: Mapping[str, Any]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for question in QUESTIONS:
        text = given[question.name]
        default = told[question.name] if question.name in told else question.default(answers)
        if text is not None:
            try:
                answers[question.name] = question.read(text)
            except ValueError:
                raise ConfigError(f"--{question.name} must be one of: {question.form}; not {text!r}.") from None
        elif ask and question.asked(answers):
            answers[question.name] = _asked(question, default)
        else:
            answers[question.name] = default
    return answers


def _asked(question: Question, default: Any) -> Any:
    shown = _shown(default)
    while True:
        text = input(f"{question.text}\n  {question.form} [{shown}]: ").strip()
        if not text:
            return default
        try:
            return question.read(text)
        except ValueError:
            print(f"  Please answer: {question.form}.")


def _shown(answer: Any) -> Any:
    if answer is None or isinstance(answer, Offload):
        return text_of(answer)
    if isinstance(answer, bool):
        return "yes" if answer else "no"
    return "auto" if answer == () else answer


def contents_of(answers: dict[str, Any]) -> dict[str, Any]:
    """The YAML's contents, by Accelerate's keys, of the answers to :data:`QUESTIONS`."""
    classes: Sequence[str] = answers["layer_classes"]
    # A check of the combination, by the class that has the rules.
    ShardPlugin(strategy=answers["strategy"], layer_classes=classes, state_dict_type=answers["state_dict_type"])
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
        fsdp["shard_offload"] = text_of(offload)
    if classes:
        fsdp["fsdp_transformer_layer_cls_to_wrap"] = ",".join(classes)
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


def write(path: Path, contents: dict[str, Any]) -> None:
    """Write the file, and read it as Accelerate does. Nothing is left where Accelerate refuses it."""
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    before = path.read_bytes() if path.exists() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        ClusterConfig(**contents).to_yaml_file(str(path))
        load_config_from_file(str(path))
    except (TypeError, ValueError) as error:
        if before is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(before)
        raise ConfigError(f"{path}: this Accelerate does not take the configuration ({error}).") from error
