"""Settings of DeepSpeed, key by key, as those of this package: for the error that refuses them, and for ``accelerate-shard config
--deepspeed``, which writes them.

They are not taken over in silence: DeepSpeed itself clips, accumulates and makes optimizers as its configuration says, where here
the script does, so that the same script would train otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_shard import Offload
from torch_shard.errors import ConfigError

from .offload_text import text_of

__all__ = ["KEYS", "Key", "advice", "answers_of", "by_hand", "of_environment", "of_json", "of_yaml", "table"]

_STRATEGIES = {0: "no_shard", 1: "shard_optim", 2: "shard_grad_op", 3: "full_shard"}
_DEVICES = ("none", "cpu", "nvme")


@dataclass(frozen=True)
class Key:
    """One setting of DeepSpeed.

    Attributes:
        yaml: in a YAML's ``deepspeed_config``.
        json: in DeepSpeed's own configuration; empty where it has none.
        variable: of the environment, behind ``ACCELERATE_``; empty where the launcher exports none.
        means: what stands for it here, for the documentation and, where it is no setting, for errors.
        setting: whether a setting stands for it.
    """

    yaml: str
    json: str
    variable: str
    means: str
    setting: bool = False


KEYS = (
    Key(
        "zero_stage", "zero_optimization.stage", "DEEPSPEED_ZERO_STAGE",
        "`SHARD_STRATEGY`: `no_shard`, `shard_optim`, `shard_grad_op`, `full_shard` for stages 0 to 3", True,
    ),
    Key(
        "offload_optimizer_device", "zero_optimization.offload_optimizer.device", "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        "`SHARD_OFFLOAD`: `params=false` for `cpu`, where parameters are not offloaded; with `nvme` `nvme=DIR` besides", True,
    ),
    Key(
        "offload_optimizer_nvme_path", "zero_optimization.offload_optimizer.nvme_path", "",
        "`SHARD_OFFLOAD`: `nvme=DIR`, with that device", True,
    ),
    Key(
        "offload_param_device", "zero_optimization.offload_param.device", "DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        "`SHARD_OFFLOAD`: `cpu` for `cpu`, which is for optimizer state, too; `nvme=DIR,nvme_params=true` for `nvme`", True,
    ),
    Key(
        "offload_param_nvme_path", "zero_optimization.offload_param.nvme_path", "",
        "`SHARD_OFFLOAD`: `nvme=DIR`, with that device, unless optimizer state has one: there is one directory", True,
    ),
    Key(
        "gradient_accumulation_steps", "gradient_accumulation_steps", "GRADIENT_ACCUMULATION_STEPS",
        "Accelerator(gradient_accumulation_steps=...) and accelerator.accumulate(model) in the script",
    ),
    Key(
        "gradient_clipping", "gradient_clipping", "GRADIENT_CLIPPING",
        "accelerator.clip_grad_norm_(model.parameters(), ...) in the script, before each step",
    ),
    Key(
        "zero3_init_flag", "", "DEEPSPEED_ZERO3_INIT",
        "nothing: accelerate_shard.from_pretrained reads slices, and models on meta get memory for slices alone",
    ),
    Key(
        "zero3_save_16bit_model", "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "nothing: accelerator.save_model and save_pretrained write the whole model",
    ),
    Key(
        "deepspeed_config_file", "", "DEEPSPEED_CONFIG_FILE",
        "its keys as above; an optimizer or scheduler in it is made in the script, in place of DummyOptim and DummyScheduler",
    ),
    Key(
        "deepspeed_moe_layer_cls_names", "", "DEEPSPEED_MOE_LAYER_CLS_NAMES",
        "nothing: experts that a rank does not use need no care",
    ),
    Key("deepspeed_hostfile", "", "", "machine_rank, num_machines and main_process_ip in the YAML of each machine"),
    Key("deepspeed_multinode_launcher", "", "", "the same: accelerate launch on each machine"),
    Key("deepspeed_inclusion_filter", "", "", "gpu_ids and num_processes"),
    Key("deepspeed_exclusion_filter", "", "", "gpu_ids and num_processes"),
)  # fmt: skip


def table() -> str:
    """The documentation's table of :data:`KEYS`, in Markdown."""
    rows = ["| in a YAML's `deepspeed_config` | in DeepSpeed's own file | here |", "|---|---|---|"]
    rows += [f"| `{key.yaml}` | {f'`{key.json}`' if key.json else 'not there'} | {key.means} |" for key in KEYS]
    return "\n".join(rows)


# -- what was said ------------------------------------------------------------------------------------------------------


def of_yaml(contents: Mapping[str, Any]) -> dict[str, Any]:
    """By the YAML's keys, what a file of Accelerate's says, with the file of DeepSpeed's that it names. Not collective."""
    section = contents.get("deepspeed_config")
    said = {k: v for k, v in (section if isinstance(section, Mapping) else {}).items() if v is not None}
    return _with_file(said)


def of_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Likewise what ``accelerate launch`` exports of one. Not collective."""
    said = {key.yaml: environment.get(f"ACCELERATE_{key.variable}", "") for key in KEYS if key.variable}
    return _with_file({name: value for name, value in said.items() if value != ""})


def of_json(config: Any) -> dict[str, Any]:
    """Likewise what DeepSpeed's own configuration says: a mapping, or the path of a file; nothing where it can't be read. Not
    collective."""
    if isinstance(config, (str, Path)):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
    said = {}
    for key in KEYS:
        value = config if key.json else None
        for part in key.json.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value != "auto":
            said[key.yaml] = value
    return said


def _with_file(said: dict[str, Any]) -> dict[str, Any]:
    # As Accelerate has it: the file counts, and it allows none of its keys beside it.
    return said | of_json(said["deepspeed_config_file"]) if "deepspeed_config_file" in said else said


# -- and what stands for it ---------------------------------------------------------------------------------------------


def answers_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the fields of :class:`ShardPlugin` that stand for settings of DeepSpeed. Not collective.

    Args:
        said: by the YAML's keys.

    Raises:
        ConfigError: a value that DeepSpeed does not have, or a disk without a directory; names the key.
    """
    stage = str(said.get("zero_stage", 2))  # Accelerate's default
    if stage not in map(str, _STRATEGIES):
        raise ConfigError(f"zero_stage must be 0, 1, 2 or 3, not {stage!r}.")
    return {"strategy": _STRATEGIES[int(stage)], "offload": _offload(said)}


def _offload(said: Mapping[str, Any]) -> Offload | None:
    optimizer, param = (_device(said, f"offload_{of}_device") for of in ("optimizer", "param"))
    if optimizer == param == "none":
        return None
    found: dict[str, Any] = {"params": param != "none"}
    for of, device in (("param", param), ("optimizer", optimizer)):
        if device == "nvme":
            path = str(said.get(f"offload_{of}_nvme_path", "none"))
            if path.lower() in ("none", ""):
                raise ConfigError(f"offload_{of}_device is nvme, and offload_{of}_nvme_path names no directory.")
            found["nvme"] = path
    if param == "nvme":
        found["nvme_params"] = True
    return Offload(**found)


def _device(said: Mapping[str, Any], key: str) -> str:
    value = str(said.get(key, "none")).lower()
    if value not in _DEVICES:
        raise ConfigError(f"{key} must be none, cpu or nvme, not {value!r}.")
    return value


def by_hand(said: Mapping[str, Any]) -> list[str]:
    """Of the keys that no setting stands for: what to do instead. Not collective."""
    usual = {"gradient_accumulation_steps": ("1", "auto"), "gradient_clipping": ("auto", "none")}
    return [
        f"{key.yaml} ({said[key.yaml]}): {key.means}"
        for key in KEYS
        if not key.setting and key.yaml in said and str(said[key.yaml]).lower() not in usual.get(key.yaml, ("false",))
    ]


def advice(said: Mapping[str, Any]) -> str:
    """What to write in place of settings of DeepSpeed, key by key: sentences for an error. Not collective."""
    if not said:
        return ""
    try:
        answers = answers_of(said)
    except ConfigError as error:
        return f" In its settings: {error}"
    of_stage: list[str] = []
    of_offload: list[str] = []
    for key in KEYS:
        if key.setting and key.yaml in said:
            (of_stage if key.yaml == "zero_stage" else of_offload).append(f"{key.yaml}={said[key.yaml]}")
    parts = [f"SHARD_STRATEGY={answers['strategy']} ({', '.join(of_stage) or 'zero_stage=2, the default'})"]
    if answers["offload"] is not None:
        parts.append(f"SHARD_OFFLOAD={text_of(answers['offload'])} ({', '.join(of_offload)})")
    return f" What stands for its settings here: {'; '.join([*parts, *by_hand(said)])}."
