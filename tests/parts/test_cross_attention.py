"""Cross-attention equals plain loops and torch's module; its source is projected once and cached."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.kernels.attention.mask import Causal
from regard.layout import Source, TokenLayout
from regard.parts.cross_attention import CrossAttention, CrossAttentionModule
from regard.parts.norm import RMSNorm
from regard.parts.position.rope import Rope
from regard.spec import SpecError
from tests.parts.attention_layer import random

WIDTH, SOURCE_WIDTH, LENGTH, SOURCE_LENGTH, EPS = 12, 10, 6, 5, 0.1
SPECS = {
    "default": CrossAttention(3, source_width=SOURCE_WIDTH),
    "grouped, biases": CrossAttention(4, 2, bias=True, source_width=SOURCE_WIDTH),
    "options": CrossAttention(
        4, 2, 5, qk_norm=RMSNorm(EPS), softcap=0.8, sinks=True, gate="head", scale=1.3, source_width=SOURCE_WIDTH
    ),
}
VALID = torch.tensor([[True] * SOURCE_LENGTH, [True] * (SOURCE_LENGTH - 2) + [False] * 2])


def build(spec: CrossAttention) -> CrossAttentionModule:
    module = spec.build(WIDTH).double()
    for n, parameter in enumerate(module.parameters()):
        parameter.data = random(*parameter.shape, seed=n) * 0.5 + (parameter.dim() == 1)
    return module


def random_source(valid: Tensor = VALID) -> Source:
    rows = len(valid)
    layout = TokenLayout(torch.arange(SOURCE_LENGTH).expand(rows, -1), valid=valid)
    return Source(random(rows, SOURCE_LENGTH, SOURCE_WIDTH, seed=7), layout)


def query_layout(source: Source | None, start: int = 0, stop: int = LENGTH, rows: Tensor | None = None) -> TokenLayout:
    layout = TokenLayout(torch.arange(start, stop).expand(2, -1), rows=rows)
    return layout if source is None else layout.with_source(source)


def plain_loop(module: CrossAttentionModule, spec: CrossAttention, x: Tensor, source: Source) -> Tensor:
    heads, kv_heads, dim = spec.sizes(WIDTH)
    weight = module.state_dict()

    def project(name: str, x: Tensor, heads: int) -> Tensor:
        y = x @ weight[f"{name}_proj.weight"].T + weight.get(f"{name}_proj.bias", 0)
        return y.unflatten(-1, (heads, -1))

    def norm(name: str, x: Tensor) -> Tensor:
        if spec.qk_norm is None:
            return x
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight[f"{name}_norm.norm.weight"]

    q = norm("q", project("q", x, heads))
    k, v = norm("k", project("k", source.x, kv_heads)), project("v", source.x, kv_heads)
    z = torch.zeros(*x.shape[:2], heads, dim, dtype=x.dtype)
    for b, i, h in torch.cartesian_prod(*map(torch.arange, z.shape[:3])).tolist():
        allowed, g = source.layout.valid[b].nonzero().flatten().tolist(), h * kv_heads // heads
        scores = [float(q[b, i, h] @ k[b, j, g]) * (spec.scale or dim**-0.5) for j in allowed]
        if spec.softcap:
            scores = [spec.softcap * math.tanh(s / spec.softcap) for s in scores]
        total = sum(map(math.exp, scores)) + (math.exp(weight["sinks"][h]) if spec.sinks else 0)
        for s, j in zip(scores, allowed, strict=True):
            z[b, i, h] += math.exp(s) / total * v[b, j, g]
    if spec.gate == "head":
        z = z * (x @ weight["gate.proj.weight"].T).sigmoid().unsqueeze(-1)
    return z.flatten(-2) @ weight["o_proj.weight"].T + weight.get("o_proj.bias", 0)


@pytest.mark.parametrize("name", SPECS)
def test_equals_the_equation_in_plain_loops(name: str) -> None:
    module, x = build(SPECS[name]), random(2, LENGTH, WIDTH)
    found = module(x, query_layout(random_source()))
    assert found.shape == x.shape
    assert (found - plain_loop(module, SPECS[name], x, random_source())).abs().max() < 1e-12


@pytest.mark.parametrize("name", SPECS)
def test_gradients_equal_finite_differences(name: str) -> None:
    module, x, encoded = build(SPECS[name]), random(2, LENGTH, WIDTH), random_source()
    parameters = dict(module.named_parameters())

    def as_function(x: Tensor, states: Tensor, *values: Tensor) -> Tensor:
        layout = query_layout(Source(states, encoded.layout))
        return torch.func.functional_call(module, dict(zip(parameters, values, strict=True)), (x, layout))

    inputs = (x.requires_grad_(), encoded.x.requires_grad_(), *parameters.values())
    assert gradcheck(as_function, inputs, fast_mode=True)


@pytest.mark.ledger("cross.module")
@pytest.mark.parametrize("length", [1, SOURCE_LENGTH, 9])
def test_equals_the_module_of_torch(length: int) -> None:
    """Outputs and gradients, for sequences of different lengths and widths and a padded source."""
    ours = build(CrossAttention(3, bias=True, source_width=SOURCE_WIDTH))
    theirs = nn.MultiheadAttention(
        WIDTH, 3, batch_first=True, kdim=SOURCE_WIDTH, vdim=SOURCE_WIDTH, dtype=torch.float64
    )
    for name in "qkv":
        getattr(theirs, f"{name}_proj_weight").data = getattr(ours, f"{name}_proj").weight.data
    theirs.in_proj_bias.data = torch.cat([ours.q_proj.bias, ours.k_proj.bias, ours.v_proj.bias])
    theirs.out_proj.load_state_dict(ours.o_proj.state_dict())
    x, encoded = random(2, length, WIDTH).requires_grad_(), random_source()
    states = encoded.x.requires_grad_()
    found = ours(x, query_layout(encoded, 0, length))
    expected, _ = theirs(x, states, states, key_padding_mask=~VALID, need_weights=False)
    assert (found - expected).abs().max() < 1e-12
    for f, e in zip(*(torch.autograd.grad(y.sin().sum(), (x, states)) for y in (found, expected)), strict=True):
        assert (f - e).abs().max() < 1e-12


@pytest.mark.ledger("cross.once")
@pytest.mark.parametrize("store_class", [Contiguous, Paged])
@pytest.mark.parametrize("name", SPECS)
def test_a_source_is_projected_once_and_cached(name: str, store_class: type) -> None:
    """Decoding with the cached source equals the whole forward, also if store rows differ from batch rows.

    The source is projected once.
    """
    spec, x, rows = SPECS[name], random(2, LENGTH, WIDTH), torch.tensor([2, 0])
    module, size = build(spec), {"blocks": 12} if store_class is Paged else {}
    store = store_class(((spec.memory(WIDTH),),), 3, 8, dtype=torch.float64, source=9, **size)
    whole = module(x, query_layout(random_source()))
    calls: list[int] = []
    module.k_proj.register_forward_hook(lambda *_: calls.append(1))
    for t in range(LENGTH):
        layout = query_layout(random_source() if t == 0 else None, t, t + 1, rows)
        (state,) = store.begin_forward(layout)[0]
        assert (module(x[:, t : t + 1], layout, state) - whole[:, t : t + 1]).abs().max() < 1e-12
    assert len(calls) == 1


@pytest.mark.parametrize("store_class", [Contiguous, Paged])
def test_a_released_row_drops_its_source(store_class: type) -> None:
    """The next sequence in the row has no source; a rewind within the same sequence keeps it."""
    spec, x = SPECS["default"], random(2, LENGTH, WIDTH)
    module, size = build(spec), {"blocks": 12} if store_class is Paged else {}
    store = store_class(((spec.memory(WIDTH),),), 2, 8, dtype=torch.float64, source=9, **size)

    def attend(layout: TokenLayout, check: bool = True) -> Tensor:
        return module(x, layout, store.begin_forward(layout, check=check)[0][0])

    whole = attend(query_layout(random_source()))
    store.rewind(0, 0)
    assert torch.equal(attend(query_layout(None)), whole)
    store.release(0)
    with pytest.raises(ValueError, match=r"rows \[0\] start here, but they have no source"):
        attend(query_layout(None))
    after = attend(query_layout(None), check=False)
    assert after[0].count_nonzero() == 0  # the row has no source tokens left to attend to
    assert torch.equal(after[1], whole[1])


def test_padding_of_the_source_does_not_change_outputs() -> None:
    """Padding may be on the left or the right and have any value."""
    module, x, encoded = build(SPECS["default"]), random(2, LENGTH, WIDTH), random_source()
    expected = module(x, query_layout(encoded))
    changed = encoded.x.clone()
    changed[1, -2:] = 1e3
    assert torch.equal(module(x, query_layout(Source(changed, encoded.layout))), expected)
    left_padded = Source(encoded.x.flip(1), TokenLayout(encoded.layout.positions, valid=VALID.flip(1)))
    assert (module(x, query_layout(left_padded)) - expected).abs().max() < 1e-12


def test_invalid_specs_sources_and_stores_are_refused() -> None:
    module, x = build(SPECS["default"]), random(2, LENGTH, WIDTH)
    with pytest.raises(ValueError, match="cross-attention has no source"):
        module(x, query_layout(None))
    with pytest.raises(SpecError, match="queries attend to the whole source"):
        CrossAttention(2, mask=Causal())
    with pytest.raises(SpecError, match="because the source is another sequence; leave it out"):
        CrossAttention(2, position=Rope())
    memory = ((SPECS["default"].memory(WIDTH),),)
    with pytest.raises(ValueError, match="give the longest source's length"):
        Contiguous(memory, 1, 8, torch.float64)
    store = Contiguous(memory, 2, 8, torch.float64, source=SOURCE_LENGTH - 1)
    layout = query_layout(random_source())
    (state,) = store.begin_forward(layout)[0]
    with pytest.raises(ValueError, match="the source has 5 tokens, but the store holds 4"):
        module(x, layout, state)
    zeros = torch.zeros(2, LENGTH).long()
    packed = TokenLayout(zeros, segments=zeros).with_source(random_source())
    with pytest.raises(ValueError, match="packed documents cannot be cached"):
        store.begin_forward(packed)
