"""Splitting a projection into heads and merging the heads' outputs, for every mixer with heads."""

from torch import Tensor

from regard.spec import SpecError


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, L, H·E) -> (B, H, L, E)"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, L, E) -> (B, L, H·E)"""
    return x.transpose(1, 2).flatten(-2)


def head_dim_of(kind: str, width: int, heads: int, remedy: str = "") -> int:
    """width / heads; SpecError if that is not an integer."""
    if width % heads:
        choices = ", ".join(map(str, divisors(width)))
        raise SpecError(f"{kind}: width={width} is not divisible by heads={heads}; choose one of {choices}{remedy}")
    return width // heads


def divisors(number: int) -> list[int]:
    """The divisors up to 1024."""
    return [n for n in range(1, min(number, 1024) + 1) if number % n == 0]
