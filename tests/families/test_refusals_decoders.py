"""Llama's relatives: defaults are those of transformers, older keys are read, unsupported settings are refused."""

import copy
from dataclasses import replace

import pytest
import transformers

from regard.families import FamilyError, family
from regard.families.common.layer_types import shortest_period
from regard.kernels.attention.mask import Causal
from regard.kernels.attention.patterns.window import Window
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.position.base import NoPosition
from regard.parts.position.rope import Rope
from regard.parts.position.rope_scaling import LinearScaling, LongRope
from tests.families.cases.decoders import FULL, LLAMA, LONGROPE, SHAPE, SLIDING

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 7,
    "num_attention_heads": 32,
}
MODEL_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "granite",
    "olmo2",
    "gemma2",
    "gemma3_text",
    "smollm3",
    "cohere2",
)


def read_spec(model_type: str, **changes: object) -> Decoder:
    return family(model_type).spec(SHAPE | {"sliding_window": 5} | changes)


def attentions(spec: Decoder) -> list[Attention]:
    return [block.sublayers[0].body for block in spec.blocks]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 9},
        {"sliding_window_pattern": 3, "no_rope_layer_interval": 2, "tie_word_embeddings": True},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
    ids=str,
)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_omitted_keys_have_the_defaults_of_transformers(model_type: str, changes: dict) -> None:
    """The config with the defaults of its class has the same spec as the config without them."""
    if model_type == "phi3" and "rope_scaling" in changes:
        changes = {"rope_theta": 500.0}
    config = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(SIZES | changes))  # the class modifies it
    expected = family(model_type).spec(config.to_dict())
    assert family(model_type).spec(SIZES | changes).blocks == expected.blocks
    assert replace(family(model_type).spec(SIZES | changes), layers=expected.layers) == expected


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("mistral", ["sliding_window", "head_dim"]),
        ("gemma2", ["attn_logit_softcapping", "final_logit_softcapping"]),
        ("smollm3", ["num_key_value_heads"]),
    ],
)
def test_null_differs_from_an_omitted_key(model_type: str, keys: list[str]) -> None:
    null = dict.fromkeys(keys)
    assert family(model_type).spec(SIZES | null) != family(model_type).spec(SIZES)
    config = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(SIZES | null))
    assert family(model_type).spec(SIZES | null) == family(model_type).spec(config.to_dict())


def test_gemma3_configs_of_transformers_4_are_read() -> None:
    settings = {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"type": "linear", "factor": 8.0}}
    *local, full = attentions(read_spec("gemma3_text", num_hidden_layers=6, **settings))
    assert {(mixer.position, mixer.mask) for mixer in local} == {(Rope(3e4), Window(5))}
    assert (full.position, full.mask) == (Rope(2e6, scaling=LinearScaling(8.0)), Causal())


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_older_names_of_longrope_in_phi3_are_read(kind: str) -> None:
    settings = {"type": kind, "short_factor": LONGROPE["short_factor"], "long_factor": LONGROPE["long_factor"]}
    spec = read_spec("phi3", rope_scaling=settings, original_max_position_embeddings=16)
    short, long = (tuple(map(float, LONGROPE[key])) for key in ("short_factor", "long_factor"))
    assert attentions(spec)[0].position == Rope(scaling=LongRope(short, long, 4.0, 16))


def test_layers_are_read_as_their_shortest_period() -> None:
    assert shortest_period((1, 2, 1, 2, 1)) == (1, 2)
    assert shortest_period((1, 1, 1)) == (1,)
    assert shortest_period((1, 2, 3)) == (1, 2, 3)
    spec = read_spec("gemma2", num_hidden_layers=7, layer_types=[SLIDING, FULL] * 3 + [SLIDING])
    assert [(len(run.blocks), run.times) for run in spec.layers] == [(2, 3), (1, 1)]


@pytest.mark.parametrize("model_type", ["cohere2", "gemma2", "gemma3_text", "llama", "qwen2", "smollm3"])
def test_a_config_with_many_layers_is_read_quickly_or_refused(model_type: str) -> None:
    """The depth is compared with the files later; until then a config may declare up to 10000 layers."""
    spec = read_spec(model_type, num_hidden_layers=10_000)
    assert sum(run.times * len(run.blocks) for run in spec.layers) == 10_000
    with pytest.raises(FamilyError, match="num_hidden_layers=1000000000000000 must be at most 10000"):
        read_spec(model_type, num_hidden_layers=10**15)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported, only 1.0 is"),
        ("mistral", {"hidden_act": "mish"}, "hidden_act='mish' is not supported"),
        ("mistral", {"sliding_window": "all"}, "sliding_window='all' must be int"),
        ("qwen2", {"layer_types": [FULL] * 2}, "layer_types has 2 entries, but num_hidden_layers=3"),
        (
            "qwen2",
            {"layer_types": [SLIDING] * 3},
            "a layer has the type 'sliding_attention'; with these settings it must be",
        ),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "a layer has the type 'chunked_attention'"),
        ("qwen3", {"layer_types": [1, 2, 3]}, "layer_types=.* must be a list of str"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not supported, only 'longrope' is"),
        ("phi3", {"rope_scaling": {"type": "su"}}, "the config has no 'short_factor'"),
        ("phi3", {"rope_scaling": LONGROPE | {"short_factor": ["1"]}}, "short_factor='1' must be a finite number"),
        ("granite", {"logits_scaling": 0}, "logits_scaling=0.0 must be positive"),
        ("granite", {"embedding_multiplier": 10**400}, "embedding_multiplier=1000.* must be a finite number"),
        ("olmo2", {"rms_norm_eps": float("inf")}, "rms_norm_eps=inf must be a finite number"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma2", {"sliding_window": None}, "a layer has the type 'sliding_attention'"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar=-1.0 must be positive"),
        ("gemma2", {"hidden_activation": "mish"}, "hidden_activation='mish' is not supported"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0 must be from 1 to 128"),
        ("gemma3_text", {"rope_parameters": {FULL: 3}}, "full_attention=3 must be dict"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries, but num_hidden_layers=3"),
        ("smollm3", {"no_rope_layers": [1, 0, 7]}, r"a layer has the type \('full_attention', 7\)"),
        ("smollm3", {"no_rope_layer_interval": 1000}, "no_rope_layer_interval=1000 must be from 1 to 128"),
        (
            "cohere2",
            {"layer_types": [FULL, SLIDING, SLIDING], "sliding_window": None},
            "a layer has the type 'sliding_attention'",
        ),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused(model_type: str, changes: dict, message: str) -> None:
    with pytest.raises(FamilyError, match=f"^{model_type}: .*{message}"):
        read_spec(model_type, **changes)


def change_attention(spec: Decoder, layer: int, **changes: object) -> Decoder:
    """The same spec with changed fields of the attention in one layer."""
    blocks = spec.blocks
    mixer, *other_sublayers = blocks[layer].sublayers
    mixer = replace(mixer, body=replace(mixer.body, **changes))
    blocks[layer] = replace(blocks[layer], sublayers=(mixer, *other_sublayers))
    return replace(spec, layers=(Repeat(tuple(blocks)),))


@pytest.mark.parametrize(
    ("model_type", "layer", "changes", "message"),
    [
        ("llama", 0, {"mask": Window(5)}, r"layers\[0\].*\.mask=Window"),
        ("llama", 0, {"position": Rope(share=0.5)}, "partial_rotary_factor=0.5"),
        ("mistral", 2, {"mask": Window(6)}, r"layers\[2\].*\.mask\.size=6, only 5"),
        ("mistral", 0, {"bias": True}, r"\.bias=True, only False"),
        ("qwen2", 0, {"out_bias": True}, r"\.out_bias=True, only False"),
        ("qwen3", 1, {"qk_norm": None}, r"layers\[1\].*\.qk_norm=None"),
        ("olmo2", 0, {"norm_over": "head"}, r"\.norm_over='head', only 'all'"),
        ("granite", 1, {"scale": 0.7}, r"layers\[1\].*\.scale=0.7, only 1.0"),
        ("gemma2", 1, {"softcap": 7.0}, r"layers\[1\].*\.softcap=7.0, only 50.0"),
        ("gemma2", 0, {"scale": 0.3}, r"layers\[0\].*\.scale=0.3"),
        ("gemma3_text", 0, {"softcap": 7.0}, r"\.softcap=7.0, only None"),
        ("smollm3", 0, {"position": Rope(7.0)}, r"layers\[1\].*\.base=2000000.0, only 7.0"),
        ("cohere2", 2, {"position": NoPosition()}, r"layers\[2\].*\.position=NoPosition\(\), only Rope"),
        ("cohere2", 0, {"head_dim": 20}, r"\.head_dim=20, only 12"),
    ],
    ids=str,
)
def test_specs_that_the_class_cannot_express_are_refused(
    model_type: str, layer: int, changes: dict, message: str
) -> None:
    spec = family(model_type).spec(LLAMA) if model_type == "llama" else read_spec(model_type)
    with pytest.raises(FamilyError, match=message):
        family(model_type).config(change_attention(spec, layer, **changes))


def test_listed_layers_may_have_any_order() -> None:
    """Classes with a list of layer types can express any sequence of them."""
    smol = change_attention(read_spec("smollm3"), 0, position=NoPosition(), mask=Window(4))
    assert family("smollm3").spec(family("smollm3").config(smol)).blocks == smol.blocks
    gemma = change_attention(read_spec("gemma3_text"), 1, mask=Causal(), position=Rope(77.0))
    assert family("gemma3_text").spec(family("gemma3_text").config(gemma)).blocks == gemma.blocks
