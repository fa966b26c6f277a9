"""Scalings of rotary frequencies for sequences longer than those of training.

The angle of pair i grows by θ_i = base^(-2i/d) per position. Beyond the trained length slow pairs reach angles that did
not occur in training:

    Linear       θ / s                                        all pairs slower, also the fast ones     Chen et al. 2023
    NTK          base · s^(d/(d-2))                           fastest pair unchanged, slowest θ / s    bloc97 2023
    DynamicNTK   the same, with s growing with the document                                            emozilla 2023
    Yarn         fast pairs θ, slow pairs θ / s, a ramp between, and sharper attention                 Peng et al. 2023
    Llama3       the same with a ramp over frequencies                                                 Llama 3.1, 2024
    LongRope     a searched divisor for every pair                                                     Ding et al. 2024
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.layout import TokenLayout
from regard.parts.position.base import rope_frequencies
from regard.spec import Spec, require


@dataclass(frozen=True)
class Scaling(Spec):
    def frequencies(self, base: float, dim: int, layout: TokenLayout) -> Tensor:
        """The frequency of each of the dim/2 pairs: (dim/2,), or (B, L, dim/2) if it depends on the token; float64."""
        raise NotImplementedError

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines, and so of scores by its square: the attention temperature."""
        return 1.0

    @property
    def max_exact_cache(self) -> int | None:
        """See Position.max_exact_cache."""
        return None

    def check_use(self, base: float, dim: int) -> None:
        """Raise SpecError if a rope with this base and `dim` rotated coordinates cannot be scaled in this way."""

    def check_extension(self, factor: float, length: int = 2) -> None:
        require(factor >= 1, f"{self.kind}: factor={factor} must be at least 1: sequences are this many times longer")
        require(length > 1, f"{self.kind}: length={length} must be above 1: it is the length of training")

    def check_pairs(self, dim: int) -> None:
        require(dim > 2, f"{self.kind}: {dim} coordinates are rotated; at least 4 are needed")


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Position interpolation: position t counts as t / factor."""

    factor: float

    def check(self) -> None:
        self.check_extension(self.factor)

    def frequencies(self, base: float, dim: int, layout: TokenLayout) -> Tensor:
        return rope_frequencies(base, dim, layout) / self.factor


@dataclass(frozen=True)
class NTK(Scaling):
    factor: float

    def check(self) -> None:
        self.check_extension(self.factor)

    def frequencies(self, base: float, dim: int, layout: TokenLayout) -> Tensor:
        return rope_frequencies(base * self.factor ** (dim / (dim - 2)), dim, layout)

    def check_use(self, base: float, dim: int) -> None:
        self.check_pairs(dim)


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """s = 1 + factor · (n / length - 1) for a document of n > length tokens, so the base differs between documents.

    Keys and values that were cached while the document was shorter are then wrong, and not only in their rotation: they
    were computed from other attention outputs. So no cache is exact beyond `length`.
    """

    factor: float
    length: int

    def check(self) -> None:
        self.check_extension(self.factor, self.length)

    def frequencies(self, base: float, dim: int, layout: TokenLayout) -> Tensor:
        lengths = document_lengths(layout).clamp_min(self.length).double().unsqueeze(-1)  # (B, L, 1)
        growth = 1 + self.factor * (lengths / self.length - 1)
        return rope_frequencies(base * growth ** (dim / (dim - 2)), dim, layout)  # (B, L, dim/2)

    def check_use(self, base: float, dim: int) -> None:
        self.check_pairs(dim)

    @property
    def max_exact_cache(self) -> int:
        return self.length


@dataclass(frozen=True)
class Yarn(Scaling):
    """Pairs with more than beta_fast rotations in the trained length keep θ; with fewer than beta_slow: θ / factor."""

    factor: float
    length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 1 + ln(factor) / 10, or the quotient of the two below
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # the ends of the ramp are rounded to whole pairs

    def check(self) -> None:
        self.check_extension(self.factor, self.length)
        require(
            self.beta_fast > self.beta_slow > 0,
            f"yarn: beta_fast={self.beta_fast} must be above beta_slow={self.beta_slow}, and both above 0",
        )

    def frequencies(self, base: float, dim: int, layout: TokenLayout) -> Tensor:
        low, high = self.pair_of(self.beta_fast, base, dim), self.pair_of(self.beta_slow, base, dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        pairs = torch.arange(dim // 2, dtype=torch.float64, device=layout.positions.device)
        ramp = ((pairs - low) / (high - low or 0.001)).clamp(0, 1)  # 0: unchanged, 1: interpolated
        theta = rope_frequencies(base, dim, layout)
        return theta * (1 - ramp) + theta / self.factor * ramp

    def pair_of(self, rotations: float, base: float, dim: int) -> float:
        """The (fractional) pair with this many rotations within the trained length: θ_i · length = 2π · rotations."""
        return dim * math.log(self.length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    def check_use(self, base: float, dim: int) -> None:
        require(base > 1, f"yarn: rope's base={base} must be above 1, so that frequencies fall from pair to pair")

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.temperature(self.mscale) / self.temperature(self.mscale_all_dim)
        return self.temperature(1.0)

    def temperature(self, mscale: float) -> float:
        return 1 + 0.1 * mscale * math.log(self.factor)


@dataclass(frozen=True)
class Llama3(Scaling):
    """Pairs with over high_freq_factor rotations in the trained length keep θ; below low_freq_factor: θ / factor."""

    factor: float
    length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def check(self) -> None:
        self.check_extension(self.factor, self.length)
        low, high = self.low_freq_factor, self.high_freq_factor
        require(high > low > 0, f"llama3: high_freq_factor={high} must be above low_freq_factor={low}, both above 0")

    def frequencies(self, base: float, dim: int, layout: TokenLayout) -> Tensor:
        theta = rope_frequencies(base, dim, layout)
        rotations = self.length * theta / (2 * math.pi)  # within the trained length
        keep = ((rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return theta * keep + theta / self.factor * (1 - keep)


@dataclass(frozen=True)
class LongRope(Scaling):
    """θ_i / short_i in documents up to `length`, θ_i / long_i in longer ones; a cache is valid for one of them."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    factor: float
    length: int
    attention_factor: float | None = None  # None: √(1 + ln(factor) / ln(length))

    def check(self) -> None:
        self.check_extension(self.factor, self.length)
        least = min(self.short + self.long, default=1.0)
        require(least > 0, f"longrope: short and long are divisors, so {least} must be above 0")

    def check_use(self, base: float, dim: int) -> None:
        require(
            len(self.short) == len(self.long) == dim // 2,
            f"longrope: {dim // 2} pairs need as many divisors; short has {len(self.short)}, long {len(self.long)}",
        )

    def frequencies(self, base: float, dim: int, layout: TokenLayout) -> Tensor:
        theta = rope_frequencies(base, dim, layout)
        short, long = (theta / torch.tensor(d, dtype=theta.dtype, device=theta.device) for d in (self.short, self.long))
        return torch.where(document_lengths(layout).unsqueeze(-1) > self.length, long, short)  # (B, L, dim/2)

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(self.length))

    @property
    def max_exact_cache(self) -> int:
        return self.length


def document_lengths(layout: TokenLayout) -> Tensor:
    """(B, L): the length of each token's document in this forward: its largest position plus one."""
    positions = layout.positions if layout.valid is None else layout.positions.where(layout.valid, 0)
    if layout.segments is None:
        return positions.amax(-1, keepdim=True).expand_as(positions) + 1
    # The tokens of a document have the same slot: the first index of their segment among the sorted segments.
    slots = torch.searchsorted(layout.segments.sort(-1).values, layout.segments.contiguous())
    return torch.zeros_like(positions).scatter_reduce(-1, slots, positions, "amax").gather(-1, slots) + 1
