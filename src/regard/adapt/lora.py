"""LoRA: a weight is adapted by a low-rank product of two matrices, and only these are trained.

    LoRA      y = W x + s B A x               s = α / r; A (r, in) random, B (out, r) zero, so training starts from W
    rsLoRA    s = α / √r                      the product keeps its size as the rank grows
    DoRA      y = m ⊙ (W + s B A) x / ‖W + s B A‖      m (out,): the norms of the rows, at the start those of W
    PiSSA     y = W x + s (B A − B₀ A₀) x     A and B start at A₀ and B₀, singular vectors of W (pissa.py)
    QLoRA     y = W' x + s B A x              W' is stored in few bits (quantized.py)

Hu et al. 2021; Kalajdzievski 2023; Liu et al. 2024; Meng et al. 2024; Dettmers et al. 2023. The norm of DoRA is a
constant for the gradient.
The defaults are those of Schulman et al. 2025, "LoRA without regret": all layers, α = 32, A uniform within ±1/√in.
Experts have one pair A, B per expert, and stacked projections one per head. A layer can have adapters of several names,
of which at most one is active. adapters.py adds, activates and merges them in a model.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.adapt.pissa import INIT, is_initialization, join_initial, principal_matrices
from regard.adapt.quantized import QuantizedLinear
from regard.formats.base import NumberFormat
from regard.parts.experts import GroupedLinear
from regard.spec import Spec, SpecError, require

Targets = tuple[str, ...] | Literal["all-linear"]


@dataclass(frozen=True)
class LoRA(Spec):
    rank: int = 8
    alpha: float = 32.0  # fixed: with α = 2r the best learning rate would depend on the rank
    targets: Targets = "all-linear"  # all but the head; else names of layers, or their last components
    dropout: float = 0.0
    rslora: bool = False  # scale α / √r instead of α / r
    dora: bool = False  # train the norms of the rows of the adapted weight too
    init: str = INIT  # of A, with B zero; "pissa": singular vectors, "pissa_niter_4": approximately, in 4 iterations
    base: NumberFormat | None = None  # QLoRA: in which the frozen linear layers are stored, such as NF4()

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
        require(
            is_initialization(self.init),
            f"lora: init={self.init!r} is none of 'uniform', 'pissa' and 'pissa_niter_N' with N from 1 to 999",
        )

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def with_rank(self, rank: int) -> "LoRA":
        """Another rank with the same scale."""
        ratio = rank / self.rank
        return replace(self, rank=rank, alpha=self.alpha * (ratio**0.5 if self.rslora else ratio))

    @property
    def of_original(self) -> "LoRA":
        """The same adapter as a product alone, with B A − B₀ A₀ of PiSSA as one of twice the rank."""
        return self if self.init == INIT else replace(self.with_rank(2 * self.rank), init=INIT)


class Magnitude(nn.Module):
    """The norms of the rows of a weight that DoRA adapts."""

    def __init__(self, norms: Tensor):
        super().__init__()
        self.weight = nn.Parameter(norms)  # (out,)


class LoRALayer(nn.Module):
    """The adapters of one weight, by name. `active` is the name of the one that is used; None: no adapter."""

    merged_into: nn.Module | nn.Parameter  # while merged: the layer or parameter that replaces the adapted one

    def __init__(self) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.lora_init_A, self.lora_init_B = nn.ModuleDict(), nn.ModuleDict()  # A₀ and B₀ of PiSSA, frozen
        self.lora_magnitude_vector = nn.ModuleDict()  # of DoRA
        self.loras: dict[str, LoRA] = {}
        self.active: str | None = None

    def keep_merged(self, merged: nn.Module | nn.Parameter) -> None:
        """Keep the result of a merge, without making it a part of the adapter."""
        object.__setattr__(self, "merged_into", merged)

    @torch.no_grad()
    def add(self, name: str, lora: LoRA, weight: Tensor) -> None:
        """Add an adapter of this weight and make it active."""
        self.lora_A[name], self.lora_B[name] = make_matrices(weight, lora.rank)
        a, b = self.matrix("A", name), self.matrix("B", name)
        if lora.init == INIT:
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(a, -bound, bound)  # as nn.Linear
            nn.init.zeros_(b)
        else:
            self.lora_init_A[name], self.lora_init_B[name] = make_matrices(weight, lora.rank)
            initial = principal_matrices(weight, lora.rank, lora.scale, lora.init)
            for side, matrix, start in zip("AB", (a, b), initial, strict=True):
                matrix.copy_(start)
                self.matrix(f"init_{side}", name).copy_(start).requires_grad_(False)
        self.loras[name], self.active = lora, name
        if lora.dora:
            self.lora_magnitude_vector[name] = Magnitude(self.row_norms(weight, name).to(weight.dtype))

    def matrix(self, side: str, name: str) -> nn.Parameter:
        """A (…, r, in) or B (…, out, r) of an adapter; "init_A" and "init_B": those that PiSSA started from."""
        matrix = getattr(self, f"lora_{side}")[name].weight
        assert isinstance(matrix, nn.Parameter)
        return matrix

    def magnitude(self, name: str) -> nn.Parameter:
        """m (out,) of DoRA"""
        magnitude = self.lora_magnitude_vector[name].weight
        assert isinstance(magnitude, nn.Parameter)
        return magnitude

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained parameters of all adapters, with the names of the adapters."""
        for modules in (self.lora_A, self.lora_B, self.lora_magnitude_vector):
            for name, module in modules.items():
                yield from ((name, parameter) for parameter in module.parameters())

    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        """A and B of the adapter as one of the original weight (`LoRA.of_original`)."""
        a, b = self.matrix("A", name).detach(), self.matrix("B", name).detach()
        if name not in self.lora_init_A:
            return a, b
        return join_initial(a, b, self.matrix("init_A", name).detach(), self.matrix("init_B", name).detach())

    @torch.no_grad()
    def write_matrices(self, name: str, a: Tensor, b: Tensor) -> None:
        """The inverse of `matrices`."""
        rank = self.loras[name].rank
        self.matrix("A", name).copy_(a[..., :rank, :])
        self.matrix("B", name).copy_(b[..., :rank])
        if name in self.lora_init_A:
            self.matrix("init_A", name).copy_(a[..., rank:, :])
            self.matrix("init_B", name).copy_(-b[..., rank:])

    def delta_weight(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """s B A, with PiSSA s (B A − B₀ A₀)"""
        a, b = (self.matrix(side, name).to(dtype) for side in ("A", "B"))
        product = b @ a  # (…, out, in)
        if name in self.lora_init_A:
            a, b = (self.matrix(side, name).to(dtype) for side in ("init_A", "init_B"))
            product = product - b @ a
        return self.loras[name].scale * product

    @torch.no_grad()
    def row_norms(self, weight: Tensor, name: str) -> Tensor:
        """‖W + s B A‖ of every row, in at least float32."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        with torch.autocast(weight.device.type, enabled=False):
            return (weight.to(wide) + self.delta_weight(name, wide)).norm(dim=-1)

    def gain(self, weight: Tensor, name: str) -> Tensor:
        """m / ‖W + s B A‖: the factor of every output of DoRA; its gradient takes the norm for a constant."""
        norms = self.row_norms(weight, name)
        return self.magnitude(name).to(norms.dtype) / norms.clamp_min(torch.finfo(norms.dtype).tiny)

    @torch.no_grad()
    def merged_weight(self, weight: Tensor, name: str) -> nn.Parameter:
        wide = torch.promote_types(weight.dtype, torch.float32)  # half precision would round the small addend away
        merged = weight.to(wide) + self.delta_weight(name, wide)
        if self.loras[name].dora:
            merged = self.gain(weight, name).unsqueeze(-1) * merged
        return nn.Parameter(merged.to(weight.dtype), requires_grad=weight.requires_grad)


def make_matrices(weight: Tensor, rank: int) -> tuple[nn.Module, nn.Module]:
    """Modules with A (…, r, in) and B (…, out, r) of a weight."""
    outputs, inputs = weight.shape[-2:]
    linear = nn.Linear if weight.ndim == 2 else partial(GroupedLinear, len(weight))
    with torch.device(weight.device):
        down, up = linear(inputs, rank, bias=False), linear(rank, outputs, bias=False)
    return down.to(weight.dtype), up.to(weight.dtype)


class LoRALinear(LoRALayer):
    """A linear layer `base`, or one per expert, and its adapters."""

    def __init__(self, base: nn.Linear | GroupedLinear | QuantizedLinear):
        super().__init__()
        self.base = base

    def forward(self, x: Tensor, *ends: Tensor) -> Tensor:
        y = self.base(x, *ends)
        if self.active is None or self.active not in self.loras:
            return y
        name, lora = self.active, self.loras[self.active]
        dropped = F.dropout(x, lora.dropout, self.training)
        product = self.lora_B[name](lora.scale * self.lora_A[name](dropped, *ends), *ends)  # r numbers per token scaled
        if name in self.lora_init_A:
            product = product - self.lora_init_B[name](lora.scale * self.lora_init_A[name](x, *ends), *ends)
        return y + (self.dora(y, dropped, product) if lora.dora else product)

    def dora(self, y: Tensor, dropped: Tensor, product: Tensor) -> Tensor:
        """g ⊙ (W x + s B A x) − W x, of which y has W x with the bias. With dropout, of the x that is left."""
        assert self.active is not None
        weight, bias = self.base.weight, self.base.bias
        if self.training and self.loras[self.active].dropout:
            plain = F.linear(dropped, weight)
        else:
            plain = y if bias is None else y - bias
        gain = self.gain(weight, self.active)
        return (gain - 1).to(y.dtype) * plain + gain.to(y.dtype) * product

    def merged(self, name: str) -> nn.Module:
        """One layer with the same output; the base itself if it does not have the adapter."""
        if name not in self.loras:
            return self.base
        if isinstance(self.base, QuantizedLinear):
            merged = self.base.dequantized()
        else:
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
