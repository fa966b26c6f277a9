"""Adapter files: they round-trip, also to and from the PEFT library, and those that do not fit are refused."""

import json
import random
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.adapt import AdapterError, LoRA, add_lora, load_adapter, save_adapter
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from tests.laws import assert_equal_weights

LORA = LoRA(rank=3, alpha=6.5, targets=("q_proj", "down_proj", "head"), dropout=0.1)
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def saved(make_model, randomize_adapter, tmp_path):
    """A folder with an adapter, and the model that it was saved from."""
    model = make_model().eval()
    add_lora(model, LORA)
    randomize_adapter(model)
    save_adapter(model, tmp_path)
    return tmp_path, model


def test_adapter_files_round_trip(saved, make_model, ids):
    folder, model = saved
    other = make_model().eval()
    names = load_adapter(other, folder)
    assert_equal_weights(other, model)
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    assert (other(ids) - model(ids)).abs().max() <= 1e-12
    assert other.head.loras == {"default": LORA} and json.loads((folder / CONFIG).read_text())["lora_alpha"] == 6.5
    assert {name for name, p in other.named_parameters() if p.requires_grad} == {
        f"{name}.{side}.default.weight" for name in names for side in ("lora_A", "lora_B")
    }
    assert "base_model.model.stack.blocks.0.sublayers.0.body.q_proj.lora_A.weight" in load_file(folder / TENSORS)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"r": 4}, r"has shape \[3, 16\], this model and config need \[4, 16\]"),
        ({"r": None}, "LoRA.rank"),
        ({"r": -1}, "must be positive"),
        ({"lora_alpha": "x"}, "LoRA.alpha"),
        ({"target_modules": ["q_proj"]}, "not expected"),
        ({"target_modules": ["q_proj", "k_proj", "down_proj", "head"]}, "missing"),
        ({"target_modules": ["q_porj"]}, "did you mean 'q_proj'"),
        ({"target_modules": ".*q_proj"}, "LoRA.targets"),
        ({"use_dora": True}, "missing .*lora_magnitude_vector"),
        ({"use_rslora": "yes"}, "use_rslora='yes' is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' is not supported"),
        ({"something_new": 1}, "something_new=1 is not supported"),
        ({"peft_type": "IA3"}, "not the config of a LoRA adapter"),
    ],
)
def test_configs_that_do_not_fit_are_refused(saved, make_model, change, message):
    folder, _ = saved
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | change))
    assert_refused(make_model(), folder, message)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 100_000, "\0", json.dumps({"peft_type": "LORA", "x": "y" * (1 << 20)})]
)
def test_damaged_configs_are_refused(saved, make_model, text):
    folder, _ = saved
    (folder / CONFIG).write_text(text)
    assert_refused(make_model(), folder, CONFIG)


def test_damaged_tensors_are_refused(saved, make_model):
    folder, _ = saved
    path, tensors = folder / TENSORS, load_file(folder / TENSORS)
    path.write_bytes(path.read_bytes()[:-8])
    assert_refused(make_model(), folder, "cannot be read")
    save_file({name: tensor.long() for name, tensor in tensors.items()}, path)
    assert_refused(make_model(), folder, "floating-point")
    path.unlink()
    assert_refused(make_model(), folder, TENSORS)


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
def test_mutated_files_are_refused_or_still_valid(saved, make_model, name):
    folder, _ = saved
    good, rng, model = (folder / name).read_bytes(), random.Random(0), make_model()
    refusals = 0
    for _ in range(100):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            bad[rng.randrange(min(len(bad), 800))] = rng.randrange(256)  # 800: within the header
        (folder / name).write_bytes(bad)
        try:
            load_adapter(model, folder)
        except AdapterError:
            refusals += 1
        else:
            model = make_model()
    assert refusals > 50


def assert_refused(model, folder, message):
    """Assert an AdapterError with this message, and an unchanged model."""
    keys = list(model.state_dict())
    with pytest.raises(AdapterError, match=message):
        load_adapter(model, folder)
    assert list(model.state_dict()) == keys
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_second_adapter_of_the_same_name_is_refused(saved):
    folder, model = saved
    with pytest.raises(AdapterError, match="already"):
        load_adapter(model, folder)


def test_a_model_without_adapter_is_not_saved(make_model, tmp_path):
    with pytest.raises(AdapterError, match="no LoRA adapters"):
        save_adapter(make_model(), tmp_path)


# The same Llama in our names and in those of `transformers`.
TRANSFORMERS_NAMES = {
    r"stack\.blocks\.(\d+)\.sublayers\.0\.body\.": r"model.layers.\1.self_attn.",
    r"stack\.blocks\.(\d+)\.sublayers\.1\.body\.": r"model.layers.\1.mlp.",
    r"stack\.blocks\.(\d+)\.sublayers\.0\.norm": r"model.layers.\1.input_layernorm",
    r"stack\.blocks\.(\d+)\.sublayers\.1\.norm": r"model.layers.\1.post_attention_layernorm",
    r"^embedding": "model.embed_tokens",
    r"^norm": "model.norm",
    r"^head": "lm_head",
}


def transformers_name(path: str) -> str:
    for pattern, replacement in TRANSFORMERS_NAMES.items():
        path = re.sub(pattern, replacement, path)
    return path


def our_llama():
    block = Block((Sublayer(Attention(heads=4, kv_heads=2, position=Rope())), Sublayer(SwiGLU(24))))
    return Decoder(vocab=31, width=16, layers=(Repeat((block,), 2),), tied=False).build(seed=1).double().eval()


def their_llama(model):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False, max_position_embeddings=64,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config).double().eval()
    llama.load_state_dict({transformers_name(name): tensor for name, tensor in model.state_dict().items()})
    return llama


@pytest.mark.ledger("lora.linear")
def test_peft_loads_our_adapters(randomize_adapter, ids, tmp_path):
    peft = pytest.importorskip("peft")
    model = our_llama()
    llama = their_llama(model)
    add_lora(model, LORA)
    randomize_adapter(model)
    save_adapter(model, tmp_path, names=transformers_name)
    adapted = peft.PeftModel.from_pretrained(llama, tmp_path)
    # the rotation angles are float32 in transformers and float64 here
    assert (adapted(ids).logits - model(ids)).abs().max() <= 1e-5
    assert (adapted(ids).logits - our_llama()(ids)).abs().max() > 1e-3


@pytest.mark.ledger("lora.linear")
def test_adapters_of_peft_are_loaded_and_saved_unchanged(randomize_adapter, ids, tmp_path):
    peft = pytest.importorskip("peft")
    model = our_llama()
    config = peft.LoraConfig(r=3, lora_alpha=6.5, target_modules=["q_proj", "down_proj", "lm_head"], lora_dropout=0.1)
    adapted = peft.get_peft_model(their_llama(model), config).eval()
    randomize_adapter(adapted)
    adapted.save_pretrained(tmp_path, save_embedding_layers=False)
    names = load_adapter(model, tmp_path, names=transformers_name)
    assert len(names) == 2 * 2 + 1
    assert (adapted(ids).logits - model(ids)).abs().max() <= 1e-5
    save_adapter(model, tmp_path / "saved_again", names=transformers_name)
    saved_again = load_file(tmp_path / "saved_again" / TENSORS)
    assert all(torch.equal(tensor, saved_again[name]) for name, tensor in load_file(tmp_path / TENSORS).items())
