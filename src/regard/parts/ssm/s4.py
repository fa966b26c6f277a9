"""S4 and S4D: time-invariant state spaces with HiPPO's matrix A, or with a diagonal one.

    S4     A = Λ - PPᵀ, Re Λ < 0          diagonal plus low rank: HiPPO-LegS in its eigenbasis
    S4D    A = diag(λ), Re λ < 0          K_k = 2 Re Σ_n C_n B̄_n Ā_n^k

S4 (Gu, Goel & Ré 2021, "Efficiently modeling long sequences with structured state spaces") starts as HiPPO-LegS, whose
state holds the coefficients of a polynomial fitted to the past, and learns Λ, P, B, C and Δ. The form -PPᵀ keeps A
stable for all values of the parameters (Goel et al. 2022, "It's raw!"). A step of the recurrence takes O(N), because
the bilinear Ā is again diagonal plus rank one. The convolution kernel is computed from powers of Ā by squaring; the
paper's sums over the roots of unity need a fixed length and N·L divisions per channel.

S4D (Gu, Gupta, Goel & Ré 2022, "On the parameterization and initialization of diagonal state space models") stores N/2
complex λ, one of each conjugate pair. B is fixed to one, because only its product with C matters. Re λ = -exp(a) is
always negative, so no kernel grows. The initial λ matter most: "legs" has the frequencies of HiPPO's matrix, "inv" an
approximation of them, "lin" those of a Fourier series; "real" has decay only.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from regard.kernels.recurrent.state_space.discretise import RULES, bilinear_low_rank
from regard.kernels.recurrent.state_space.hippo import DIAGONALS, normal_plus_low_rank
from regard.kernels.recurrent.state_space.transition import DiagonalTransition, LowRankTransition, as_real
from regard.parts.ssm.time_invariant import TimeInvariantSSM, TimeInvariantSSMModule


@dataclass(frozen=True)
class S4(TimeInvariantSSM):
    dense: ClassVar[bool] = True

    def build(self, width: int) -> nn.Module:
        return S4Module(width, self)


class S4Module(TimeInvariantSSMModule):
    def __init__(self, width: int, spec: S4):
        super().__init__(width, spec)
        self.P = nn.Parameter(torch.empty(width, spec.state))
        self.B = nn.Parameter(torch.empty(width, spec.state))
        if not self.C.is_meta:
            eigenvalues, P, B = normal_plus_low_rank(spec.state)
            self.initialize(spec, eigenvalues)
            self.P.data.copy_(P)
            self.B.data.copy_(B)

    def discretise(self) -> tuple[LowRankTransition, Tensor]:
        return bilinear_low_rank(self.eigenvalues, self.P.double(), self.B.double(), self.step)


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
            self.initialize(spec, DIAGONALS[spec.initial](spec.state))

    def discretise(self) -> tuple[DiagonalTransition, Tensor]:
        values = self.eigenvalues
        values, b = self.rule(values, torch.ones_like(values), self.step)
        return DiagonalTransition(values), as_real(b)
