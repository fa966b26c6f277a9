"""Mamba and Mamba-2: selection, initial values, and equality of training and decoding."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.recurrent.selective_scan import SelectiveScanInputs, selective_scan
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.ssm import selective
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2
from regard.parts.ssm.s4 import S4, S4D
from regard.parts.state import FixedSize
from regard.spec import SpecError
from regard.training.parameter_groups import decay_groups
from tests.laws import MODELS, WIDTH

L, CHANNELS, N = 9, 3, 2


def scan_inputs(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    u, delta = torch.randn(2, 1, L, CHANNELS, generator=generator, dtype=torch.float64)
    B, C = torch.randn(2, 1, L, N, generator=generator, dtype=torch.float64)
    state = torch.randn(1, CHANNELS, N, generator=generator, dtype=torch.float64)
    A = -torch.rand(CHANNELS, N, generator=generator, dtype=torch.float64) - 0.5
    return [u, delta.exp(), A, B, C, torch.zeros(CHANNELS, dtype=torch.float64), state]


@pytest.mark.ledger("mamba.gate")
def test_a_step_of_zero_skips_the_token() -> None:
    u, delta, A, B, C, D, state = scan_inputs()
    delta[:, 4] = 0
    y, last = selective_scan(SelectiveScanInputs(u, delta, A, B, C, D, state))
    remaining = [torch.cat([x[:, :4], x[:, 5:]], 1) for x in (u, delta, B, C)]
    expected, expected_state = selective_scan(SelectiveScanInputs(*remaining[:2], A, *remaining[2:], D, state))
    assert (torch.cat([y[:, :4], y[:, 5:]], 1) - expected).abs().max() < 1e-14
    assert (last - expected_state).abs().max() < 1e-14


@pytest.mark.ledger("mamba.gate")
def test_a_large_step_resets_the_state() -> None:
    u, delta, A, B, C, D, state = scan_inputs()
    delta[:, 4] = 200.0
    _, after = selective_scan(SelectiveScanInputs(u[:, :5], delta[:, :5], A, B[:, :5], C[:, :5], D, state))
    assert (after - 200.0 * u[:, 4, :, None] * B[:, 4, None, :]).abs().max() < 1e-12
    y, _ = selective_scan(SelectiveScanInputs(u, delta, A, B, C, D, state))
    y_other, _ = selective_scan(SelectiveScanInputs(torch.cat([-u[:, :4], u[:, 4:]], 1), delta, A, B, C, D, -state))
    assert (y - y_other)[:, 4:].abs().max() < 1e-12
    assert (y - y_other)[:, :4].abs().max() > 0.1


def deviation_from_toeplitz(matrix: Tensor) -> float:
    """The largest deviation of a matrix from a Toeplitz matrix."""
    return (matrix[1:, 1:] - matrix[:-1, :-1]).abs().max().item()


@pytest.mark.ledger("mamba.noconv")
def test_a_selective_scan_is_not_a_convolution() -> None:
    """The effect of a token on a later one is a function of their distance only if Δ, B and C are constant."""
    u, delta, A, B, C, D, state = scan_inputs()
    empty = torch.zeros_like(state)

    def matrix(delta: Tensor, B: Tensor, C: Tensor) -> Tensor:
        def of_channel(v: Tensor) -> Tensor:
            padded = F.pad(v[None, :, None], (0, CHANNELS - 1))  # (1, L, F)
            return selective_scan(SelectiveScanInputs(padded, delta, A, B, C, D, empty))[0][0, :, 0]

        return torch.autograd.functional.jacobian(of_channel, u[0, :, 0])  # (L, L)

    input_dependent = matrix(delta, B, C)
    assert input_dependent.triu(1).abs().max() == 0
    assert deviation_from_toeplitz(input_dependent) > 0.1
    assert deviation_from_toeplitz(matrix(*(x[:, :1].expand_as(x) for x in (delta, B, C)))) < 1e-14


FILTER_ONLY = {"activation": "identity", "gate": False}  # activation and gate do not mix tokens
FILTERS = {"s4": S4(8, **FILTER_ONLY), "s4d": S4D(8, **FILTER_ONLY), "mamba": Mamba(4), "mamba2": Mamba2(4, 4)}


@pytest.mark.ledger("mamba.noconv")
@pytest.mark.parametrize("kind", FILTERS)
def test_only_time_invariant_mixers_are_shift_equivariant(kind: str) -> None:
    torch.manual_seed(0)
    module = FILTERS[kind].build(4).double().requires_grad_(False)
    x, token = torch.randn(1, 12, 4, dtype=torch.float64), torch.randn(1, 1, 4, dtype=torch.float64)

    def effect(position: int) -> Tensor:
        changed = x.index_add(1, torch.tensor([position]), token)
        return module(changed, TokenLayout.whole(1, 12)) - module(x, TokenLayout.whole(1, 12))

    difference = (effect(4)[:, 1:] - effect(3)[:, :-1]).abs().max() / effect(3).abs().max()
    assert difference < 1e-9 if kind.startswith("s4") else difference > 0.05


@pytest.mark.ledger("mamba.selective")
@pytest.mark.parametrize("spec", [Mamba(4), Mamba2(4, 4)], ids=["mamba", "mamba2"])
def test_selective_mixers_are_not_linear(spec: Body) -> None:
    """The output of a sum of inputs is not the sum of the outputs: B, C and Δ depend on the input."""
    module, layout = spec.build(8).double(), TokenLayout.whole(1, L)
    x, y = torch.randn(2, 1, L, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    difference = module(x + y, layout) - module(x, layout) - module(y, layout)
    assert difference.abs().max() > 0.01 * module(x, layout).abs().max()


def test_initial_rates_are_integers_and_initial_steps_are_log_uniform() -> None:
    torch.manual_seed(0)
    for module, rates in ((Mamba(16).build(64), 16), (Mamba2(16, 4).build(64), 32)):
        assert torch.allclose(module.A_log.exp(), torch.arange(1.0, rates + 1).expand_as(module.A_log))
        steps = F.softplus(module.step_bias)
        assert 0.99e-3 < steps.min() < steps.max() < 1.01e-1
        assert (module.D == 1).all()
    assert steps.log().std() > 0.8  # a log-uniform step in [0.001, 0.1] has 1.33


def test_rates_have_no_weight_decay() -> None:
    decayed, not_decayed = ({name for name, _ in group} for group in decay_groups(Mamba(4).build(8)))
    assert {"A_log", "D", "step_bias", "conv.bias"} <= not_decayed
    assert {"in_proj.weight", "step_proj.weight", "conv.weight"} <= decayed


def test_invalid_specs_are_refused() -> None:
    for make, message in (
        (lambda: Mamba(0), "state=0 must be positive"),
        (lambda: Mamba(rank=-1), "rank=-1"),
        (lambda: Mamba2(4, 7).build(8), "16 channels .* not divisible by head_dim=7"),
        (lambda: Mamba2(4, 8, groups=3).build(8), "2 heads are not divisible by groups=3"),
        (lambda: Mamba2(shortest=0.5, longest=0.1), "must satisfy 0 <= shortest < longest"),
    ):
        with pytest.raises(SpecError, match=message):
            make()


@pytest.mark.parametrize("padded", [False, True], ids=["valid", "padded"])
@pytest.mark.parametrize("spec", [Mamba(4), Mamba2(4, 4)], ids=["mamba", "mamba2"])
def test_chunked_equals_whole(spec: Body, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = spec.build(8).double()
    x = torch.randn(2, 11, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    layout = TokenLayout.whole(2, 11)
    if padded:
        valid = torch.arange(11) >= torch.tensor([[6], [1]])
        layout = TokenLayout((torch.arange(11) - torch.tensor([[6], [1]])).clamp_min(0), valid=valid)
    valid = torch.ones(2, 11, dtype=torch.bool) if layout.valid is None else layout.valid
    whole = module(x, layout)[valid]
    monkeypatch.setattr(selective, "CHUNK", 4)
    chunked = module(x, replace(layout))[valid]
    assert (chunked - whole).abs().max() < 1e-12
    chunked_gradients, whole_gradients = (
        torch.autograd.grad(y.sin().sum(), [x, *module.parameters()]) for y in (chunked, whole)
    )
    assert all((a - b).abs().max() < 1e-10 for a, b in zip(chunked_gradients, whole_gradients, strict=True))


@pytest.mark.parametrize("spec", [Mamba(4), Mamba2(8, 4)], ids=["mamba", "mamba2"])
def test_float32_is_stable_over_16k_tokens(spec: Body) -> None:
    torch.manual_seed(0)
    module, x = spec.build(8).requires_grad_(False), torch.randn(1, 16384, 8)
    found, expected = module(x, TokenLayout.whole(1, 16384)), module.double()(x.double(), TokenLayout.whole(1, 16384))
    assert (found - expected).abs().max() < 1e-5 * max(1, expected.abs().max())


class InMemoryState:
    """A state that keeps its arrays between forwards."""

    arrays: dict[str, Tensor] | None = None

    def read(self, layout: TokenLayout, **empty: Tensor) -> tuple[Tensor, ...]:
        return tuple((empty if self.arrays is None else self.arrays).values())

    def write(self, layout: TokenLayout, **arrays: Tensor) -> None:
        self.arrays = arrays


RECURRENT = {
    f"{name}, {index}": sublayer.body
    for name, spec in MODELS.items()
    for index, sublayer in enumerate(s for run in spec.layers for block in run.blocks for s in block.sublayers)
    if isinstance(sublayer.body.memory(WIDTH), FixedSize)
}


@pytest.mark.ledger("ssm.duality")
@pytest.mark.parametrize("name", RECURRENT)
def test_token_by_token_equals_whole(name: str) -> None:
    """For every mixer with a state of fixed size, decoding computes the same function as training."""
    torch.manual_seed(0)
    module = RECURRENT[name].build(WIDTH).double().requires_grad_(False)
    x, state, outputs = torch.randn(2, 70, WIDTH, dtype=torch.float64), InMemoryState(), []
    whole = module(x, TokenLayout.whole(2, 70))
    for t in range(70):
        outputs.append(module(x[:, t : t + 1], TokenLayout(torch.full((2, 1), t)), state))
    assert (torch.cat(outputs, 1) - whole).abs().max() < 1e-9 * max(1, whole.abs().max())
