"""Adapters of models of `transformers`: PEFT computes our logits with an exported adapter, and the other way round."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.adapt import AdapterError, LoRA, add_lora, merge_lora
from regard.adapt.foreign_adapters import export_adapter, has_foreign_names, load_foreign_adapter
from regard.checkpoint import load
from regard.families import family
from tests.families.pairs import LIMIT, Pair, make_pair

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
ENCODER_DECODER = {"vocab_size": 61, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8}
# class of transformers, config, our targets, their target modules
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...] | str, list[str]]] = {
    "llama": (
        "LlamaForCausalLM", SIZES | {"intermediate_size": 48, "num_key_value_heads": 2},
        ("q_proj", "v_proj", "down_proj"), ["q_proj", "v_proj", "down_proj"],
    ),
    "gpt2": (
        "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 32},
        ("q_proj", "v_proj", "up_proj"), ["c_attn", "c_fc"],
    ),
    "phi3": (
        "Phi3ForCausalLM", SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0},
        "all-linear", ["qkv_proj", "gate_up_proj", "down_proj"],
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM", SIZES | {"intermediate_size": 48}, ("q_proj", "k_proj", "o_proj"),
        ["query_key_value", "dense_4h_to_h"],
    ),
    "bert": (
        "BertForMaskedLM", SIZES | {"intermediate_size": 48}, ("q_proj", "v_proj"), ["query", "value"],
    ),
    "t5": ("T5ForConditionalGeneration", ENCODER_DECODER, ("q_proj", "v_proj"), ["q", "v", "wo"]),
    "opt": (
        "OPTForCausalLM",
        SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 32}, "all-linear",
        ["q_proj", "fc1"],
    ),
}  # fmt: skip


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    name, config, *_ = CASES[request.param]
    return make_pair((name, config), tmp_path / "model")


def outputs(pair: Pair, theirs: Any, ours: Any) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(2))
    if pair.model_type == "t5":
        return theirs(ids, decoder_input_ids=ids.flip(1)).logits, ours(ids, ids.flip(1))
    return theirs(ids).logits, ours(ids)


def randomize(model: Any) -> None:
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / max(1.0, float(b.abs().max())))


@torch.no_grad()
def test_peft_computes_our_logits(pair: Pair, tmp_path: Path) -> None:
    table = family(pair.model_type).table(pair.ours.spec)
    before = outputs(pair, pair.theirs, pair.ours)[1]
    add_lora(pair.ours, LoRA(rank=3, alpha=6.5, targets=CASES[pair.model_type][2]))
    randomize(pair.ours)
    export_adapter(pair.ours, tmp_path / "adapter", table, base=str(pair.folder))
    adapted = peft.PeftModel.from_pretrained(pair.theirs, tmp_path / "adapter").eval()
    theirs, ours = outputs(pair, adapted, pair.ours)
    assert difference(theirs, ours) <= LIMIT < 1e-2 < difference(before, ours)
    # and back, into a model without the adapter
    again = load(pair.folder)
    assert has_foreign_names(again, tmp_path / "adapter")
    load_foreign_adapter(again, tmp_path / "adapter", table)
    assert difference(outputs(pair, adapted, again)[1], ours) <= LIMIT
    merge_lora(again)
    assert difference(outputs(pair, adapted, again)[1], ours) <= LIMIT


@torch.no_grad()
def test_adapters_that_peft_made_are_loaded(pair: Pair, tmp_path: Path) -> None:
    targets, fan_in_fan_out = CASES[pair.model_type][3], pair.model_type == "gpt2"
    patterns = {"rank_pattern": {targets[0]: 5}, "alpha_pattern": {targets[0]: 2}}
    for number, options in enumerate(({}, patterns)):
        config = peft.LoraConfig(r=3, lora_alpha=6.5, target_modules=targets, fan_in_fan_out=fan_in_fan_out, **options)
        adapted = peft.get_peft_model(pair.theirs, config).eval()
        randomize(adapted)
        folder, ours = tmp_path / f"adapter{number}", load(pair.folder)
        adapted.save_pretrained(folder, save_embedding_layers=False)
        load_foreign_adapter(ours, folder, family(pair.model_type).table(ours.spec))
        theirs, own = outputs(pair, adapted, ours)
        assert difference(own, theirs) <= LIMIT < 1e-2 < difference(outputs(pair, adapted, load(pair.folder))[1], own)
        adapted.unload()


@torch.no_grad()
def test_an_adapter_of_peft_is_exported_unchanged(tmp_path: Path) -> None:
    pair = make_pair(CASES["llama"][:2], tmp_path / "model")
    adapted = peft.get_peft_model(pair.theirs, peft.LoraConfig(r=3, target_modules=CASES["llama"][3]))
    randomize(adapted)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    table = family("llama").table(pair.ours.spec)
    load_foreign_adapter(pair.ours, tmp_path / "adapter", table)
    export_adapter(pair.ours, tmp_path / "again", table)
    stored, again = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again"))
    assert stored.keys() == again.keys() and all(torch.equal(stored[name], again[name]) for name in stored)


def test_only_heads_of_classifiers_are_exported(tmp_path: Path) -> None:
    pair = make_pair(CASES["bert"][:2], tmp_path / "model")
    add_lora(pair.ours, LoRA(rank=2))
    with pytest.raises(AdapterError, match="no place for head.dense.dense.bias.*regard export --merge"):
        export_adapter(pair.ours, tmp_path / "adapter", family("bert").table(pair.ours.spec), with_head=True)


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    pair = make_pair(CASES["llama"][:2], tmp_path / "model")
    table, folder = family("llama").table(pair.ours.spec), tmp_path / "adapter"
    add_lora(pair.ours, LoRA(rank=2, targets=("q_proj",)))
    export_adapter(pair.ours, folder, table)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["target_modules"] == [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    for change, message in (
        ({"use_dora": True}, "missing .*lora_magnitude_vector"),
        ({"rank_pattern": {".*": 3}}, "use names of layers"),
        ({"rank_pattern": {"q_proj": "3"}}, "use names of layers"),
        ({"r": 4}, "has shape"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(AdapterError, match=message):
            load_foreign_adapter(load(pair.folder), folder, table)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "adapter_model.safetensors")
    for old, new, message in (
        ("q_proj", "x_proj", "not a linear layer that"),
        ("lora_A", "lora_C", "neither a matrix of"),
    ):
        renamed = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        save_file(renamed, folder / "adapter_model.safetensors")
        with pytest.raises(AdapterError, match=message):
            load_foreign_adapter(load(pair.folder), folder, table)
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(AdapterError, match="cannot be read"):
        load_foreign_adapter(load(pair.folder), folder, table)


def test_experts_have_no_layers_that_peft_could_adapt(tmp_path: Path) -> None:
    sizes = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 2}
    pair = make_pair(("MixtralForCausalLM", sizes), tmp_path / "model")
    add_lora(pair.ours, LoRA(rank=2, targets=("q_proj", "down_proj")))
    with pytest.raises(AdapterError, match=r"down_proj.* has no linear layer of its own .*--merge"):
        export_adapter(pair.ours, tmp_path / "adapter", family("mixtral").table(pair.ours.spec))
