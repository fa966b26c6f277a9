"""Rows with different adapters: equal to PEFT's own mixed batches, and each adapter only with its own model."""

import json
from pathlib import Path

import peft
import pytest
import torch
from torch import nn

import regard
from regard.adapt import LoRA, add_lora, load_adapter, save_adapter
from regard.adapt.lora_weights import lora_weights, read_lora, without_gradients
from regard.adapt.many_lora import AdaptedModel, AdapterRows
from regard.checkpoint import load, save
from regard.checkpoint.atomic_folder import CheckpointError
from regard.families import weight_table
from regard.language_model import LanguageModel
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from regard.text.train import byte
from regard.training.base_model import fingerprint_model
from tests.families.pairs import LIMIT, make_pair

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
CASES = {
    "llama": (
        "LlamaForCausalLM", SIZES | {"intermediate_size": 48, "num_key_value_heads": 2}, ["q_proj", "v_proj"],
        ["k_proj", "down_proj"],
    ),
    "phi3": (
        "Phi3ForCausalLM", SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0},
        ["qkv_proj"], ["gate_up_proj", "down_proj"],
    ),
}  # fmt: skip


def small(vocab: int) -> Decoder:
    block = Block((Sublayer(Attention(2, position=Rope())), Sublayer(SwiGLU(24))))
    return Decoder(vocab=vocab, width=16, layers=(Repeat((block,)),), context=64)


@pytest.mark.ledger("lora.multi")
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_mixed_batch_equals_that_of_peft(name: str, tmp_path: Path) -> None:
    """PEFT's forward with one adapter name per row; one adapter is rank-stabilized."""
    model, config, first, second = CASES[name]
    pair = make_pair((model, config), tmp_path / "model")
    theirs = peft.get_peft_model(pair.theirs, peft.LoraConfig(r=3, lora_alpha=7, target_modules=first), "one")
    theirs.add_adapter("two", peft.LoraConfig(r=5, lora_alpha=4, target_modules=second, use_rslora=True))
    for key, parameter in theirs.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(parameter, std=0.3)
    theirs.eval().save_pretrained(tmp_path)
    rows = AdapterRows(4, 3, torch.device("cpu"))
    ours = AdaptedModel(pair.ours, rows)
    for slot, each in ((2, "one"), (0, "two")):
        weights = read_lora(pair.ours, tmp_path / each, lambda: weight_table(pair.ours.spec, pair.model_type))
        ours.check(weights)
        ours.prepare(weights)
        ours.load(slot, weights)
    ids = torch.randint(3, 61, (4, 9), generator=torch.Generator().manual_seed(2))
    rows.write([0, -1, 2, 0])
    found, base = ours.model(ids), pair.ours(ids)
    expected = theirs(ids, adapter_names=["two", "__base__", "one", "two"]).logits
    assert (found - expected).abs().max() <= LIMIT * max(1, expected.abs().max())
    assert torch.equal(found[1], base[1]) and (found - base).abs().amax((1, 2))[[0, 2, 3]].min() > 0.01


def test_rank_stabilized_adapters_equal_peft(tmp_path: Path) -> None:
    model = small(31).build(1)
    add_lora(model, LoRA(4, 6.0), seed=0)
    save_adapter(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": True}))
    again = without_gradients(small(31).build(1))
    load_adapter(again, tmp_path)
    assert lora_weights(again).scale == pytest.approx(6.0 / 4**0.5)


@pytest.fixture
def bases(tmp_path: Path) -> dict[str, Path]:
    """Two models of the same shapes with different weights."""
    for seed, name in enumerate(("one", "two")):
        save(small(byte().vocab_size).build(seed), tmp_path / name, byte())
    return {name: tmp_path / name for name in ("one", "two")}


def make_adapter(model_folder: Path, folder: Path, base: str | None = None) -> Path:
    model = load(model_folder)
    add_lora(model, LoRA(2, 40.0, "all-linear"), seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    save_adapter(model, folder, base=base)
    return folder


@pytest.mark.ledger("lora.bound")
def test_an_adapter_of_other_weights_is_refused_by_their_fingerprint(bases, tmp_path: Path) -> None:
    """The shapes are equal; a run's checkpoint has the fingerprint of the weights that it was trained on."""
    folder = make_adapter(bases["one"], tmp_path / "adapter")
    (folder / "training.json").write_text(json.dumps({"run": {"base": fingerprint_model(bases["one"])}}))
    llm = regard.load(bases["one"], "cpu")
    llm.load_adapter("a", folder)
    assert llm.adapters == ("a",)
    other = regard.load(bases["two"], "cpu")
    with pytest.raises(CheckpointError, match="are not those that .* was trained from: their fingerprints differ"):
        other.load_adapter("a", folder)
    assert other.adapters == ()


@pytest.mark.ledger("lora.bound")
def test_an_adapter_that_names_another_model_gives_a_warning(bases, tmp_path: Path, recwarn) -> None:
    """PEFT's files have no fingerprint."""
    make_adapter(bases["one"], tmp_path / "a", base="hub/one")
    llm = regard.load(bases["one"], "cpu")
    llm.load_adapter("a", tmp_path / "a")
    assert not recwarn.list
    with pytest.warns(UserWarning, match="names 'hub/one' as its model, and this one is 'two'"):
        regard.load(bases["two"], "cpu").load_adapter("a", tmp_path / "a")


def test_a_language_model_mixes_adapters(bases, tmp_path: Path) -> None:
    folder = make_adapter(bases["one"], tmp_path / "a")
    llm, options = regard.load(bases["one"], "cpu", torch.float64), {"max_new": 6, "temperature": 0, "ignore_eos": True}
    llm.load_adapter("a", folder)
    adapted = LanguageModel(load(bases["one"]).double(), byte())
    load_adapter(adapted.model, folder)
    plain, mixed = llm.generate("Hello", **options), llm.generate(["Hello", "Hi"], adapter="a", **options)
    assert mixed == adapted.generate(["Hello", "Hi"], **options) and plain != mixed[0]
    assert "".join(llm.stream("Hello", adapter="a", **options)) == mixed[0]
    llm.unload_adapter("a")
    with pytest.raises(ValueError, match="there is no adapter 'a'"):
        llm.generate("Hello", adapter="a", **options)
    assert llm.generate("Hello", **options) == plain
