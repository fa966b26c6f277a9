"""Norms equal their formulas, torch and transformers; precision, and independence of other tokens."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from regard.parts.norm import LayerNorm, NoNorm, Norm, RMSNorm
from regard.spec import SpecError

WIDTH, EPS = 12, 0.1
NORMS: dict[str, Norm] = {
    "layernorm": LayerNorm(EPS),
    "layernorm: no bias": LayerNorm(EPS, bias=False),
    "layernorm: no weights": LayerNorm(EPS, bias=False, weight=False),
    "rmsnorm": RMSNorm(EPS),
    "rmsnorm: no weight": RMSNorm(EPS, weight=False),
    "rmsnorm: around one": RMSNorm(EPS, around_one=True),
    "none": NoNorm(),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build_randomized(spec: Norm) -> nn.Module:
    module = spec.build(WIDTH).double()
    for n, parameter in enumerate(module.parameters()):
        parameter.data = 1 + random(WIDTH, seed=7 + n)
    return module


def normalize_token(x: list[float], spec: Norm, module: nn.Module) -> list[float]:
    """The formula for one token, one coordinate at a time."""
    if isinstance(spec, NoNorm):
        return x
    mean = sum(x) / len(x) if isinstance(spec, LayerNorm) else 0.0
    deviation = math.sqrt(sum((value - mean) ** 2 for value in x) / len(x) + EPS)
    weight = [1.0] * len(x) if getattr(module, "weight", None) is None else module.weight.tolist()
    weight = [1 + w for w in weight] if getattr(spec, "around_one", False) else weight
    bias = [0.0] * len(x) if getattr(module, "bias", None) is None else module.bias.tolist()
    return [(value - mean) / deviation * w + b for value, w, b in zip(x, weight, bias, strict=True)]


@pytest.mark.ledger("norm.layer", "norm.rms")
@pytest.mark.parametrize("name", NORMS)
def test_norms_equal_their_formulas(name: str) -> None:
    spec, x = NORMS[name], random(5, WIDTH)
    module = build_randomized(spec)
    expected = torch.tensor([normalize_token(token, spec, module) for token in x.tolist()], dtype=torch.float64)
    assert torch.allclose(module(x), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", NORMS)
def test_gradients_equal_finite_differences(name: str) -> None:
    module, x = build_randomized(NORMS[name]), random(2, 3, WIDTH).requires_grad_()
    weights = dict(module.named_parameters())

    def as_function(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(weights, values, strict=True)), (x,))

    assert gradcheck(as_function, (x, *weights.values()), fast_mode=True)


@pytest.mark.parametrize("name", NORMS)
def test_each_norm_has_its_number_of_weights(name: str) -> None:
    """RMSNorm has D weights, LayerNorm 2 D."""
    counts = {"layernorm": 2, "layernorm: no bias": 1, "rmsnorm": 1, "rmsnorm: around one": 1}
    assert sum(p.numel() for p in NORMS[name].build(WIDTH).parameters()) == counts.get(name, 0) * WIDTH


@pytest.mark.ledger("norm.layer", "norm.rms")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_equal_torch(dtype: torch.dtype) -> None:
    x = random(4, WIDTH).to(dtype)
    for spec, theirs in (
        (LayerNorm(), nn.LayerNorm(WIDTH)),
        (LayerNorm(bias=False, weight=False), nn.LayerNorm(WIDTH, elementwise_affine=False)),
        (RMSNorm(), nn.RMSNorm(WIDTH, eps=1e-6)),
    ):
        ours = build_randomized(spec).to(dtype)
        theirs.to(dtype).load_state_dict(ours.state_dict())
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.ledger("norm.rms")
def test_norms_equal_transformers() -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

    x = random(4, WIDTH).float()
    for spec, theirs in (
        (RMSNorm(1e-5), LlamaRMSNorm(WIDTH, 1e-5)),
        (RMSNorm(1e-5, around_one=True), Gemma2RMSNorm(WIDTH, 1e-5)),
    ):
        assert torch.equal(spec.build(WIDTH).weight, theirs.weight)  # both initial scales are one
        ours = build_randomized(spec).float()
        theirs.load_state_dict(ours.state_dict())
        assert torch.allclose(ours(x), theirs(x), atol=1e-6)
    assert torch.allclose(LayerNorm(1e-5, False, False).build(WIDTH)(x), OlmoLayerNorm(WIDTH)(x), atol=1e-6)


@pytest.mark.ledger("norm.layer")
def test_weight_and_bias_can_undo_a_layernorm() -> None:
    x, module = random(WIDTH), LayerNorm(1e-9).build(WIDTH).double()
    module.weight.data.fill_(x.std(correction=0))
    module.bias.data.fill_(x.mean())
    assert torch.allclose(module(x), x, atol=1e-7)


@pytest.mark.parametrize("name", NORMS)
def test_constant_and_zero_vectors_stay_finite(name: str) -> None:
    module = build_randomized(NORMS[name])
    for constant in (0.0, 3.0):
        x = torch.full((WIDTH,), constant, dtype=torch.float64, requires_grad=True)
        module(x).sum().backward()
        assert module(x).isfinite().all() and x.grad is not None and x.grad.isfinite().all()


@pytest.mark.ledger("norm.rms")
def test_layernorm_equals_rmsnorm_for_centered_vectors() -> None:
    x = random(4, WIDTH)
    centered = x - x.mean(-1, keepdim=True)
    layer, rms = (spec.build(WIDTH).double() for spec in (LayerNorm(EPS, bias=False), RMSNorm(EPS)))
    assert torch.allclose(layer(centered), rms(centered), atol=1e-12)
    assert not torch.allclose(layer(x), rms(x), atol=1e-2)


@pytest.mark.ledger("norm.layer")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", [LayerNorm(), RMSNorm(), RMSNorm(around_one=True)], ids=str)
def test_half_precision_inputs_are_summed_in_float32(spec: Norm, dtype: torch.dtype) -> None:
    """The error is one rounding of the exact result, also for values whose squares would overflow."""
    x = (300 + 40 * random(3, 4096)).to(dtype)
    found = spec.build(4096).to(dtype)(x)
    exact = spec.build(4096).double()(x.double())
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() / exact.abs().clamp_min(1e-2)).max() <= torch.finfo(dtype).eps


@pytest.mark.ledger("norm.layer.fig")
def test_layernorm_normalizes_rows_and_batchnorm_columns() -> None:
    row = torch.tensor([-0.7, 1.5, 0.2, -1.1], dtype=torch.float64)
    assert row.mean().item() == pytest.approx(-0.025)
    assert row.std(correction=0).item() == pytest.approx(0.998, abs=5e-4)
    y = LayerNorm(1e-12).build(4).double()(row)
    assert torch.allclose(y, (row + 0.025) / row.std(correction=0))
    rows = torch.stack([row, random(4, seed=1), random(4, seed=2)])
    columns = nn.BatchNorm1d(4, affine=False, dtype=torch.float64)(rows)  # statistics over the batch, per feature
    assert columns.mean(0).abs().max() < 1e-12 and columns.mean(1).abs().max() > 0.1
    assert not torch.allclose(columns[0], y, atol=0.1)


@pytest.mark.ledger("norm.batch")
@pytest.mark.parametrize("name", NORMS)
def test_a_token_is_normalized_independently_of_other_tokens(name: str) -> None:
    module, x = build_randomized(NORMS[name]), random(6, WIDTH)
    alone = torch.cat([module(token.unsqueeze(0)) for token in x])
    assert torch.allclose(module(x), alone, atol=1e-14)


@pytest.mark.ledger("norm.batch")
def test_batchnorm_depends_on_the_batch() -> None:
    batch, x = nn.BatchNorm1d(WIDTH, dtype=torch.float64), random(6, WIDTH)
    assert not torch.allclose(batch(x)[:3], batch(x[:3]), atol=0.1)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        batch(x[:1])  # a decoding step


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_around_one_keeps_the_precision_of_small_weights(dtype: torch.dtype) -> None:
    """1 + w in half precision would round a small w away; the result is rounded once."""
    module = RMSNorm(around_one=True).build(4096).to(dtype)
    module.weight.data = (0.01 * random(4096)).to(dtype)
    x = random(3, 4096).to(dtype)
    exact = RMSNorm(around_one=True).build(4096).double()
    exact.weight.data = module.weight.data.double()
    expected = exact(x.double())
    assert ((module(x).double() - expected).abs() / expected.abs().clamp_min(1e-2)).max() <= torch.finfo(dtype).eps


def test_a_bias_without_a_weight_is_refused() -> None:
    with pytest.raises(SpecError, match="set bias=False too"):
        LayerNorm(weight=False)


def test_around_one_without_a_weight_is_refused() -> None:
    with pytest.raises(SpecError, match="around_one needs a weight"):
        RMSNorm(weight=False, around_one=True)
