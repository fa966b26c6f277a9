"""S4D: a fixed filter with a diagonal A. Gu, Gupta, Goel & Ré 2022, "On the parameterization and initialization of
diagonal state space models".

    A = diag(λ), Re λ < 0        K_k = 2 Re Σ_n C_n B̄_n Ā_n^k

Each of N/2 complex λ stands for itself and its conjugate. B is one everywhere: only its product with C is seen.
Re λ = -exp(a) cannot become positive, so no kernel grows, whatever is learned. Where λ begins matters most: "legs"
turns at the speeds of HiPPO's matrix, "inv" nearly so, "lin" at those of a Fourier series; "real" only decays.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from regard.kernels.recurrent.state_space.discretise import RULES
from regard.kernels.recurrent.state_space.hippo import DIAGONALS
from regard.kernels.recurrent.state_space.transition import DiagonalTransition, real
from regard.parts.ssm.time_invariant import TimeInvariantSSM, TimeInvariantSSMModule


@dataclass(frozen=True)
class S4D(TimeInvariantSSM):
    initial: Literal["lin", "inv", "legs", "real"] = "lin"
    rule: Literal["zoh", "bilinear"] = "zoh"

    def build(self, width: int) -> nn.Module:
        return S4DModule(width, self)


class S4DModule(TimeInvariantSSMModule):
    def __init__(self, width: int, spec: S4D):
        super().__init__(width, spec)
        self.rule = RULES[spec.rule]
        if not self.C.is_meta:
            self.begin(spec, DIAGONALS[spec.initial](spec.state))

    def discretised(self) -> tuple[DiagonalTransition, Tensor]:
        values = self.eigenvalues
        values, b = self.rule(values, torch.ones_like(values), self.step)
        return DiagonalTransition(values), real(b)
