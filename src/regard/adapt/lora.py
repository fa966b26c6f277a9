"""LoRA: a weight is adapted by a low-rank product of two matrices, and only these are trained.

    y = W x + (α / r) B A x          A (r, in) random, B (out, r) zero, so training starts from W

Hu et al. 2021. Experts have one pair A, B per expert, and stacked projections one per head. A layer can have adapters
of several names, of which at most one is active. adapters.py adds, activates and merges them in a model.
"""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.parts.experts import GroupedLinear
from regard.spec import Spec, SpecError, require

Targets = tuple[str, ...] | Literal["all-linear"]


@dataclass(frozen=True)
class LoRA(Spec):
    rank: int = 8
    alpha: float = 16.0
    targets: Targets = ("q_proj", "v_proj")  # names of layers, or their last components; "all-linear": all but the head
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.targets, str) and self.targets != "all-linear":
            raise SpecError(
                f"LoRA.targets={self.targets!r} is neither a tuple of names nor 'all-linear'; for a single name write "
                f"targets=({self.targets!r},)"
            )
        super().__post_init__()

    def check(self) -> None:
        require(self.rank > 0, f"lora: rank={self.rank} must be positive")
        require(self.alpha > 0, f"lora: alpha={self.alpha} must be positive")
        require(len(self.targets) > 0, "lora: targets is empty; name some linear layers, such as 'q_proj'")
        require(0 <= self.dropout < 1, f"lora: dropout={self.dropout} must be in [0, 1)")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class LoRALayer(nn.Module):
    """The adapters of one weight, by name. `active` is the name of the one that is used; None: no adapter."""

    merged_into: nn.Module | nn.Parameter  # while merged: the layer or parameter that replaces the adapted one

    def __init__(self) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.loras: dict[str, LoRA] = {}
        self.active: str | None = None

    def keep_merged(self, merged: nn.Module | nn.Parameter) -> None:
        """Keep the result of a merge, without making it a part of the adapter."""
        object.__setattr__(self, "merged_into", merged)

    def add(self, name: str, lora: LoRA, weight: Tensor) -> None:
        """Add an adapter of this weight and make it active."""
        outputs, inputs = weight.shape[-2:]
        linear = nn.Linear if weight.ndim == 2 else partial(GroupedLinear, len(weight))
        with torch.device(weight.device):
            self.lora_A[name] = linear(inputs, lora.rank, bias=False).to(weight.dtype)
            self.lora_B[name] = linear(lora.rank, outputs, bias=False).to(weight.dtype)
        nn.init.uniform_(self.matrix("A", name), -(inputs**-0.5), inputs**-0.5)  # as nn.Linear
        nn.init.zeros_(self.matrix("B", name))
        self.loras[name], self.active = lora, name

    def matrix(self, side: str, name: str) -> nn.Parameter:
        """A (…, r, in) or B (…, out, r) of an adapter."""
        matrix = getattr(self, f"lora_{side}")[name].weight
        assert isinstance(matrix, nn.Parameter)
        return matrix

    def delta_weight(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """(α / r) B A"""
        a, b = (self.matrix(side, name).to(dtype) for side in ("A", "B"))
        return self.loras[name].scale * (b @ a)  # (…, out, in)

    @torch.no_grad()
    def merged_weight(self, weight: Tensor, name: str) -> nn.Parameter:
        wide = torch.promote_types(weight.dtype, torch.float32)  # half precision would round the small addend away
        merged = (weight.to(wide) + self.delta_weight(name, wide)).to(weight.dtype)
        return nn.Parameter(merged, requires_grad=weight.requires_grad)


class LoRALinear(LoRALayer):
    """A linear layer `base`, or one per expert, and its adapters."""

    def __init__(self, base: nn.Linear | GroupedLinear):
        super().__init__()
        self.base = base

    def forward(self, x: Tensor, *ends: Tensor) -> Tensor:
        y = self.base(x, *ends)
        if self.active is None or self.active not in self.loras:
            return y
        lora, down, up = self.loras[self.active], self.lora_A[self.active], self.lora_B[self.active]
        return y + lora.scale * up(down(F.dropout(x, lora.dropout, self.training), *ends), *ends)

    def merged(self, name: str) -> nn.Module:
        """One layer with the same output; the base itself if it does not have the adapter."""
        if name not in self.loras:
            return self.base
        merged = deepcopy(self.base, {id(parameter): parameter for parameter in self.base.parameters()})
        merged.weight = self.merged_weight(self.base.weight, name)
        return merged


class LoRAWeight(LoRALayer):
    """The adapters of a stacked parameter, as its parametrization: reading the parameter returns W + (α / r) B A."""

    original: nn.Parameter  # while merged

    def forward(self, weight: Tensor) -> Tensor:
        if self.active is None or self.active not in self.loras:
            return weight
        return weight + self.delta_weight(self.active)

    def keep_original(self, weight: nn.Parameter) -> None:
        """Keep the parameter while it is merged, without making it a parameter of the adapter."""
        object.__setattr__(self, "original", weight)

    def merged(self, name: str) -> nn.Parameter:
        return self.merged_weight(self.original, name) if name in self.loras else self.original
