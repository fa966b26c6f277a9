"""A figure about state-space models: past inputs in the state of HiPPO."""

from typing import Any

import torch

from plotting import BLUE, GREEN, GREY, ORANGE, PURPLE, canvas
from regard.kernels.recurrent.state_space.discretise import bilinear
from regard.kernels.recurrent.state_space.hippo import legs, reconstruct
from regard.kernels.recurrent.state_space.kernel import System, driven, kernel
from regard.kernels.recurrent.state_space.transition import DenseTransition


def history() -> Any:
    """The weights of past inputs in HiPPO's first state variables, and a signal reconstructed from the state."""
    figure, (weights, past) = canvas(1, 2, height=2.3)
    A, b = bilinear(*legs(4), 0.01)
    units = System(DenseTransition(A.expand(4, 4, 4)), b.expand(4, 4), torch.eye(4, dtype=torch.float64))
    responses = kernel(units, 300, torch.float64) / 0.01  # (4, 300)
    for n, (line, colour) in enumerate(zip(responses, (BLUE, ORANGE, GREEN, PURPLE), strict=True)):
        weights.plot((torch.arange(300) * 0.01).numpy(), line.numpy(), color=colour, linewidth=1.5, label=f"n = {n}")
    weights.set(title="weights of past inputs in x_n", xlabel="age", yticks=[0], xlim=(2.4, 0))
    weights.legend(frameon=False, fontsize=8, labelcolor="linecolor", handlelength=0, loc="upper left")
    step, count = 0.002, 4000
    time = torch.arange(count, dtype=torch.float64) * step
    u = torch.sin(3 * time) + 0.5 * torch.cos(7.3 * time)
    ages = time[:1200]
    past.plot(ages.numpy(), u.flip(0)[:1200].numpy(), color=GREY, linewidth=3, alpha=0.5)
    for size, colour in ((8, ORANGE), (64, BLUE)):
        A, b = bilinear(*legs(size), step)
        state = driven(System(DenseTransition(A[None]), b[None], b[None]), u[None, None])[0, 0]
        past.plot(ages.numpy(), reconstruct(state, ages).numpy(), color=colour, linewidth=1.3, label=f"N = {size}")
    past.set(title="signal and its reconstruction", xlabel="age", yticks=[0], ylim=(-2, 2), xlim=(2.4, 0))
    past.legend(frameon=False, fontsize=8, labelcolor="linecolor", handlelength=0, loc="upper left")
    for panel in (weights, past):
        panel.title.set(fontsize=9, color=GREY)
    return figure
