"""WAV files as samples of one channel, from -1 to 1."""

import wave
from io import BytesIO
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MAX_CHANNELS = 32


class Sound(NamedTuple):
    samples: Tensor  # (T,) float32, the mean of all channels
    rate: int  # samples per second

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


def read_wav(data: bytes, max_seconds: float = float("inf")) -> Sound:
    """A WAV file with integer samples of 8, 16, 24 or 32 bits. ValueError if it is none, or too long."""
    try:
        with wave.open(BytesIO(data)) as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            if not (1 <= channels <= MAX_CHANNELS and width in (1, 2, 3, 4) and 1000 <= rate <= 1_000_000):
                raise ValueError(f"{channels} channels of {8 * width} bits at {rate} Hz are not supported")
            if file.getnframes() > max_seconds * rate:
                raise ValueError(f"{file.getnframes() / rate:.0f} seconds are too many; at most {max_seconds:g} fit")
            content = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise ValueError(f"it is no WAV file with integer samples ({error}); convert it to one") from error
    content = content[: len(content) // (channels * width) * channels * width]  # a file may end within a sample
    samples = integers(content, width).reshape(-1, channels).mean(1)
    return Sound(torch.from_numpy(samples.astype(np.float32)), rate)


def integers(content: bytes, width: int) -> np.ndarray:
    """Little-endian samples of this many bytes as float64 from -1 to 1; those of one byte are unsigned."""
    if width == 1:
        return (np.frombuffer(content, np.uint8).astype(np.float64) - 128) / 128
    if width == 3:
        padded = np.zeros((len(content) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        return padded.view("<i4")[:, 0] / 2.0**31
    return np.frombuffer(content, f"<i{width}") / 2.0 ** (8 * width - 1)
