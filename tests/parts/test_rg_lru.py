"""RG-LRU equals its equation in plain loops and the module of `transformers` with the same weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

from regard.layout import TokenLayout
from regard.parts.rg_lru import RGLRU
from regard.spec import SpecError
from regard.verification.trial import randomize_weights

WIDTH, HIDDEN = 12, 18
NAMES = {
    "linear_x": "in_proj",
    "linear_y": "gate_proj",
    "linear_out": "o_proj",
    "rg_lru.input_gate_weight": "i_proj.weight",
    "rg_lru.input_gate_bias": "i_proj.bias",
    "rg_lru.recurrent_gate_weight": "r_proj.weight",
    "rg_lru.recurrent_gate_bias": "r_proj.bias",
    "rg_lru.recurrent_param": "rate",
    "conv_1d": "conv",
}


def build_randomized(spec: RGLRU) -> nn.Module:
    module = spec.build(WIDTH).double().requires_grad_(False)
    randomize_weights(module, seed=1)
    return module


def plain_loop(module: nn.Module, x: Tensor) -> Tensor:
    """The equations, token by token."""
    u, taps = module.in_proj(x), module.conv.weight
    h, outputs = torch.zeros(len(x), HIDDEN, dtype=x.dtype), []
    for t in range(x.shape[1]):
        convolved = sum(taps[i] * u[:, t - i] for i in range(min(len(taps), t + 1))) + module.conv.bias
        heads = convolved.unflatten(-1, (3, -1))
        r, i = (
            torch.stack([heads[:, n] @ gate.weight[n] + gate.bias[n] for n in range(3)], 1).flatten(1).sigmoid()
            for gate in (module.r_proj, module.i_proj)
        )
        a = F.softplus(module.rate).mul(-8 * r).exp()
        h = a * h + (1.0 if t == 0 else (1 - a**2).sqrt()) * i * convolved
        outputs.append(module.o_proj(h * F.gelu(module.gate_proj(x[:, t]), approximate="tanh")))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("length", [1, 3, 40])
def test_equals_its_equation_in_plain_loops(length: int) -> None:
    module = build_randomized(RGLRU(3, HIDDEN))
    x = torch.randn(2, length, WIDTH, dtype=torch.float64)
    expected = plain_loop(module, x)
    assert (module(x, TokenLayout.whole(2, length)) - expected).abs().max() < 1e-12 * max(1, expected.abs().max())


def test_equals_transformers() -> None:
    theirs = RecurrentGemmaRecurrentBlock(
        RecurrentGemmaConfig(hidden_size=WIDTH, lru_width=HIDDEN, num_attention_heads=3, conv1d_width=3), 0
    ).requires_grad_(False)
    weights = {}
    for name, weight in theirs.named_parameters():
        weight.copy_(0.6 * torch.randn(weight.shape))
        prefix = max((name_prefix for name_prefix in NAMES if name.startswith(name_prefix)), key=len)
        weights[name.replace(prefix, NAMES[prefix])] = weight
    weights["conv.weight"] = weights["conv.weight"].squeeze(1).t().flip(0)
    ours = RGLRU(3, HIDDEN, 3).build(WIDTH)
    ours.load_state_dict(weights)
    x, layout = torch.randn(2, 30, WIDTH), TokenLayout.whole(2, 30)
    expected, _ = theirs(x, layout.positions, None, use_cache=False)
    assert (ours(x, layout) - expected).abs().max() < 1e-5 * max(1, expected.abs().max())


def test_a_closed_gate_has_finite_gradients() -> None:
    module = RGLRU(3).build(WIDTH)
    nn.init.constant_(module.r_proj.bias, -200.0)  # r = 0: no decay, and only the first token changes the state
    module(torch.randn(1, 5, WIDTH), TokenLayout.whole(1, 5)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


def test_initial_decays_are_in_their_range() -> None:
    decays = F.softplus(RGLRU(2).build(400).rate).neg().exp()
    assert 0.9 <= decays.min() < 0.92 < 0.99 < decays.max() <= 0.999


def test_states_have_their_shapes_and_invalid_sizes_are_refused() -> None:
    assert RGLRU(2, 8).memory(6).arrays == {"conv": (3, 8), "h": (8,)}
    with pytest.raises(SpecError, match="rg_lru: 8 channels are not divisible by heads=3"):
        RGLRU(3, 8).build(6)
    with pytest.raises(SpecError, match="rg_lru: taps=0 must be positive"):
        RGLRU(3, taps=0)
