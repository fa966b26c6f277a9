"""Older decoders: published key names are read, unsupported settings and specs are refused; ALiBi with padding."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models.falcon.modeling_falcon as falcon_code
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from regard.families import FamilyError, family
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.norm import NoNorm
from regard.parts.position.alibi import Alibi
from regard.parts.position.learned import Learned
from tests.families.cases import VOCAB
from tests.families.cases.classic import CASES, CLASSES, FALCON, rope
from tests.families.pairs import LIMIT, make_pair
from tests.families.test_decoders import tokens
from tests.laws import error, layout_with_padding


def read_spec(model_type: str, **changes: Any) -> Decoder:
    return family(model_type).spec(CLASSES[model_type][1] | changes)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("opt", {"activation_function": "mish"}, "activation_function='mish' is not supported"),
        ("gpt_neox", {"rotary_pct": "all"}, "rotary_pct='all' must be int or float"),
        ("gptj", {"rotary_dim": 16}, "rotary_dim=16 must be from 1 to the head dimension 12"),
        ("phi", {"qk_layernorm": True, "head_dim": 20}, "head_dim=20 is not supported, only 12 is"),
        ("phi", rope("yarn", factor=2.0) | {"max_position_embeddings": 10**400}, "max_position_embeddings=1000+"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2 must be 1 with"),
        ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn=3"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn=False is not supported"),
        ("falcon", {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads=2 is not supported, only 4 is"),
        ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm=True"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config: qk_ln=True is not supported"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config: alibi=False is not supported"),
        ("mpt", {"no_bias": False}, "no_bias=False is not supported"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale='inv_sqrt_d_model' is not supported, only None"),
    ],
)
def test_unsupported_settings_are_refused(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FamilyError, match=f"^{model_type}: .*{message}"):
        read_spec(model_type, **changes)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("opt", {"tied": False, "position": Learned(64)}, r"decoder\.position\.offset=0, only 2"),
        ("gptj", {"head_bias": False}, r"decoder\.head_bias=False, only True"),
        ("phi", {"norm": NoNorm()}, r"decoder\.norm=NoNorm"),
        ("bloom", {"embedding_norm": None}, r"decoder\.embedding_norm=None"),
        ("gpt_neox", {"embedding_dim": 20}, r"decoder\.embedding_dim=20, only None"),
    ],
)
def test_specs_that_the_class_cannot_express_are_refused(
    model_type: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(FamilyError, match=message):
        family(model_type).config(dataclasses.replace(read_spec(model_type), **changes))


@pytest.mark.parametrize("model_type", CLASSES)
@pytest.mark.parametrize("source_type", CLASSES)
def test_models_of_other_families_are_expressed_or_refused(model_type: str, source_type: str) -> None:
    spec = read_spec(source_type)
    try:
        written = family(model_type).config(spec)
    except FamilyError:
        assert model_type != source_type
    else:
        assert family(model_type).spec(written) == spec


def test_alibi_with_smaller_slopes_is_read_but_not_written() -> None:
    spec = read_spec("mpt", attn_config={"alibi_bias_max": 16})
    assert spec.blocks[0].sublayers[0].body.position == Alibi(exponent=16.0)
    with pytest.raises(FamilyError, match="only ALiBi with exponent=8"):
        family("mpt").config(spec)


def test_published_key_names_are_read() -> None:
    published = {"n_embed": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": VOCAB, "seq_length": 9}
    assert family("bloom").spec(published) == dataclasses.replace(read_spec("bloom"), context=9)
    older = {"rotary_pct": 0.25, "rotary_emb_base": 10000, "rope_scaling": None}
    assert read_spec("gpt_neox", **older) == read_spec("gpt_neox")
    linear = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read_spec("falcon", **linear) == read_spec("falcon", rope_parameters={"rope_type": "linear", "factor": 2.0})


def test_a_table_does_not_iterate_over_the_layers() -> None:
    """A config may declare any depth, and the table is built before the depth is compared with the files."""
    for model_type in CLASSES:
        spec = read_spec(model_type)
        deep = dataclasses.replace(spec, layers=(Repeat(spec.layers[0].blocks, 10**12),))
        assert family(model_type).table(deep)


@pytest.mark.parametrize("name", ["bloom: three heads, untied", "mpt: six heads, untied, explicit softmax scale"])
@torch.no_grad()
def test_padding_on_the_left_equals_transformers(name: str, tmp_path: Path) -> None:
    """These classes accept no position_ids: they count positions from the mask, or use distances only."""
    pair, ids, layout = make_pair(CASES[name], tmp_path), tokens(3, 12), layout_with_padding([4, 9, 12], 12, True)
    theirs = pair.theirs(ids, attention_mask=layout.valid.long()).logits
    assert error(pair.ours(ids, layout)[layout.valid], theirs[layout.valid]) <= LIMIT


@torch.no_grad()
def test_falcon_slopes_equal_transformers_without_its_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 16 heads on, slopes are not powers of two; transformers rounds them to bfloat16 even in float32 models."""
    pair = make_pair(
        ("FalconForCausalLM", FALCON | {"alibi": True, "num_attention_heads": 16, "hidden_size": 64}), tmp_path
    )
    ids = tokens(2, 33)
    assert error(pair.ours(ids), pair.theirs(ids).logits) < 0.02
    monkeypatch.setattr(falcon_code, "build_alibi_tensor", build_alibi_tensor)
    assert error(pair.ours(ids), pair.theirs(ids).logits) <= LIMIT
