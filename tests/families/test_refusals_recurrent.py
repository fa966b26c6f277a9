"""Recurrent and hybrid families refuse unsupported settings, and specs that they cannot express."""

import dataclasses

import pytest
import torch
import transformers

from regard.checkpoint import load
from regard.families import FamilyError, family
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.block import Block, Sublayer
from regard.parts.norm import RMSNorm
from regard.parts.position.rope import Rope
from regard.parts.ssm.mamba import Mamba
from regard.spec import SpecError
from tests.families.cases import NO_SPECIAL_TOKENS
from tests.families.cases.recurrent import BAMBA, GRIFFIN, JAMBA, MAMBA, MAMBA2, RWKV, ZAMBA2
from tests.laws import error

CONFIGS = {
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
    "mamba2": MAMBA2,
    "jamba": JAMBA,
    "bamba": BAMBA,
    "recurrent_gemma": GRIFFIN,
    "rwkv": RWKV,
    "zamba2": ZAMBA2,
}


def read_spec(model_type: str, **changes) -> Decoder:
    return family(model_type).spec(CONFIGS[model_type] | changes)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mamba", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("mamba", {"intermediate_size": 50}, "intermediate_size=50 must be a multiple of hidden_size=32"),
        ("falcon_mamba", {"time_step_rank": "full"}, "time_step_rank='full' must be a number or 'auto'"),
        ("mamba2", {"num_heads": 3}, "num_heads=3 is not supported, only 8 is"),
        ("mamba2", {"time_step_limit": [0.1]}, r"time_step_limit=\[0.1\] must be two numbers"),
        ("jamba", {"attn_layer_offset": 2}, "attn_layer_offset=2 and attn_layer_period=2 must satisfy"),
        ("bamba", {"attn_layer_indices": [9]}, r"attn_layer_indices=\(9,\) must be from 0 to 2"),
        ("bamba", {"mamba_d_head": 5}, "mamba_d_head=5 is not supported, only 8 is"),
        ("recurrent_gemma", {"block_types": ["lstm"]}, r"block_types=\('lstm',\) must be a list of 'recurrent'"),
        ("recurrent_gemma", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear' is not supported"),
        ("rwkv", {"hidden_size": "big"}, "hidden_size='big' must be int"),
        ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings=False is not supported"),
        ("zamba2", {"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported, only 4 is"),
        ("zamba2", {"layers_block_type": ["mamba"]}, "layers_block_type=.* must have one entry per layer"),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused(model_type: str, changes: dict, message: str) -> None:
    with pytest.raises(FamilyError, match=f"^{model_type}: .*{message}"):
        read_spec(model_type, **changes)


def test_heads_without_dimensions_are_refused() -> None:
    with pytest.raises(SpecError, match="head_dim=0 must be positive"):
        read_spec("zamba2", num_attention_heads=100)


def change_mixer(model: Decoder, layer: int, **fields) -> Decoder:
    """The same spec with changed fields of the mixer in one layer."""
    blocks = model.blocks
    mixer, *other_sublayers = blocks[layer].sublayers
    mixer = dataclasses.replace(mixer, body=dataclasses.replace(mixer.body, **fields))
    blocks[layer] = dataclasses.replace(blocks[layer], sublayers=(mixer, *other_sublayers))
    return dataclasses.replace(model, layers=(Repeat(tuple(blocks)),))


@pytest.mark.parametrize(
    ("model_type", "model", "message"),
    [
        ("mamba", read_spec("mamba2"), "blocks hold mamba2; this family's blocks hold Mamba"),
        ("mamba", read_spec("falcon_mamba"), r"body\.norm=RMSNorm"),
        ("falcon_mamba", read_spec("mamba"), r"body\.norm=NoNorm"),
        ("mamba2", change_mixer(read_spec("mamba2"), 1, groups=2), r"layers\[1\].*body\.groups=2, only 1"),
        ("jamba", change_mixer(read_spec("jamba"), 1, position=Rope()), r"layers\[1\].*body\.position=Rope"),
        ("jamba", change_mixer(read_spec("jamba"), 3, kv_heads=4), r"layers\[3\].*body\.kv_heads=4, only 2"),
        ("bamba", change_mixer(read_spec("bamba"), 1, sinks=True), r"body\.sinks=True, only False"),
        (
            "recurrent_gemma",
            change_mixer(read_spec("recurrent_gemma"), 0, heads=2),
            r"layers\[0\].*body\.heads=2, only 4",
        ),
        ("rwkv", dataclasses.replace(read_spec("rwkv"), embedding_norm=None), r"decoder\.embedding_norm=None"),
        ("zamba2", change_mixer(read_spec("zamba2"), 3, number=7), r"layers\[3\].*body\.number=7, only 1"),
        ("zamba2", read_spec("mamba2"), "this family has SharedBlock"),
    ],
)
def test_specs_that_the_class_cannot_express_are_refused(model_type: str, model: Decoder, message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        family(model_type).config(model)


def test_omitted_sizes_round_trip() -> None:
    norm = RMSNorm(1e-5)
    model = Decoder(97, 32, (Repeat((Block((Sublayer(Mamba(4), norm),)),), 3),), norm=norm)
    assert family("mamba").spec(family("mamba").config(model)) == model


@torch.no_grad()
def test_rwkv_logits_equal_transformers_with_rescaling(tmp_path) -> None:
    """In eval mode transformers halves hidden states and weights every few layers; this affects only the norm's eps."""
    torch.manual_seed(0)
    config = transformers.RwkvConfig(**NO_SPECIAL_TOKENS | RWKV | {"rescale_every": 2, "layer_norm_epsilon": 1e-9})
    theirs = transformers.RwkvForCausalLM(config).eval()
    theirs.rwkv.embeddings.weight.normal_()
    theirs.save_pretrained(tmp_path)
    theirs.rwkv.ln_out.eps /= 4  # for a halved hidden state
    ids = torch.arange(20).view(2, 10)
    found, expected = load(tmp_path)(ids), theirs(ids).logits
    assert error(found, expected) <= 1e-5
