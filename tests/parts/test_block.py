"""Blocks equal torch's layers and their equations; residuals, and growth of the residual stream with depth."""

from collections.abc import Iterator
from dataclasses import is_dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from regard.kernels.attention.mask import Full
from regard.layout import Source, TokenLayout
from regard.models.base import build_on_meta
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.presets import transformer_2017
from regard.models.stack import Repeat, Stack
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.cross_attention import CrossAttention
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward, SwiGLU, eight_thirds
from regard.parts.norm import LayerNorm, NoNorm, RMSNorm
from regard.parts.position.rope import Rope
from regard.parts.position.sinusoidal import Sinusoidal
from regard.planning.published import PUBLISHED

WIDTH, HEADS, NORM = 12, 3, LayerNorm()
SELF_ATTENTION, CROSS_ATTENTION, FEED_FORWARD = (
    Attention(HEADS, bias=True, mask=Full()),
    CrossAttention(HEADS, bias=True),
    FeedForward(20, "relu"),
)
BLOCKS = {
    "pre": Block((Sublayer(SELF_ATTENTION, NORM), Sublayer(FEED_FORWARD, NORM))),
    "post": Block((Sublayer(SELF_ATTENTION, NORM), Sublayer(FEED_FORWARD, NORM)), style="post"),
    "sandwich": Block((Sublayer(SELF_ATTENTION, NORM, after=RMSNorm()), Sublayer(FEED_FORWARD, NORM, after=RMSNorm()))),
    "parallel": Block((Sublayer(SELF_ATTENTION, NORM), Sublayer(FEED_FORWARD, NoNorm())), style="parallel"),
    "parallel, one norm": Block(
        (Sublayer(SELF_ATTENTION, NoNorm()), Sublayer(FEED_FORWARD, NoNorm())), style="parallel", norm=RMSNorm()
    ),
    "scaled": Block((Sublayer(SELF_ATTENTION, NORM, scale=0.1), Sublayer(FEED_FORWARD, NORM)), keep=0.9, share=0.3),
    "scaled, post": Block(
        (Sublayer(SELF_ATTENTION, NORM), Sublayer(FEED_FORWARD, NORM, scale=0.1)), style="post", keep=1.5
    ),
    "experts": Block((Sublayer(SELF_ATTENTION, NORM), Sublayer(Experts(4, 2, SwiGLU(8)), NORM))),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build_randomized(spec: Block, width: int = WIDTH) -> nn.Module:
    block = spec.build(width).double().eval()
    for n, parameter in enumerate(block.parameters()):
        parameter.data = random(*parameter.shape, seed=n) * 0.4 + (parameter.dim() == 1)
    return block


def block_equation(spec: Block, block: nn.Module, x: Tensor, layout: TokenLayout) -> Tensor:
    """The equation of each block style, one sublayer at a time."""

    def contribution(sublayer: nn.Module, y: Tensor) -> Tensor:
        y = sublayer.after(sublayer.body(y, layout))
        return spec.share * (y if sublayer.scale is None else sublayer.scale * y)

    assert len(block.sublayers) == len(spec.sublayers)
    if spec.style == "parallel":
        inner = block.norm(x)
        return spec.keep * x + sum(contribution(sublayer, sublayer.norm(inner)) for sublayer in block.sublayers)
    for sublayer in block.sublayers:
        if spec.style == "pre":
            x = spec.keep * x + contribution(sublayer, sublayer.norm(x))
        else:  # the next sublayer adds to the output of this norm
            x = sublayer.norm(spec.keep * x + contribution(sublayer, x))
    return x


@pytest.mark.ledger("blk.trace")
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_equals_its_equation(name: str) -> None:
    block, x = build_randomized(BLOCKS[name]), random(2, 5, WIDTH, seed=9)
    found, losses = block(x, TokenLayout.whole(2, 5))
    assert torch.allclose(found, block_equation(BLOCKS[name], block, x, TokenLayout.whole(2, 5)), atol=1e-12)
    assert losses == {}


@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_equal_finite_differences(name: str) -> None:
    block, x = build_randomized(BLOCKS[name]), random(1, 4, WIDTH, seed=3).requires_grad_()
    assert gradcheck(lambda x: block(x, TokenLayout.whole(1, 4))[0], x, fast_mode=True)


def copy_attention_weights(theirs: nn.MultiheadAttention, ours: nn.Module) -> None:
    projections = [ours.q_proj, ours.k_proj, ours.v_proj]
    theirs.in_proj_weight.data = torch.cat([p.weight for p in projections])
    theirs.in_proj_bias.data = torch.cat([p.bias for p in projections])
    theirs.out_proj.load_state_dict(ours.o_proj.state_dict())


@pytest.mark.ledger("blk.post", "blk.pre", "blk.trace")
@pytest.mark.parametrize("style", ["pre", "post"])
@pytest.mark.parametrize(("width", "heads"), [(12, 3), (512, 8)])
def test_an_encoder_layer_equals_torch(style: str, width: int, heads: int) -> None:
    attention = Attention(heads, bias=True, mask=Full())
    block = build_randomized(Block((Sublayer(attention, NORM), Sublayer(FEED_FORWARD, NORM)), style=style), width)
    theirs = nn.TransformerEncoderLayer(
        width, heads, 20, 0.0, batch_first=True, norm_first=style == "pre", dtype=torch.float64
    )
    first, second = block.sublayers
    copy_attention_weights(theirs.self_attn, first.body)
    for our_layer, their_layer in (
        (second.body.up_proj, theirs.linear1),
        (second.body.down_proj, theirs.linear2),
        (first.norm, theirs.norm1),
        (second.norm, theirs.norm2),
    ):
        their_layer.load_state_dict(our_layer.state_dict())
    x = random(2, 10, width)
    found, _ = block(x, TokenLayout.whole(2, 10))
    assert found.shape == x.shape and torch.allclose(found, theirs(x), atol=1e-9)


@pytest.mark.ledger("blk.trace")
@pytest.mark.parametrize("style", ["pre", "post"])
def test_a_decoder_layer_equals_torch(style: str) -> None:
    """Masked self-attention, cross-attention to an encoder's output, and a feed-forward, each with a residual."""
    masked_attention = Attention(HEADS, bias=True)
    block = build_randomized(
        Block(tuple(Sublayer(body, NORM) for body in (masked_attention, CROSS_ATTENTION, FEED_FORWARD)), style=style)
    )
    theirs = nn.TransformerDecoderLayer(
        WIDTH, HEADS, 20, 0.0, batch_first=True, norm_first=style == "pre", dtype=torch.float64
    )
    self_attention, cross_attention, feed_forward = block.sublayers
    copy_attention_weights(theirs.self_attn, self_attention.body)
    copy_attention_weights(theirs.multihead_attn, cross_attention.body)
    for our_layer, their_layer in (
        (feed_forward.body.up_proj, theirs.linear1),
        (feed_forward.body.down_proj, theirs.linear2),
        (self_attention.norm, theirs.norm1),
        (cross_attention.norm, theirs.norm2),
        (feed_forward.norm, theirs.norm3),
    ):
        their_layer.load_state_dict(our_layer.state_dict())
    x, source = random(2, 5, WIDTH), random(2, 7, WIDTH, seed=8)
    layout = TokenLayout.whole(2, 5).with_source(Source(source, TokenLayout.whole(2, 7)))
    causal_mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    assert torch.allclose(block(x, layout)[0], theirs(x, source, tgt_mask=causal_mask), atol=1e-9)


@pytest.mark.ledger("blk.recipes")
def test_blocks_of_2017_and_llama_differ_as_published() -> None:
    old, new = transformer_2017(), PUBLISHED["llama-7b"].spec()
    old_block, new_block = (model.layers[0].blocks[0] for model in (old.source, new))
    assert (old_block.style, new_block.style) == ("post", "pre")
    assert {type(s.norm) for s in old_block.sublayers} == {LayerNorm}
    assert {type(s.norm) for s in new_block.sublayers} == {RMSNorm}
    assert old_block.dropout == 0.1 and new_block.dropout == 0.0
    (old_attention, old_feed_forward), (new_attention, gated) = (
        [s.body for s in block.sublayers] for block in (old_block, new_block)
    )
    assert (old_feed_forward.activation, old_feed_forward.bias) == ("relu", True)
    assert old_feed_forward.hidden_dim(512) == 4 * 512
    assert isinstance(gated, SwiGLU) and not gated.bias and gated.hidden_dim(4096) == eight_thirds(4096)
    assert isinstance(old.source.position, Sinusoidal) and isinstance(new_attention.position, Rope)
    assert old_attention.sizes(512) == (8, 8, 64)
    grouped = PUBLISHED["llama-2-70b"].spec().blocks[0].sublayers[0].body
    assert (grouped.heads, grouped.kv_heads) == (64, 8)
    assert old.shared and old.target.tied and not new.tied  # tied embeddings in 2017, untied in Llama


@pytest.mark.ledger("blk.shapes")
def test_every_step_of_a_block_has_its_shape() -> None:
    """10 tokens, width 512, hidden width 2048."""
    block = Block((Sublayer(Attention(8), NORM), Sublayer(FeedForward(activation="relu"), NORM))).build(512)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in block.named_modules():
        module.register_forward_hook(lambda _, __, out, name=name: shapes.update({name: getattr(out, "shape", None)}))
    with torch.no_grad():
        y, _ = block(torch.zeros(1, 10, 512), TokenLayout.whole(1, 10))
    assert (
        y.shape
        == shapes["sublayers.0.body"]
        == shapes["sublayers.1.body"]
        == shapes["sublayers.0.norm"]
        == (1, 10, 512)
    )
    assert shapes["sublayers.1.body.up_proj"] == (1, 10, 2048)
    assert shapes["sublayers.1.body.down_proj"] == (1, 10, 512)


@pytest.mark.ledger("blk.shapes")
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("depth", [6, 12, 96, 120])
def test_blocks_of_every_style_can_be_stacked(name: str, depth: int) -> None:
    stack = Stack((Repeat((BLOCKS[name],), depth),), WIDTH).eval()
    with torch.no_grad():
        y, _ = stack(torch.randn(1, 3, WIDTH, generator=torch.Generator().manual_seed(0)), TokenLayout.whole(1, 3))
    assert y.shape == (1, 3, WIDTH) and y.isfinite().all()


@pytest.mark.ledger("blk.prenorm.var")
def test_the_residual_stream_of_pre_norm_blocks_grows_and_the_final_norm_rescales_it() -> None:
    """With torch's default initialization and a width of 256 each block adds variance to the residual stream."""
    torch.manual_seed(0)
    block = Block((Sublayer(Attention(4), NORM), Sublayer(FeedForward(activation="relu"), NORM)))
    stack, variances = Stack((Repeat((block,), 64),), 256), []
    for layer in stack.blocks:
        layer.register_forward_hook(lambda _, __, out: variances.append(out[0].var().item()))
    with torch.no_grad():
        hidden, _ = stack(torch.randn(1, 64, 256), TokenLayout.whole(1, 64))
        normed = NORM.build(256)(hidden)
    sampled = [variances[depth - 1] for depth in (1, 8, 32, 64)]
    assert sampled == pytest.approx([1.05, 1.55, 3.9, 8.2], rel=0.1)
    assert normed.var(-1, correction=0).mean().item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.ledger("res.gradient")
@pytest.mark.parametrize("name", ["pre", "sandwich", "parallel", "parallel, one norm", "experts"])
def test_a_block_that_adds_nothing_is_the_identity(name: str) -> None:
    block, x = build_randomized(BLOCKS[name]), random(1, 4, WIDTH)
    for path, parameter in block.named_parameters():
        if ".o_proj." in path or ".down_proj." in path:
            parameter.data.zero_()
    assert torch.equal(block(x, TokenLayout.whole(1, 4))[0], x)


@pytest.mark.ledger("res.gradient")
@pytest.mark.parametrize("body", [FEED_FORWARD, SELF_ATTENTION], ids=["feed-forward", "attention"])
def test_the_jacobian_of_a_residual_is_the_identity_plus_that_of_its_body(body: FeedForward | Attention) -> None:
    block, x, layout = build_randomized(Block((Sublayer(body, NORM),))), random(1, 3, WIDTH), TokenLayout.whole(1, 3)
    (sublayer,) = block.sublayers

    def jacobian(function) -> Tensor:
        return torch.autograd.functional.jacobian(function, x).reshape(3 * WIDTH, 3 * WIDTH)

    body_jacobian = jacobian(lambda x: sublayer.body(sublayer.norm(x), layout))
    identity = torch.eye(3 * WIDTH, dtype=torch.float64)
    assert torch.allclose(jacobian(lambda x: block(x, layout)[0]), identity + body_jacobian, atol=1e-12)
    for parameter in (sublayer.body.o_proj if body is SELF_ATTENTION else sublayer.body.down_proj).parameters():
        parameter.data *= 1e-6
    assert torch.allclose(jacobian(lambda x: block(x, layout)[0]), identity, atol=1e-4)


def test_dropout_acts_in_training_only() -> None:
    for style in ("pre", "post", "parallel"):
        block, x = (
            build_randomized(Block((Sublayer(SwiGLU(20), NoNorm()),), style=style, dropout=0.5)),
            random(1, 40, WIDTH),
        )
        layout = TokenLayout.whole(1, 40)
        assert torch.equal(block(x, layout)[0], block(x, layout)[0])
        kept = block.train()(x, layout)[0] != x
        assert 0.4 < kept.double().mean() < 0.6


@pytest.mark.ledger("tr.dropout")
def test_dropout_and_biases_are_fields_of_the_spec() -> None:
    """The model of 2017 has both, Llama and its successors neither."""
    old = transformer_2017(20, 12, 2, 24, 1)
    assert list(values_of(old, "dropout")).count(0.1) == 4  # of the embeddings and blocks of both stacks
    assert any(name.endswith("up_proj.bias") for name, _ in old.build().named_parameters())
    assert EncoderDecoder.from_json(old.to_json()) == old
    for name in ("llama-7b", "llama-2-70b", "mistral-7b", "mixtral-8x7b", "llama-3.1-70b"):
        spec = PUBLISHED[name].spec()
        assert not any(values_of(spec, "dropout")) and not any(values_of(spec, "bias")), name
        assert not [name for name, _ in build_on_meta(spec).named_parameters() if "bias" in name]
    with_biases = replace(FEED_FORWARD, bias=True, dropout=0.2).build(WIDTH).state_dict()
    assert with_biases.keys() - replace(FEED_FORWARD, bias=False).build(WIDTH).state_dict().keys() == {
        "up_proj.bias", "down_proj.bias",
    }  # fmt: skip


def values_of(spec: object, field: str) -> Iterator[object]:
    """The values of this field in all nodes of a tree of specs."""
    if isinstance(spec, tuple):
        for item in spec:
            yield from values_of(item, field)
    elif is_dataclass(spec):
        for name, value in vars(spec).items():
            if name == field:
                yield value
            yield from values_of(value, field)


@pytest.mark.ledger("tr.dropout")
@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropout_is_off_in_evaluation_and_its_mask_follows_from_the_seed(dropout: float) -> None:
    source, tokens = torch.arange(7).unsqueeze(0), torch.arange(5).unsqueeze(0)
    model, without = (transformer_2017(20, 12, 2, 24, 2, p).build(0).double() for p in (dropout, 0.0))

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(source, tokens)

    model.eval()
    assert torch.equal(run(1), run(2)) and torch.equal(run(1), without.train()(source, tokens))
    model.train()
    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))


def test_no_norm_round_trips_through_files() -> None:
    spec = BLOCKS["parallel, one norm"]
    assert Block.from_json(spec.to_json()) == Block.from_toml(spec.to_toml()) == spec
