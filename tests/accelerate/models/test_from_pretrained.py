"""from_pretrained on meta, filled when the model is sharded: to the bit what transformers loads."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import torch_shard
from accelerate_shard import from_pretrained
from tests.accelerate.support.peft_models import transformers_takes_peft
from tests.support.hf_models import NAMES, build
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import CheckpointError, ConfigError, SetupError

TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def saved(name: str, folder: Path, dtype: torch.dtype | None = None, **options: Any) -> type[nn.Module]:
    """Save a small model, on rank 0; the others wait. Its class."""
    model = build(name, 1)[0]
    if dist.get_rank() == 0:
        model.to(dtype).save_pretrained(folder, **options)
    dist.barrier()
    return type(model)


def assert_equal(model: Any, reference: Any) -> None:
    """The sharded model has the values, dtypes, ties and buffers of the plain one. Collective."""
    found = torch_shard.engine_of(model).state_dict(rank0_only=False)
    wanted = reference.state_dict()
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in reference.named_parameters()]  # ties
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in reference.parameters()]
    for (name, value), (other, buffer) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        assert name == other
        assert value.dtype == buffer.dtype
        assert torch.equal(value, buffer), name


def loaded(cls: Any, path: Any, **options: Any) -> Any:
    """A model of ours that nothing has been read of."""
    model = from_pretrained(cls, path, **options)
    assert all(p.device.type == "meta" for p in model.parameters())
    return model


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n not in ("gpt2", "mixtral"))) for n in NAMES]
)
@ranks(2)
def test_a_model_is_what_transformers_loads(name, tmp_path):
    cls = saved(name, tmp_path)
    reference = cls.from_pretrained(tmp_path)
    model = from_pretrained(cls, tmp_path)
    torch_shard.shard(model, unit_bytes=4096)
    assert_equal(model, reference)
    assert not model.training
    assert model.config.to_dict() == reference.config.to_dict()


@pytest.mark.parametrize(
    ("stored", "options"),
    [
        (torch.float32, {"dtype": torch.bfloat16}),
        *exhaustive((torch.bfloat16, {"torch_dtype": "auto"}), (torch.bfloat16, {"dtype": "float32"})),
    ],
)
@ranks(2)
def test_dtypes_are_those_of_transformers_from_several_files(stored, options, tmp_path):
    cls = saved("llama", tmp_path, stored, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    model = loaded(cls, tmp_path, **options)
    torch_shard.shard(model)
    assert_equal(model, cls.from_pretrained(tmp_path, **options))


@contextlib.contextmanager
def said() -> Any:
    """What transformers logs inside."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("transformers")
    log.addHandler(handler)
    try:
        yield texts
    finally:
        log.removeHandler(handler)


def bert(cls: Any, path: Path, **options: Any) -> Any:
    model = cls(transformers.BertConfig(**TEXT, **options))
    if dist.get_rank() == 0:
        model.save_pretrained(path)
    dist.barrier()
    return model


@ranks(2)
def test_a_head_that_the_files_lack_is_initialised_and_reported_as_by_transformers(rank, tmp_path):
    bert(transformers.BertModel, tmp_path)
    cls = transformers.BertForSequenceClassification
    torch.manual_seed(5)
    with said() as wanted:
        reference = cls.from_pretrained(tmp_path)
    torch.manual_seed(5 + rank)  # of ranks that differ rank 0's values count
    with said() as texts:
        model, info = from_pretrained(cls, tmp_path, output_loading_info=True)
    assert texts == wanted and any("classifier.weight" in text for text in texts)
    assert info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    torch_shard.shard(model)
    full = torch_shard.engine_of(model).state_dict(rank0_only=False)
    assert rank or all(torch.equal(full[key], value) for key, value in reference.state_dict().items())
    both = [torch.empty_like(full["classifier.weight"]) for _ in range(2)]
    dist.all_gather(both, full["classifier.weight"])
    assert torch.equal(*both)


@ranks(2)
def test_a_model_with_a_head_gives_its_base_and_reports_the_rest(tmp_path):
    bert(transformers.BertForMaskedLM, tmp_path)
    with said() as wanted:
        reference = transformers.BertModel.from_pretrained(tmp_path, add_pooling_layer=False)
    with said() as texts:
        model = loaded(transformers.BertModel, tmp_path, add_pooling_layer=False)
    assert texts == wanted and any("UNEXPECTED" in text for text in texts)
    torch_shard.shard(model)
    assert_equal(model, reference)


@ranks(2)
def test_entries_of_another_size_are_an_error_or_initialised(tmp_path):
    bert(transformers.BertForSequenceClassification, tmp_path, num_labels=4)
    cls, options = transformers.BertForSequenceClassification, {"num_labels": 7, "ignore_mismatched_sizes": True}
    with pytest.raises(RuntimeError, match=r"ignore_mismatched_sizes"):
        from_pretrained(cls, tmp_path, num_labels=7)
    torch.manual_seed(5)
    reference = cls.from_pretrained(tmp_path, **options)
    torch.manual_seed(5)
    model = from_pretrained(cls, tmp_path, **options)
    torch_shard.shard(model)
    assert_equal(model, reference)


@pytest.mark.parametrize("equal", [True, *exhaustive(False)])
@ranks(2)
def test_where_the_files_have_both_of_two_tied_weights_their_values_decide(rank, equal, tmp_path):
    from safetensors.torch import load_file, save_file

    cls = saved("gpt2", tmp_path)
    if rank == 0:
        values = load_file(tmp_path / "model.safetensors")
        values["lm_head.weight"] = values["transformer.wte.weight"] + (0 if equal else 1)
        save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    reference = cls.from_pretrained(tmp_path)
    model = loaded(cls, tmp_path)
    assert (model.lm_head.weight is model.transformer.wte.weight) is equal
    assert model.all_tied_weights_keys == reference.all_tied_weights_keys
    torch_shard.shard(model)
    assert_equal(model, reference)


@ranks(1, 2)
def test_a_model_from_the_cache_needs_its_name_only(rank, tmp_path):
    folder = tmp_path / "models--team--tiny"
    snapshot = folder / "snapshots" / ("0" * 40)
    cls = saved("gpt2", snapshot)
    if rank == 0:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("0" * 40)
    dist.barrier()
    options = {"cache_dir": tmp_path, "local_files_only": True, "attn_implementation": "eager"}
    # Without it transformers looks for an adapter at the hub, `local_files_only` or not, and waits long for an answer.
    with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
        model = loaded(transformers.AutoModelForCausalLM, "team/tiny", **options)
    assert model.config._attn_implementation == "eager"
    torch_shard.shard(model)
    assert_equal(model, cls.from_pretrained(snapshot))


# -- with PEFT --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replaces", [None, *exhaustive(["lm_head"])])
@ranks(2)
def test_new_and_saved_adapters_are_put_on_as_on_the_model_that_transformers_loads(rank, replaces, tmp_path):
    cls = saved("llama", tmp_path / "base", torch.bfloat16)
    config = peft.LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False, modules_to_save=replaces)
    if rank == 0:
        tuned = peft.get_peft_model(cls.from_pretrained(tmp_path / "base"), config)
        with torch.no_grad():
            for p in tuned.parameters():
                p.add_(1 if p.requires_grad else 0)
        tuned.save_pretrained(tmp_path / "adapter")
    dist.barrier()

    def fresh(load: Any) -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(load(cls, tmp_path / "base", dtype=torch.float32), config)

    def tuned_(load: Any) -> Any:
        return peft.PeftModel.from_pretrained(load(cls, tmp_path / "base"), tmp_path / "adapter", is_trainable=True)

    for make in (fresh, tuned_):
        reference, model = make(cls.from_pretrained.__func__), make(from_pretrained)
        wanted = peft.get_peft_model_state_dict(reference)
        found = peft.get_peft_model_state_dict(model)  # adapters have values before the model is sharded
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
        assert sum(p.device.type != "meta" for p in model.parameters()) == len(wanted)
        torch_shard.shard(model)
        assert_equal(model, reference)


@transformers_takes_peft
@pytest.mark.parametrize("modules", [None, *exhaustive(["lm_head"])])
@ranks(2)
def test_transformers_own_adapters_are_loaded_saved_and_added_before_it_is_sharded(rank, modules, tmp_path):
    cls = saved("llama", tmp_path / "base")
    config = peft.LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False, modules_to_save=modules)
    if rank == 0:
        peft.get_peft_model(cls.from_pretrained(tmp_path / "base"), config).save_pretrained(tmp_path / "adapter")
    dist.barrier()
    reference, model = cls.from_pretrained(tmp_path / "base"), loaded(cls, tmp_path / "base")
    for each in (reference, model):
        each.load_adapter(tmp_path / "adapter")
        if modules is None:
            torch.manual_seed(4)
            each.add_adapter(peft.LoraConfig(target_modules=["v_proj"], r=2), adapter_name="other")
            each.set_adapter("default")
    assert "hf_device_map" not in vars(model)
    model.save_pretrained(tmp_path / "again", is_main_process=rank == 0)  # the adapter, which has values
    dist.barrier()
    found, wanted = (tmp_path / name / "adapter_model.safetensors" for name in ("again", "adapter"))
    assert found.read_bytes() == wanted.read_bytes()
    torch_shard.shard(model)
    assert_equal(model, reference)


# -- before it is sharded ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, *exhaustive(True)])
@ranks(2)
def test_before_it_is_sharded_a_model_says_that_it_has_no_values_and_nothing_is_written(rank, compiled, tmp_path):
    cls = saved("gpt2", tmp_path / "base")
    model, reference = loaded(cls, tmp_path / "base"), cls.from_pretrained(tmp_path / "base")
    ids, target = torch.tensor([[5, 6, 7]]), tmp_path / f"early{rank}"
    for own in (model, copy.deepcopy(model)):
        for name, use in {
            "forward": lambda own: own(input_ids=ids),
            "generate": lambda own: own.generate(ids, max_new_tokens=2, do_sample=False),
            "save_pretrained": lambda own: own.save_pretrained(target, is_main_process=rank == 0),
        }.items():
            with pytest.raises(SetupError, match=rf"{cls.__name__}\.{name}: .*prepare\(model\)"):
                use(own)
    assert not target.exists()
    assert inspect.signature(model.forward) == inspect.signature(cls.forward.__get__(model))
    used = torch.compile(model, backend="eager") if compiled else model
    model.save_pretrained(target, state_dict=reference.state_dict())  # values of the user's
    assert rank != 0 or (target / "model.safetensors").is_file()
    torch_shard.shard(model)
    assert not {"forward", "generate", "save_pretrained", "load_adapter"} & vars(model).keys()
    assert torch.equal(model(input_ids=ids).logits, reference(input_ids=ids).logits)
    torch.testing.assert_close(used(input_ids=ids).logits, reference(input_ids=ids).logits)


@ranks(2)
def test_a_copy_that_gets_values_in_another_way_is_an_ordinary_model(tmp_path):
    cls = saved("gpt2", tmp_path / "base")
    reference = cls.from_pretrained(tmp_path / "base")
    twin = copy.deepcopy(loaded(cls, tmp_path / "base"))
    twin.load_state_dict(reference.state_dict(), assign=True)
    twin.tie_weights()
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(twin(input_ids=ids).logits, reference(input_ids=ids).logits)
    assert "forward" not in vars(twin)
    torch_shard.shard(twin)
    assert_equal(twin, reference)


# -- what is refused --------------------------------------------------------------------------------------------------


@ranks(1)
def test_what_would_place_or_quantize_weights_is_refused_with_the_remedy(tmp_path):
    cls = saved("gpt2", tmp_path)
    for name, value in {
        "device_map": "auto", "max_memory": {0: "1GB"}, "offload_folder": "x", "tp_plan": "auto", "gguf_file": "x.gguf",
        "quantization_config": {"load_in_8bit": True},
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            from_pretrained(cls, tmp_path, **{name: value})
    quantized = cls.config_class.from_pretrained(tmp_path)
    quantized.quantization_config = {"quant_method": "gptq", "bits": 4}
    quantized.save_pretrained(tmp_path / "quantized")
    with pytest.raises(ConfigError, match="gptq"):
        from_pretrained(cls, tmp_path / "quantized")


@ranks(1)
def test_what_cannot_be_read_in_shards_is_refused(tmp_path):
    cls = saved("gpt2", tmp_path / "good")
    model = cls.from_pretrained(tmp_path / "good")
    model.config.save_pretrained(tmp_path / "bin")
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"])).save_pretrained(tmp_path / "adapter")
    stock = transformers.PreTrainedModel._load_pretrained_model
    file = Path(shutil.copytree(tmp_path / "good", tmp_path / "cut"), "model.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    for error, said, kind, folder, options in (
        (ConfigError, "safetensors", cls, "bin", {"use_safetensors": False}),
        (ConfigError, r"PeftModel\.from_pretrained", cls, "adapter", {}),
        (ConfigError, "from_files", nn.Linear, "good", {}),
        (CheckpointError, r"model\.safetensors", cls, "cut", {"dtype": "float32"}),
        (OSError, "nowhere", cls, "nowhere", {}),
    ):
        with pytest.raises(error, match=said):
            from_pretrained(kind, tmp_path / folder, **options)
    assert transformers.PreTrainedModel._load_pretrained_model is stock
