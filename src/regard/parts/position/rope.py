"""Rotary positions (RoPE): queries and keys are rotated by an angle proportional to their position.

    ⟨R(s) q, R(t) k⟩ depends on t - s alone,     R(t) rotates pair i by t · θ_i,  θ_i = base^(-2i/d)     Su et al. 2021

Pairs are (x_i, x_{i+d/2}) in the "half" layout of Llama's published checkpoints, and (x_{2i}, x_{2i+1}) in the
"interleaved" layout of the paper and GPT-J. With `share` below 1 only the first d = share · E coordinates are rotated
(partial rotary embeddings: GPT-NeoX, Phi). Angles are computed in float64: in float32 the error at position 131071 is
already a hundredth of a radian.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard.compat import cannot_run_triton
from regard.layout import TokenLayout
from regard.parts.position.base import Position, PositionModule, rope_frequencies
from regard.parts.position.rope_scaling import Scaling
from regard.spec import require

PairLayout = Literal["half", "interleaved"]
MIN_KERNEL_TOKENS = 64  # per row; for fewer the launch of a kernel takes longer than the rotation


@dataclass(frozen=True)
class Rope(Position):
    places = ("attention",)

    base: float = 10000.0
    share: float = 1.0  # fraction of a head's coordinates that are rotated
    layout: PairLayout = "half"
    scaling: Scaling | None = None

    def check(self) -> None:
        require(self.base > 0, f"rope: base={self.base} must be positive")
        require(0 < self.share <= 1, f"rope: share={self.share} must be above 0 and at most 1")

    @property
    def max_exact_cache(self) -> int | None:
        return None if self.scaling is None else self.scaling.max_exact_cache

    def rotated_dim(self, head_dim: int) -> int:
        """Number of coordinates of a head that are rotated."""
        dim = round(self.share * head_dim)
        rotated = f"head_dim={head_dim}" if self.share == 1 else f"share={self.share} of head_dim={head_dim}"
        is_integer = abs(dim - self.share * head_dim) < 1e-6
        require(is_integer and dim % 2 == 0, f"rope: {rotated} must be even: coordinates are rotated in pairs")
        return dim

    def frequencies(self, dim: int, layout: TokenLayout) -> Tensor:
        """(dim/2,), or (B, L, dim/2) where tokens differ"""
        return (
            rope_frequencies(self.base, dim, layout)
            if self.scaling is None
            else self.scaling.frequencies(self.base, dim, layout)
        )

    def shift(self, k: Tensor, offsets: Tensor) -> Tensor:
        dim = self.rotated_dim(k.shape[-1])
        angles = offsets.unsqueeze(-1) * self.frequencies(dim, TokenLayout(offsets))  # (…, d/2)
        return rotate_first(k, *cos_sin(angles, 1.0, k.dtype), dim, self.layout)

    def build(self, head_dim: int, heads: int, /) -> PositionModule:
        return RopeModule(head_dim, self)


class RopeModule(PositionModule):
    def __init__(self, head_dim: int, spec: Rope):
        super().__init__()
        self.spec, self.dim = spec, spec.rotated_dim(head_dim)
        if spec.scaling is not None:
            spec.scaling.check_use(spec.base, self.dim)

    def rotate(self, q: Tensor, k: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        cos, sin = layout.derived(rotations, self.spec, self.dim, q.dtype)
        pairs = self.spec.layout
        return rotate_first(q, cos, sin, self.dim, pairs), rotate_first(k, cos, sin, self.dim, pairs)


def rotations(layout: TokenLayout, spec: Rope, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (B, 1, L, d/2) of the angles by which the pairs of each token are rotated."""
    amplitude = 1.0 if spec.scaling is None else spec.scaling.amplitude
    angles = layout.positions.unsqueeze(-1) * spec.frequencies(dim, layout)  # (B, L, d/2)
    angles = angles.unsqueeze(1)  # (B, 1, L, d/2)
    # torch.compile would compute the float64 sines again in every rotation, a third of a training step on a GPU.
    compute = opaque_cos_sin if torch.compiler.is_compiling() else cos_sin
    return compute(angles, amplitude, dtype)


def cos_sin(angles: Tensor, amplitude: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (angles.cos() * amplitude).to(dtype), (angles.sin() * amplitude).to(dtype)


@torch.library.custom_op("regard::cos_sin", mutates_args=())
def opaque_cos_sin(angles: Tensor, amplitude: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`cos_sin` as one operator, which torch.compile does not fuse with others."""
    return cos_sin(angles, amplitude, dtype)


@opaque_cos_sin.register_fake
def _(angles: Tensor, amplitude: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(angles, dtype=dtype), torch.empty_like(angles, dtype=dtype)


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor, dim: int, layout: PairLayout) -> Tensor:
    """Rotate the pairs of the first `dim` coordinates of x (…, E)."""
    if dim == x.shape[-1]:
        return rotate_pairs(x, cos, sin, layout)
    return torch.cat([rotate_pairs(x[..., :dim], cos, sin, layout), x[..., dim:]], -1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, layout: PairLayout) -> Tensor:
    """Rotate the pairs of x (…, d) by angles with cosines and sines (…, d/2)."""
    if layout == "half" and use_triton(x):
        from regard.kernels.triton_rope import rotate as kernel

        return kernel(x, cos, sin)
    a, b = x.chunk(2, -1) if layout == "half" else x.unflatten(-1, (-1, 2)).unbind(-1)
    a, b = a * cos - b * sin, b * cos + a * sin
    return torch.cat([a, b], -1) if layout == "half" else torch.stack([a, b], -1).flatten(-2)


def use_triton(x: Tensor) -> bool:
    """Only for long inputs on a GPU; torch.compile fuses the rotation with the operation before it."""
    if x.dim() != 4 or x.shape[2] < MIN_KERNEL_TOKENS or x.dtype == torch.float64 or torch.compiler.is_compiling():
        return False
    return cannot_run_triton(x.device) is None
