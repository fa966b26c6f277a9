"""Audio for models: WAV files, other sampling rates, and the log-mel spectrogram of Whisper (Radford et al. 2022).

Resampling evaluates a windowed sinc at the phases of the new samples (Smith, "Digital Audio Resampling", 2002). It
removes what is above half of the lower of the two rates, so that it is not folded into the result:

    y[n] = Σ_k x[k] · h(n · rate/new - k),    h(t) = c · sinc(c t) · cos²(π t / 2w),    c = 0.95 · min(1, new/rate)

The filters of the mel scale are those of Slaney's Auditory Toolbox: linear below 1000 Hz, logarithmic above, each with
the same area:

    S = |STFT(x)|² with windows of 400 samples every 160;    M = log10 max(mel · S, 1e-10)
    features = (max(M, max M - 8) + 4) / 4
"""

import math
import wave
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

MAX_CHANNELS = 32
ZERO_CROSSINGS = 32  # of the sinc on each side
MAX_KERNEL = 1 << 24  # numbers; rates without a common factor need one sinc per new sample
ROLLOFF = 0.95  # a steep filter needs a margin below half of the rate
RATE, WINDOW, HOP, SECONDS = 16000, 400, 160, 30
CHUNK = 3000  # frames whose spectrum is computed at once


class Audio(NamedTuple):
    samples: Tensor  # (T,) float32, the mean of all channels
    rate: int  # samples per second

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


def read_wav(data: bytes | BinaryIO, max_seconds: float = float("inf")) -> Audio:
    """A WAV file with integer samples of 8, 16, 24 or 32 bits. ValueError if it is none, or too long."""
    with open_wav(data, max_seconds) as file:
        channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
        content = file.readframes(file.getnframes())
    content = content[: len(content) // (channels * width) * channels * width]  # a file may end within a sample
    samples = decode_pcm(content, width).reshape(-1, channels).mean(1)
    return Audio(torch.from_numpy(samples.astype(np.float32)), rate)


def wav_seconds(data: bytes | BinaryIO, max_seconds: float = float("inf")) -> float:
    """The seconds of a WAV file by its header; a damaged one may have less. ValueError as for `read_wav`."""
    with open_wav(data, max_seconds) as file:
        return file.getnframes() / file.getframerate()


@contextmanager
def open_wav(data: bytes | BinaryIO, max_seconds: float) -> Generator[wave.Wave_read]:
    stream = BytesIO(data) if isinstance(data, bytes) else data
    stream.seek(0)
    try:
        with wave.open(stream, "rb") as file:  # by default the mode of the stream, which may be rb+
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            if not (1 <= channels <= MAX_CHANNELS and width in (1, 2, 3, 4) and 1000 <= rate <= 1_000_000):
                raise ValueError(f"{channels} channels of {8 * width} bits at {rate} Hz are not supported")
            if file.getnframes() > max_seconds * rate:
                raise ValueError(f"{file.getnframes() / rate:.0f} seconds are too many; at most {max_seconds:g} fit")
            yield file
    except (wave.Error, EOFError) as error:
        raise ValueError(
            f"not a WAV file with integer samples ({str(error) or 'it ends too early'}); convert it to one"
        ) from error


def decode_pcm(content: bytes, width: int) -> np.ndarray:
    """Little-endian samples of this many bytes as float64 from -1 to 1; those of one byte are unsigned."""
    if width == 1:
        return (np.frombuffer(content, np.uint8).astype(np.float64) - 128) / 128
    if width == 3:
        padded = np.zeros((len(content) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        return padded.view("<i4")[:, 0] / 2.0**31
    return np.frombuffer(content, f"<i{width}") / 2.0 ** (8 * width - 1)


def resample(samples: Tensor, rate: int, new_rate: int) -> Tensor:
    """(T,) -> (⌈T · new_rate / rate⌉,)"""
    if rate == new_rate:
        return samples
    step, phases = (number // math.gcd(rate, new_rate) for number in (rate, new_rate))
    cutoff = ROLLOFF * min(1.0, new_rate / rate)
    width = math.ceil(ZERO_CROSSINGS / cutoff)
    if phases * (2 * width + step) > MAX_KERNEL:
        raise ValueError(
            f"a rate of {rate} Hz cannot be converted to {new_rate} Hz; use a common one, such as 44100 Hz"
        )
    offsets = torch.arange(-width, width + step, dtype=torch.float64)
    times = torch.arange(phases, dtype=torch.float64)[:, None] * step / phases - offsets  # (phases, taps)
    window = torch.cos(times.clamp(-width, width) * math.pi / (2 * width)).square()
    kernel = cutoff * torch.sinc(cutoff * times) * window
    padded = F.pad(samples.double(), (width, width + step))
    found = F.conv1d(padded[None, None], kernel[:, None], stride=step)[0]  # (phases, frames)
    return found.T.flatten()[: math.ceil(len(samples) * new_rate / rate)].to(samples.dtype)


def log_mel(samples: Tensor, mels: int, frames: int = RATE * SECONDS // HOP) -> Tensor:
    """(T,) samples at 16 kHz, padded with silence or cut to the frames -> (mels, frames) in float32"""
    samples = F.pad(samples[: frames * HOP], (0, max(0, frames * HOP - len(samples))))
    samples = F.pad(samples.unsqueeze(0), (WINDOW // 2, WINDOW // 2), mode="reflect")[0]
    window, filters = torch.hann_window(WINDOW, dtype=torch.float64), mel_filters(mels)
    logs = samples.new_empty(mels, frames, dtype=torch.float32)
    for start in range(0, frames, CHUNK):  # the spectrum of an hour would take gigabytes
        count = min(CHUNK, frames - start)
        part = samples[start * HOP : (start + count - 1) * HOP + WINDOW].double()
        power = torch.stft(part, WINDOW, HOP, window=window, center=False, return_complex=True).abs().square()
        logs[:, start : start + count] = (filters @ power).clamp(min=1e-10).log10()
    return (logs.clamp(min=float(logs.max()) - 8) + 4) / 4


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
