"""Llama and GPT-2 refuse unsupported settings and name the key or path; both spellings of RoPE's settings are read."""

import dataclasses

import pytest

from regard.families import FAMILIES, FamilyError, family
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.linear_attention import LinearAttention
from regard.parts.norm import LayerNorm, RMSNorm
from regard.parts.position.rope import Rope
from regard.parts.position.rope_scaling import DynamicNTK, LinearScaling, Llama3, Scaling, Yarn
from regard.spec import SpecError
from tests.families.cases.classic import GPT2
from tests.families.cases.decoders import LLAMA


def llama(**changes) -> Decoder:
    return family("llama").spec(LLAMA | changes)


def gpt2(**changes) -> Decoder:
    return family("gpt2").spec(GPT2 | changes)


def attention(spec: Decoder) -> Attention:
    return spec.blocks[0].sublayers[0].body


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 500000, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_parameters": {"rope_theta": 500000}},
    ],
    ids=str,
)
def test_rope_settings_of_transformers_4_and_5_are_read(settings: dict) -> None:
    assert attention(llama(**settings)).position == Rope(5e5)


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}}, LinearScaling(2.0)),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, DynamicNTK(2.0, 64)),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, Yarn(4.0, 64)),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 16,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
            },
            Llama3(8.0, 16, 1.0, 4.0),
        ),
    ],
    ids=str,
)
def test_scaling_settings_of_transformers_4_and_5_are_read(settings: dict, scaling: Scaling) -> None:
    assert attention(llama(**settings)).position == Rope(10000.0, scaling=scaling)


def test_rope_without_settings_has_base_10000() -> None:
    assert attention(llama()).position == Rope(10000.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "su"}}, "rope_scaling: rope_type='su' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: the config has no 'factor'"),
        ({"rope_parameters": [1]}, "rope_parameters=.* must be dict"),
        ({"rope_theta": "big"}, "rope_theta='big' must be int or float"),
        ({"hidden_act": "mish"}, "hidden_act='mish' is not supported"),
        ({"hidden_size": "48"}, "hidden_size='48' must be int"),
        ({"hidden_size": None}, "the config has no 'hidden_size'"),
        ({"attention_bias": 1}, "attention_bias=1 must be bool"),
    ],
    ids=str,
)
def test_llama_refuses_unsupported_settings(changes: dict, message: str) -> None:
    with pytest.raises(FamilyError, match=f"^llama: .*{message}"):
        llama(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "mish"}, "activation_function='mish' is not supported"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention=True"),
        ({"n_embd": 4.5}, "n_embd=4.5 must be int"),
    ],
    ids=str,
)
def test_gpt2_refuses_unsupported_settings(changes: dict, message: str) -> None:
    with pytest.raises(FamilyError, match=f"gpt2: {message}"):
        gpt2(**changes)


@pytest.mark.parametrize("sizes", [{"num_attention_heads": 0}, {"num_key_value_heads": 3}, {"num_hidden_layers": -1}])
def test_impossible_sizes_are_refused(sizes: dict) -> None:
    with pytest.raises(SpecError, match="heads|times"):
        llama(**sizes)


def with_first_block(spec: Decoder, block: Block) -> Decoder:
    return dataclasses.replace(spec, layers=(Repeat((block,)), *spec.layers))


def with_attention(spec: Decoder, **changes) -> Decoder:
    mixer, feedforward = spec.blocks[0].sublayers
    changed = dataclasses.replace(mixer, body=dataclasses.replace(mixer.body, **changes))
    return dataclasses.replace(spec, layers=(Repeat((Block((changed, feedforward)),), 3),))


@pytest.mark.parametrize(
    ("model_type", "spec", "message"),
    [
        ("llama", dataclasses.replace(llama(), norm=LayerNorm(1e-6)), r"decoder\.norm=LayerNorm"),
        ("llama", dataclasses.replace(llama(), context=None), r"decoder\.context=None"),
        ("llama", with_attention(llama(), out_bias=True), r"sublayers\[0\]\.body\.out_bias=True"),
        ("llama", with_attention(llama(), heads=5, kv_heads=5), "width=48 to be divisible by heads=5"),
        ("llama", gpt2(), "blocks hold attention, feedforward"),
        ("gpt2", llama(), "blocks hold attention, swiglu"),
        ("gpt2", with_attention(gpt2(), kv_heads=2), r"kv_heads=2, only 4"),
        ("gpt2", with_attention(gpt2(), bias=False), r"\.bias=False, only True"),
        ("gpt2", dataclasses.replace(gpt2(), norm=RMSNorm(1e-5)), r"decoder\.norm=RMSNorm"),
        ("llama", with_first_block(llama(), Block((Sublayer(LinearAttention(4)),))), "blocks hold linear_attention"),
        (
            "llama",
            dataclasses.replace(llama(), layers=(*llama().layers, Repeat((Block((Sublayer(LinearAttention(4)),)),)))),
            r"decoder\.layers\[3\]\.blocks\[0\]\.sublayers",
        ),
    ],
)
def test_specs_that_the_class_cannot_express_are_refused(model_type: str, spec: Decoder, message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        family(model_type).config(spec)


def test_a_changed_rope_base_round_trips() -> None:
    spec = with_attention(llama(), position=Rope(7.0))
    assert family("llama").spec(family("llama").config(spec)) == spec


def test_equal_models_have_equal_configs() -> None:
    """Dropout, omitted sizes and another grouping of the layers do not change the config."""
    spec = llama()
    mixer, feedforward = spec.blocks[0].sublayers
    mixer = Sublayer(Attention(4, position=Rope()), mixer.norm)
    block = Block((mixer, feedforward), dropout=0.1)
    assert family("llama").config(
        dataclasses.replace(spec, layers=(Repeat((block, block)), Repeat((block,))))
    ) == family("llama").config(spec)


@pytest.mark.parametrize("name", ["lama", None, 3])
def test_an_unknown_family_is_refused(name: object) -> None:
    with pytest.raises(FamilyError, match="there is no family"):
        family(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_defines_spec_config_and_table(name: str) -> None:
    module = family(name)
    assert callable(module.spec)
    assert callable(module.config)
    assert callable(module.table)
