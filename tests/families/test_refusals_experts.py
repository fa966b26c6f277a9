"""Families with experts refuse unsupported settings, and specs that they cannot express; old keys are read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from regard.checkpoint import CheckpointError, load
from regard.families import FamilyError, family
from regard.kernels.attention.mask import Causal
from regard.kernels.attention.patterns.window import Window
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.block import Block
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.position.rope_scaling import Yarn
from regard.spec import SpecError
from tests.families.cases.experts import DEEPSEEK, GPT_OSS, MIXTRAL, OLMOE, QWEN, QWEN2, V3

SETTINGS = {"mixtral": MIXTRAL, "qwen2_moe": QWEN2, "qwen3_moe": QWEN, "olmoe": OLMOE}
SETTINGS |= {"gpt_oss": GPT_OSS, "deepseek_v2": DEEPSEEK, "deepseek_v3": V3}


def read_spec(model_type: str, **changes) -> Decoder:
    return family(model_type).spec(SETTINGS[model_type] | changes)


def experts(spec: Decoder) -> Experts:
    return spec.blocks[-1].sublayers[1].body


def with_experts(model_type: str, **changes) -> Decoder:
    spec = read_spec(model_type)
    mixer, feedforward = spec.blocks[-1].sublayers
    block = Block((mixer, replace(feedforward, body=replace(feedforward.body, **changes))))
    return replace(spec, layers=(*spec.layers[:-1], Repeat((block,), spec.layers[-1].times)))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("mixtral", {"num_local_experts": 2.0}, "num_local_experts=2.0 must be int"),
        ("qwen2_moe", {"num_hidden_layers": 5000}, "num_hidden_layers=5000 must be from 1 to 1024"),
        ("qwen2_moe", {"layer_types": ["full_attention"]}, "layer_types has 1 entries, but num_hidden_layers=3"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 3}, "a layer has the type .*sliding_attention"),
        ("qwen2_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers=.* must be a list of int"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be from 1"),
        ("olmoe", {"clip_qkv": "8"}, "clip_qkv='8' must be int or float"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 is not supported, only 1.702 is"),
        ("gpt_oss", {"layer_types": ["chunked"] * 3}, "a layer has the type 'chunked'"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported, only 4 is"),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused(model_type: str, changes: dict, message: str) -> None:
    with pytest.raises(FamilyError, match=f"^{model_type}: {message}"):
        read_spec(model_type, **changes)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mixtral", {"num_experts_per_tok": 6}),
        ("olmoe", {"clip_qkv": -1.0}),
        ("gpt_oss", {"num_hidden_layers": -3}),
        ("deepseek_v3", {"n_group": 3}),
        ("deepseek_v3", {"num_hidden_layers": 0}),
    ],
    ids=str,
)
def test_impossible_sizes_are_refused(model_type: str, changes: dict) -> None:
    with pytest.raises(SpecError):
        read_spec(model_type, **changes)


@pytest.mark.parametrize(
    ("model_type", "spec", "message"),
    [
        ("mixtral", read_spec("olmoe"), "norm_over='all', only 'head'|qk_norm=RMSNorm"),
        ("mixtral", read_spec("deepseek_v3"), "blocks hold latent_attention, experts"),
        ("mixtral", with_experts("mixtral", expert=FeedForward(40, "relu")), "hidden_act='relu' is not supported"),
        ("mixtral", with_experts("mixtral", shared=SwiGLU(8)), "shared=SwiGLU"),
        ("qwen2_moe", read_spec("qwen3_moe"), "cannot express this spec .*hidden=0"),
        ("qwen3_moe", read_spec("qwen2_moe"), "out_bias=False, only True"),
        ("qwen3_moe", with_experts("qwen3_moe", shared=SwiGLU(8)), "shared=SwiGLU"),
        ("deepseek_v2", read_spec("deepseek_v3"), "router.*scores='sigmoid', only 'softmax'"),
        ("deepseek_v3", with_experts("deepseek_v3", shared=SwiGLU(25)), "hidden=25, only 24"),
    ],
)
def test_specs_that_the_class_cannot_express_are_refused(model_type: str, spec: Decoder, message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        family(model_type).config(spec)


@pytest.mark.parametrize("model_type", SETTINGS)
def test_training_options_are_not_exported(model_type: str) -> None:
    config = family(model_type).config(with_experts(model_type, balance=0.3, z=0.1, capacity=2.0))
    assert experts(family(model_type).spec(config)).capacity is None


def test_the_balance_loss_is_divided_among_the_layers() -> None:
    assert experts(read_spec("mixtral", router_aux_loss_coef=0.03)).balance == 0.01
    assert experts(read_spec("qwen2_moe", router_aux_loss_coef=0.03, mlp_only_layers=[0])).balance == 0.015


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_keys_of_transformers_4_are_read(model_type: str) -> None:
    """Keys that version 5 renamed or nested, and unused keys of published files."""
    if model_type == "qwen3_moe":
        old = {
            "num_experts": 5,
            "rope_theta": 1e6,
            "rope_scaling": None,
            "sliding_window": None,
            "max_window_layers": 3,
        }
        new = {"num_local_experts": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    elif model_type == "gpt_oss":
        yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        yarn |= {"original_max_position_embeddings": 4096}
        old = {"rope_theta": 150000, "rope_scaling": yarn, "rope_parameters": None, "experts_per_token": 2}
        new = {"rope_parameters": None}
    else:
        yarn = {"factor": 4, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.7}
        old = {"rope_theta": 10000, "rope_scaling": {"type": "yarn"} | yarn, "seq_aux": True, "scoring_func": "softmax"}
        new = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0} | yarn}
    spec = read_spec(model_type, **old)
    assert spec == read_spec(model_type, **new)
    scaling = spec.blocks[0].sublayers[0].body.position.scaling
    assert isinstance(scaling, Yarn) == (model_type != "qwen3_moe")


def test_gpt_oss_alternates_windows() -> None:
    masks = [block.sublayers[0].body.mask for block in read_spec("gpt_oss").blocks]
    assert masks == [Window(5), Causal(), Window(5)]


def test_quantized_experts_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    config = GPT_OSS | {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantization_config with the method 'mxfp4', which is not read"):
        load(tmp_path)
