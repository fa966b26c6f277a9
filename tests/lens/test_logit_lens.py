"""The logit lens and direct logit attribution equal plain hooks on `transformers`; terms sum to the logit."""

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from regard.kernels.attention.mask import Full
from regard.lens import activation_patching, attention_maps, logit_attribution, logit_difference, logit_lens
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.heads import MaskedLM, Pooled
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.input import Tokens
from regard.parts.norm import LayerNorm, RMSNorm
from regard.verification.trial import randomize_weights
from tests.laws import error
from tests.lens.their_hooks import IDS, LIMIT, blocks, head_projection, inputs_of

if TYPE_CHECKING:
    from tests.families.pairs import Pair  # imports transformers, which takes seconds


def final_norm(theirs) -> torch.nn.Module:
    return theirs.transformer.ln_f if hasattr(theirs, "transformer") else theirs.model.norm


@torch.no_grad()
def test_the_logit_lens_is_their_head_of_each_hidden_state(pair: "Pair") -> None:
    with inputs_of([*blocks(pair.theirs), final_norm(pair.theirs)]) as states:
        pair.theirs(IDS)
    found = logit_lens(pair.ours, IDS)
    assert list(found)[:2] == ["stack.input", "stack.blocks.0"]
    for logits, x in zip(found.values(), states, strict=True):
        assert error(logits, pair.theirs.lm_head(final_norm(pair.theirs)(x))) <= LIMIT
    last = logit_lens(pair.ours, IDS, slice(-1, None))
    assert torch.allclose(last["stack.blocks.0"], found["stack.blocks.0"][:, -1:], atol=1e-5)


@torch.no_grad()
def test_the_logit_lens_of_an_encoder_ends_in_its_logits() -> None:
    layers = (Repeat((Block((Sublayer(Attention(2)),)),), 2),)
    model = Encoder(Tokens(97), 16, layers, head=MaskedLM()).build(seed=0).eval()
    assert torch.allclose(logit_lens(model, IDS)["stack.blocks.1"], model(IDS))
    with pytest.raises(ValueError, match="no head for tokens"):
        logit_lens(Encoder(Tokens(97), 16, layers, head=Pooled()).build(seed=0), IDS)


@torch.no_grad()
def test_attributed_logits_equal_plain_hooks(pair: "Pair") -> None:
    """The outputs of heads and sublayers, times the head of the model, with the scale of the final norm fixed."""
    token, minus, theirs = 5, 11, pair.theirs
    norm, direction = final_norm(theirs), theirs.lm_head.weight[token] - theirs.lm_head.weight[minus]
    with inputs_of([norm, *map(head_projection, blocks(theirs))]) as inputs:
        logits = theirs(IDS).logits
    *heads, x = (tensor[:, -1] for tensor in inputs)

    def read(y: Tensor) -> Tensor:
        if isinstance(norm, torch.nn.LayerNorm):
            return (
                (y - y.mean(-1, keepdim=True))
                / (x.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
                * norm.weight
            ) @ direction
        return (y / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight) @ direction

    found = logit_attribution(pair.ours, IDS, token, minus, by="head")
    terms = dict(zip(found.names, found.values, strict=True))
    assert error(found.total, logits[:, -1, token] - logits[:, -1, minus]) <= LIMIT
    for layer, block in enumerate(blocks(theirs)):
        module, count = head_projection(block), pair.ours.stack.blocks[layer].sublayers[0].body.heads
        weight = module.weight if type(module).__name__ == "Conv1D" else module.weight.T  # (H · E, D)
        size = len(weight) // count
        for head in range(count):
            columns = slice(head * size, head * size + size)
            expected = read(heads[layer][:, columns] @ weight[columns])
            assert error(terms[f"stack.blocks.{layer}.sublayers.0.body.head {head}"], expected) <= LIMIT


@torch.no_grad()
@pytest.mark.parametrize("by", ["sublayer", "head", "neuron"])
@pytest.mark.parametrize("style", ["pre", "parallel"])
@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm(around_one=True)])
def test_terms_sum_to_the_logit(by: str, style: str, norm) -> None:
    block = Block(
        (Sublayer(Attention(4, 2, bias=True, gate="head"), norm, after=norm, scale=0.5), Sublayer(SwiGLU(20), norm),
         Sublayer(FeedForward(20), norm)), style, share=0.7,
    )  # fmt: skip
    spec = Decoder(97, 16, (Repeat((block,), 2),), norm=norm, embedding_dim=12, head_bias=True, logit_scale=0.3)
    model = spec.build(seed=0).double().eval()
    randomize_weights(model)
    found = logit_attribution(model, IDS, 5, position=7, by=by)
    assert (found.total - model(IDS)[:, 7, 5]).abs().max() <= 1e-9
    terms = {"sublayer": 3, "head": 4 + 1 + 2, "neuron": 1 + 20 + 20 + 1}[by]
    assert len(found.names) == len(set(found.names)) == 2 * terms + 2


@torch.no_grad()
def test_terms_of_an_encoder_decoder_sum_to_the_logit() -> None:
    encoder = Encoder(Tokens(97), 16, (Repeat((Block((Sublayer(Attention(4, mask=Full())),)),)),))
    block = Block((Sublayer(Attention(4)), Sublayer(CrossAttention(4)), Sublayer(FeedForward(20))))
    model = EncoderDecoder(encoder, Decoder(97, 16, (Repeat((block,), 2),))).build(seed=0).double().eval()
    randomize_weights(model)
    found = logit_attribution(model, (IDS[:, :5], IDS), 5, minus=6, by="head")
    logits = model(IDS[:, :5], IDS)[:, -1]
    assert (found.total - (logits[:, 5] - logits[:, 6])).abs().max() <= 1e-9
    assert len(found.names) == 2 * (4 + 4 + 1) + 2
    with pytest.raises(ValueError, match="EncoderDecoderModule needs a pair"):
        logit_attribution(model, IDS, 5)


def test_places_outside_the_model_are_refused() -> None:
    model = Decoder(97, 16, (Repeat((Block((Sublayer(Attention(2)),)),)),)).build(seed=0)
    with pytest.raises(ValueError, match="no position 30; choose 0 to 2"):
        logit_attribution(model, [1, 2, 3], 4, position=30)
    with pytest.raises(ValueError, match="no token 97; choose 0 to 96"):
        logit_attribution(model, [1, 2, 3], 4, minus=97)
    with pytest.raises(ValueError, match="by='heads' is unknown"):
        logit_attribution(model, [1, 2, 3], 4, by="heads")
    with pytest.raises(ValueError, match="no position -9"):
        activation_patching(model, [1, 2], [3, 4], logit_difference(1, 2, position=-11))
    with pytest.raises(ValueError, match="no layer 1; choose 0 to 0"):
        attention_maps(model, [1, 2], layer=1)
    for function in (attention_maps, logit_lens):
        with pytest.raises(ValueError, match="there are no ids"):
            function(model, [])


def test_models_whose_stream_is_no_sum_are_refused() -> None:
    block = Block((Sublayer(Attention(2)),), "post")
    with pytest.raises(ValueError, match="no sum of outputs"):
        logit_attribution(Decoder(97, 16, (Repeat((block,)),)).build(seed=0), IDS, 1)
    with pytest.raises(ValueError, match="which predicts no next token"):
        logit_attribution(Encoder(Tokens(97), 16, (Repeat((block,)),)).build(seed=0), IDS, 1)
