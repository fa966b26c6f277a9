"""Linear systems for the tests of state space models, and their recurrence as a loop."""

import torch
from torch import Tensor

from regard.kernels.recurrent.state_space.discretise import bilinear_low_rank, zero_order_hold_diagonal
from regard.kernels.recurrent.state_space.hippo import DIAGONALS, normal_plus_low_rank
from regard.kernels.recurrent.state_space.kernel import System
from regard.kernels.recurrent.state_space.transition import DiagonalTransition, as_real

KINDS = ["s4d", "s4"]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def system(kind: str, channels: int, state: int, step: float | None = None) -> System:
    """A HiPPO system. Its steps grow from 0.001 to 0.3 over the channels, or are all equal to `step`."""
    steps = (
        torch.logspace(-3, -0.5, channels, dtype=torch.float64)
        if step is None
        else torch.tensor([step], dtype=torch.float64)
    )
    steps, c = steps.unsqueeze(-1), random(channels, state, seed=7)
    if kind == "s4d":
        values, b = zero_order_hold_diagonal(DIAGONALS["legs"](state), torch.ones(1).to(torch.complex128), steps)
        return System(DiagonalTransition(values), as_real(b), c)
    values, P, B = (value.expand(channels, -1) for value in normal_plus_low_rank(state))
    return System(*bilinear_low_rank(values, P, B, steps), c)


def loop(
    system: System, u: Tensor, state: Tensor, segments: Tensor | None = None, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the outputs and the last state of the recurrence, computed token by token and row by row."""
    y, state = torch.zeros_like(u), state.clone()
    for row in range(len(u)):
        previous = None
        for t in range(u.shape[1]):
            if valid is not None and not valid[row, t]:
                continue
            if segments is not None and previous is not None and segments[row, t] != previous:
                state[row] = 0
            previous = None if segments is None else segments[row, t]
            advanced = system.transition @ state[row : row + 1]
            state[row] = advanced[0] + system.b * u[row, t].unsqueeze(-1)
            y[row, t] = (system.c * state[row]).sum(-1)
    return y, state
