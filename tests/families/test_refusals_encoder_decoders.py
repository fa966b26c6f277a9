"""T5, BART and their variations refuse unsupported settings, and specs that they cannot express."""

from dataclasses import replace

import pytest

from regard.families import FamilyError, family
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.presets import transformer_2017
from regard.parts.norm import LayerNorm
from regard.parts.position.sinusoidal import Sinusoidal
from regard.parts.position.t5 import T5Buckets
from regard.spec import SpecError
from tests.families.cases.encoder_decoders import BART, LED, SWITCH, T5, WHISPER

BASES = {
    "t5": T5, "mt5": T5, "switch_transformers": SWITCH, "bart": BART, "marian": BART, "pegasus": BART, "led": LED,
    "whisper": WHISPER,
}  # fmt: skip


def read_spec(name: str, **changes: object) -> EncoderDecoder:
    return family(name).spec(BASES[name] | changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("t5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj='gated-mish' is not supported"),
        ("t5", {"d_kv": None}, "the config has no 'd_kv'"),
        ("mt5", {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' must be bool"),
        ("switch_transformers", {"router_dtype": "bfloat16"}, "router_dtype='bfloat16' is not supported"),
        ("switch_transformers", {"encoder_sparse_step": 10**9}, "encoder_sparse_step=1000000000 must be at most 1000"),
        ("bart", {"activation_function": "mish"}, "activation_function='mish' is not supported"),
        ("marian", {"decoder_vocab_size": 9.5, "share_encoder_decoder_embeddings": False}, "must be int"),
        ("pegasus", {"scale_embedding": 1}, "scale_embedding=1 must be bool"),
        ("led", {"attention_window": 5}, "attention_window=5 must be even"),
        ("led", {"attention_window": [4]}, r"attention_window=\[4\] must have one entry for each of 2 layers"),
        ("whisper", {"scale_embedding": True}, "scale_embedding=True is not supported"),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused(name: str, changes: dict, message: str) -> None:
    with pytest.raises(FamilyError, match=f"^{name}: .*{message}"):
        read_spec(name, **changes)


@pytest.mark.parametrize("name", BASES)
def test_impossible_sizes_are_refused(name: str) -> None:
    layers = "num_layers" if BASES[name] in (T5, SWITCH) else "encoder_layers"
    for changes in ({"d_model": 0}, {"d_model": -48}, {layers: 0}, {"vocab_size": -1}):
        with pytest.raises((SpecError, FamilyError)):
            read_spec(name, **changes)


@pytest.mark.parametrize("name", BASES)
def test_specs_that_the_class_cannot_express_are_refused(name: str) -> None:
    """Models of other families, a softcap, another norm of the encoder."""
    config, ours = family(name).config, read_spec(name)
    relatives = {"t5", "mt5", "switch_transformers"}  # these can express some of each other's models
    others = [read_spec(other) for other in BASES if other != name and not {other, name} <= relatives]
    others += [
        transformer_2017(31, 24, 4, 40, 2),
        replace(ours, target=replace(ours.target, softcap=3.0)),
        replace(ours, source=replace(ours.source, norm=LayerNorm(0.5))),
    ]
    for other in others:
        with pytest.raises(FamilyError):
            config(other)


def test_the_error_names_the_field_that_differs() -> None:
    bart, t5 = read_spec("bart"), read_spec("t5")
    with pytest.raises(FamilyError, match="a bart model cannot express encoder_decoder.source.position="):
        family("bart").config(replace(bart, source=replace(bart.source, position=Sinusoidal())))
    with pytest.raises(FamilyError, match=r"a t5 model cannot express encoder_decoder.target.position.distance=64"):
        family("t5").config(replace(t5, target=replace(t5.target, position=T5Buckets(distance=64, heads=4))))
