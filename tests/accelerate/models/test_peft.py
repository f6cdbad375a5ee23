"""PEFT's adapters on sharded models: training as under DDP, files in PEFT's own format, merging, several adapters."""

from __future__ import annotations

import copy
import gc
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.accelerate.models.test_generation import text, too_little_memory
from tests.accelerate.support.accelerators import OURS, STOCK, accelerator, engine_of
from tests.accelerate.support.peft_models import adapted, compare, lora, train, transformers_takes_peft
from tests.support.hf_models import build
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError

TASK = {"task_type": "CAUSAL_LM"}
CONFIGS: dict[str, peft.PeftConfig] = {
    "lora": lora(),
    "rslora with bias": lora(use_rslora=True, bias="lora_only"),
    "dora": lora(use_dora=True),
    "modules to save": lora(modules_to_save=["lm_head"]),
    "embedding": lora(target_modules=["embed_tokens", "q_proj"]),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **TASK),
    "prompt tuning": peft.PromptTuningConfig(num_virtual_tokens=4, **TASK),
    "p-tuning": peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, **TASK),
    "prefix tuning": peft.PrefixTuningConfig(num_virtual_tokens=4, **TASK),
}


def made(way: str) -> Any:
    """A llama with adapters of one of :data:`CONFIGS`, and its inputs and loss."""
    return adapted("llama", copy.deepcopy(CONFIGS[way]))


@ranks(2)
def test_lora_on_gpt2_trains_as_under_ddp() -> None:
    compare(lambda: adapted("gpt2"))


@pytest.mark.parametrize("way", quick(CONFIGS, ["dora", "ia3"]))
@ranks(2)
def test_every_method_trains_as_under_ddp(way: str) -> None:
    compare(lambda: made(way))


@pytest.mark.parametrize("way", quick(CONFIGS, ["lora", "p-tuning"]))
@ranks(2)
def test_checkpoints_are_peft_s_own_and_hold_the_adapter_alone(tmp_path: Path, way: str) -> None:
    plain = made(way)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dist.get_rank() == 0:
            plain.save_pretrained(tmp_path / "stock")
        with accelerator(OURS) as acc:
            model = acc.prepare(made(way)[0])
            model.save_pretrained(tmp_path / "ours")
            acc.unwrap_model(model).save_pretrained(
                tmp_path / "idiom",
                is_main_process=acc.is_main_process,
                save_function=acc.save,
                state_dict=acc.get_state_dict(model),
            )
        dist.barrier()
    stock = load_file(tmp_path / "stock" / "adapter_model.safetensors")
    for folder in ("ours", "idiom"):
        assert {p.name for p in (tmp_path / folder).iterdir()} == {p.name for p in (tmp_path / "stock").iterdir()}
        found = load_file(tmp_path / folder / "adapter_model.safetensors")
        assert list(found) == list(stock) and all(torch.equal(found[key], value) for key, value in stock.items())
    if isinstance(CONFIGS[way], peft.LoraConfig):
        loaded = peft.PeftModel.from_pretrained(build("llama")[0], tmp_path / "ours").state_dict()
        assert all(torch.equal(value, plain.state_dict()[key]) for key, value in loaded.items())


@pytest.mark.parametrize(
    ("way", "gathered"),
    [("lora", True), *exhaustive(("dora", False), ("modules to save", True), ("modules to save", False))],
)
@ranks(2)
def test_merging_equals_stock_and_the_merged_model_is_saved_whole(tmp_path: Path, way: str, gathered: bool) -> None:
    plain, inputs, _ = made(way)
    plain.eval()
    logits = plain(**inputs).logits
    merged = plain.merge_and_unload()
    with accelerator(OURS) as acc:
        model = acc.prepare(made(way)[0]).eval()
        engine = engine_of(model)
        if gathered:
            with engine.gathered(write=True):
                found = model.merge_and_unload()
        else:
            found = model.merge_and_unload()
        torch.testing.assert_close(found(**inputs).logits, logits, rtol=1e-4, atol=1e-5)
        found.save_pretrained(tmp_path)
        saved = load_file(tmp_path / "model.safetensors")
        wanted = merged.state_dict()
        assert set(saved) == set(wanted)
        assert all(torch.equal(saved[key], value) for key, value in wanted.items())


@ranks(2)
def test_a_merged_model_is_saved_whole_when_the_model_around_it_is_gone(tmp_path: Path) -> None:
    wanted = adapted()[0].merge_and_unload().state_dict()
    with accelerator(OURS) as acc:
        model = acc.prepare(adapted()[0])
        merged = model.merge_and_unload()
        acc.free_memory()
        del model
        gc.collect()
        merged.save_pretrained(tmp_path)
        saved = load_file(tmp_path / "model.safetensors")
        assert all(torch.equal(value, wanted[key]) for key, value in saved.items())


@pytest.mark.parametrize("what", ["loaded", *exhaustive("merged and unmerged", "deleted")])
@ranks(2)
def test_between_steps_adapters_are_loaded_merged_and_deleted(what: str, tmp_path: Path) -> None:
    with accelerator(STOCK) as acc:
        model, _ = train(acc, *adapted())
        if acc.is_main_process:
            acc.unwrap_model(model).save_pretrained(tmp_path)
        dist.barrier()

    def between(model: Any, step: int) -> None:
        if step == 1 and what == "loaded":
            model.load_adapter(str(tmp_path), "default", is_trainable=True)
        elif step == 1 and what == "deleted":
            model.delete_adapter("second")
        elif step == 1:
            model.merge_adapter()
            model.unmerge_adapter()

    more = {"second": lora(r=2)} if what == "deleted" else {}
    compare(lambda: adapted(**more), between)


@ranks(2)
def test_each_of_several_adapters_is_saved(tmp_path: Path) -> None:
    second = lora(r=2, target_modules=["k_proj"])
    plain = adapted(second=second)[0]
    with accelerator(OURS) as acc:
        model = acc.prepare(adapted(second=second)[0])
        model.save_pretrained(tmp_path / "both")
        model.save_pretrained(tmp_path / "one", selected_adapters=["second"])
    state = plain.state_dict()
    for folder, name in (("both", "default"), ("both/second", "second"), ("one/second", "second")):
        saved = load_file(tmp_path / folder / "adapter_model.safetensors")
        assert saved and all(torch.equal(v, state[k.replace(".weight", f".{name}.weight")]) for k, v in saved.items())
    assert not (tmp_path / "one" / "adapter_model.safetensors").exists()


@ranks(2)
def test_an_adapter_added_to_a_sharded_model_is_refused(tmp_path: Path) -> None:
    model, inputs, loss = adapted()
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path)
    dist.barrier()
    with accelerator(OURS) as acc:
        model = acc.prepare(model)
        with pytest.raises(ConfigError, match=r"add_adapter\('second'\).* before accelerator\.prepare"):
            model.add_adapter("second", lora())
        with pytest.raises(ConfigError, match=r"load_adapter\('second'\)"):
            model.load_adapter(str(tmp_path), "second")
        with pytest.raises(ConfigError, match=r"add_weighted_adapter\('mean'\)"):
            model.add_weighted_adapter(["default"], [1.0], "mean")
        with pytest.raises(ConfigError, match="inject_adapter"):
            model.base_model.inject_adapter(model.get_base_model(), "default")
        assert list(model.peft_config) == ["default"]
        acc.backward(loss(model(**inputs)))


@pytest.mark.parametrize("precision", ["no", *exhaustive("bf16")])
@pytest.mark.parametrize("config", ["lora", *exhaustive("prompt tuning")])
@ranks(2)
def test_peft_models_generate_as_stock(rank: int, precision: str, config: str) -> None:
    def found(kind: Any) -> list[torch.Tensor]:
        with accelerator(kind, mixed_precision=precision) as acc:
            model = acc.unwrap_model(acc.prepare(made(config)[0])).eval()
            result = [text(model, rank)]
            if kind is OURS and precision == "no":
                with too_little_memory():
                    result.append(text(model, rank))
            return result

    (wanted,) = found(STOCK)
    assert all(torch.equal(value, wanted) for value in found(OURS))


@pytest.mark.exhaustive
@ranks(2)
def test_token_by_token_a_peft_model_is_computed_under_autocast(rank: int) -> None:
    # PeftModel.generate goes past the forward that Accelerate puts under autocast; stock weights are in fp32 there.
    with accelerator(OURS, mixed_precision="bf16") as acc:
        model = acc.prepare(adapted()[0]).eval()
        wanted = text(model, rank, return_dict_in_generate=True, output_scores=True).scores[0]
        with too_little_memory():
            found = text(model, rank, return_dict_in_generate=True, output_scores=True).scores[0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-2 * wanted.abs().max().item())


@pytest.mark.exhaustive
@transformers_takes_peft
@ranks(2)
def test_adapters_of_transformers_own_methods_are_saved_by_peft_s_names(tmp_path: Path) -> None:
    def make() -> Any:
        model = build("llama")[0]
        torch.manual_seed(1)
        model.add_adapter(lora())
        return model

    plain = make()
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "stock")
    with accelerator(OURS) as acc:
        model = acc.prepare(make())
        model.save_pretrained(tmp_path / "ours")
        with pytest.raises(ConfigError, match="add_adapter"):
            model.add_adapter(lora(), "second")
    dist.barrier()
    stock, ours = (load_file(tmp_path / kind / "adapter_model.safetensors") for kind in ("stock", "ours"))
    assert list(stock) == list(ours) and all(torch.equal(ours[key], value) for key, value in stock.items())
