"""A system of steps, and all that powers of Ā are needed for.

    x_t = Ā x_{t-1} + B̄ u_t        y_t = C x_t

    kernel      K_k = C Ā^k B̄                        what an impulse says k steps later
    response    C Ā^(k+1) x                          what a state says of itself
    driven      Σ_j Ā^(L-1-j) B̄ u_j                  the state in which inputs leave an empty one
    advanced    Ā^n x                                where a state goes by itself

No power is taken alone. An orbit x, Āx, Ā²x … doubles in length with each squaring of Ā, and k = aT + b splits a power
into a leap and a rest: K_(aT+b) = (C Ā^(aT)) (Ā^b B̄) is one product of two orbits of about √L each. So a kernel of any
length takes O(L·N) work and O(√L·N) memory a channel. Orbits are in float64: an angle that is off by one part in 10⁷
has turned by a radian's thousandth after ten thousand steps. They depend on weights alone, not on the batch.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.recurrent.state_space.transition import Transition


@dataclass(frozen=True)
class System:
    transition: Transition
    b: Tensor  # (D, N) float64
    c: Tensor  # (D, N) float64
    squares: list[Transition] = field(default_factory=list, repr=False)

    def power(self, bits: int) -> Transition:
        """Ā to the 2^bits: each is the square of the one before, and is computed once."""
        while len(self.squares) <= bits:
            self.squares.append(self.squares[-1].squared() if self.squares else self.transition)
        return self.squares[bits]


def orbit(system: System, x: Tensor, length: int, bits: int = 0, transposed: bool = False) -> Tensor:
    """x (…), Ā^m x, Ā^2m x … with m = 2^bits, up to a power of two that is at least `length`: (M, …)"""
    found = x.unsqueeze(0)
    while len(found) < length:
        power = system.power(bits)
        found = torch.cat([found, (power.mT if transposed else power) @ found])
        bits += 1
    return found


def leap_bits(length: int) -> int:
    """T = 2^bits is the power of two from √length up."""
    return ((length - 1).bit_length() + 1) // 2


def kernel(system: System, length: int, dtype: torch.dtype) -> Tensor:
    """(D, L)"""
    return said(system, system.b, length, dtype)


def response(system: System, x: Tensor, length: int) -> Tensor:
    """x (B, D, N) -> (B, D, L)"""
    return said(system, system.transition @ x.double(), length, x.dtype)


def said(system: System, x: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """C x, C Ā x, C Ā² x …: (…, D, N) -> (…, D, L)"""
    bits = leap_bits(length)
    rests = orbit(system, x, 1 << bits)  # (T, …, D, N)
    count = -(-length >> bits)
    leaps = orbit(system, system.c, count, bits, transposed=True)[:count]  # (A, D, N)
    return torch.einsum("adn,t...dn->...dat", leaps.to(dtype), rests.to(dtype)).flatten(-2)[..., :length]


def driven(system: System, u: Tensor) -> Tensor:
    """u (B, D, L) -> (B, D, N)"""
    length = u.shape[-1]
    bits = leap_bits(length)
    rests = orbit(system, system.b, 1 << bits)  # (T, D, N)
    u = F.pad(u, (-length % len(rests), 0)).unflatten(-1, (-1, len(rests)))  # (B, D, A, T), zeros first
    x = torch.einsum("bdat,tdn->abdn", u, rests.flip(0).to(u.dtype)).double()  # each stretch from nothing
    while len(x) > 1:  # neighbours join: the earlier leaps over the later
        x = F.pad(x, (0, 0, 0, 0, 0, 0, len(x) % 2, 0))
        x = system.power(bits) @ x[0::2] + x[1::2]
        bits += 1
    return x[0].to(u.dtype)


def advanced(system: System, x: Tensor, steps: Tensor, most: int) -> Tensor:
    """x (B, D, N) by steps (B,), each at most `most`: bit by bit."""
    far = x.double()
    for bits in range(most.bit_length()):
        far = torch.where((steps >> bits & 1).bool().view(-1, 1, 1), system.power(bits) @ far, far)
    return far.to(x.dtype)


def flops(channels: int, state: int, length: int, dense: bool, ways: int = 1) -> int:
    """Of the matrix products of kernels; the rest of a diagonal Ā is elementwise, and transforms are no products."""
    bits = leap_bits(length)
    count = -(-length >> bits)
    pairs = 2 * channels * state * count << bits
    if not dense:
        return ways * pairs
    more = (count - 1).bit_length()
    squarings = max(0, bits + more - 1)
    doublings = max(0, (1 << bits) - 2) + (1 << more) - 1
    return ways * (pairs + 2 * channels * state**2 * doublings) + 2 * channels * state**3 * squarings
