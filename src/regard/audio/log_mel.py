"""The log-mel spectrogram of Whisper (Radford et al. 2022).

    S = |STFT(x)|² with windows of 400 samples every 160;    M = log10 max(mel · S, 1e-10)
    features = (max(M, max M - 8) + 4) / 4

The filters of the mel scale are those of Slaney's Auditory Toolbox: linear below 1000 Hz, logarithmic above, each with
the same area.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

RATE, WINDOW, HOP, SECONDS = 16000, 400, 160, 30


def log_mel(samples: Tensor, mels: int, frames: int = RATE * SECONDS // HOP) -> Tensor:
    """(T,) samples at 16 kHz, padded with silence or cut to the frames -> (mels, frames) in float32"""
    samples = samples.double()[: frames * HOP]
    samples = F.pad(samples, (0, frames * HOP - len(samples)))
    window = torch.hann_window(WINDOW, dtype=torch.float64)
    power = torch.stft(samples, WINDOW, HOP, window=window, return_complex=True)[:, :-1].abs().square()  # (F, frames)
    logs = (mel_filters(mels) @ power).clamp(min=1e-10).log10()
    return ((logs.clamp(min=float(logs.max()) - 8) + 4) / 4).float()


@cache
def mel_filters(mels: int) -> Tensor:
    """(mels, 201) triangles over the frequencies of the spectrum."""
    frequencies = torch.linspace(0, RATE / 2, WINDOW // 2 + 1, dtype=torch.float64)
    highest = 15 + 27 * torch.log(torch.tensor(RATE / 2 / 1000, dtype=torch.float64)) / torch.log(torch.tensor(6.4))
    scale = torch.linspace(0, float(highest), mels + 2, dtype=torch.float64)
    log_step = torch.log(torch.tensor(6.4, dtype=torch.float64)) / 27
    corners = torch.where(scale < 15, 200 / 3 * scale, 1000 * torch.exp(log_step * (scale - 15)))  # in Hz
    rising = (frequencies - corners[:-2, None]) / (corners[1:-1] - corners[:-2])[:, None]
    falling = (corners[2:, None] - frequencies) / (corners[2:] - corners[1:-1])[:, None]
    area = 2 / (corners[2:] - corners[:-2])[:, None]
    return torch.minimum(rising, falling).clamp(min=0) * area
