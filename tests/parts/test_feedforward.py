"""Feed-forward layers equal their formulas and transformers; known identities, sizes and invalid specs."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from regard.parts.feedforward import ACTIVATIONS, FeedForward, Gated, PositionWise, SwiGLU, eight_thirds
from regard.spec import SpecError

WIDTH = 6
BY_HAND: dict[str, Callable[[float], float]] = {
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "identity": lambda x: x,
}
SPECS: dict[str, PositionWise] = (
    {f"feed-forward: {name}": FeedForward(10, name) for name in BY_HAND}
    | {f"gated: {name}": Gated(10, name) for name in BY_HAND}
    | {"no bias": FeedForward(10, bias=False), "gated, bias": Gated(10, "gelu", bias=True), "swiglu": SwiGLU(10)}
    | {"limit and offset": Gated(10, "quick_gelu", bias=True, limit=1.1, offset=1.0), "limit": SwiGLU(10, limit=0.5)}
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build_randomized(spec: PositionWise, width: int = WIDTH) -> nn.Module:
    module = spec.build(width).double().eval()
    for n, parameter in enumerate(module.parameters()):
        parameter.data = random(*parameter.shape, seed=3 + n)
    return module


def linear_by_hand(linear: nn.Linear, x: list[float]) -> list[float]:
    bias = [0.0] * linear.out_features if linear.bias is None else linear.bias.tolist()
    rows = linear.weight.tolist()
    return [sum(w * value for w, value in zip(row, x, strict=True)) + b for row, b in zip(rows, bias, strict=True)]


@pytest.mark.ledger("ffn.relu", "ffn.swiglu")
@pytest.mark.parametrize("name", SPECS)
def test_layers_equal_their_formulas(name: str) -> None:
    spec, module, x = SPECS[name], build_randomized(SPECS[name]), random(3, WIDTH)
    sigma = BY_HAND[spec.activation]
    for token, found in zip(x.tolist(), module(x), strict=True):
        inner = linear_by_hand(module.up_proj, token)
        if isinstance(spec, Gated):
            gate = linear_by_hand(module.gate_proj, token)
            limit = math.inf if spec.limit is None else spec.limit
            inner = [max(-limit, min(u, limit)) + spec.offset for u in inner]
            inner = [sigma(min(g, limit)) * u for g, u in zip(gate, inner, strict=True)]
        else:
            inner = [sigma(u) for u in inner]
        assert torch.allclose(found, found.new_tensor(linear_by_hand(module.down_proj, inner)), atol=1e-12)


@pytest.mark.parametrize("name", SPECS)
def test_gradients_equal_finite_differences(name: str) -> None:
    module, x = build_randomized(SPECS[name]), random(2, 3, WIDTH).requires_grad_()
    weights = dict(module.named_parameters())

    def as_function(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(weights, values, strict=True)), (x,))

    assert gradcheck(as_function, (x, *weights.values()), fast_mode=True)


@pytest.mark.ledger("ffn.relu")
@pytest.mark.parametrize("name", SPECS)
def test_no_token_affects_another(name: str) -> None:
    """The Jacobian between tokens is zero, exactly, and the same at every position."""
    module, x = build_randomized(SPECS[name]), random(3, WIDTH)
    jacobian = torch.autograd.functional.jacobian(module, x)  # (3, D, 3, D)
    for i in range(3):
        for j in range(3):
            assert (jacobian[i, :, j] == 0).all() == (i != j)
    repeated = x[:1].expand(3, -1)
    assert torch.allclose(module(repeated), module(repeated[:1]).expand(3, -1), atol=1e-13)


@pytest.mark.ledger("ffn.relu")
@pytest.mark.parametrize("name", ["relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu"])
def test_activations_equal_transformers(name: str) -> None:
    from transformers.activations import ACT2FN

    x = 3 * random(100)
    assert torch.allclose(ACTIVATIONS[name](x), ACT2FN[{"gelu_tanh": "gelu_pytorch_tanh"}.get(name, name)](x))


@pytest.mark.ledger("ffn.swiglu", "ffn.names")
def test_swiglu_equals_llama() -> None:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

    ours, x = build_randomized(SwiGLU(10)), random(4, WIDTH)
    theirs = LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=10, num_attention_heads=1)).double()
    theirs.load_state_dict(ours.state_dict())
    assert torch.allclose(ours(x), theirs(x), atol=1e-12)
    ours.gate_proj, ours.up_proj = ours.up_proj, ours.gate_proj
    assert not torch.allclose(ours(x), theirs(x), atol=0.1)  # gate and up are not interchangeable


@pytest.mark.ledger("ffn.swiglu")
def test_geglu_equals_gemma_and_reglu_equals_t5() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaConfig, GemmaMLP
    from transformers.models.t5.modeling_t5 import T5Config, T5DenseGatedActDense

    x = random(4, WIDTH)
    ours = build_randomized(Gated(10, "gelu_tanh"))
    gemma = GemmaMLP(GemmaConfig(hidden_size=WIDTH, intermediate_size=10)).double()
    gemma.load_state_dict(ours.state_dict())
    assert torch.allclose(ours(x), gemma(x), atol=1e-12)
    ours = build_randomized(Gated(10, "relu"))
    t5 = T5DenseGatedActDense(T5Config(d_model=WIDTH, d_ff=10, feed_forward_proj="gated-relu")).double().eval()
    names = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}
    t5.load_state_dict({f"{names[k.split('.')[0]]}.weight": w for k, w in ours.state_dict().items()})
    assert torch.allclose(ours(x), t5(x), atol=1e-12)


@pytest.mark.ledger("ffn.swish")
def test_silu_has_one_minimum_and_slope_one_half_at_zero() -> None:
    silu = ACTIVATIONS["silu"]
    x = torch.linspace(-6, 6, 1_200_001, dtype=torch.float64)
    minimum = silu(x).min(0)
    assert minimum.values.item() == pytest.approx(-0.278, abs=5e-4)
    assert x[minimum.indices].item() == pytest.approx(-1.278, abs=5e-4)
    assert torch.allclose(silu(x), x * torch.sigmoid(x))
    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(silu(zero), zero)[0].item() == 0.5
    assert gradcheck(silu, (torch.linspace(-4, 4, 9, dtype=torch.float64, requires_grad=True),))  # smooth


@pytest.mark.ledger("ffn.collapse")
def test_without_a_nonlinearity_two_layers_equal_one_matrix() -> None:
    module, x = build_randomized(FeedForward(10, "identity", bias=False)), random(4, WIDTH)
    merged = module.down_proj.weight @ module.up_proj.weight  # (D, D)
    assert torch.allclose(module(x), x @ merged.T, atol=1e-12)
    nonlinear = build_randomized(FeedForward(10, "relu", bias=False))
    assert not torch.allclose(nonlinear(x), x @ merged.T, atol=0.1)


@pytest.mark.ledger("ffn.relu", "ffn.params")
def test_the_2017_feed_forward_has_its_published_shapes_and_weights() -> None:
    module = FeedForward(activation="relu").build(512)
    assert (module.up_proj.weight.shape, module.down_proj.weight.shape) == ((2048, 512), (512, 2048))
    assert sum(p.numel() for p in module.parameters()) == 2_099_712
    assert sum(p.numel() for p in FeedForward(bias=False).build(512).parameters()) == 2_097_152


@pytest.mark.ledger("ffn.parity")
@pytest.mark.parametrize(("width", "hidden"), [(4096, 11008), (5120, 13824), (6656, 17920), (8192, 22016)])
def test_eight_thirds_equals_the_hidden_sizes_of_llama(width: int, hidden: int) -> None:
    """Llama 7B, 13B, 33B and 65B."""
    assert eight_thirds(width) == hidden == SwiGLU().hidden_dim(width)
    assert 0 <= hidden - 8 * width / 3 < 256 and hidden % 256 == 0


@pytest.mark.ledger("ffn.parity")
def test_a_gated_layer_of_eight_thirds_has_as_many_weights_as_an_ungated_one() -> None:
    ungated, gated = FeedForward(bias=False), Gated(multiple_of=1)
    for width in (3, 48, 96):  # 8/3 of these widths is an integer
        count = [sum(p.numel() for p in spec.build(width).parameters()) for spec in (ungated, gated)]
        assert count == [8 * width**2, 8 * width**2]
        assert ungated.flops(width, 7, 7) == gated.flops(width, 7, 7) == 7 * 16 * width**2
    assert SwiGLU(14336).hidden_dim(4096) == 14336  # an explicit hidden width is not rounded


def test_swiglu_is_a_gated_layer() -> None:
    assert isinstance(SwiGLU(4), Gated)
    assert SwiGLU(10).build(4).state_dict().keys() == {f"{name}_proj.weight" for name in ("gate", "up", "down")}
    with pytest.raises(SpecError, match=r"SwiGLU\.activation='relu'"):
        SwiGLU(4, "relu")


def test_dropout_acts_on_hidden_channels_in_training_only() -> None:
    x = random(400, WIDTH)
    for spec in (FeedForward(10, "identity", bias=False, dropout=0.5), Gated(10, dropout=0.5)):
        module = build_randomized(spec)
        assert torch.equal(module(x), module(x))
        hidden: list[Tensor] = []
        module.down_proj.register_forward_pre_hook(lambda _, args, hidden=hidden: hidden.append(args[0]))
        module.train()(x)
        assert 0.4 < (hidden[0] == 0).double().mean() < 0.6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FeedForward(0), "feedforward: hidden=0 must be positive"),
        (lambda: Gated(4, multiple_of=0), "gated: multiple_of=0 must be positive"),
        (lambda: Gated(4, limit=-1.0), "gated: limit=-1.0 must be positive"),
        (lambda: SwiGLU(4, dropout=1.0), "swiglu: dropout=1.0 must be in"),
        (lambda: Gated(4, "swish"), "activation='swish'"),
    ],
)
def test_invalid_specs_are_refused(make: Callable[[], PositionWise], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()
