"""mask=None: the model chooses the mask. Decoders are causal and encoders bidirectional; an explicit mask is kept."""

from dataclasses import replace

import pytest
import torch

from regard.kernels.attention.mask import Causal, Full, Mask
from regard.kernels.attention.patterns.window import Window
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.pattern import Tiled, tile
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import SwiGLU
from regard.parts.input import Tokens
from regard.parts.latent_attention import LatentAttention
from regard.parts.patches import Patches
from regard.parts.position.rope import Rope
from regard.parts.recurrent import GRU
from regard.parts.scored_attention import ScoredAttention
from regard.parts.shared_block import SharedBlock
from regard.parts.ssm.mamba2 import Mamba2
from regard.verification.report import verify
from tests.laws import VOCAB, WIDTH, random_ids

BODIES: dict[str, Body] = {
    "attention": Attention(4, position=Rope()),
    "latent": LatentAttention(4, 8, 4, 4),
    "additive": ScoredAttention(4),
    "dot": ScoredAttention(4, score="dot"),
}
SHARED = SharedBlock(Attention(4), SwiGLU(40), Mamba2(state=4, head_dim=8))


def block(body: Body) -> Block:
    return Block((Sublayer(body), Sublayer(SwiGLU(40))))


def encoder(body: Body) -> Encoder:
    return Encoder(Tokens(VOCAB), WIDTH, (Repeat((block(body),), 2),))


def decoder(body: Body, **fields: object) -> Decoder:
    return Decoder(VOCAB, WIDTH, (Repeat((block(body),), 2),), **fields)  # ty: ignore[invalid-argument-type]


def masks(spec: Encoder | Decoder) -> list[Mask]:
    return [mask for block in spec.blocks if (mask := getattr(block.sublayers[0].body, "mask", None)) is not None]


def attends_to_last_token(spec: Encoder | Decoder) -> bool:
    """Whether the first token's output depends on the last token."""
    model, tokens = spec.build(seed=0).double().eval(), random_ids(1, 6)
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % VOCAB
    with torch.no_grad():
        return not torch.equal(model(tokens)[0, 0], model(changed)[0, 0])


@pytest.mark.parametrize("name", BODIES)
def test_by_default_an_encoder_is_bidirectional_and_a_decoder_causal(name: str) -> None:
    assert attends_to_last_token(encoder(BODIES[name]))
    assert not attends_to_last_token(decoder(BODIES[name]))
    assert masks(encoder(BODIES[name])) == [Full()] * 2 and masks(decoder(BODIES[name])) == [Causal()] * 2


@pytest.mark.parametrize("mask", [Causal(), Full(), Window(3), Window(3, causal=False)], ids=str)
def test_an_explicit_mask_is_kept(mask: Mask) -> None:
    body = replace(Attention(4), mask=mask)
    assert masks(encoder(body)) == [mask] * 2
    assert attends_to_last_token(encoder(body)) == (not mask.causal)
    if mask.causal:
        assert masks(decoder(body)) == [mask] * 2


def test_encoder_of_an_image_is_bidirectional() -> None:
    assert masks(Encoder(Patches((4, 4), (8, 8)), WIDTH, (Repeat((block(Attention(4)),), 1),))) == [Full()]


def test_an_encoder_decoder_has_a_bidirectional_source_and_a_causal_target() -> None:
    self_attention, cross_attention = Sublayer(Attention(4)), Sublayer(CrossAttention(4))
    source = Encoder(Tokens(VOCAB), WIDTH, (Repeat((Block((self_attention,)),), 1),))
    target = Decoder(VOCAB, WIDTH, (Repeat((Block((self_attention, cross_attention)),), 1),))
    spec = EncoderDecoder(source, target)
    assert (masks(spec.source), masks(spec.target)) == ([Full()], [Causal()])
    assert EncoderDecoder.from_json(spec.to_json()) == spec


def test_attention_to_a_source_gets_no_default_mask() -> None:
    body = ScoredAttention(4, source=True)
    assert decoder(body).blocks[0].sublayers[0].body == body


def test_nested_attention_gets_the_default_mask() -> None:
    for model, mask in ((encoder(SHARED), Full()), (decoder(SHARED), Causal())):
        body = model.blocks[0].sublayers[0].body
        assert isinstance(body, SharedBlock) and body.attention.mask == mask


def test_multi_token_prediction_blocks_are_causal() -> None:
    (ahead,) = decoder(Attention(4), ahead=(block(Attention(4)),)).ahead
    assert getattr(ahead.sublayers[0].body, "mask", None) == Causal()


def test_full_and_windows_of_a_pattern_take_the_default_of_the_model() -> None:
    layers = (Tiled(block(Attention(4)), "window(3), full", 2),)
    assert masks(Encoder(Tokens(VOCAB), WIDTH, layers)) == [Window(3, causal=False), Full()]
    assert masks(Decoder(VOCAB, WIDTH, layers)) == [Window(3), Causal()]


def test_attention_added_by_a_pattern_takes_the_default_of_the_model() -> None:
    layers = (Tiled(block(GRU()), "gru, attention(4)", 2),)
    assert masks(Encoder(Tokens(VOCAB), WIDTH, layers)) == [Full()]
    assert masks(Decoder(VOCAB, WIDTH, layers)) == [Causal()]


def test_full_of_a_pattern_outside_a_model_leaves_the_mask_unset() -> None:
    layers = tile(block(Attention(4)), "full", 1)
    assert masks(Encoder(Tokens(VOCAB), WIDTH, layers)) == [Full()]
    assert masks(Decoder(VOCAB, WIDTH, layers)) == [Causal()]


@pytest.mark.parametrize("name", BODIES)
def test_an_unset_mask_round_trips(name: str) -> None:
    spec = block(BODIES[name])
    assert Block.from_json(spec.to_json()) == spec == Block.from_toml(spec.to_toml())
    assert getattr(spec.sublayers[0].body, "mask", spec) is None


@pytest.mark.parametrize("make_spec", [encoder, decoder])
def test_a_model_with_default_masks_round_trips(make_spec) -> None:
    spec = make_spec(Attention(4))
    assert type(spec).from_json(spec.to_json()) == spec == type(spec).from_toml(spec.to_toml())
    assert spec.to_dict()["layers"][0]["blocks"][0]["sublayers"][0]["body"]["mask"] == masks(spec)[0].to_dict()


@pytest.mark.parametrize("make_spec", [encoder, decoder])
@pytest.mark.parametrize("body", [*BODIES.values(), SHARED], ids=[*BODIES, "shared"])
def test_toml_does_not_contain_default_masks(make_spec, body: Body) -> None:
    spec = make_spec(body)
    assert "mask" not in spec.to_toml() and "mask" in spec.to_toml(defaults=True)
    assert type(spec).from_toml(spec.to_toml()) == spec


def test_toml_of_multi_token_prediction_blocks_does_not_contain_default_masks() -> None:
    spec = decoder(Attention(4), ahead=(block(Attention(4)),))
    assert "mask" not in spec.to_toml() and Decoder.from_toml(spec.to_toml()) == spec


def test_toml_contains_masks_that_are_not_the_default() -> None:
    for spec in (encoder(Attention(4, mask=Causal())), decoder(Attention(4, mask=Window(3)))):
        assert "mask" in spec.to_toml() and type(spec).from_toml(spec.to_toml()) == spec
    source = encoder(ScoredAttention(4, source=True, mask=Full()))  # the encoder would leave mask=None unchanged
    assert Encoder.from_toml(source.to_toml()) == source


def test_a_file_without_masks_loads_with_the_default_of_its_model() -> None:
    for spec in (encoder(Attention(4)), decoder(Attention(4))):
        data = spec.to_dict()
        for sublayer in data["layers"][0]["blocks"][0]["sublayers"]:
            sublayer["body"].pop("mask", None)
        assert type(spec).from_dict(data) == spec


@pytest.mark.parametrize("name", BODIES)
def test_outside_a_model_an_unset_mask_is_causal(name: str) -> None:
    module = BODIES[name].build(WIDTH).double().eval()
    x = torch.randn(1, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layout = TokenLayout.whole(1, 5)
    with torch.no_grad():
        whole, first = module(x, layout), module(x[:, :1], layout.tokens(slice(0, 1)))
    assert torch.allclose(whole[:, :1], first, atol=1e-12)
    assert BODIES[name].causal


@pytest.mark.parametrize("make_spec", [encoder, decoder])
def test_laws_hold_for_models_with_default_masks(make_spec) -> None:
    report = verify(make_spec(Attention(4, position=Rope())).build(seed=0), length=8)
    assert report.ok and any(verdict.result == "pass" for verdict in report.verdicts)
