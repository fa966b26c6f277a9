"""Long convolution: every output is a weighted sum of all inputs up to it, by the fast Fourier transform.

    y_t = Σ_{j ≤ t} K_{t-j} u_j          FFT(y) = FFT(K) ⊙ FFT(u)          O(L log L) instead of O(L²)

A product of transforms is a circular convolution: the end of one turn would run into the start of the next. Zeros
behind the inputs, as many as there are inputs, make room for it.
"""

import torch
from torch import Tensor


def convolve(u: Tensor, kernel: Tensor) -> Tensor:
    """u (…, L) and kernel (…, L) -> (…, L), causal"""
    length = u.shape[-1]
    if u.numel() == 0:
        return u * kernel  # some transforms refuse to do nothing
    size = 1 << (2 * length - 1).bit_length()  # any from 2L - 1 would do; a power of two is fast
    spectrum = torch.fft.rfft(u, size) * torch.fft.rfft(kernel, size)
    return torch.fft.irfft(spectrum, size)[..., :length]
