"""S4: a fixed filter with HiPPO's matrix. Gu, Goel & Ré 2021, "Efficiently modeling long sequences with structured
state spaces".

    A = Λ - PPᵀ, Re Λ < 0          diagonal plus low rank, in the basis in which HiPPO-LegS is so

It begins as HiPPO-LegS, whose state is a polynomial through the past, and all of Λ, P, B, C and Δ are learned. That the
low-rank part is -PPᵀ keeps A stable whatever is learned (Goel et al. 2022, "It's raw!"). A step of the recurrence takes
O(N): the bilinear Ā is diagonal plus rank one again. The kernel is computed from powers of Ā, by squaring; the paper's
way, sums over the roots of unity, wants a fixed length and N·L divisions a channel.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.kernels.recurrent.state_space.discretise import bilinear_low_rank
from regard.kernels.recurrent.state_space.hippo import normal_plus_low_rank
from regard.kernels.recurrent.state_space.transition import LowRankTransition
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
            self.begin(spec, eigenvalues)
            self.P.data.copy_(P)
            self.B.data.copy_(B)

    def discretised(self) -> tuple[LowRankTransition, Tensor]:
        return bilinear_low_rank(self.eigenvalues, self.P.double(), self.B.double(), self.step)
