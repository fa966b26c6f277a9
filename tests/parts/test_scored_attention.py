"""Additive and multiplicative scores equal plain loops, in self-attention and in attention to a source."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.flop_counter import FlopCounterMode

from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.kernels.attention.mask import Causal, Full
from regard.layout import Source, TokenLayout
from regard.parts.attention import use_backend
from regard.parts.scored_attention import ScoredAttention, ScoredAttentionModule
from regard.spec import SpecError
from tests.parts.attention_layer import random

WIDTH, LENGTH, SOURCE_LENGTH = 12, 6, 5
SPECS = {
    "additive": ScoredAttention(),
    "additive, heads, score_dim": ScoredAttention(3, score_dim=5),
    "dot": ScoredAttention(1, "dot"),
    "dot, heads, full": ScoredAttention(2, "dot", mask=Full()),
    "general": ScoredAttention(2, "general"),
    "scaled": ScoredAttention(2, "scaled"),
    "additive, source": ScoredAttention(2, score_dim=3, source=True, source_width=8),
    "dot, source": ScoredAttention(1, "dot", source=True),
    "general, source": ScoredAttention(2, "general", source=True, source_width=8),
}


def build(spec: ScoredAttention) -> ScoredAttentionModule:
    module = spec.build(WIDTH).double()
    for n, parameter in enumerate(module.parameters()):
        parameter.data = random(*parameter.shape, seed=n) * 0.5
    return module


def layout_for(spec: ScoredAttention, batch: int = 2) -> TokenLayout:
    """Two rows; the second row's source is two tokens shorter."""
    if not spec.source:
        return TokenLayout.whole(batch, LENGTH)
    valid = torch.tensor([[True] * SOURCE_LENGTH, [True] * (SOURCE_LENGTH - 2) + [False] * 2])[:batch]
    states = random(2, SOURCE_LENGTH, spec.source_width or WIDTH, seed=7)[:batch]
    source = Source(states, TokenLayout(torch.arange(SOURCE_LENGTH).expand(batch, -1), valid=valid))
    return TokenLayout(torch.arange(LENGTH).expand(batch, -1)).with_source(source)


def plain_loop(module: ScoredAttentionModule, spec: ScoredAttention, x: Tensor, layout: TokenLayout) -> Tensor:
    weight = module.state_dict()
    states = x if layout.inputs.source is None else layout.inputs.source.x
    values = states.unflatten(-1, (spec.heads, -1))
    size = values.shape[-1]

    def score(b: int, i: int, j: int, head: int) -> float:
        s, h = x[b, i], states[b, j]
        head_slice = slice(head * size, (head + 1) * size)
        if spec.score == "additive":
            inner = (weight["q_proj.weight"] @ s + weight["k_proj.weight"] @ h).unflatten(0, (spec.heads, -1))[head]
            return float(weight["v"][head] @ torch.tanh(inner))
        if spec.score == "general":
            return float((weight["q_proj.weight"] @ s)[head_slice] @ h[head_slice])
        return float(s[head_slice] @ h[head_slice]) / (math.sqrt(size) if spec.score == "scaled" else 1)

    context = torch.zeros(*x.shape[:2], spec.heads, size, dtype=x.dtype)
    for b, i, head in torch.cartesian_prod(*map(torch.arange, context.shape[:3])).tolist():
        if layout.inputs.source is None:
            allowed = list(range(states.shape[1] if spec.mask == Full() else i + 1))
        else:
            allowed = layout.inputs.source.layout.valid[b].nonzero().flatten().tolist()
        weights = [math.exp(score(b, i, j, head)) for j in allowed]
        for w, j in zip(weights, allowed, strict=True):
            context[b, i, head] += w / sum(weights) * values[b, j, head]
    return context.flatten(-2) @ weight["o_proj.weight"].T


@pytest.mark.parametrize("name", SPECS)
def test_equals_the_equation_in_plain_loops(name: str) -> None:
    spec, x = SPECS[name], random(2, LENGTH, WIDTH, seed=99) * 0.5
    module, layout = build(spec), layout_for(spec)
    found = module(x, layout)
    assert found.shape == x.shape
    assert (found - plain_loop(module, spec, x, layout)).abs().max() < 1e-12


@pytest.mark.parametrize("name", SPECS)
def test_gradients_equal_finite_differences(name: str) -> None:
    spec, x = SPECS[name], random(2, LENGTH, WIDTH, seed=99).requires_grad_()
    module = build(spec)
    parameters = dict(module.named_parameters())

    def as_function(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(parameters, values, strict=True)), (x, layout_for(spec)))

    assert gradcheck(as_function, (x, *parameters.values()), fast_mode=True)


@pytest.mark.parametrize("heads", [1, 3])
def test_general_score_with_the_identity_matrix_equals_dot(heads: int) -> None:
    general, dot, x = (
        build(ScoredAttention(heads, "general")),
        build(ScoredAttention(heads, "dot")),
        random(2, 5, WIDTH),
    )
    general.q_proj.weight.data = torch.eye(WIDTH, dtype=torch.float64)
    general.o_proj.load_state_dict(dot.o_proj.state_dict())
    assert torch.equal(general(x, TokenLayout.whole(2, 5)), dot(x, TokenLayout.whole(2, 5)))


def test_additive_weights_sum_to_one() -> None:
    module, layout = build(SPECS["additive, heads, score_dim"]), TokenLayout.whole(1, LENGTH)
    q, k = random(1, 3, LENGTH, 5), random(1, 3, LENGTH, 5, seed=1)
    weights = module.weights(q, k, layout)
    assert torch.allclose(weights.sum(-1), torch.ones(1, 3, LENGTH, dtype=torch.float64))
    assert torch.equal(weights, weights.tril())
    all_padding = TokenLayout(layout.positions, valid=torch.zeros(1, LENGTH, dtype=torch.bool))
    assert torch.equal(module.weights(q, k, all_padding), torch.zeros_like(weights))


@pytest.mark.parametrize("store_class", [Contiguous, Paged])
@pytest.mark.parametrize("name", [name for name in SPECS if SPECS[name].source])
def test_a_cached_source_equals_the_whole_forward(name: str, store_class: type) -> None:
    spec, x = SPECS[name], random(2, LENGTH, WIDTH, seed=99)
    module, layout, memory = build(spec), layout_for(spec), ((SPECS[name].memory(WIDTH),),)
    size = {"blocks": 8} if store_class is Paged else {}
    store = store_class(memory, 2, 8, dtype=torch.float64, source=9, **size)
    whole = module(x, layout)
    for t in range(LENGTH):
        step = TokenLayout(layout.positions[:, t : t + 1])
        step = step.with_source(layout.inputs.source) if t == 0 else step
        (state,) = store.begin_forward(step)[0]
        assert (module(x[:, t : t + 1], step, state) - whole[:, t : t + 1]).abs().max() < 1e-12


@pytest.mark.parametrize("name", SPECS)
def test_flops_equal_the_counted_flops(name: str) -> None:
    spec, x = SPECS[name], random(1, LENGTH, WIDTH)
    module = build(spec)
    use_backend(module, "reference")
    with FlopCounterMode(display=False) as counter:
        module(x, layout_for(spec, batch=1))
    assert counter.get_total_flops() == spec.flops(WIDTH, LENGTH, SOURCE_LENGTH if spec.source else LENGTH)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 0}, "heads=0 must be positive"),
        ({"score": "cosine"}, "ScoredAttention.score='cosine'"),
        ({"score": "dot", "score_dim": 3}, "has no hidden layer; leave score_dim=3 out"),
        ({"source_width": 8}, "set source=True"),
        ({"source": True, "mask": Causal()}, "queries attend to the whole source"),
    ],
)
def test_invalid_specs_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ScoredAttention(**fields)


def test_incompatible_widths_are_refused() -> None:
    with pytest.raises(SpecError, match="choose 'general'"):
        ScoredAttention(1, "dot", source=True, source_width=8).build(WIDTH)
    with pytest.raises(SpecError, match="the states, 12, is not divisible by heads=5; choose one of 1, 2, 3"):
        replace(SPECS["additive"], heads=5).build(WIDTH)
