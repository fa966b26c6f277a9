"""Blocks: equal to torch's layers and to their steps one by one; residuals, and the growth of the stream with depth."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from regard.kernels.attention.mask import Full
from regard.layout import Source, TokenLayout
from regard.models.presets import transformer_2017
from regard.models.stack import Repeat, Stack
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.cross_attention import CrossAttention
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward, SwiGLU, eight_thirds
from regard.parts.norm import LayerNorm, NoNorm, RMSNorm
from regard.parts.position.rope import Rope
from regard.parts.position.sinusoidal import Sinusoidal
from regard.planning.published import PUBLISHED

WIDTH, HEADS, NORM = 12, 3, LayerNorm()
SEEING, READING, FEEDING = (
    Attention(HEADS, bias=True, mask=Full()),
    CrossAttention(HEADS, bias=True),
    FeedForward(20, "relu"),
)
BLOCKS = {
    "pre": Block((Sublayer(SEEING, NORM), Sublayer(FEEDING, NORM))),
    "post": Block((Sublayer(SEEING, NORM), Sublayer(FEEDING, NORM)), style="post"),
    "sandwich": Block((Sublayer(SEEING, NORM, after=RMSNorm()), Sublayer(FEEDING, NORM, after=RMSNorm()))),
    "parallel": Block((Sublayer(SEEING, NORM), Sublayer(FEEDING, NoNorm())), style="parallel"),
    "parallel, one norm": Block(
        (Sublayer(SEEING, NoNorm()), Sublayer(FEEDING, NoNorm())), style="parallel", norm=RMSNorm()
    ),
    "scaled": Block((Sublayer(SEEING, NORM, scale=0.1), Sublayer(FEEDING, NORM)), keep=0.9, share=0.3),
    "scaled, post": Block((Sublayer(SEEING, NORM), Sublayer(FEEDING, NORM, scale=0.1)), style="post", keep=1.5),
    "experts": Block((Sublayer(SEEING, NORM), Sublayer(Experts(4, 2, SwiGLU(8)), NORM))),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build_randomized(spec: Block, width: int = WIDTH) -> nn.Module:
    block = spec.build(width).double().eval()
    for n, parameter in enumerate(block.parameters()):
        parameter.data = random(*parameter.shape, seed=n) * 0.4 + (parameter.dim() == 1)
    return block


def step_by_step(spec: Block, block: nn.Module, x: Tensor, layout: TokenLayout) -> Tensor:
    """The block step by step, as in the figures of the papers."""

    def adds(part: nn.Module, body: Body, y: Tensor) -> Tensor:
        y = part.after(part.body(y, layout))
        return spec.share * (y if part.scale is None else part.scale * y)

    parts = [(part, sublayer.body) for part, sublayer in zip(block.sublayers, spec.sublayers, strict=True)]
    if spec.style == "parallel":
        inner = block.norm(x)
        return spec.keep * x + sum(adds(part, body, part.norm(inner)) for part, body in parts)
    for part, body in parts:
        if spec.style == "pre":
            x = spec.keep * x + adds(part, body, part.norm(x))
        else:  # the second sublayer adds to the output of the first one's norm
            x = part.norm(spec.keep * x + adds(part, body, x))
    return x


@pytest.mark.ledger("blk.trace")
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_equals_its_steps(name: str) -> None:
    block, x = build_randomized(BLOCKS[name]), random(2, 5, WIDTH, seed=9)
    found, losses = block(x, TokenLayout.whole(2, 5))
    assert torch.allclose(found, step_by_step(BLOCKS[name], block, x, TokenLayout.whole(2, 5)), atol=1e-12)
    assert losses == {}


@pytest.mark.parametrize("name", BLOCKS)
def test_gradients(name: str) -> None:
    block, x = build_randomized(BLOCKS[name]), random(1, 4, WIDTH, seed=3).requires_grad_()
    assert gradcheck(lambda x: block(x, TokenLayout.whole(1, 4))[0], x, fast_mode=True)


def fill(theirs: nn.MultiheadAttention, ours: nn.Module) -> None:
    projections = [ours.q_proj, ours.k_proj, ours.v_proj]
    theirs.in_proj_weight.data = torch.cat([p.weight for p in projections])
    theirs.in_proj_bias.data = torch.cat([p.bias for p in projections])
    theirs.out_proj.load_state_dict(ours.o_proj.state_dict())


@pytest.mark.ledger("blk.post", "blk.pre", "blk.trace")
@pytest.mark.parametrize("style", ["pre", "post"])
@pytest.mark.parametrize(("width", "heads"), [(12, 3), (512, 8)])
def test_an_encoder_layer_equals_torch(style: str, width: int, heads: int) -> None:
    seeing = Attention(heads, bias=True, mask=Full())
    block = build_randomized(Block((Sublayer(seeing, NORM), Sublayer(FEEDING, NORM)), style=style), width)
    theirs = nn.TransformerEncoderLayer(
        width, heads, 20, 0.0, batch_first=True, norm_first=style == "pre", dtype=torch.float64
    )
    first, second = block.sublayers
    fill(theirs.self_attn, first.body)
    for ours, part in (
        (second.body.up_proj, theirs.linear1),
        (second.body.down_proj, theirs.linear2),
        (first.norm, theirs.norm1),
        (second.norm, theirs.norm2),
    ):
        part.load_state_dict(ours.state_dict())
    x = random(2, 10, width)
    found, _ = block(x, TokenLayout.whole(2, 10))
    assert found.shape == x.shape and torch.allclose(found, theirs(x), atol=1e-9)


@pytest.mark.ledger("blk.trace")
@pytest.mark.parametrize("style", ["pre", "post"])
def test_a_decoder_layer_equals_torch(style: str) -> None:
    """Masked self-attention, cross-attention on an encoder's output, feed-forward; each adds to the stream."""
    own = Attention(HEADS, bias=True)
    block = build_randomized(Block(tuple(Sublayer(body, NORM) for body in (own, READING, FEEDING)), style=style))
    theirs = nn.TransformerDecoderLayer(
        WIDTH, HEADS, 20, 0.0, batch_first=True, norm_first=style == "pre", dtype=torch.float64
    )
    looking, reading, feeding = block.sublayers
    fill(theirs.self_attn, looking.body)
    fill(theirs.multihead_attn, reading.body)
    for ours, part in (
        (feeding.body.up_proj, theirs.linear1),
        (feeding.body.down_proj, theirs.linear2),
        (looking.norm, theirs.norm1),
        (reading.norm, theirs.norm2),
        (feeding.norm, theirs.norm3),
    ):
        part.load_state_dict(ours.state_dict())
    x, source = random(2, 5, WIDTH), random(2, 7, WIDTH, seed=8)
    layout = TokenLayout.whole(2, 5).with_source(Source(source, TokenLayout.whole(2, 7)))
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    assert torch.allclose(block(x, layout)[0], theirs(x, source, tgt_mask=later), atol=1e-9)


@pytest.mark.ledger("blk.recipes")
def test_differences_between_the_blocks_of_2017_and_llama() -> None:
    old, new = transformer_2017(), PUBLISHED["llama-7b"].spec()
    first, last = (model.layers[0].blocks[0] for model in (old.source, new))
    assert (first.style, last.style) == ("post", "pre")
    assert {type(s.norm) for s in first.sublayers} == {LayerNorm} and {type(s.norm) for s in last.sublayers} == {
        RMSNorm
    }
    assert first.dropout == 0.1 and last.dropout == 0.0
    (seeing, feeding), (looking, gated) = ([s.body for s in block.sublayers] for block in (first, last))
    assert (feeding.activation, feeding.bias, feeding.hidden_dim(512)) == ("relu", True, 4 * 512)
    assert isinstance(gated, SwiGLU) and not gated.bias and gated.hidden_dim(4096) == eight_thirds(4096)
    assert isinstance(old.source.position, Sinusoidal) and isinstance(looking.position, Rope)
    assert seeing.sizes(512) == (8, 8, 64)
    shared = PUBLISHED["llama-2-70b"].spec().blocks[0].sublayers[0].body
    assert (shared.heads, shared.kv_heads) == (64, 8)
    assert old.shared and old.target.tied and not new.tied  # tied in 2017, untied in Llama: a field of the spec


@pytest.mark.ledger("blk.shapes")
def test_shapes_of_every_step() -> None:
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
def test_blocks_of_every_kind_stack(name: str, depth: int) -> None:
    stack = Stack((Repeat((BLOCKS[name],), depth),), WIDTH).eval()
    with torch.no_grad():
        y, _ = stack(torch.randn(1, 3, WIDTH, generator=torch.Generator().manual_seed(0)), TokenLayout.whole(1, 3))
    assert y.shape == (1, 3, WIDTH) and y.isfinite().all()


@pytest.mark.ledger("blk.prenorm.var")
def test_the_stream_of_pre_norm_blocks_grows_and_the_final_norm_corrects_it() -> None:
    """With torch's default initialization and a width of 256 each block adds variance to the stream."""
    torch.manual_seed(0)
    block = Block((Sublayer(Attention(4), NORM), Sublayer(FeedForward(activation="relu"), NORM)))
    stack, variances = Stack((Repeat((block,), 64),), 256), []
    for layer in stack.blocks:
        layer.register_forward_hook(lambda _, __, out: variances.append(out[0].var().item()))
    with torch.no_grad():
        top, _ = stack(torch.randn(1, 64, 256), TokenLayout.whole(1, 64))
        normed = NORM.build(256)(top)
    after = [variances[depth - 1] for depth in (1, 8, 32, 64)]
    assert after == pytest.approx([1.05, 1.55, 3.9, 8.2], rel=0.1)
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
@pytest.mark.parametrize("body", [FEEDING, SEEING], ids=["feed-forward", "attention"])
def test_the_jacobian_of_a_residual_is_the_identity_plus_that_of_its_body(body: FeedForward | Attention) -> None:
    block, x, layout = build_randomized(Block((Sublayer(body, NORM),))), random(1, 3, WIDTH), TokenLayout.whole(1, 3)
    (part,) = block.sublayers

    def jacobian(function) -> Tensor:
        return torch.autograd.functional.jacobian(function, x).reshape(3 * WIDTH, 3 * WIDTH)

    alone = jacobian(lambda x: part.body(part.norm(x), layout))
    identity = torch.eye(3 * WIDTH, dtype=torch.float64)
    assert torch.allclose(jacobian(lambda x: block(x, layout)[0]), identity + alone, atol=1e-12)
    for parameter in (part.body.o_proj if body is SEEING else part.body.down_proj).parameters():
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


def test_no_norm_round_trips_through_files() -> None:
    spec = BLOCKS["parallel, one norm"]
    assert Block.from_json(spec.to_json()) == Block.from_toml(spec.to_toml()) == spec
