"""S4 and S4D equal the equations of their papers; long sequences, chunks, steps, shifts and precision."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.engine.stores.contiguous import Contiguous
from regard.kernels.recurrent.state_space.discretise import bilinear
from regard.kernels.recurrent.state_space.hippo import legs
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.block import Block, Sublayer
from regard.parts.ssm.s4 import S4, S4D
from regard.parts.ssm.time_invariant import TimeInvariantSSM, TimeInvariantSSMModule
from regard.spec import SpecError
from regard.training.parameter_groups import decay_groups
from regard.verification.trial import randomize_weights
from tests.laws import error

WIDTH = 6
FILTERS: dict[str, TimeInvariantSSM] = {
    "s4": S4(8),
    "s4d-lin": S4D(8),
    "s4d-inv, bilinear": S4D(8, initial="inv", rule="bilinear"),
    "s4d-legs": S4D(8, initial="legs"),
    "s4d-real": S4D(8, initial="real"),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(spec: TimeInvariantSSM, width: int = WIDTH) -> TimeInvariantSSMModule:
    torch.manual_seed(0)
    module = spec.build(width).double().eval().requires_grad_(False)
    assert isinstance(module, TimeInvariantSSMModule)
    return module


def plain_loop(module: TimeInvariantSSMModule, spec: TimeInvariantSSM, u: Tensor) -> Tensor:
    """u (L, D) -> y (L, D): full complex matrices with both numbers of every conjugate pair, token by token."""
    y = torch.zeros_like(u)
    for channel in range(u.shape[1]):
        values = torch.complex(-module.log_decay[channel].exp(), module.turn[channel])
        A = torch.cat([values, values.conj()]).diag()
        step = module.log_step[channel, 0].exp().item()
        c = with_conjugates(module.C[channel]).conj() / 2
        b = torch.ones(len(A), dtype=A.dtype)
        if isinstance(spec, S4):
            A = A - torch.outer(with_conjugates(module.P[channel]), with_conjugates(module.P[channel]).conj()) / 2
            b = with_conjugates(module.B[channel])
        Ab, Bb = bilinear(A, b, step)
        if isinstance(spec, S4D) and spec.rule == "zoh":
            Ab = torch.linalg.matrix_exp(step * A)
            Bb = torch.linalg.solve(A, (Ab - torch.eye(len(A))) @ b)
        x = torch.zeros_like(b)
        for t, value in enumerate(u[:, channel]):
            x = Ab @ x + Bb * value
            output = c @ x
            assert output.imag.abs() < 1e-12
            y[t, channel] = output.real + module.skip[channel] * value
    return y


def with_conjugates(pairs: Tensor) -> Tensor:
    """N real numbers as N/2 complex numbers, followed by their conjugates."""
    half = torch.view_as_complex(pairs.unflatten(-1, (-1, 2)).contiguous())
    return torch.cat([half, half.conj()])


@pytest.mark.ledger("ssm.s4")
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("randomized", [False, True], ids=["initial", "randomized"])
def test_equals_the_equation_of_the_paper(name: str, randomized: bool) -> None:
    spec = FILTERS[name]
    module, u = build(spec), random(1, 21, WIDTH)
    if randomized:
        randomize_weights(module)
    y = F.gelu(plain_loop(module, spec, u[0]))
    assert module.gate_proj is not None
    expected = module.o_proj(y) * torch.sigmoid(module.gate_proj(y))
    assert error(module(u, TokenLayout.whole(1, 21))[0], expected) < 1e-10


def test_disabled_options_have_no_weights() -> None:
    without_options = build(S4D(8, activation="identity", gate=False))
    assert without_options.gate_proj is None and without_options.C_back is None
    u = random(1, 9, WIDTH)
    expected = without_options.o_proj(plain_loop(without_options, S4D(8), u[0]))
    assert error(without_options(u, TokenLayout.whole(1, 9))[0], expected) < 1e-10


@pytest.mark.parametrize("spec", [S4(8, bidirectional=True), S4D(8, bidirectional=True)], ids=["s4", "s4d"])
def test_bidirectional_equals_the_sum_of_one_system_per_direction(spec: TimeInvariantSSM) -> None:
    module, u, layout = (
        build(replace(spec, activation="identity", gate=False)),
        random(2, 13, WIDTH),
        TokenLayout.whole(2, 13),
    )
    forward, backward = (build(replace(spec, bidirectional=False, activation="identity", gate=False)) for _ in range(2))
    weights = module.state_dict()
    C_backward = weights.pop("C_back")
    forward.load_state_dict(weights)
    backward.load_state_dict(weights | {"C": C_backward, "skip": torch.zeros(WIDTH)})
    expected = forward(u, layout) + backward(u.flip(1), layout).flip(1)
    assert error(module(u, layout), expected) < 1e-10
    assert not spec.causal and spec.memory(WIDTH) is None
    with pytest.raises(SpecError, match="later ones"):
        Decoder(5, WIDTH, (Repeat((Block((Sublayer(spec),)),)),))


@pytest.mark.ledger("mamba.noconv")
@pytest.mark.parametrize("name", FILTERS)
def test_a_shifted_input_has_a_shifted_output(name: str) -> None:
    module, u = build(FILTERS[name]), random(1, 30, WIDTH)
    delayed = torch.cat([torch.zeros(1, 7, WIDTH, dtype=torch.float64), u], 1)
    y, shifted = module(u, TokenLayout.whole(1, 30)), module(delayed, TokenLayout.whole(1, 37))
    assert error(shifted[:, 7:], y) < 1e-12
    assert error(shifted[:, 6:-1], y) > 1e-3


@pytest.mark.parametrize("spec", [S4(16), S4D(16), S4D(16, initial="inv")], ids=["s4", "s4d-lin", "s4d-inv"])
def test_float32_is_stable_over_long_sequences(spec: TimeInvariantSSM) -> None:
    """In one pass, in uneven chunks with a carried state, and the last tokens in steps."""
    length, module = 16384, build(spec)
    x = random(1, length, WIDTH)
    expected = module(x, TokenLayout.whole(1, length))
    in_float32 = module.float()
    assert error(in_float32(x.float(), TokenLayout.whole(1, length)).double(), expected) < 1e-5
    store, found = Contiguous(((spec.memory(WIDTH),),), 1, length, torch.float32), []
    boundaries = [0, 1, 5000, 5001, 12000, *range(16300, length + 1)]
    for start, stop in zip(boundaries, boundaries[1:], strict=False):
        layout = TokenLayout(torch.arange(start, stop)[None])
        found.append(in_float32(x[:, start:stop].float(), layout, store.begin_forward(layout)[0][0]))
    assert error(torch.cat(found, 1).double(), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("spec", [S4(64), S4D(64)], ids=["s4", "s4d"])
def test_float32_is_stable_step_by_step(spec: TimeInvariantSSM) -> None:
    """Over four time constants of the slowest initial state, which decays by exp(-0.0005) per token."""
    length, module = 8192, build(spec)
    x = random(1, length, WIDTH)
    expected, in_float32 = module(x, TokenLayout.whole(1, length)), module.float()
    store = Contiguous(((spec.memory(WIDTH),),), 1, length, torch.float32)
    steps = [
        in_float32(x[:, t : t + 1].float(), step := TokenLayout(torch.tensor([[t]])), store.begin_forward(step)[0][0])
        for t in range(length)
    ]
    assert error(torch.cat(steps, 1).double(), expected) < 2e-5


@pytest.mark.parametrize("name", ["s4", "s4d-lin"])
def test_the_state_stays_bounded_for_any_weights(name: str) -> None:
    spec = FILTERS[name]
    module, x = build(spec), torch.ones(1, 2000, WIDTH, dtype=torch.float64)
    for parameter in (module.log_decay, module.turn, module.log_step, getattr(module, "P", module.turn)):
        parameter.copy_(3 * random(*parameter.shape, seed=5))
    y = module(x, TokenLayout.whole(1, 2000))
    assert y.isfinite().all() and y[:, 1000:].abs().max() < 2 * y[:, :1000].abs().max() + 1


@pytest.mark.parametrize("spec", [S4(8), S4D(8)], ids=["s4", "s4d"])
def test_the_state_of_a_half_precision_layer_is_float32(spec: TimeInvariantSSM) -> None:
    module = build(spec)
    x, layout = random(1, 40, WIDTH), TokenLayout.whole(1, 40)
    store = Contiguous(((spec.memory(WIDTH),),), 1, 64, torch.bfloat16)
    in_bfloat16 = build(spec).bfloat16()
    rounded = build(spec)
    rounded.load_state_dict({name: tensor.double() for name, tensor in in_bfloat16.state_dict().items()})
    cached_layout = TokenLayout(layout.positions)
    found = in_bfloat16(x.bfloat16(), cached_layout, store.begin_forward(cached_layout)[0][0])
    assert found.dtype == torch.bfloat16
    assert next(iter(store.storages)).arrays["x"].dtype == torch.float32
    assert error(found.double(), rounded(x.bfloat16().double(), layout)) < 0.03
    assert error(found.double(), module(x, layout)) < 0.3


def test_initial_steps_and_eigenvalues_equal_their_formulas() -> None:
    module = S4D(8, min_step=0.01, max_step=1.0).build(5)
    assert torch.allclose(module.log_step.exp().flatten(), torch.logspace(-2, 0, 5))
    assert torch.allclose(module.log_decay.exp(), torch.full((5, 4), 0.5))
    s4 = S4(8).build(2)
    A, b = legs(8)
    assert math.isclose(s4.B[1].square().sum().item(), b.square().sum().item(), rel_tol=1e-5)
    assert math.isclose(
        -s4.log_decay[0].exp().sum().item() * 2 - s4.P[0].square().sum().item(), A.trace(), rel_tol=1e-5
    )


@pytest.mark.parametrize("spec", [S4(8), S4D(8)], ids=["s4", "s4d"])
def test_rates_and_steps_have_no_weight_decay(spec: TimeInvariantSSM) -> None:
    model = Decoder(5, WIDTH, (Repeat((Block((Sublayer(spec),)),)),)).build()
    not_decayed = {name.rpartition("body.")[2] for name, _ in decay_groups(model)[1]}
    assert {"log_step", "log_decay", "turn", "skip"} <= not_decayed and "C" not in not_decayed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"state": 7}, "state=7 must be even and positive"),
        ({"state": 0}, "state=0 must be even and positive"),
        ({"min_step": 0.0}, "must satisfy 0 < min_step"),
        ({"min_step": 0.5}, "must satisfy 0 < min_step"),
        ({"initial": "random"}, "lin"),
    ],
)
def test_invalid_specs_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        S4D(**fields)
