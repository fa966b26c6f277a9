"""A discrete linear system, its convolution kernel, and the other functions of powers of Ā.

    x_t = Ā x_{t-1} + B̄ u_t        y_t = C x_t

    kernel      K_k = C Ā^k B̄                        impulse response after k steps
    response    C Ā^(k+1) x                          outputs from an initial state x without inputs
    driven      Σ_j Ā^(L-1-j) B̄ u_j                  final state from a zero state
    advanced    Ā^n x                                state after n steps without inputs

Powers are computed together. An orbit x, Āx, Ā²x … doubles in length with each squaring of Ā, and with k = aT + b the
kernel K_(aT+b) = (C Ā^(aT)) (Ā^b B̄) is one product of two orbits of about √L each. So a kernel of any length takes
O(L·N) work and O(√L·N) memory per channel. Orbits are in float64: a relative error of 10⁻⁷ in an angle of 1 adds up to
a milliradian after ten thousand steps. They depend on weights only, not on the batch.
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
        """Ā^(2^bits), the square of the previous one; each is computed once."""
        while len(self.squares) <= bits:
            self.squares.append(self.squares[-1].squared() if self.squares else self.transition)
        return self.squares[bits]


def orbit(system: System, x: Tensor, length: int, bits: int = 0, transposed: bool = False) -> Tensor:
    """x (…), Ā^m x, Ā^2m x … with m = 2^bits: (M, …), where M is a power of two that is at least `length`"""
    states = x.unsqueeze(0)
    while len(states) < length:
        power = system.power(bits)
        states = torch.cat([states, (power.mT if transposed else power) @ states])
        bits += 1
    return states


def stride_bits(length: int) -> int:
    """bits of T = 2^bits, the smallest power of two that is at least √length."""
    return ((length - 1).bit_length() + 1) // 2


def kernel(system: System, length: int, dtype: torch.dtype) -> Tensor:
    """(D, L)"""
    return project_orbit(system, system.b, length, dtype)


def response(system: System, x: Tensor, length: int) -> Tensor:
    """x (B, D, N) -> (B, D, L)"""
    return project_orbit(system, system.transition @ x.double(), length, x.dtype)


def project_orbit(system: System, x: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """C x, C Ā x, C Ā² x …: (…, D, N) -> (…, D, L)"""
    bits = stride_bits(length)
    within = orbit(system, x, 1 << bits)  # (T, …, D, N)
    count = -(-length >> bits)
    strides = orbit(system, system.c, count, bits, transposed=True)[:count]  # (A, D, N)
    return torch.einsum("adn,t...dn->...dat", strides.to(dtype), within.to(dtype)).flatten(-2)[..., :length]


def driven(system: System, u: Tensor) -> Tensor:
    """u (B, D, L) -> (B, D, N)"""
    length = u.shape[-1]
    bits = stride_bits(length)
    within = orbit(system, system.b, 1 << bits)  # (T, D, N)
    u = F.pad(u, (-length % len(within), 0)).unflatten(-1, (-1, len(within)))  # (B, D, A, T), zeros first
    x = torch.einsum("bdat,tdn->abdn", u, within.flip(0).to(u.dtype)).double()  # each part from a zero state
    while len(x) > 1:  # merge neighbours: advance the earlier state over the later part
        x = F.pad(x, (0, 0, 0, 0, 0, 0, len(x) % 2, 0))
        x = system.power(bits) @ x[0::2] + x[1::2]
        bits += 1
    return x[0].to(u.dtype)


def advanced(system: System, x: Tensor, steps: Tensor, max_steps: int) -> Tensor:
    """Ā^steps x for x (B, D, N) and steps (B,), at most `max_steps`, by binary powers."""
    result = x.double()
    for bits in range(max_steps.bit_length()):
        odd = (steps >> bits & 1).bool().view(-1, 1, 1)
        result = torch.where(odd, system.power(bits) @ result, result)
    return result.to(x.dtype)


def convolve(u: Tensor, kernel: Tensor) -> Tensor:
    """The causal convolution y_t = Σ_{j ≤ t} K_{t-j} u_j by FFT, in O(L log L): u and kernel (…, L) -> (…, L).

    A product of transforms is a circular convolution; padding with L zeros makes it a linear one.
    """
    length = u.shape[-1]
    if u.numel() == 0:
        return u * kernel  # some FFT libraries reject empty inputs
    size = 1 << (2 * length - 1).bit_length()  # at least 2L - 1; a power of two is fast
    spectrum = torch.fft.rfft(u, size) * torch.fft.rfft(kernel, size)
    return torch.fft.irfft(spectrum, size)[..., :length]


def flops(channels: int, state: int, length: int, dense: bool, kernels: int = 1) -> int:
    """FLOPs of the matrix products of `kernels` kernels; diagonal powers are elementwise, FFTs are not counted."""
    bits = stride_bits(length)
    count = -(-length >> bits)
    pairs = 2 * channels * state * count << bits
    if not dense:
        return kernels * pairs
    stride_doublings = (count - 1).bit_length()
    squarings = max(0, bits + stride_doublings - 1)
    doublings = max(0, (1 << bits) - 2) + (1 << stride_doublings) - 1
    return kernels * (pairs + 2 * channels * state**2 * doublings) + 2 * channels * state**3 * squarings
