"""Families of encoders refuse unsupported settings, and specs that they cannot express."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from regard.families import FamilyError, family
from regard.kernels.attention.mask import Full
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.window import Window
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Pooled, Pooler
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.big_bird_attention import BigBirdAttention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope
from regard.weights.table import StoredTensor, WeightsError
from tests.families.cases.encoders import BERT, DISTILBERT, ELECTRA, MODERNBERT

SETTINGS = {
    "bert": BERT,
    "roberta": BERT | {"pad_token_id": 1},
    "distilbert": DISTILBERT,
    "electra": ELECTRA,
    "modernbert": MODERNBERT,
    "roformer": BERT,
    "longformer": BERT,
    "big_bird": BERT,
}


def read_spec(model_type: str, **changes: Any) -> Encoder:
    return family(model_type).spec(SETTINGS[model_type] | changes)


def mask(spec: Encoder) -> Any:
    return spec.blocks[0].sublayers[0].body.mask


@pytest.mark.parametrize("model_type", SETTINGS)
def test_a_config_without_architectures_is_a_base_model(model_type: str) -> None:
    pooler = Pooler() if model_type in ("bert", "roberta", "longformer", "big_bird") else None
    assert read_spec(model_type).head == pooler


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (
            "bert",
            {"architectures": ["BertForQuestionAnswering"]},
            "architectures='BertForQuestionAnswering' is not supported",
        ),
        ("bert", {"architectures": "BertModel"}, "architectures='BertModel' must be list"),
        ("bert", {"is_decoder": True}, "is_decoder=True is not supported"),
        ("bert", {"position_embedding_type": "relative_key"}, "only 'absolute' is"),
        ("bert", {"hidden_act": "mish"}, "hidden_act='mish' is not supported"),
        ("bert", {"vocab_size": None}, "the config has no 'vocab_size'"),
        ("roberta", {"pad_token_id": -1}, "pad_token_id=-1"),
        ("roformer", {"rotary_value": True}, "rotary_value=True is not supported"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types"),
        ("modernbert", {"layer_types": ["global"] * 4}, "a layer has the type 'global'"),
        ("modernbert", {"global_attn_every_n_layers": 0}, "global_attn_every_n_layers=0"),
        ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling='max' is not supported"),
        ("longformer", {"attention_window": [4]}, "must have one entry for each of 2 layers"),
        ("longformer", {"attention_window": 5}, "attention_window=5 must be even"),
        ("big_bird", {"attention_type": "ring"}, "attention_type='ring' is not supported"),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused(model_type: str, changes: dict, message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        read_spec(model_type, **changes)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("bert", {"head": Pooled()}, "no bert class has the head Pooled"),
        ("bert", {"head": Classification(3, "mean")}, "no bert class has the head"),
        ("bert", {"position": Learned(40, 2), "context": 40}, "position"),
        ("bert", {"embedding_dim": 20}, "embedding_dim=20"),
        ("roberta", {"position": Learned(40), "context": 40}, "pad_token_id=-1"),
        ("modernbert", {"norm": None}, "norm"),
    ],
    ids=str,
)
def test_specs_that_the_class_cannot_express_are_refused(model_type: str, changes: dict, message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        family(model_type).config(replace(read_spec(model_type), **changes))


@pytest.mark.parametrize("model_type", SETTINGS)
def test_blocks_of_another_architecture_are_refused(model_type: str) -> None:
    block = Block((Sublayer(Attention(4, position=Rope(base=7.0), mask=Full())), Sublayer(SwiGLU(40))))
    with pytest.raises(FamilyError):
        family(model_type).config(replace(read_spec(model_type), layers=(Repeat((block,), 2),)))


def test_modernbert_configs_of_transformers_4_and_5_are_equal() -> None:
    version_4 = {"global_attn_every_n_layers": 2, "global_rope_theta": 500.0, "local_rope_theta": 100.0}
    version_5 = {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    }
    spec = read_spec("modernbert", **version_4)
    assert spec == read_spec("modernbert", **version_5)
    assert [mask(replace(spec, layers=(Repeat((block,)),))) for block in spec.blocks] == [Full(), Window(4, False)] * 2


def test_the_first_token_is_global_for_sequence_classification() -> None:
    assert mask(read_spec("longformer", attention_window=8)) == Window(4, causal=False)
    classifier = read_spec("longformer", attention_window=[8, 8], architectures=["LongformerForSequenceClassification"])
    assert mask(classifier) == Longformer(4, 1)


def test_big_bird_is_sparse_by_default() -> None:
    body = read_spec("big_bird").blocks[0].sublayers[0].body
    assert isinstance(body, BigBirdAttention) and (body.block, body.links) == (64, 3)
    assert type(read_spec("big_bird", attention_type="original_full").blocks[0].sublayers[0].body) is Attention


def test_a_file_with_different_sinusoids_is_refused() -> None:
    spec = read_spec("roformer")
    table, ours = family("roformer").table(spec), {name: p.data for name, p in spec.build(0).named_parameters()}
    theirs = {n: StoredTensor("file", tuple(t.shape), "F32", lambda t=t: t) for n, t in table.write(ours)}
    name = "encoder.embed_positions.weight"
    for tensor, message in (
        (torch.ones(64, 12), "should be the same in every model of this family"),
        (torch.ones(3), "head_dim"),
    ):
        sines = {name: StoredTensor("file", tuple(tensor.shape), "F32", lambda tensor=tensor: tensor)}
        with pytest.raises(WeightsError, match=message):
            dict(table.read(theirs | sines, ours))
