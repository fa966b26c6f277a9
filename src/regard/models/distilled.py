"""A classifier that learned from labels and from a teacher: two heads, and their mean is what it says.

    logits = ½ (W_c h_cls + b_c) + ½ (W_t h_teacher + b_t)          Touvron et al. 2020 (DeiT)

The token that learned from the teacher is the first register, the one behind [CLS].
"""

from dataclasses import dataclass

from torch import Tensor, nn

from regard.layout import TokenLayout
from regard.models.heads import Head
from regard.parts.input import Input
from regard.parts.patches import Patches
from regard.spec import require


@dataclass(frozen=True)
class Distilled(Head):
    labels: int

    def check(self) -> None:
        require(self.labels > 0, f"distilled: labels={self.labels} must be positive")

    def check_input(self, input: Input, narrow: int, width: int) -> None:
        require(
            isinstance(input, Patches) and input.cls and input.registers > 0,
            "distilled: it reads [CLS] and the token of a teacher; give it Patches with registers=1",
        )

    def build(self, width: int, input: nn.Module) -> nn.Module:
        return DistilledModule(width, self)


class DistilledModule(nn.Module):
    def __init__(self, width: int, spec: Distilled):
        super().__init__()
        self.labels, self.teacher = nn.Linear(width, spec.labels), nn.Linear(width, spec.labels)

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        return (self.labels(x[:, 0]) + self.teacher(x[:, 1])) / 2  # (B, labels)
