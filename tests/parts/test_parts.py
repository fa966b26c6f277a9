"""Formulas, shapes and gradients of parts, from one table."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck

from regard.kernels.attention.mask import Full
from regard.layout import TokenLayout
from regard.parts.attention import Attention, use_backend
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.linear_attention import LinearAttention
from regard.parts.norm import LayerNorm, RMSNorm
from regard.parts.position.alibi import Alibi
from regard.parts.position.rope import Rope
from regard.parts.short_convolution import ShortConvolution
from regard.spec import Spec

WIDTH = 12
BODIES: dict[str, Spec] = {
    "attention": Attention(3),
    "attention: grouped, rope, biases": Attention(6, 2, head_dim=4, position=Rope(), bias=True),
    "attention: output bias only": Attention(2, out_bias=True),
    "attention: full, alibi": Attention(2, position=Alibi(), mask=Full()),
    "linear attention": LinearAttention(3),
    "short convolution": ShortConvolution(3),
    "feed-forward: relu": FeedForward(20, "relu"),
    "feed-forward: gelu": FeedForward(20, "gelu", bias=False),
    "feed-forward: gelu_tanh": FeedForward(20, "gelu_tanh"),
    "feed-forward: silu": FeedForward(20, "silu"),
    "swiglu": SwiGLU(20),
    "swiglu: biases": SwiGLU(20, bias=True),
}
NORMS = {"layernorm": LayerNorm(), "layernorm: no bias": LayerNorm(bias=False), "rmsnorm": RMSNorm()}
BLOCKS = {
    "pre": Block((Sublayer(Attention(3)), Sublayer(SwiGLU(20)))),
    "post": Block((Sublayer(Attention(3), LayerNorm()), Sublayer(FeedForward(20), LayerNorm())), style="post"),
    "one sublayer": Block((Sublayer(LinearAttention(2)),)),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomized(module: nn.Module) -> nn.Module:
    for n, parameter in enumerate(module.double().parameters()):
        parameter.data = random(*parameter.shape, seed=n) * 0.5 + (parameter.dim() == 1)
    return module


def call(module: nn.Module, x: Tensor, mixes: bool) -> Tensor:
    return module(x, TokenLayout.whole(*x.shape[:2])) if mixes else module(x)


@pytest.mark.parametrize("name", BODIES)
def test_bodies_keep_shapes_and_pass_gradcheck(name: str) -> None:
    spec = BODIES[name]
    module, x = randomized(spec.build(WIDTH)), random(2, 5, WIDTH, seed=9).requires_grad_()
    weights = dict(module.named_parameters())
    assert call(module, x, spec.mixes).shape == x.shape

    def as_function(x: Tensor, *values: Tensor) -> Tensor:
        named = dict(zip(weights, values, strict=True))
        inputs = (x, TokenLayout.whole(2, 5)) if spec.mixes else (x,)
        return torch.func.functional_call(module, named, inputs)

    assert gradcheck(as_function, (x, *weights.values()), fast_mode=True)


@pytest.mark.parametrize("name", BODIES)
def test_only_bodies_that_mix_depend_on_other_tokens(name: str) -> None:
    spec = BODIES[name]
    module, x = randomized(spec.build(WIDTH)), random(1, 5, WIDTH)
    changed = x.clone()
    changed[:, 2] += 1
    affected = (call(module, x, spec.mixes) != call(module, changed, spec.mixes)).any(-1)[0].tolist()
    full = getattr(spec, "mask", None) == Full()
    assert affected == ([full, full, True, True, True] if spec.mixes else [False, False, True, False, False])


@pytest.mark.parametrize("name", NORMS)
def test_norms_pass_gradcheck(name: str) -> None:
    module, x = randomized(NORMS[name].build(WIDTH)), random(2, 3, WIDTH, seed=5).requires_grad_()
    assert gradcheck(module, x, fast_mode=True)


def test_norms_equal_their_formulas() -> None:
    x, eps = random(2, 3, WIDTH), 0.1
    layer, rms = (randomized(spec.build(WIDTH)) for spec in (LayerNorm(eps), RMSNorm(eps)))
    centered = x - x.mean(-1, keepdim=True)
    expected = centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt() * layer.weight + layer.bias
    assert torch.allclose(layer(x), expected, atol=1e-12)
    assert torch.allclose(rms(x), x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * rms.weight, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rmsnorm_does_not_overflow_in_half_precision(dtype: torch.dtype) -> None:
    x = torch.full((1, WIDTH), 3e4, dtype=dtype)
    out = RMSNorm().build(WIDTH).to(dtype)(x)
    assert out.dtype == dtype
    assert torch.allclose(out.float(), torch.ones(1, WIDTH), atol=1e-2)


def test_feedforwards_equal_their_formulas() -> None:
    x = random(2, 3, WIDTH)
    ungated, gated = (randomized(spec.build(WIDTH)) for spec in (FeedForward(20, "relu"), SwiGLU(20)))
    inner = (x @ ungated.up_proj.weight.T + ungated.up_proj.bias).clamp_min(0)
    assert torch.allclose(ungated(x), inner @ ungated.down_proj.weight.T + ungated.down_proj.bias, atol=1e-12)
    gate = x @ gated.gate_proj.weight.T
    inner = gate * gate.sigmoid() * (x @ gated.up_proj.weight.T)
    assert torch.allclose(gated(x), inner @ gated.down_proj.weight.T, atol=1e-12)


def test_attention_equals_torch() -> None:
    """The outputs equal those of a causal `nn.MultiheadAttention` with the same weights."""
    ours = randomized(Attention(3, bias=True).build(WIDTH))
    theirs = nn.MultiheadAttention(WIDTH, 3, batch_first=True, dtype=torch.float64)
    projections = [ours.q_proj, ours.k_proj, ours.v_proj]
    theirs.in_proj_weight.data = torch.cat([p.weight for p in projections])
    theirs.in_proj_bias.data = torch.cat([p.bias for p in projections])
    theirs.out_proj.load_state_dict(ours.o_proj.state_dict())
    x, mask = random(2, 7, WIDTH), ~torch.ones(7, 7, dtype=torch.bool).tril()
    expected, _ = theirs(x, x, x, attn_mask=mask, need_weights=False)
    assert torch.allclose(ours(x, TokenLayout.whole(2, 7)), expected, atol=1e-10)


def test_use_backend_applies_to_a_whole_model() -> None:
    model, x = randomized(nn.Sequential(Attention(3).build(WIDTH))), random(1, 5, WIDTH)
    before = model[0](x, TokenLayout.whole(1, 5))
    use_backend(model, "reference")
    assert model[0].attend.__name__ == "reference"
    assert torch.allclose(model[0](x, TokenLayout.whole(1, 5)), before, atol=1e-12)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_pass_gradcheck(name: str) -> None:
    block, x = randomized(BLOCKS[name].build(WIDTH)), random(2, 4, WIDTH, seed=3).requires_grad_()
    assert gradcheck(lambda x: block(x, TokenLayout.whole(2, 4))[0], x, fast_mode=True)


def test_the_style_sets_where_the_norm_is_applied() -> None:
    x, layout = random(1, 4, WIDTH), TokenLayout.whole(1, 4)
    for style in ("pre", "post"):
        block = randomized(Block((Sublayer(SwiGLU(20), LayerNorm()),), style=style).build(WIDTH))
        inner = block.sublayers[0]
        expected = x + inner.body(inner.norm(x)) if style == "pre" else inner.norm(x + inner.body(x))
        assert torch.equal(block(x, layout)[0], expected)


def test_dropout_acts_in_training_only() -> None:
    block, x = Block((Sublayer(SwiGLU(20)),), dropout=0.5).build(WIDTH).double(), random(1, 40, WIDTH)
    layout = TokenLayout.whole(1, 40)
    assert torch.equal(block.eval()(x, layout)[0], block(x, layout)[0])
    kept = block.train()(x, layout)[0] != x
    assert 0.3 < kept.double().mean() < 0.7
    assert F.mse_loss(block(x, layout)[0], block(x, layout)[0]) > 0
